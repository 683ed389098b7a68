//! The state of an engine: it queues, submits and reaps requests. No function here runs user code.
//!
//! ```text
//!  alloc ─► Pending ─submit─► InFlight ─reap─► Ready ─deliver─► Free
//!              ▲                 │               └─ a future: Done ─collect─► Free
//!              └── short, EAGAIN ┘
//! ```
//!
//! # Invariants
//!
//! 1. accepted = pending + in flight + ready + done + finished; in flight <= depth.
//! 2. A slot that is `Pending` or `InFlight` owns its buffer (in `payload`) and its file.
//! 3. The first `staged` requests on the pending list are staged in the backend. Their slots are
//!    `InFlight`, so that the submission does not visit them, but count as pending. Code that takes
//!    a request off the list, or cancels one in the backend, calls `unstage` before.
//! 4. If requests are pending although there is room, then `blocked` is set (the engine arms a timer),
//!    or the program is notified (by `Turn::pending` and the kick).

use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};
use std::num::NonZeroI32;
use std::task::Waker;
use std::time::{Duration, Instant};
use std::{io, mem};

use crate::backend::device::Device;
use crate::completion_state::{CompletionState, Turn};
use crate::file::File;
use crate::op::{Kind, Op, Stop};
use crate::payload::{Delivery, RawResult, Receive, Reply};
use crate::slab::{
    Batch, CancelReason, CompletionTarget, Index, Slab, SlotState, finish_submission,
};

/// The requests and the backend of an engine.
pub(crate) struct State {
    pub(crate) completions: CompletionState,
    pub(crate) backend: Device,
    /// The maximum number of requests in flight.
    depth: usize,
    pub(crate) closed: bool,
    pub(crate) deadlines: Deadlines,
    /// Futures that wait for a slot.
    pub(crate) waiting: WaitQueue,
    /// Other threads may make calls, which wake the engine by its descriptors only.
    pub(crate) has_remote: bool,
    /// The number of requests at the head of the pending list that are staged, and its limit, which is
    /// larger only if no other request is pending.
    staged: usize,
    stage_limit: usize,
}

impl State {
    pub(crate) fn new(backend: Device, depth: usize, capacity: usize) -> Self {
        Self {
            completions: CompletionState::new(capacity, depth),
            backend,
            depth,
            closed: false,
            deadlines: Deadlines::default(),
            waiting: WaitQueue::default(),
            has_remote: false,
            staged: 0,
            stage_limit: 0,
        }
    }

