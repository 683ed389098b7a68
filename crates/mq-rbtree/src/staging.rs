//! The staging ring: sends that take no lock.
//!
//! ```text
//!  sender:  claim (tail + 1) ─► write the message ─► publish its slot
//!                                                        │
//!  ring     ─────┬──────────┬──────────┬──────────┬──────▼───┬─────
//!                │  taken   │published │ claimed  │published │ free
//!  ──────────────┴──────────┴▲─────────┴──────────┴──────────┴▲────
//!                          head (lock)     ▲                 tail
//!                                   a hole, as the sender behind it reports
//! ```
//!
//! A sender claims the next slot by one compare-exchange on `tail`, and publishes it by a store of
//! its sequence number. The holder of the queue's lock takes the messages of published slots in the
//! order of their positions. It reads the slots and not `tail`, so that the line of `tail` stays with
//! the senders.
//!
//! A sender may publish a slot behind one that is only claimed: a *hole*. It reports the hole before
//! it publishes. The holder of the lock waits for the slots below a reported hole, and never skips
//! one, because positions are the order of the sends.
//!
//! The ring is *open*, or *shut* by the holder of the lock: a bit of `tail` makes every claim fail,
//! and senders take the lock. It is shut whenever a thread or task waits or a `Readiness` is armed, and
//! in a closed queue. While the ring is shut and drained, the store under the lock is the whole queue.
//!
//! Every accepted message takes a position, also one sent under the lock. So the limit of claims,
//! which is the number of messages that have left plus the capacity, never decreases: a sender with
//! an outdated limit is refused too early, and never admitted beyond the limit.
//!
//! # Invariants
//!
//! 1. The thread that claimed a position writes its slot until it publishes it. Then the holder of
//!    the lock reads the message, once, before it raises the limit above the slot's next position.
//! 2. If a slot is published, each unpublished slot before it is below `hole`.
//! 3. Claimed positions are below the limit, up to which the queue has room, memory and slots.
//! 4. In the open ring, the number of each slot is that of the last position of this slot below the
//!    tail, or of the one a lap before. `reopen` sees to it for the positions sent under the lock.
//! 5. While the ring is shut no position is claimed, and `Cursor::end` is the first one not claimed.

use std::mem::MaybeUninit;

use offlock_sync::atomic::{AtomicU32, AtomicU64, Ordering};
use offlock_sync::cell::UnsafeCell;
use offlock_sync::{check, hint, order, step};

/// The bit of `tail` that makes claims fail.
const SHUT: u64 = 1 << 63;
/// The most slots; a measured value: more did not help a sender and a receiver at full speed.
const MAX_SLOTS: usize = if cfg!(offlock_model) { 4 } else { 1024 };
/// The most bytes of a ring.
const MAX_BYTES: usize = 64 << 10;

#[repr(C)]
struct Slot<T, P> {
    /// The low half of the position of its message, plus 1; 0 before the first message.
    sequence: AtomicU32,
    priority: UnsafeCell<MaybeUninit<P>>,
    value: UnsafeCell<MaybeUninit<T>>,
}

/// Fields on cache lines of their own.
#[repr(C, align(128))]
struct Lines<F>(F);

/// Written by senders.
struct Senders {
    /// The first position that is not claimed, and [`SHUT`].
    tail: AtomicU64,
    /// A copy of `Room::limit`, perhaps an outdated one.
    limit: AtomicU64,
}

/// Written by the holder of the lock.
struct Room {
    /// Positions below it may be claimed.
    limit: AtomicU64,
    /// The messages that have left the queue.
    departed: AtomicU64,
}

pub(crate) struct Ring<T, P> {
    senders: Lines<Senders>,
    room: Lines<Room>,
    slots: Box<[Slot<T, P>]>,
    mask: u64,
    /// The holder of the lock waits for each unpublished slot below this position. A sender writes it
    /// when it reports a hole.
    hole: Lines<AtomicU64>,
}

