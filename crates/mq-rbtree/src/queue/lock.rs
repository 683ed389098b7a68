//! A queue: the state under its lock, and the ways to lock it: with or without a drain of the ring, and up
//! to a deadline.
//!
//! A `&mut State` comes from the lock's guard, or from the queue's owner; either excludes all other
//! threads. What the unlock does for waiters is in [`LockedState`].
//!
//! A thread that drains the ring may have to wait for a sender between its claim and its publication.
//! It waits without the lock.

use std::fmt;
use std::ops::{Deref, DerefMut};
use std::sync::Arc;
use std::time::Duration;

use offlock_sync::{AllocError, Futex, WaitSet, WordGuard, WordLock, check, hint, step, thread};

use super::park::{Spin, Wait};
use crate::core::{Bitmap, Core, Hint, Levels, Message, Preload};
use crate::error::{ReceiveError, SendError, SendRefused};
use crate::notifier::{EventNotifier, Interest};
use crate::staging::{Cursor, Next, Ring};

/// A bounded priority queue for any number of threads and tasks.
///
/// Messages are received by priority, the highest first. Messages of equal priority are received in
/// the order in which they were sent.
///
/// Threads share a queue by reference or in an `Arc`. A queue that closes when its last sender or
/// receiver is dropped comes from [`Builder::channel`](crate::Builder::channel).
///
/// # Futures
///
/// A waiting future is woken when there is a message, or room, for it. Until it is polled or dropped, the
/// queue leaves one message, or its room, to it, and wakes no other waiter for that. So a future that was woken
/// and is kept without a poll, also a leaked one, costs others a wake-up as long as it is kept: whenever one
/// message is in the queue, none of the other waiters is woken. Receivers that need not wait may take the
/// message.
///
/// ```
/// use std::thread;
/// use mq_rbtree::Queue;
///
/// let queue: Queue<&str> = Queue::new(100)?; // at most 100 messages
/// thread::scope(|s| {
///     s.spawn(|| {
///         queue.send("later", 1).unwrap(); // waits if the queue is full
///         queue.send("now", 9).unwrap();
///         queue.close(); // refuses further messages
///     });
///     while let Ok((message, priority)) = queue.receive() {
///         println!("{message} ({priority})"); // until the queue is closed and empty
///     }
/// });
/// assert!(queue.is_empty());
/// # Ok::<(), mq_rbtree::BuildError>(())
/// ```
pub struct Queue<T, L: Levels = Bitmap> {
    /// Takes the sends that need no lock, unless priorities are compared or limits need the lock.
    pub(super) ring: Option<Ring<T, L::Priority>>,
    pub(super) state: WordLock<State<T, L>>,
    /// The threads and tasks that wait for a message.
    pub(crate) receivers: WaitSet,
    /// The threads and tasks that wait for room; each needs the places that are not reserved for others.
    pub(super) senders: WaitSet,
    pub(crate) hint: Hint<L>,
    pub(crate) config: Config<L>,
    pub(super) spin: Spin,
    /// For senders of the ring.
    pub(super) room_spin: Spin,
}

/// A received message and its priority.
///
/// ```
/// use mq_rbtree::{Bitmap, Queue, Received};
///
/// let queue: Queue<&str> = Queue::new(8)?;
/// queue.send("a message", 7)?;
/// let (message, priority): Received<&str, Bitmap> = queue.receive()?;
/// assert_eq!((message, priority), ("a message", 7));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub type Received<T, L> = (T, <L as Levels>::Priority);

/// The fields that every message uses come first: up to `core` they are on the cache line of the lock's word.
#[repr(C)]
pub(crate) struct State<T, L: Levels> {
    pub(crate) cursor: Cursor,
    pub(crate) closed: bool,
    /// The armed notifiers: one bit for each direction.
    pub(crate) armed: u8,
    /// The most messages that were in the queue and in guards at one time.
    pub(super) peak: usize,
    pub(crate) core: Core<T, L>,
    pub(crate) notifiers: [Option<Arc<EventNotifier>>; 2],
    /// Receives whose wait ended before they were listed.
    pub(super) spun_receives: u64,
    pub(super) timeouts: u64,
}