    /// Initialises the slot `index`, which was just allocated, and queues its request. Stages it if every
    /// request before it is staged. Returns its user data.
    #[inline]
    pub(crate) fn queue<B: 'static, T: Reply<B>>(
        &mut self,
        index: Index,
        file: Option<File>,
        op: Op,
        zero_fill: bool,
        target: CompletionTarget,
        delivery: Delivery<B, impl Receive<B, T>, T>,
    ) -> u64 {
        let CompletionState { slab, pending, stats, .. } = &mut self.completions;
        let slot = slab.get(index);
        let user_data = slot.user_data(index);
        slot.target = target;
        slot.zero_fill = zero_fill;
        slot.retries = 0;
        slot.op = op;
        slot.result = RawResult { done: 0, error: None };
        debug_assert!(slot.file.is_none());
        mem::forget(mem::replace(&mut slot.file, file)); // a free slot has no file to drop
        slot.payload.put(delivery);
        stats.accepted += 1;
        if op.offset > i64::MAX as u64 {
            // The kernel would see a negative offset and fail with EINVAL, but to io_uring -1 means
            // the current position of the file.
            self.completions.finish(index, NonZeroI32::new(libc::EINVAL));
        } else if op.transfers() && op.len == 0 {
            // The kernel would return 0, which would be taken for the end of the file or a full
            // device.
            self.completions.finish(index, None);
        } else {
            pending.push(index);
            slot.state = SlotState::Pending;
            if self.staged < self.stage_limit {
                debug_assert_eq!(pending.len(), self.staged + 1);
                if self.backend.stage(user_data, &op, slot) {
                    self.staged += 1;
                    slot.state = SlotState::InFlight;
                } else {
                    self.stage_limit = self.staged;
                }
            }
        }
        user_data
    }

    /// Takes back every staged request: they are only pending then.
    fn unstage(&mut self) {
        if self.staged > 0 {
            let CompletionState { slab, pending, .. } = &mut self.completions;
            finish_submission(slab, pending, mem::take(&mut self.staged), 0);
            self.backend.unstage();
        }
        self.stage_limit = 0;
    }

    /// Updates the number of requests that may be staged, after a submission and a reap.
    #[inline]
    pub(crate) fn update_stage_limit(&mut self) {
        let completions = &self.completions;
        // Not while the kernel has entries to consume. Those of an older submission come first, and that
        // of a cancellation would be counted as a staged one.
        let may = completions.pending.len() == self.staged && !self.backend.has_unsubmitted();
        self.stage_limit = if may { self.room() } else { 0 };
    }

    /// Returns the number of requests that the next submission may take.
    #[inline]
    fn room(&self) -> usize {
        self.depth - self.completions.in_flight
    }

    /// Returns the number of requests that the kernel will complete: those it took that were not
    /// reaped.
    pub(crate) fn in_kernel(&self) -> usize {
        self.completions.in_flight - self.backend.backlog()
    }

    /// Returns whether requests or cancellations wait for room in the kernel. A timer must then cause the
    /// next turn, because the requests in the kernel may never complete.
    pub(crate) fn needs_retry(&self) -> bool {
        self.completions.blocked || self.backend.has_unsubmitted()
    }

    /// Returns the number of completions to deliver.
    pub(crate) fn ready(&self) -> usize {
        self.completions.ready.len()
    }

    /// Returns whether another turn makes progress without a wake-up, apart from the calls of other
    /// threads.
    pub(crate) fn has_work(&self) -> bool {
        let can_submit = self.completions.pending.len() > 0 && self.room() > 0;
        self.ready() > 0
            || self.completions.enqueued > 0
            || (!self.completions.blocked && (can_submit || self.backend.has_unsubmitted()))
    }

    /// Returns the report of a call that has delivered `delivered` completions.
    pub(crate) fn report(&self, delivered: usize) -> Turn {
        let pending = self.completions.pending.len() + self.ready();
        Turn { delivered, pending, in_flight: self.completions.in_flight }
    }

    /// Returns whether the engine can only wait for the kernel, or is idle, and no future waits for
    /// a slot.
    pub(crate) fn can_only_wait(&self) -> bool {
        let completions = &self.completions;
        let quiet = !completions.blocked && !self.backend.has_unsubmitted();
        let quiet = quiet && completions.deferred_drops.is_empty();
        quiet
            && completions.pending.len() == 0
            && self.ready() == 0
            && completions.slab.promised == 0
    }

    /// Returns whether every reaped completion was delivered, and no future waits for a slot.
    fn has_delivered_all(&self) -> bool {
        self.completions.enqueued == 0 && self.ready() == 0 && self.completions.slab.promised == 0
    }

    /// Submits one batch. With `sleep` it may also wait for a completion, unless a delivery, a
    /// future, a deadline or another thread would wait for that.
    pub(crate) fn submit(&mut self, sleep: bool) {
        let sleep = sleep && !self.has_remote;
        let sleep = sleep && self.deadlines.earliest().is_none() && self.has_delivered_all();
        loop {
            let (room, staged) = (self.room(), mem::take(&mut self.staged));
            let completions = &mut self.completions;
            let CompletionState { slab, pending, .. } = &mut *completions;
            let batch = Batch::new(slab, pending, staged, room - staged);
            let offered = staged + batch.len();
            if offered == 0 && !self.backend.has_unsubmitted() {
                completions.blocked = false;
                return;
            }
            let submitted = if sleep {
                let (submitted, slept) = self.backend.submit_and_wait(batch);
                completions.stats.waits += u64::from(slept);
                submitted
            } else {
                self.backend.submit(batch)
            };
            finish_submission(
                &mut completions.slab,
                &mut completions.pending,
                offered,
                submitted.accepted,
            );
            completions.in_flight += submitted.accepted;
            completions.stats.submitted(submitted.accepted, completions.in_flight);
            match submitted.stop {
                None => {
                    completions.blocked = false;
                    return;
                }
                Some(Stop::Busy) => {
                    completions.stats.busy += 1;
                    completions.blocked = true;
                    return;
                }
                Some(Stop::Failed(errno)) => {
                    // The error is about the first request that was not accepted, not about those
                    // behind it.
                    let Some(index) = completions.pending.pop() else {
                        completions.blocked = true; // an older entry failed: retry after a delay
                        return;
                    };
                    completions.refuse(index, NonZeroI32::new(errno));
                }
            }
        }
    }

    /// Reaps the completions that are visible: at most as many as requests are in flight, because a
    /// reap submits nothing. Returns whether one of them made progress, that is, was not EAGAIN.
    pub(crate) fn reap(&mut self) -> bool {
        if self.completions.in_flight == 0 && !self.backend.has_cancellations() {
            return false;
        }
        let completions = &mut self.completions;
        let blocked = mem::take(&mut completions.blocked); // a completion makes room in the kernel
        let found = self.backend.reap_into(completions);
        completions.blocked |= blocked && found == 0;
        if found > 0 {
            completions.stats.reap_sizes.add(found);
        }
        found > mem::take(&mut completions.eagain_reaped)
    }

    /// Returns the number of completions that were put into queues since the last call.
    pub(crate) fn take_enqueued(&mut self) -> usize {
        let enqueued = mem::take(&mut self.completions.enqueued);
        self.completions.stats.completed += enqueued as u64;
        enqueued
    }

    /// Tries to end a request early with `reason` as its result. Returns false if there was no
    /// attempt.
    pub(crate) fn cancel(&mut self, index: Index, reason: CancelReason) -> bool {
        self.unstage();
        let completions = &mut self.completions;
        let slot = completions.slab.get(index);
        match slot.state {
            _ if slot.op.kind == Kind::Close => false, // the result would not show whether it was closed
            SlotState::Pending => {
                completions.pending.remove(index);
                completions.finish(index, Some(reason.errno()));
                true
            }
            SlotState::InFlight => {
                slot.cancel(reason); // also without an attempt: a deadline has no second one
                self.backend.cancel(slot.user_data(index))
            }
            SlotState::Free | SlotState::Ready | SlotState::Done => false,
        }
    }

    /// Updates the number of promised slots. Called when the queue of waiting futures has changed.
    pub(crate) fn note_waiting(&mut self) {
        self.completions.slab.promised = self.waiting.len();
    }

    /// Blocks until a completion is probably visible. May return early.
    pub(crate) fn wait(&mut self, timeout: Option<Duration>) -> io::Result<()> {
        debug_assert_eq!(self.staged, 0, "staged requests are submitted before a sleep");
        self.completions.stats.waits += 1;
        self.backend.wait(timeout)
    }

    /// Checks the invariants that hold between two calls.
    ///
    /// # Panics
    ///
    /// Panics with the name of an invariant that does not hold.
    pub(crate) fn validate(&self) {
        let completions = &self.completions;
        let count = |state| completions.slab.count(state);
        assert_eq!(completions.in_flight + self.staged, count(SlotState::InFlight), "in flight");
        let pending = count(SlotState::Pending) + self.staged;
        assert_eq!(completions.pending.len(), pending, "pending list");
        assert_eq!(self.ready(), count(SlotState::Ready), "ready lists");
        assert_eq!(completions.slab.free_len(), count(SlotState::Free), "free list");
        assert!(completions.in_flight <= self.depth, "in flight above depth");
        let queues = completions.pending.len() + self.ready() + completions.enqueued;
        let held = (queues + completions.in_flight) as u64;
        assert_eq!(
            completions.stats.accepted,
            held + completions.stats.completed,
            "accepted adds up"
        );
    }
}

