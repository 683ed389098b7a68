//! The engine's books: queue, submit, reap. Nothing here runs user code.
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
//! 3. If requests are pending although there is room, either something is in flight in the
//!    kernel (its completion turns the engine) or `blocked` is set (the engine arms a timer) or
//!    the caller is told (`Turn::pending`, the kick).

use std::io;
use std::mem;
use std::num::NonZeroI32;
use std::os::fd::OwnedFd;
use std::task::Waker;
use std::time::{Duration, Instant};

use percpu::sync::Arc;

use crate::adaptive::BatchLimit;
use crate::backend::{Backend, Device};
use crate::completion_state::CompletionState;
use crate::deadlines::{Action, Deadlines};
use crate::histogram::Histogram;
use crate::payload::{RawResult, TakenPayload};
use crate::raw::Stop;
use crate::remote::{Inbox, PendingRemote, Shared};
use crate::slab::{
    Batch, CancelReason, CompletionTarget, Index, Slab, State as SlotState, finish_submission,
};
use crate::wait_queue::WaitQueue;

pub(crate) struct Limits {
    /// Most requests the kernel holds at a time.
    pub(crate) depth: usize,
    /// Most requests the engine holds at a time.
    pub(crate) capacity: usize,
    /// Most requests in one submission, and whether the limit follows the device.
    pub(crate) max_batch: usize,
    pub(crate) adaptive: bool,
    /// Most completions taken by one reap.
    pub(crate) reap_budget: usize,
    /// Most requests of other threads at a time.
    pub(crate) remote: usize,
    /// Measure latencies.
    pub(crate) timed: bool,
}

pub(crate) struct State {
    pub(crate) completions: CompletionState,
    pub(crate) backend: Device,
    pub(crate) limits: Limits,
    pub(crate) closed: bool,
    pub(crate) batch: BatchLimit,
    pub(crate) deadlines: Deadlines,
    /// Futures that wait for a slot.
    pub(crate) waiting: WaitQueue,
    /// Requests of other threads, once there may be any.
    pub(crate) inbox: Option<Box<Inbox>>,
    /// The last reap used up its budget: more may be there, and no wake-up will say so.
    more: bool,
}

/// One completion on its way to whoever waits for it.
pub(crate) enum Delivery {
    /// It lies in the slot that held it: use it before the state.
    Payload(TakenPayload, RawResult),
    Wake(Waker),
    /// A future nobody has polled yet: it will find its result.
    Silent,
}

impl State {
    pub(crate) fn new(backend: Device, limits: Limits) -> Self {
        let mut completions = CompletionState::new(limits.capacity, limits.depth);
        completions.stats.latency = limits.timed.then(Histogram::new);
        let batch = BatchLimit::new(limits.max_batch, limits.adaptive);
        Self {
            completions,
            backend,
            limits,
            closed: false,
            batch,
            deadlines: Deadlines::default(),
            waiting: WaitQueue::default(),
            inbox: None,
            more: false,
        }
    }

    pub(crate) fn pending(&self) -> usize {
        self.completions.pending.len()
    }

    pub(crate) fn in_flight(&self) -> usize {
        self.completions.in_flight
    }

    /// Requests a completion can be expected from: accepted by the kernel, not yet reaped.
    pub(crate) fn in_kernel(&self) -> usize {
        self.completions.in_flight - self.backend.backlog()
    }

    /// Nothing will turn the engine by itself: the retry timer must.
    pub(crate) fn needs_retry(&self) -> bool {
        (self.completions.blocked || self.backend.backlog() > 0) && self.in_kernel() == 0
    }

    /// Complete, on the way to whoever waits for it.
    pub(crate) fn ready(&self) -> usize {
        self.completions.ready.len()
    }

    /// Whether another turn would get somewhere without any wake-up.
    pub(crate) fn has_work(&self) -> bool {
        let can_submit = self.pending() > 0 && self.in_flight() < self.limits.depth;
        self.more
            || self.ready() > 0
            || self.completions.enqueued > 0
            || (!self.completions.blocked && (can_submit || self.backend.backlog() > 0))
            || self.inbox.as_ref().is_some_and(|inbox| inbox.has_requests())
            || self.remote_requests() > 0
    }

    /// Requests of other threads that a turn would find a slot for.
    fn remote_requests(&self) -> usize {
        let Some(inbox) = &self.inbox else { return 0 };
        inbox.pending(&self.waiting, &self.completions.slab)
    }

