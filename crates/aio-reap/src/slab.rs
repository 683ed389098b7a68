//! The fixed table of requests, and lists of its slots.
//!
//! ```text
//!  slots | Pending | InFlight | Free | Ready | Done | ...      user data = generation << 32 | index
//!  free (a stack) ──────────────┘       │
//!  pending (enqueue order) ─┘   ready ──┘
//! ```

use std::num::NonZeroI32;
use std::task::Waker;
use std::{mem, slice};

use crate::file::File;
use crate::op::{Op, Sub};
use crate::payload::{Payload, RawResult};

/// The number of a slot.
pub(crate) type Index = u32;

/// The state of a slot and its request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum SlotState {
    Free,
    /// Queued, but not accepted by the backend.
    Pending,
    /// Accepted by the backend, or staged for the next submission. The buffer and the file must stay.
    InFlight,
    /// Complete, and on the ready list for delivery.
    Ready,
    /// Complete. Its [`Operation`](crate::Operation) will collect it.
    Done,
}

/// The receiver of the result.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum CompletionTarget {
    /// A [`CompletionQueue`](crate::CompletionQueue). The delivery runs no user code.
    Queue,
    /// A callback. The delivery runs user code.
    Callback,
    /// An [`Operation`](crate::Operation), which will collect it.
    Future,
    /// None: the operation was dropped. The buffer is freed at completion.
    Orphan,
}

/// The reason why a request ends early. The values are numbers of retries that no request reaches.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum CancelReason {
    Cancelled = 254,
    TimedOut = 255,
}

impl CancelReason {
    pub(crate) fn errno(self) -> NonZeroI32 {
        const CANCELLED: NonZeroI32 = NonZeroI32::new(libc::ECANCELED).unwrap();
        const TIMED_OUT: NonZeroI32 = NonZeroI32::new(libc::ETIMEDOUT).unwrap();
        match self {
            Self::Cancelled => CANCELLED,
            Self::TimedOut => TIMED_OUT,
        }
    }
}

/// One request. It takes three cache lines; a request with a small payload and no waker uses two.
#[repr(C, align(64))]
pub(crate) struct Slot {
    pub(crate) generation: u32,
    pub(crate) state: SlotState,
    pub(crate) target: CompletionTarget,
    /// A read that ends at the end of the file fills the rest of its buffer with zeros.
    pub(crate) zero_fill: bool,
    /// The number of EAGAIN and EINTR completions in a row, or a [`CancelReason`].
    pub(crate) retries: u8,
    pub(crate) op: Op,
    /// The bytes moved so far and no error; in `Ready` and `Done` the result.
    pub(crate) result: RawResult,
    pub(crate) file: Option<File>,
    pub(crate) payload: Payload,
    pub(crate) waker: Option<Waker>,
}

const _: () = assert!(size_of::<Slot>() == 192 && mem::offset_of!(Slot, payload) == 64);

impl Slot {
    const VACANT: Self = Self {
        generation: 0,
        state: SlotState::Free,
        target: CompletionTarget::Callback,
        zero_fill: false,
        retries: 0,
        op: Op::NOP,
        result: RawResult { done: 0, error: None },
        file: None,
        payload: Payload::empty(),
        waker: None,
    };

    /// Returns the user data of completions of the current use of this slot, which is that at `index`.
    #[inline]
    pub(crate) fn user_data(&self, index: Index) -> u64 {
        u64::from(self.generation) << 32 | u64::from(index)
    }

    /// Ends the use of this slot, which [`Slab::add_free`] then frees. The payload may still be there.
    #[inline]
    pub(crate) fn vacate(&mut self) {
        debug_assert!(self.state != SlotState::Free && self.waker.is_none());
        self.state = SlotState::Free;
        if let Some(file) = self.file.take() {
            drop(file);
        }
        self.generation = self.generation.wrapping_add(1);
    }

    /// Returns the next operation for the kernel.
    pub(crate) fn next_op(&self) -> Op {
        self.op.rest(self.result.done)
    }

    /// Marks the request, which is then neither retried nor continued.
    pub(crate) fn cancel(&mut self, reason: CancelReason) {
        self.retries = reason as u8;
    }

    /// Returns the errno of a cancelled request.
    pub(crate) fn cancel_errno(&self) -> Option<NonZeroI32> {
        [CancelReason::Cancelled, CancelReason::TimedOut]
            .into_iter()
            .find(|&reason| reason as u8 == self.retries)
            .map(CancelReason::errno)
    }