impl Drop for State {
    /// Waits until the kernel no longer uses buffers that the slots own, and only then drops them,
    /// because a drop is user code, which may panic. Leaks the slots if it cannot wait.
    fn drop(&mut self) {
        self.unstage(); // see the contract of `backend`
        loop {
            // Reap before the wait: the wake-up of a visible completion may have been cleared.
            self.backend.acknowledge();
            let completions = &mut self.completions;
            self.backend.reap(&mut |completion| {
                completions.in_flight = completions.in_flight.saturating_sub(1);
                completions.complete_at_end(completion);
            });
            if self.in_kernel() == 0 {
                self.completions.abandon_all_ready();
                return;
            }
            if self.backend.wait(None).is_err() {
                mem::forget(mem::replace(&mut self.completions.slab, Slab::new(0)));
                return;
            }
        }
    }
}

// The futures that wait for a free slot, first come, first served.
//
// The first `n` futures in the queue may take the `n` free slots, before any other request. So no
// slot is handed over: a polled future checks its position, and a future that leaves moves those
// behind it forward.

/// A queue of futures that wait for a slot.
#[derive(Default)]
pub(crate) struct WaitQueue {
    /// Sorted by ticket.
    waiters: VecDeque<Waiter>,
    next: u64,
}

/// A waiting future.
struct Waiter {
    ticket: u64,
    /// `None` after it was woken.
    waker: Option<Waker>,
}

impl WaitQueue {
    pub(crate) fn len(&self) -> usize {
        self.waiters.len()
    }