// SAFETY: by invariant 1 one thread at a time uses a slot's message and priority, which is a move
// as far as they can tell, so `Send` suffices.
unsafe impl<T: Send, P: Send> Send for Ring<T, P> {}
// SAFETY: invariant 1 holds for shared rings too, so no `&T` or `&P` is ever shared: each message moves
// from its sender to the holder of the lock.
unsafe impl<T: Send, P: Send> Sync for Ring<T, P> {}

/// The part of the ring that the queue's lock protects.
#[derive(Debug)]
pub(crate) struct Cursor {
    /// The position of the next message to take from the ring: the number of messages taken so far,
    /// and of those sent under the lock.
    head: u64,
    /// In a shut ring, the first position that is not claimed. A queue without a ring has the cursor
    /// of a ring that is never opened.
    end: u64,
    /// The value of `end` when the ring was shut. Positions from it on belong to messages that were
    /// sent under the lock.
    shut_at: u64,
    shut: bool,
}

/// The next slot, as the holder of the lock finds it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Next<P> {
    /// No published message, and no hole to wait for.
    Nothing,
    /// A message of this priority.
    Message(P),
    /// A sender has claimed the slot, and must publish it first.
    Hole,
}

impl Cursor {
    /// Returns the cursor of a new ring, which is open, or of a queue without one.
    pub(crate) fn new(has_ring: bool) -> Self {
        Self { head: 0, end: 0, shut_at: 0, shut: !has_ring }
    }

    /// Returns the number of messages taken from the ring or sent under the lock.
    #[inline(always)]
    pub(crate) fn accepted(&self) -> u64 {
        self.head
    }

    /// Counts a message that was accepted under the lock; the ring is shut and drained.
    #[inline(always)]
    pub(crate) fn accept(&mut self) {
        debug_assert!(self.is_drained());
        self.head += 1;
        self.end += 1;
    }

    /// Returns the position whose message comes through the ring next, or `None` if it is shut.
    #[inline(always)]
    pub(crate) fn next_staged(&self) -> Option<u64> {
        (!self.shut).then_some(self.head)
    }

    #[inline(always)]
    pub(crate) fn is_shut(&self) -> bool {
        self.shut
    }

    /// Returns whether the ring is shut and holds no message: the store is the whole queue.
    #[inline(always)]
    pub(crate) fn is_drained(&self) -> bool {
        self.shut && self.head == self.end
    }
}

fn sequence(position: u64) -> u32 {
    (position as u32).wrapping_add(1)
}

impl<T, P: Copy> Ring<T, P> {
    /// Creates an open ring for a queue of `max_messages`. Returns `None` if fewer than two slots fit into
    /// [`MAX_BYTES`].
    pub(crate) fn new(max_messages: usize) -> Option<Self> {
        let slot = size_of::<Slot<T, P>>();
        let fit = (MAX_BYTES / slot).clamp(1, MAX_SLOTS);
        let count = max_messages.min(MAX_SLOTS).next_power_of_two().max(2).min(1 << fit.ilog2());
        if count < 2 {
            return None;
        }
        let slots = (0..count).map(|_| Slot {
            sequence: AtomicU32::new(0),
            priority: UnsafeCell::new(MaybeUninit::uninit()),
            value: UnsafeCell::new(MaybeUninit::uninit()),
        });
        Some(Self {
            senders: Lines(Senders { tail: AtomicU64::new(0), limit: AtomicU64::new(0) }),
            room: Lines(Room { limit: AtomicU64::new(0), departed: AtomicU64::new(0) }),
            slots: slots.collect(),
            mask: count as u64 - 1,
            hole: Lines(AtomicU64::new(0)),
        })
    }

    #[inline(always)]
    fn slot(&self, position: u64) -> &Slot<T, P> {
        // The mask keeps the index below the length, which the compiler cannot know.
        let index = (position & self.mask) as usize;
        // SAFETY: the length is `mask + 1`, and `index` is at most `mask`.
        unsafe { self.slots.get_unchecked(index) }
    }