// SAFETY: messages move between threads, and priorities are copied between them, for which `Send` suffices. The levels contain nothing but priorities.
unsafe impl<T: Send, L: Levels> Send for State<T, L> where L::Priority: Send {}

impl<T, L: Levels> State<T, L> {
    pub(crate) fn new(core: Core<T, L>, cursor: Cursor) -> Self {
        Self {
            cursor,
            closed: false,
            armed: 0,
            peak: 0,
            core,
            notifiers: [const { None }; 2],
            spun_receives: 0,
            timeouts: 0,
        }
    }

    /// Takes the message into the store. If it is refused, or if a comparison panics, nothing has changed. The
    /// message is in the caller's frame, where an unwind drops it after the unlock.
    #[inline(always)]
    pub(crate) fn send(
        &mut self,
        message: &mut Option<Message<T, L::Priority>>,
        config: &Config<L>,
        preload: &mut Preload<T, L>,
    ) -> Result<(), SendRefused> {
        let Some(priority) = message.as_ref().map(|message| message.priority) else {
            return Ok(());
        };
        if self.closed {
            return Err(SendRefused::Closed);
        }
        if self.core.occupied() >= config.len_limit(priority) {
            return Err(SendRefused::Full);
        }
        let level = self.core.get_or_insert_level(priority, preload);
        let level = level.map_err(|AllocError { .. }| SendRefused::NoMemory)?;
        let Some(sent) = message.take() else { unreachable!("it has a priority") };
        // SAFETY: `get_or_insert_level` has just returned the level.
        if let Err(refused) = unsafe { self.core.push_to_level(level, sent, preload) } {
            *message = Some(refused);
            return Err(SendRefused::NoMemory);
        }
        self.count_sent();
        Ok(())
    }

    /// Returns whether a sender must publish its message in the open ring before a receive goes on.
    pub(crate) fn awaits_sender(&self, ring: &Ring<T, L::Priority>) -> bool {
        !self.cursor.is_shut() && ring.has_hole(&self.cursor)
    }

    /// Takes the message that is alone in the open ring, if any. `Ok` if it is the next one: of a higher
    /// priority than those of the store.
    #[inline(always)]
    pub(super) fn take_alone(
        &mut self,
        ring: &Ring<T, L::Priority>,
        config: &Config<L>,
    ) -> Alone<T, L::Priority> {
        if self.cursor.is_shut() {
            return Err(None);
        }
        let priority = ring.alone(&self.cursor).ok_or(None)?;
        self.count_depth(self.core.occupied() + 1);
        // SAFETY: the lock is held, and `alone` has just returned the priority of the message.
        let message = Message { value: unsafe { ring.take(&mut self.cursor) }, priority };
        let next = self.core.is_next(priority);
        if !check!("receive: the stored messages were sent before", next) {
            return Err(Some(message));
        }
        self.set_room(ring, config);
        Ok(message)
    }

    /// Receives the next message of the store and the open ring, from which a message that was `alone` has
    /// been taken. Returns `None` if there is none, or if a sender must publish its message first.
    #[inline(always)]
    pub(super) fn receive_staged(
        &mut self,
        ring: &Ring<T, L::Priority>,
        config: &Config<L>,
        alone: Option<Message<T, L::Priority>>,
        preload: &mut Preload<T, L>,
    ) -> Option<Message<T, L::Priority>> {
        if let Some(message) = alone {
            self.core.push_stored(message);
        } else {
            match ring.next(&self.cursor, u64::MAX) {
                Next::Hole => return None,
                Next::Nothing => (),
                Next::Message(_) => {
                    // The message before a hole stays in the ring.
                    let at_hole = matches!(ring.second(&self.cursor), Next::Hole);
                    if (self.core.is_empty() && at_hole) || !self.drain(ring, u64::MAX) {
                        return None;
                    }
                }
            }
        }
        let message = self.core.pop_with(preload)?;
        self.set_room(ring, config);
        Some(message)
    }