    pub(crate) fn join(&mut self, waker: Waker) -> u64 {
        let ticket = self.next;
        self.next += 1;
        self.waiters.push_back(Waiter { ticket, waker: Some(waker) });
        ticket
    }

    /// Returns how many futures are before the future with this ticket, which must be in the queue.
    pub(crate) fn position(&self, ticket: u64) -> usize {
        let found = self.waiters.binary_search_by_key(&ticket, |waiter| waiter.ticket);
        found.expect("a future with a ticket is in the queue")
    }

    /// Removes the future with this ticket. The caller drops the returned waker where user code may
    /// run.
    pub(crate) fn leave(&mut self, ticket: u64) -> Option<Waker> {
        let position = self.position(ticket);
        self.waiters.remove(position).and_then(|waiter| waiter.waker)
    }

    /// Replaces the waker of the future with this ticket. The caller drops the old one where user
    /// code may run.
    pub(crate) fn replace_waker(&mut self, ticket: u64, waker: Waker) -> Option<Waker> {
        let position = self.position(ticket);
        self.waiters[position].waker.replace(waker)
    }

    /// Returns whether a future that may take one of the `free` slots was not woken.
    pub(crate) fn is_due(&self, free: usize) -> bool {
        self.waiters.iter().take(free).any(|waiter| waiter.waker.is_some())
    }

    /// Takes the waker of the first future that may take one of the `free` slots and was not woken.
    pub(crate) fn next_to_wake(&mut self, free: usize) -> Option<Waker> {
        self.waiters.iter_mut().take(free).find_map(|waiter| waiter.waker.take())
    }
}

// The times at which requests are cancelled.
//
// An entry becomes stale when its request completes. A stale entry is dropped when its time comes, or
// when the heap reaches twice the number of slots. A slot has at most one entry that is not stale, so
// cleaning costs a constant per added entry.

/// A deadline of one use of a slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Entry {
    at: Instant,
    index: Index,
    generation: u32,
}

/// The deadlines of an engine, earliest first.
#[derive(Default)]
pub(crate) struct Deadlines {
    heap: BinaryHeap<Reverse<Entry>>,
}

impl Deadlines {
    /// Adds an entry for the request in `index`. Allocates only if the heap has more entries than ever
    /// before.
    pub(crate) fn add(&mut self, at: Instant, index: Index, slab: &Slab) {
        if self.heap.len() >= 2 * slab.capacity() {
            self.heap.retain(|Reverse(entry)| entry.is_current(slab));
        }
        let generation = slab.peek(index).generation;
        self.heap.push(Reverse(Entry { at, index, generation }));
    }

    /// Returns the time of the earliest entry.
    #[inline]
    pub(crate) fn earliest(&self) -> Option<Instant> {
        self.heap.peek().map(|Reverse(entry)| entry.at)
    }

    /// Returns `timeout`, or the time until the earliest entry if that is less.
    pub(crate) fn shorten(
        &self,
        timeout: Option<Duration>,
        now: impl FnOnce() -> Instant,
    ) -> Option<Duration> {
        let Some(at) = self.earliest() else { return timeout };
        let left = at.saturating_duration_since(now());
        Some(timeout.map_or(left, |timeout| timeout.min(left)))
    }

    /// Removes an entry that is due at `now`. Returns its slot.
    pub(crate) fn due(&mut self, now: Instant, slab: &Slab) -> Option<Index> {
        while self.earliest().is_some_and(|at| at <= now) {
            let Reverse(entry) = self.heap.pop()?;
            if entry.is_current(slab) {
                return Some(entry.index);
            }
        }
        None
    }
}

impl Entry {
    /// Returns whether the request still runs.
    fn is_current(&self, slab: &Slab) -> bool {
        slab.peek(self.index).generation == self.generation
    }
}

#[cfg(test)]
mod deadlines_tests {
    use super::*;

    #[test]
    fn inv17_only_entries_of_requests_that_run_are_kept() {
        let mut slab = Slab::new(4);
        let mut deadlines = Deadlines::default();
        let at = Instant::now();
        for index in 1..4 {
            deadlines.add(at, index, &slab);
        }
        for _ in 0..1000 {
            slab.get(0).generation += 1;
            deadlines.add(at, 0, &slab);
        }
        assert!(deadlines.heap.len() <= 8 && deadlines.heap.capacity() <= 16);
        let mut due: Vec<_> = std::iter::from_fn(|| deadlines.due(at, &slab)).collect();
        due.sort_unstable();
        assert_eq!(due, [0, 1, 2, 3]);
    }
}