    /// Returns the number of slots.
    #[inline(always)]
    pub(crate) fn slots(&self) -> usize {
        self.slots.len()
    }

    /// Claims the next position. The calling thread must publish it without delay. Returns `None` if
    /// the ring is shut or seems full.
    #[inline(always)]
    pub(crate) fn claim(&self) -> Option<u64> {
        let Senders { tail, limit } = &self.senders.0;
        // Ordering: Relaxed; the exchange below decides.
        let mut at = tail.load(Ordering::Relaxed);
        loop {
            let acquire = order!(Acquire, "claim: the slot is free");
            // Ordering: Acquire pairs with the Release in `refresh`; it carries the free slots: the
            // message of the lap before was read. `at` of a shut ring is above every limit.
            if at >= limit.load(acquire) {
                return None;
            }
            let acquire = order!(Acquire, "claim: the slots are stamped");
            // Ordering: Acquire on success pairs with the Release in `reopen`; it carries the stamps,
            // which the sender's own must follow. Later claims continue its release sequence. The
            // messages are in the order of the exchanges on this one word. Relaxed on failure;
            // nothing is read by it.
            match tail.compare_exchange_weak(at, at + 1, acquire, Ordering::Relaxed) {
                Ok(_) => return Some(at),
                Err(now) => at = now,
            }
            hint::spin_loop();
        }
    }

    /// Publishes the message of a position.
    ///
    /// # Safety
    ///
    /// `claim` has returned the position to the calling thread, and this is the only call for it.
    #[inline(always)]
    pub(crate) unsafe fn publish(&self, position: u64, value: T, priority: P) {
        let slot = self.slot(position);
        // SAFETY: invariant 1: this thread claimed the position.
        slot.priority.with_mut(|own| unsafe { own.write(MaybeUninit::new(priority)) });
        // SAFETY: invariant 1: this thread claimed the position, and has not published it.
        slot.value.with_mut(|own| unsafe { own.write(MaybeUninit::new(value)) });
        let acquire = order!(Acquire, "publish: the holes before");
        // Ordering: Acquire pairs with the Release below in the sender before; it carries `hole`, as
        // that sender and those before it have reported. A Relaxed load would lose a hole: A claims 0
        // and stops; B claims 1, reports the hole and publishes; C claims 2, finds 1 published, returns,
        // and receives: nothing would order B's report before C's look at `hole`.
        let before = self.slot(position.wrapping_sub(1)).sequence.load(acquire);
        // By invariant 4 the number is at most a lap old. A slot that is a lap ahead was published.
        if (before.wrapping_sub(position as u32) as i32) < 0 {
            step!("publish: report the hole", self.report_hole(position));
        }
        let release = order!(Release, "publish: the message is written");
        // Ordering: Release pairs with the Acquire in `is_published`; it carries the message, and
        // `hole` for the Acquire above.
        slot.sequence.store(sequence(position), release);
    }

    #[cold]
    #[inline(never)]
    fn report_hole(&self, position: u64) {
        // Ordering: Relaxed; the Release of the sequence number publishes it.
        self.hole.0.fetch_max(position, Ordering::Relaxed);
    }

    /// Copies the limit to the senders' line. Returns whether there seems to be room.
    #[inline]
    pub(crate) fn refresh(&self) -> bool {
        let Senders { tail, limit } = &self.senders.0;
        // Ordering: Acquire pairs with the Release in `set_room`; it carries the free slots.
        let now = self.room.0.limit.load(order!(Acquire, "refresh: the slots are free"));
        // Ordering: Relaxed; a comparison.
        if limit.load(Ordering::Relaxed) < now {
            // Ordering: Release pairs with the Acquire in `claim`; it carries the free slots.
            limit.store(now, order!(Release, "refresh: for the other senders"));
        }
        // Ordering: Relaxed; `claim` decides.
        tail.load(Ordering::Relaxed) < now
    }