    /// Records that `bytes` were moved, and advances vectors.
    pub(crate) fn progress(&mut self, bytes: u64) {
        self.result.done += bytes;
        // SAFETY: the slot owns the list that the vectors belong to, and its request has just
        // completed, so the kernel no longer uses them.
        unsafe { self.op.advance(bytes) }
    }

    /// Zeroes the rest of a read's buffer, and counts it as read.
    pub(crate) fn zero_rest(&mut self) {
        // SAFETY: a read's slot owns its `IoBufMut`s, which are valid for `op.len` bytes in all.
        // Vectors have advanced by `done`, and the request has just completed, so the kernel uses
        // neither.
        unsafe { self.op.zero_rest(self.result.done) };
        self.result.done = self.op.len;
    }
}

/// A first-in first-out list of slots. A slot is on at most one list. Not a `VecDeque`, which tests for its end at
/// each access: by cachegrind a callback took 22 instructions of 283 more, and a read 33 of 345.
pub(crate) struct Fifo {
    /// A ring buffer. Its size is a power of two that holds all slots.
    ring: Box<[Index]>,
    /// The counters of removed and added slots. Their low bits are positions in the ring.
    head: usize,
    tail: usize,
}

/// The slots of an engine, of which some are free.
pub(crate) struct Slab {
    slots: Box<[Slot]>,
    /// The first `free_len` are the free slots. The last one freed is used first, because its cache
    /// lines are still in the cache.
    free: Box<[Index]>,
    free_len: usize,
    /// The number of futures that wait for a slot.
    pub(crate) promised: usize,
}

impl Slab {
    pub(crate) fn new(capacity: usize) -> Self {
        assert!(u32::try_from(capacity).is_ok());
        Self {
            slots: (0..capacity).map(|_| Slot::VACANT).collect(),
            free: (0..capacity as Index).rev().collect(),
            free_len: capacity,
            promised: 0,
        }
    }

    pub(crate) fn capacity(&self) -> usize {
        self.slots.len()
    }

    /// Takes a free slot that is not promised to a future. The caller initialises it and sets its
    /// state.
    #[inline]
    pub(crate) fn alloc(&mut self) -> Option<Index> {
        if self.free_len > self.promised { self.alloc_promised() } else { None }
    }

    /// Takes a free slot for a future whose turn it is.
    #[inline]
    pub(crate) fn alloc_promised(&mut self) -> Option<Index> {
        let last = self.free_len.checked_sub(1)?;
        self.free_len = last;
        Some(self.free[last])
    }

    /// Frees a slot. Its user data does not match again for 2^32 uses of the slot.
    ///
    /// Returns its payload, which the caller takes before the slab is used again, or has taken.
    #[inline]
    pub(crate) fn release(&mut self, index: Index) -> &mut Payload {
        self.add_free(index);
        let slot = &mut self.slots[index as usize];
        slot.vacate();
        &mut slot.payload
    }

    /// Frees the slot `index`, which was [vacated](Slot::vacate).
    #[inline]
    pub(crate) fn add_free(&mut self, index: Index) {
        self.free[self.free_len] = index;
        self.free_len += 1;
    }

    #[inline]
    pub(crate) fn get(&mut self, index: Index) -> &mut Slot {
        &mut self.slots[index as usize]
    }

    pub(crate) fn peek(&self, index: Index) -> &Slot {
        &self.slots[index as usize]
    }

    /// Returns the slot whose current use has this user data.
    #[inline]
    pub(crate) fn current(&mut self, user_data: u64) -> Option<(Index, &mut Slot)> {
        let index = user_data as Index;
        let slot = self.slots.get_mut(index as usize)?;
        (slot.generation == (user_data >> 32) as u32).then_some((index, slot))
    }

    /// Returns the slot in flight that a completion names, or `None` if it names no slot in flight.
    #[inline]
    pub(crate) fn in_flight(&mut self, user_data: u64) -> Option<(Index, &mut Slot)> {
        self.current(user_data).filter(|(_, slot)| slot.state == SlotState::InFlight)
    }

    pub(crate) fn free_len(&self) -> usize {
        self.free_len
    }

    pub(crate) fn count(&self, state: SlotState) -> usize {
        self.slots.iter().filter(|slot| slot.state == state).count()
    }
}

impl Fifo {
    /// Makes a list for the slots of a slab.
    pub(crate) fn new(capacity: usize) -> Self {
        let ring = vec![0; capacity.next_power_of_two()].into();
        Self { ring, head: 0, tail: 0 }
    }

    #[inline]
    pub(crate) fn len(&self) -> usize {
        self.tail.wrapping_sub(self.head)
    }