    /// Moves the published messages of the ring into the store. Returns true if every message is moved
    /// whose send returned before this call, or before `upto` was read from [`Ring::reported`]. Returns
    /// false at a hole; the messages before the hole are moved. Does not allocate.
    #[inline(never)]
    pub(crate) fn drain(&mut self, ring: &Ring<T, L::Priority>, upto: u64) -> bool {
        let mut complete = true;
        // Senders may go on meanwhile; at most a whole ring of messages was sent before the call.
        for _ in 0..ring.slots() {
            match ring.next(&self.cursor, upto) {
                Next::Nothing => break,
                Next::Hole => {
                    complete = false;
                    break;
                }
                Next::Message(priority) => {
                    // SAFETY: the lock is held, and `next` has just returned a message.
                    let value = unsafe { ring.take(&mut self.cursor) };
                    self.core.push_stored(Message { value, priority });
                }
            }
        }
        self.count_depth(self.core.occupied());
        complete
    }

    /// Publishes the room to the senders of the ring.
    #[inline(always)]
    pub(super) fn set_room(&self, ring: &Ring<T, L::Priority>, config: &Config<L>) {
        let most = config.max_messages.min(self.core.capacity());
        ring.set_room(&self.cursor, self.core.occupied(), most);
    }

    /// Counts a message that was added to the queue.
    #[inline(always)]
    pub(super) fn count_sent(&mut self) {
        self.cursor.accept();
        self.count_depth(self.core.occupied());
    }

    #[inline(always)]
    fn count_depth(&mut self, len: usize) {
        if len > self.peak {
            self.peak = len;
        }
    }

    /// Receives the next message, or the error that none will come. Returns `None` if there is none yet.
    #[inline(always)]
    pub(crate) fn receive(
        &mut self,
        preload: &mut Preload<T, L>,
    ) -> Option<Result<(T, L::Priority), ReceiveError>> {
        match self.core.pop_with(preload) {
            Some(message) => Some(Ok((message.value, message.priority))),
            None => self.has_ended().then_some(Err(ReceiveError::Closed)),
        }
    }

    /// Returns whether no message will come any more: the queue is closed, and no guard can put one
    /// back.
    #[inline(always)]
    pub(crate) fn has_ended(&self) -> bool {
        self.closed && self.core.lent() == 0
    }

    /// Signals the armed notifiers whose event has occurred, and disarms them.
    pub(super) fn signal_notifiers(&mut self, config: &Config<L>) {
        let readable = !self.core.is_empty() || self.has_ended();
        let writable = self.core.occupied() < config.max_messages || self.closed;
        for (interest, due) in [(Interest::Readable, readable), (Interest::Writable, writable)] {
            let direction = interest as usize;
            if due && self.armed & (1 << direction) != 0 {
                self.armed &= !(1 << direction);
                if let Some(notifier) = &self.notifiers[direction] {
                    notifier.signal();
                }
            }
        }
    }
}

// The limits.

/// Places that messages below a priority leave free.
#[derive(Clone, Copy, Debug)]
pub(super) struct Reserve<P> {
    pub(super) from: P,
    pub(super) messages: usize,
}

/// The limits of a queue, fixed when it is made.
pub(crate) struct Config<L: Levels> {
    pub(crate) max_messages: usize,
    pub(super) reserves: Vec<Reserve<L::Priority>>,
}

impl<L: Levels> Config<L> {
    /// Checks a message. Refuses one that can never be sent.
    #[inline(always)]
    pub(crate) fn admit<T>(
        &self,
        value: T,
        priority: L::Priority,
    ) -> Result<Message<T, L::Priority>, SendError<T>> {
        match L::check(priority) {
            Ok(()) => Ok(Message { value, priority }),
            Err(priority) => {
                Err(SendError { value, reason: SendRefused::BadPriority { priority } })
            }
        }
    }