    /// Returns the number of messages that could be sent now, by the room that was published last, or
    /// `None` if the ring is shut.
    #[inline]
    pub(crate) fn room(&self, max_messages: usize) -> Option<u64> {
        // Ordering: Relaxed, all; a hint for a thread that waits.
        let tail = self.senders.0.tail.load(Ordering::Relaxed);
        let departed = self.room.0.departed.load(Ordering::Relaxed);
        (tail & SHUT == 0).then(|| (departed + max_messages as u64).saturating_sub(tail))
    }

    /// Returns whether the message of a position is published, or that of a later lap.
    #[inline(always)]
    pub(crate) fn was_published(&self, position: u64) -> bool {
        // Ordering: Relaxed; a hint for a thread that waits.
        let found = self.slot(position).sequence.load(Ordering::Relaxed);
        found.wrapping_sub(sequence(position)) as i32 >= 0
    }

    #[inline(always)]
    fn is_published(&self, position: u64) -> bool {
        let acquire = order!(Acquire, "drain: the message is written");
        // Ordering: Acquire pairs with the Release in `publish`; it carries the message.
        self.slot(position).sequence.load(acquire) == sequence(position)
    }

    /// Returns the position below which holes are reported so far.
    pub(crate) fn reported(&self) -> u64 {
        // Ordering: Relaxed; as in `peek_at`.
        self.hole.0.load(Ordering::Relaxed)
    }

    /// Returns the next slot. In the open ring only reported holes below `upto` are waited for.
    #[inline(always)]
    pub(crate) fn next(&self, cursor: &Cursor, upto: u64) -> Next<P> {
        if !cursor.shut {
            return self.peek_at(cursor.head, false, upto);
        }
        if cursor.head >= cursor.end {
            return Next::Nothing;
        }
        self.peek_at(cursor.head, true, upto)
    }

    /// Returns the slot behind the next one. The ring is open.
    #[inline(always)]
    pub(crate) fn second(&self, cursor: &Cursor) -> Next<P> {
        self.peek_at(cursor.head + 1, false, u64::MAX)
    }

    /// Returns the slot of a position. A hole is waited for if its message is `awaited`, and otherwise if it
    /// was reported and is below `upto`.
    #[inline(always)]
    fn peek_at(&self, at: u64, awaited: bool, upto: u64) -> Next<P> {
        if self.is_published(at) {
            // SAFETY: the slot is published, so its priority is written; by invariant 1 no thread
            // writes it before this one has moved the cursor. A `MaybeUninit<P>` has the layout of
            // a `P`.
            let priority = self.slot(at).priority.with(|own| unsafe { own.cast::<P>().read() });
            return Next::Message(priority);
        }
        // Ordering: Relaxed. A send that returned before this call happens before this load; the Acquire
        // in its `publish` carried the reports before its own. The report of a send that still runs may
        // be missed.
        let reported = self.hole.0.load(Ordering::Relaxed).min(upto) > at;
        let mut found = Next::Nothing;
        if awaited || reported {
            step!("drain: a hole is waited for", found = Next::Hole);
        }
        found
    }

    /// Returns whether the next slot, or the one behind its message, is a reported hole. The ring is open.
    pub(crate) fn has_hole(&self, cursor: &Cursor) -> bool {
        match self.peek_at(cursor.head, false, u64::MAX) {
            Next::Hole => true,
            Next::Message(_) => matches!(self.second(cursor), Next::Hole),
            Next::Nothing => false,
        }
    }

    /// Returns the priority of the next message if it is alone: the slot behind it has no message, and is no
    /// reported hole. The ring is open.
    #[inline(always)]
    pub(crate) fn alone(&self, cursor: &Cursor) -> Option<P> {
        let Next::Message(priority) = self.peek_at(cursor.head, false, u64::MAX) else {
            return None;
        };
        let alone = matches!(self.second(cursor), Next::Nothing);
        check!("receive: drain before the choice", alone).then_some(priority)
    }