    /// Requests that the kernel is not working on, and that another turn would bring on.
    pub(crate) fn held(&self) -> usize {
        self.pending() + self.ready() + self.remote_requests()
    }

    /// Takes requests of other threads, as far as there are slots.
    #[inline]
    pub(crate) fn take_remote_requests(&mut self) {
        if let Some(inbox) = &mut self.inbox {
            inbox.turn(&mut self.completions, &mut self.waiting, &mut self.deadlines);
        }
    }

    /// What the engine shares with its remotes, which ring the eventfd `notifier`.
    pub(crate) fn remote_shared(&mut self, kick: &Arc<OwnedFd>) -> Arc<Shared> {
        let slots = self.limits.remote;
        let inbox = self.inbox.get_or_insert_with(|| Box::new(Inbox::new(slots, kick)));
        if self.closed {
            inbox.close();
        }
        Arc::clone(inbox.shared())
    }

    /// No other thread can make requests of this engine.
    pub(crate) fn is_alone(&self) -> bool {
        !self.inbox.as_ref().is_some_and(|inbox| inbox.has_senders())
    }

    /// Refuses requests from now on.
    pub(crate) fn close(&mut self) {
        self.closed = true;
        if let Some(inbox) = &mut self.inbox {
            inbox.close();
        }
    }

    /// A request of another thread that no slot was found for, when no turn is to come.
    pub(crate) fn refuse_remote_request(&mut self) -> Option<PendingRemote> {
        let pending = self.inbox.as_mut()?.refuse(&mut self.waiting);
        self.note_waiting();
        pending
    }

    /// Nothing to do but wait for the kernel, or not even that; and nobody waits for a slot.
    pub(crate) fn is_calm(&self) -> bool {
        let completions = &self.completions;
        let quiet = !self.more && !completions.blocked && self.backend.backlog() == 0;
        let quiet = quiet && completions.deferred_drops.is_empty();
        quiet
            && completions.pending.len() == 0
            && completions.ready.len() == 0
            && completions.slab.promised == 0
    }

    /// Nothing is complete that was not delivered, and nobody waits for a slot.
    fn is_quiet(&self) -> bool {
        let completions = &self.completions;
        !self.more
            && completions.enqueued == 0
            && completions.ready.len() == 0
            && completions.slab.promised == 0
    }

    fn now(&self) -> u64 {
        if self.completions.stats.is_timed() { self.backend.now() } else { 0 }
    }