    /// Returns the length of the queue at which messages of this priority are refused. Compares
    /// priorities, which may panic: callers hold no lock, or have changed nothing yet.
    #[inline(always)]
    pub(crate) fn len_limit(&self, priority: L::Priority) -> usize {
        if self.reserves.is_empty() {
            self.max_messages
        } else {
            self.limit_below_reserves(priority)
        }
    }

    #[cold]
    #[inline(never)]
    fn limit_below_reserves(&self, priority: L::Priority) -> usize {
        let kept = |reserve: &&Reserve<L::Priority>| L::is_above(reserve.from, priority);
        let kept: usize = self.reserves.iter().filter(kept).map(|reserve| reserve.messages).sum();
        self.max_messages.saturating_sub(kept)
    }
}

// The ways to lock it.

/// The yields of a receive that finds the queue locked, before it waits for the lock. On a CPU that has
/// no other thread to run, they take about as long as the lock's own pauses.
///
/// Measured, four senders and four receivers on two CPUs: 86 to 90 ns for a message without a yield, 67
/// to 74 with 10, 62 to 70 with 40, 62 to 64 with 1,000.
const YIELDS: u32 = if cfg!(offlock_model) { 0 } else { 32 };

/// The next message, or a message that was alone in the ring and is not the next.
pub(super) type Alone<T, P> = Result<Message<T, P>, Option<Message<T, P>>>;

pub(super) type Guard<'q, T, L> = WordGuard<'q, State<T, L>>;

impl<T, L: Levels> Queue<T, L> {
    /// Locks the state for a receive, without a drain. Yields the CPU before it waits for the lock.
    #[inline(always)]
    pub(super) fn lock_yielding(&self, wait: &Wait) -> Guard<'_, T, L> {
        if YIELDS == 0 {
            return self.state.lock();
        }
        self.state.try_lock().unwrap_or_else(|| self.lock_after_yields(wait))
    }

    /// Locks the state for a receive beside another one, whose CPU has the messages in its cache. A
    /// sender on this CPU, which takes no lock, does more for the queue than a receiver that spins.
    #[cold]
    #[inline(never)]
    fn lock_after_yields(&self, wait: &Wait) -> Guard<'_, T, L> {
        // Without a ring the senders take the lock as well.
        let yields = if self.ring.is_some() { YIELDS } else { 0 };
        for _ in 0..yields {
            // Beside a busy thread on this CPU, each yield lasts for its time slice, some milliseconds.
            // A call that does not wait for messages has no deadline that this could miss.
            if wait.is_over() {
                break;
            }
            thread::yield_now();
            if let Some(guard) = self.state.try_lock() {
                return guard;
            }
        }
        self.state.lock()
    }

    /// Locks the state, without a drain.
    #[inline(always)]
    pub(crate) fn lock_undrained(&self) -> LockedState<'_, T, L> {
        self.with_queue(self.state.lock())
    }

    /// Locks the state, and drains the ring: each message whose send has returned is in the store.
    ///
    /// It waits for a sender between its claim and its publication.
    #[inline]
    pub(crate) fn lock(&self) -> LockedState<'_, T, L> {
        self.lock_until(Access::Receive, Wait::Forever).unwrap_or_else(without_deadline)
    }

    /// Locks the state for a wait that is given up. The unlock wakes the waiters for which the state has
    /// something.
    #[cold]
    pub(crate) fn give_up(&self) -> LockedState<'_, T, L> {
        let mut state = self.lock_undrained();
        // At a hole `lock_until` has left it shut.
        step!("give up: open the undrained ring", state.open_undrained());
        state
    }

    /// Counts an operation that has timed out.
    #[cold]
    pub(crate) fn count_timeout(&self) {
        self.give_up().timeouts += 1;
    }

    /// Locks the state and drains the ring; shuts it first, except for [`Access::Receive`]. Returns `None`
    /// if a hole is left after the deadline and [`SPINS`] looks: the caller [gives up](Self::give_up) then.
    pub(crate) fn lock_until(&self, access: Access, wait: Wait) -> Option<LockedState<'_, T, L>> {
        let (mut looks, mut upto) = (0, u64::MAX);
        loop {
            let mut state = self.lock_undrained();
            if access != Access::Receive {
                step!("lock: shut the ring", state.shut());
            }
            if state.drain(upto) || (access == Access::Send && state.closed) {
                return Some(state);
            }
            if looks >= SPINS && wait.is_over() {
                return None;
            }
            if looks == 0 && access == Access::Receive {
                // A receive that waited for holes reported later might never end.
                upto = state.reported();
            }
            drop(state);
            wait_for_sender(looks);
            looks += 1;
        }
    }

    /// Allocates the memory that seems to be missing, and locks the state to send a message. The ring is
    /// shut, and drained unless the queue is closed. Returns `None` at the deadline.
    pub(crate) fn lock_to_send(
        &self,
        preload: &mut Preload<T, L>,
        wait: Wait,
    ) -> Option<LockedState<'_, T, L>> {
        let mut preloaded = self.ring.is_none() || self.hint.needs_slot();
        loop {
            self.hint.preload(preload);
            let state = self.lock_until(Access::Send, wait)?;
            if preloaded || !self.hint.needs_slot() {
                return Some(state);
            }
            preloaded = true; // the drained messages took the slots
        }
    }

    /// Returns the guard with the queue, which its drop leaves as the unlocked queue needs it.
    #[inline(always)]
    pub(super) fn with_queue<'q>(&'q self, guard: Guard<'q, T, L>) -> LockedState<'q, T, L> {
        let [receivers, senders] =
            [&self.receivers, &self.senders].map(|set| Wake { set, units: 0 });
        LockedState { queue: self, guard, receivers, senders }
    }

    /// Returns whether no thread or task waits and no notifier is armed.
    #[inline(always)]
    pub(super) fn is_quiet(&self, state: &State<T, L>) -> bool {
        self.receivers.waiting() == 0 && self.senders.waiting() == 0 && state.armed == 0
    }

    /// Returns whether senders may use the ring, or append to the store at once: the queue is quiet and open.
    #[inline(always)]
    pub(super) fn may_open(&self, state: &State<T, L>) -> bool {
        self.is_quiet(state) && !state.closed
    }
}