    /// Takes the message of the next slot.
    ///
    /// # Safety
    ///
    /// The caller holds the lock that protects `cursor`, and [`next`](Self::next) or
    /// [`alone`](Self::alone) has just returned a message for the head.
    #[inline(always)]
    pub(crate) unsafe fn take(&self, cursor: &mut Cursor) -> T {
        let slot = self.slot(cursor.head);
        cursor.head += 1;
        // SAFETY: by invariant 1 the message is written, and the cursor has just moved, so it is
        // read once. A `MaybeUninit<T>` has the layout of a `T`.
        slot.value.with(|own| unsafe { own.cast::<T>().read() })
    }

    /// Publishes the room of the queue to the senders. `len` of the [accepted](Cursor::accepted)
    /// messages are in the queue, which may have `most`.
    #[inline(always)]
    pub(crate) fn set_room(&self, cursor: &Cursor, len: usize, most: usize) {
        let departed = cursor.head - len as u64;
        let limit = (departed + most as u64).min(cursor.head + self.mask + 1);
        let room = &self.room.0;
        // Ordering: Relaxed; a hint for senders that wait.
        room.departed.store(departed, Ordering::Relaxed);
        // Ordering: Release pairs with the Acquire in `refresh`; it carries the free slots: the
        // messages were read.
        room.limit.store(limit, order!(Release, "room: the slots are free"));
    }

    /// Shuts the new ring, as if `position` messages had been sent under the lock and had left.
    #[cfg(test)]
    pub(crate) fn start_at(&self, cursor: &mut Cursor, position: u64) {
        self.shut(cursor);
        (cursor.head, cursor.end) = (position, position);
    }

    /// Makes all later claims fail.
    #[inline]
    pub(crate) fn shut(&self, cursor: &mut Cursor) {
        if !cursor.shut {
            // Ordering: Relaxed; the slots publish their messages, and the one word orders this and
            // the claims.
            let tail = self.senders.0.tail.fetch_or(SHUT, Ordering::Relaxed);
            (cursor.shut, cursor.end) = (true, tail & !SHUT);
            cursor.shut_at = cursor.end;
        }
    }

    /// Lets senders claim again after a shut whose drain has met a hole. Does nothing if the ring is open
    /// or drained.
    ///
    /// No position was used since the shut: messages are sent under the lock only if the ring is drained.
    pub(crate) fn open_undrained(&self, cursor: &mut Cursor) {
        if cursor.shut && cursor.head < cursor.end {
            debug_assert_eq!(cursor.shut_at, cursor.end);
            cursor.shut = false;
            // Ordering: Relaxed; it continues the release sequence of `reopen`, whose stamps are still the
            // last ones.
            self.senders.0.tail.fetch_and(!SHUT, Ordering::Relaxed);
        }
    }

    /// Lets senders claim again. The ring is shut and drained.
    #[inline]
    pub(crate) fn reopen(&self, cursor: &mut Cursor) {
        debug_assert!(cursor.is_drained());
        cursor.shut = false;
        // The slots of the messages sent under the lock are stamped as if these had gone through the
        // ring, so that no sequence number is more than a lap old: numbers are compared modulo 2^32.
        let lap = self.mask + 1;
        for at in cursor.shut_at.max(cursor.head.saturating_sub(lap))..cursor.head {
            // Ordering: Relaxed; the Release below publishes it.
            self.slot(at).sequence.store(sequence(at), Ordering::Relaxed);
        }
        let release = order!(Release, "reopen: the slots are stamped");
        // Ordering: Release pairs with the Acquire of the exchange in `claim`; it carries the stamps.
        self.senders.0.tail.store(cursor.head, release);
    }
}