    fn position(&self, at: usize) -> usize {
        at & (self.ring.len() - 1)
    }

    #[inline]
    pub(crate) fn push(&mut self, index: Index) {
        debug_assert!(self.len() < self.ring.len());
        let position = self.position(self.tail);
        self.ring[position] = index;
        self.tail = self.tail.wrapping_add(1);
    }

    /// Removes a slot, in time proportional to the length.
    pub(crate) fn remove(&mut self, index: Index) {
        let mut to = self.head;
        for nth in 0..self.len() {
            let there = self.ring[self.position(self.head.wrapping_add(nth))];
            if there != index {
                let position = self.position(to);
                self.ring[position] = there;
                to = to.wrapping_add(1);
            }
        }
        debug_assert_eq!(to.wrapping_add(1), self.tail, "the slot was not on the list");
        self.tail = to;
    }

    #[inline]
    pub(crate) fn pop(&mut self) -> Option<Index> {
        if self.len() == 0 {
            return None;
        }
        let index = self.ring[self.position(self.head)];
        self.head = self.head.wrapping_add(1);
        Some(index)
    }
}

/// The requests of one submission, oldest first. Each is built from its slot when it is taken.
pub(crate) struct Batch<'s> {
    slots: &'s mut [Slot],
    /// The part up to the end of the list's ring, and the part that follows at its start.
    here: slice::Iter<'s, Index>,
    then: &'s [Index],
    staged: usize,
}

impl<'s> Batch<'s> {
    /// Makes a batch of the first requests on `list` after the `staged` ones, at most `most`.
    #[inline]
    pub(crate) fn new(slab: &'s mut Slab, list: &'s Fifo, staged: usize, most: usize) -> Self {
        let count = most.min(list.len() - staged);
        let (before, start) = list.ring.split_at(list.position(list.head.wrapping_add(staged)));
        let (here, then) = match count.checked_sub(start.len()) {
            None => (&start[..count], &before[..0]),
            Some(more) => (start, &before[..more]),
        };
        Self { slots: &mut slab.slots, here: here.iter(), then, staged }
    }
}

impl Batch<'_> {
    /// Returns the number of staged requests, which come before those of the batch.
    #[inline]
    pub(crate) fn staged(&self) -> usize {
        self.staged
    }

    /// Takes the next request, which is in flight from now on. Returns its user data and slot.
    #[inline(always)]
    pub(crate) fn next_slot(&mut self) -> Option<(u64, &Slot)> {
        let index = match self.here.next() {
            Some(&index) => index,
            None => {
                self.here = mem::take(&mut self.then).iter();
                *self.here.next()?
            }
        };
        let slot = &mut self.slots[index as usize];
        slot.state = SlotState::InFlight;
        Some((slot.user_data(index), slot))
    }
}

impl Iterator for Batch<'_> {
    type Item = Sub;

    fn next(&mut self) -> Option<Sub> {
        let (user_data, slot) = self.next_slot()?;
        Some(Sub { user_data, op: slot.next_op() })
    }

    #[inline]
    fn size_hint(&self) -> (usize, Option<usize>) {
        let left = self.here.len() + self.then.len();
        (left, Some(left))
    }
}

impl ExactSizeIterator for Batch<'_> {}

/// Ends a submission of the first `offered` requests on `list`: the first `accepted` leave the
/// list, and the others are pending again.
pub(crate) fn finish_submission(slab: &mut Slab, list: &mut Fifo, offered: usize, accepted: usize) {
    debug_assert!(accepted <= offered && offered <= list.len());
    for nth in accepted..offered {
        let index = list.ring[list.position(list.head.wrapping_add(nth))];
        slab.get(index).state = SlotState::Pending;
    }
    list.head = list.head.wrapping_add(accepted);
}

/// The name of a request that was submitted with a callback or to a queue, for
/// [`Engine::cancel`](crate::Engine::cancel). No later request of the engine has it (until its slot
/// was used 2^32 times).
///
/// ```
/// use std::time::Duration;
/// use aio_reap::Engine;
///
/// # fn main() -> std::io::Result<()> {
/// let engine = Engine::new()?;
/// let plug = engine.plug(); // the request stays in the engine
/// let id = engine.nop().callback(|result, ()| {
///     assert_eq!(result.unwrap_err().errno(), libc::ECANCELED);
/// })?;
/// assert!(engine.cancel(id));
/// drop(plug);
/// engine.drain()?;
/// assert!(!engine.cancel(id)); // it has completed
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct RequestId(pub(crate) u64);