impl<T, L: Levels> Drop for Queue<T, L> {
    fn drop(&mut self) {
        // The store drops all messages.
        if let Some(ring) = &self.ring {
            self.state.get_mut().drain(ring, u64::MAX);
        }
    }
}

// A panic under the lock or in a wait leaves the state consistent.
impl<T, L: Levels> std::panic::UnwindSafe for Queue<T, L> {}
impl<T, L: Levels> std::panic::RefUnwindSafe for Queue<T, L> {}

impl<T, L: Levels> fmt::Debug for Queue<T, L> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut debug = f.debug_struct("Queue");
        // The fields are written after the unlock, because the writer is the user's.
        let seen = self.state.try_lock().map(|mut state| {
            if let Some(ring) = &self.ring {
                state.drain(ring, u64::MAX);
            }
            (state.core.len(), state.closed)
        });
        if let Some((len, closed)) = seen {
            debug.field("len", &len).field("closed", &closed);
        }
        debug.field("max_messages", &self.config.max_messages).finish_non_exhaustive()
    }
}

/// What the queue is locked for.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Access {
    /// To see the messages whose sends have returned.
    Receive,
    /// To wait, or to arm a notifier.
    Wait,
    /// To send; a closed queue refuses that without a look at the ring.
    Send,
}

/// The locked state of a queue. Its drop opens a quiet ring, unlocks, and then wakes the waiters for which the
/// state has something.
pub(crate) struct LockedState<'q, T, L: Levels> {
    queue: &'q Queue<T, L>,
    guard: Guard<'q, T, L>,
    // Dropped in this order, after the guard: a panic of a waker does not keep the others waiting.
    receivers: Wake<'q>,
    senders: Wake<'q>,
}

/// The waiters to wake after the unlock.
struct Wake<'q> {
    set: &'q WaitSet,
    units: usize,
}

impl Drop for Wake<'_> {
    #[inline(always)]
    fn drop(&mut self) {
        if self.units > 0 {
            self.set.wake_for(self.units);
        }
    }
}