    /// Submits one batch. With `sleep` a completion may be waited for, too, unless that would
    /// keep others waiting.
    pub(crate) fn submit(&mut self, sleep: bool) {
        let sleep = sleep && self.inbox.is_none();
        let sleep = sleep && self.deadlines.earliest().is_none() && self.is_quiet();
        let now = self.now();
        loop {
            let completions = &mut self.completions;
            let room = (self.limits.depth - completions.in_flight).min(self.batch.get());
            let batch = Batch::new(&mut completions.slab, &completions.pending, room, now);
            let offered = batch.len();
            if offered == 0 && self.backend.backlog() == 0 {
                completions.blocked = false;
                return;
            }
            // Else the rest could be submitted as well.
            let last = offered == completions.pending.len() || offered < self.batch.get();
            let submitted = if sleep && last {
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
            self.batch.submitted(submitted.accepted, completions.pending.len());
            match submitted.stop {
                None => {
                    completions.blocked = false;
                    return;
                }
                Some(Stop::Busy) => {
                    completions.stats.busy += 1;
                    self.batch.busy();
                    completions.blocked = true;
                    return;
                }
                Some(Stop::Failed(errno)) => {
                    // The first request not accepted is at fault; those behind it are not.
                    let Some(index) = completions.pending.pop() else {
                        completions.blocked = true; // a backlog failed: only time can help
                        return;
                    };
                    completions.finish(index, NonZeroI32::new(errno));
                }
            }
        }
    }

    /// Takes as many completions as the budget allows. Returns whether one of them got somewhere:
    /// was anything but EAGAIN.
    pub(crate) fn reap(&mut self) -> bool {
        self.more = false;
        if self.completions.in_flight == 0 && !self.backend.has_cancellations() {
            return false;
        }
        let now = self.now();
        let budget = self.limits.reap_budget;
        let completions = &mut self.completions;
        let blocked = mem::take(&mut completions.blocked); // a completion makes room in the kernel
        let found = self.backend.reap_into(budget, completions, now);
        completions.blocked |= blocked && found == 0;
        completions.stats.reaped(found);
        self.batch.reaped(found, completions.in_flight);
        let progress = found > mem::take(&mut completions.eagain_reaped);
        self.more = found >= budget && completions.in_flight > 0;
        progress
    }

    /// Completions that went into queues since the last call.
    pub(crate) fn take_enqueued(&mut self) -> usize {
        let enqueued = mem::take(&mut self.completions.enqueued);
        self.completions.stats.completed += enqueued as u64;
        enqueued
    }

    /// Ends a request before it is done, if it can be, with `reason` as its result. Returns whether
    /// anything could be tried.
    pub(crate) fn cancel(&mut self, index: Index, reason: CancelReason) -> bool {
        let completions = &mut self.completions;
        let slot = completions.slab.get(index);
        match slot.state {
            SlotState::Pending => {
                completions.pending.remove(index);
                completions.finish(index, Some(reason.errno()));
                true
            }
            SlotState::InFlight => {
                slot.cancel(reason);
                self.backend.cancel(completions.slab.user_data(index))
            }
            SlotState::Free | SlotState::Ready | SlotState::Done => false,
        }
    }

    /// As [`cancel`](Self::cancel), every request; returns how many could be tried.
    pub(crate) fn cancel_all(&mut self, reason: CancelReason) -> usize {
        let completions = &mut self.completions;
        let pending = completions.pending.len();
        // At once: to take them out one by one is quadratic.
        while let Some(index) = completions.pending.pop() {
            completions.finish(index, Some(reason.errno()));
        }
        let slots = 0..completions.slab.capacity() as Index;
        pending + slots.filter(|&index| self.cancel(index, reason)).count()
    }

    /// The request in `index` is to be cancelled at a time.
    pub(crate) fn note_deadline(&mut self, index: Index, at: Instant) {
        self.deadlines.add(at, index, Action::Cancel, &self.completions.slab);
    }

    /// To be called when the queue of waiting futures has changed.
    pub(crate) fn note_waiting(&mut self) {
        self.completions.slab.promised = self.waiting.len();
    }

    /// Takes the oldest completion off the ready list.
    pub(crate) fn deliver(&mut self) -> Option<Delivery> {
        let completions = &mut self.completions;
        let index = completions.ready.pop()?;
        completions.stats.completed += 1;
        let slot = completions.slab.get(index);
        if slot.target == CompletionTarget::Future {
            slot.state = SlotState::Done;
            return Some(slot.waker.take().map_or(Delivery::Silent, Delivery::Wake));
        }
        let (taken, result) = completions.collect(index);
        Some(taken.map_or(Delivery::Silent, |taken| Delivery::Payload(taken, result)))
    }

    /// Blocks until a completion is likely there; spurious returns are fine.
    pub(crate) fn wait(&mut self, timeout: Option<Duration>) -> io::Result<()> {
        self.completions.stats.waits += 1;
        self.backend.wait(timeout)
    }

    /// Checks the invariants that can be checked at rest.
    ///
    /// # Panics
    ///
    /// Panics with the name of what does not hold.
    pub(crate) fn validate(&self) {
        let completions = &self.completions;
        let count = |state| completions.slab.count(state);
        assert_eq!(completions.in_flight, count(SlotState::InFlight), "in flight");
        assert_eq!(completions.pending.len(), count(SlotState::Pending), "pending list");
        assert_eq!(completions.ready.len(), count(SlotState::Ready), "ready list");
        assert_eq!(completions.slab.free_len(), count(SlotState::Free), "free list");
        assert!(completions.in_flight <= self.limits.depth, "in flight above depth");
        let queues = completions.pending.len() + completions.ready.len() + completions.enqueued;
        let held = (queues + completions.in_flight) as u64;
        assert_eq!(
            completions.stats.accepted,
            held + completions.stats.completed,
            "accepted adds up"
        );
    }
}

impl Drop for State {
    /// The kernel may still use buffers that the slots own: wait for it, or leak them.
    fn drop(&mut self) {
        loop {
            // Before the wait: the wake-up of what is there may have been answered.
            self.backend.acknowledge();
            let in_flight = &mut self.completions.in_flight;
            self.backend.reap(usize::MAX, |_| *in_flight = in_flight.saturating_sub(1));
            if self.in_kernel() == 0 {
                return;
            }
            if self.backend.wait(None).is_err() {
                mem::forget(mem::replace(&mut self.completions.slab, Slab::new(0)));
                if let Some(inbox) = &self.inbox {
                    inbox.lose();
                }
                return;
            }
        }
    }
}