impl<T, L: Levels> LockedState<'_, T, L> {
    /// Makes later sends take the lock.
    pub(crate) fn shut(&mut self) {
        if let Some(ring) = &self.queue.ring {
            ring.shut(&mut self.guard.cursor);
        }
    }

    /// Opens a ring that could not be drained, if no thread or task waits and no notifier is armed.
    pub(super) fn open_undrained(&mut self) {
        if let Some(ring) = &self.queue.ring {
            if self.queue.may_open(&self.guard) {
                ring.open_undrained(&mut self.guard.cursor);
            }
        }
    }

    /// Drains the ring: see [`State::drain`].
    #[inline]
    pub(crate) fn drain(&mut self, upto: u64) -> bool {
        match &self.queue.ring {
            Some(ring) => self.guard.drain(ring, upto),
            None => true,
        }
    }

    /// Returns the position below which senders have reported holes.
    fn reported(&self) -> u64 {
        self.queue.ring.as_ref().map_or(0, |ring| ring.reported())
    }

    /// Decides how many waiters the unlock wakes: as many as there are messages or places, or all if the
    /// queue is closed and has nothing for them.
    #[cold]
    #[inline(never)]
    fn serve(&mut self) {
        let (queue, state) = (self.queue, &mut *self.guard);
        if state.armed != 0 {
            step!("unlock: signal the armed notifiers", state.signal_notifiers(&queue.config));
        }
        if queue.receivers.waiting() != 0 {
            let messages = if state.has_ended() { usize::MAX } else { state.core.len() };
            step!("unlock: wake receivers for the messages", self.receivers.units = messages);
        }
        if queue.senders.waiting() != 0 {
            let places = queue.config.max_messages - state.core.occupied();
            let places = if state.closed { usize::MAX } else { places };
            step!("unlock: wake senders for the places", self.senders.units = places);
        }
    }
}

impl<T, L: Levels> Deref for LockedState<'_, T, L> {
    type Target = State<T, L>;

    #[inline(always)]
    fn deref(&self) -> &State<T, L> {
        &self.guard
    }
}

impl<T, L: Levels> DerefMut for LockedState<'_, T, L> {
    #[inline(always)]
    fn deref_mut(&mut self) -> &mut State<T, L> {
        &mut self.guard
    }
}

impl<T, L: Levels> Drop for LockedState<'_, T, L> {
    #[inline(always)]
    fn drop(&mut self) {
        if !self.queue.is_quiet(&self.guard) {
            self.serve();
        }
        if let Some(ring) = &self.queue.ring {
            let state = &mut *self.guard;
            state.set_room(ring, &self.queue.config);
            let quiet = check!("leave: open the quiet ring only", self.queue.may_open(state));
            if quiet && state.cursor.is_drained() {
                ring.reopen(&mut state.cursor);
            }
        }
    }
}

/// The looks at a hole without a yield or a sleep, also if the deadline is over: three microseconds.
pub(super) const SPINS: u32 = if cfg!(offlock_model) { 1 } else { 64 };
/// The yields after them, before a thread sleeps.
const YIELDS_TO_SENDER: u32 = 64;

/// Panics in place of the result of a timeout.
#[cold]
fn without_deadline<R>() -> R {
    unreachable!("a wait without a deadline timed out")
}

/// Waits a moment for a sender to publish its message. The sender takes some nanoseconds, unless its
/// thread was stopped.
#[cold]
pub(super) fn wait_for_sender(looks: u32) {
    if cfg!(offlock_model) {
        return thread::yield_now();
    }
    let Some(looks) = looks.checked_sub(SPINS) else { return hint::spin_loop() };
    // The caller looks at its deadline after each yield.
    let Some(looks) = looks.checked_sub(YIELDS_TO_SENDER) else { return thread::yield_now() };
    // The pauses grow from 50 us to 1 ms: a deadline is missed by a part of the wait.
    let pause = Duration::from_micros(50) * (looks + 1).min(20);
    Futex::new().wait_for(0, pause);
}
