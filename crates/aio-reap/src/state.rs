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
//! 2. A slot that is `Pending` or `InFlight` owns its buffer (in `cargo`) and its file.
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
use crate::books::Books;
use crate::cargo::{Parcel, Verdict};
use crate::deadlines::{Action, Deadlines};
use crate::histogram::Histogram;
use crate::raw::Stop;
use crate::remote::{Errand, Hub, Inbox};
use crate::slab::{Batch, Ending, Front, Index, Slab, State as SlotState, settle};
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
    pub(crate) books: Books,
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
    Parcel(Parcel, Verdict),
    Wake(Waker),
    /// A future nobody has polled yet: it will find its result.
    Silent,
}

impl State {
    pub(crate) fn new(backend: Device, limits: Limits) -> Self {
        let mut books = Books::new(limits.capacity, limits.depth);
        books.stats.latency = limits.timed.then(Histogram::new);
        let batch = BatchLimit::new(limits.max_batch, limits.adaptive);
        Self {
            books,
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
        self.books.pending.len()
    }

    pub(crate) fn in_flight(&self) -> usize {
        self.books.in_flight
    }

    /// Requests a completion can be expected from: accepted by the kernel, not yet reaped.
    pub(crate) fn in_kernel(&self) -> usize {
        self.books.in_flight - self.backend.backlog()
    }

    /// Nothing will turn the engine by itself: the retry timer must.
    pub(crate) fn needs_retry(&self) -> bool {
        (self.books.blocked || self.backend.backlog() > 0) && self.in_kernel() == 0
    }

    /// Complete, on the way to whoever waits for it.
    pub(crate) fn ready(&self) -> usize {
        self.books.ready.len()
    }

    /// Whether another turn would get somewhere without any wake-up.
    pub(crate) fn has_work(&self) -> bool {
        let can_submit = self.pending() > 0 && self.in_flight() < self.limits.depth;
        self.more
            || self.ready() > 0
            || self.books.enqueued > 0
            || (!self.books.blocked && (can_submit || self.backend.backlog() > 0))
            || self.inbox.as_ref().is_some_and(|inbox| inbox.has_mail())
            || self.letters() > 0
    }

    /// Requests of other threads that a turn would find a slot for.
    fn letters(&self) -> usize {
        let Some(inbox) = &self.inbox else { return 0 };
        inbox.pending(&self.waiting, &self.books.slab)
    }

    /// Requests that the kernel is not working on, and that another turn would bring on.
    pub(crate) fn held(&self) -> usize {
        self.pending() + self.ready() + self.letters()
    }

    /// Takes requests of other threads, as far as there are slots.
    #[inline]
    pub(crate) fn take_letters(&mut self) {
        if let Some(inbox) = &mut self.inbox {
            inbox.turn(&mut self.books, &mut self.waiting, &mut self.deadlines);
        }
    }

    /// What the engine shares with its remotes, which ring the eventfd `bell`.
    pub(crate) fn hub(&mut self, bell: &Arc<OwnedFd>) -> Arc<Hub> {
        let places = self.limits.remote;
        let inbox = self.inbox.get_or_insert_with(|| Box::new(Inbox::new(places, bell)));
        if self.closed {
            inbox.close();
        }
        Arc::clone(inbox.hub())
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
    pub(crate) fn refuse_letter(&mut self) -> Option<Errand> {
        let errand = self.inbox.as_mut()?.refuse(&mut self.waiting);
        self.note_waiting();
        errand
    }

    /// Nothing to do but wait for the kernel, or not even that; and nobody waits for a slot.
    pub(crate) fn is_calm(&self) -> bool {
        let books = &self.books;
        let quiet = !self.more && !books.blocked && self.backend.backlog() == 0;
        let quiet = quiet && books.remains.is_empty();
        quiet && books.pending.len() == 0 && books.ready.len() == 0 && books.slab.promised == 0
    }

    /// Nothing is complete that was not delivered, and nobody waits for a slot.
    fn is_quiet(&self) -> bool {
        let books = &self.books;
        !self.more && books.enqueued == 0 && books.ready.len() == 0 && books.slab.promised == 0
    }

    fn now(&self) -> u64 {
        if self.books.stats.is_timed() { self.backend.now() } else { 0 }
    }

    /// Submits one batch. With `sleep` a completion may be waited for, too, unless that would
    /// keep others waiting.
    pub(crate) fn submit(&mut self, sleep: bool) {
        let sleep = sleep && self.inbox.is_none();
        let sleep = sleep && self.deadlines.earliest().is_none() && self.is_quiet();
        let now = self.now();
        loop {
            let books = &mut self.books;
            let room = (self.limits.depth - books.in_flight).min(self.batch.get());
            let batch = Batch::new(&mut books.slab, &books.pending, room, now);
            let offered = batch.len();
            if offered == 0 && self.backend.backlog() == 0 {
                books.blocked = false;
                return;
            }
            // Else the rest could be submitted as well.
            let last = offered == books.pending.len() || offered < self.batch.get();
            let submitted = if sleep && last {
                let (submitted, slept) = self.backend.submit_and_wait(batch);
                books.stats.waits += u64::from(slept);
                submitted
            } else {
                self.backend.submit(batch)
            };
            settle(&mut books.slab, &mut books.pending, offered, submitted.accepted);
            books.in_flight += submitted.accepted;
            books.stats.submitted(submitted.accepted, books.in_flight);
            self.batch.submitted(submitted.accepted, books.pending.len());
            match submitted.stop {
                None => {
                    books.blocked = false;
                    return;
                }
                Some(Stop::Busy) => {
                    books.stats.busy += 1;
                    self.batch.busy();
                    books.blocked = true;
                    return;
                }
                Some(Stop::Failed(errno)) => {
                    // The first request not accepted is at fault; those behind it are not.
                    let Some(index) = books.pending.pop() else {
                        books.blocked = true; // a backlog failed: only time can help
                        return;
                    };
                    books.finish(index, NonZeroI32::new(errno));
                }
            }
        }
    }

    /// Takes as many completions as the budget allows. Returns whether one of them got somewhere:
    /// was anything but EAGAIN.
    pub(crate) fn reap(&mut self) -> bool {
        self.more = false;
        if self.books.in_flight == 0 && !self.backend.owes() {
            return false;
        }
        let now = self.now();
        let budget = self.limits.reap_budget;
        let books = &mut self.books;
        let blocked = mem::take(&mut books.blocked); // a completion makes room in the kernel
        let found = self.backend.reap_into(budget, books, now);
        books.blocked |= blocked && found == 0;
        books.stats.reaped(found);
        self.batch.reaped(found, books.in_flight);
        let progress = found > mem::take(&mut books.in_vain);
        self.more = found >= budget && books.in_flight > 0;
        progress
    }

    /// Completions that went into queues since the last call.
    pub(crate) fn take_enqueued(&mut self) -> usize {
        let enqueued = mem::take(&mut self.books.enqueued);
        self.books.stats.completed += enqueued as u64;
        enqueued
    }

    /// Ends a request before it is done, if it can be, with `why` as its result. Returns whether
    /// anything could be tried.
    pub(crate) fn cancel(&mut self, index: Index, why: Ending) -> bool {
        let books = &mut self.books;
        let slot = books.slab.get(index);
        match slot.state {
            SlotState::Pending => {
                books.pending.remove(index);
                books.finish(index, Some(why.errno()));
                true
            }
            SlotState::InFlight => {
                slot.end(why);
                self.backend.cancel(books.slab.user_data(index))
            }
            SlotState::Free | SlotState::Ready | SlotState::Done => false,
        }
    }

    /// As [`cancel`](Self::cancel), every request; returns how many could be tried.
    pub(crate) fn cancel_all(&mut self, why: Ending) -> usize {
        let books = &mut self.books;
        let pending = books.pending.len();
        // At once: to take them out one by one is quadratic.
        while let Some(index) = books.pending.pop() {
            books.finish(index, Some(why.errno()));
        }
        let slots = 0..books.slab.capacity() as Index;
        pending + slots.filter(|&index| self.cancel(index, why)).count()
    }

    /// The request in `index` is to be cancelled at a time.
    pub(crate) fn note_deadline(&mut self, index: Index, at: Instant) {
        self.deadlines.add(at, index, Action::Cancel, &self.books.slab);
    }

    /// To be called when the queue of waiting futures has changed.
    pub(crate) fn note_waiting(&mut self) {
        self.books.slab.promised = self.waiting.len();
    }

    /// Takes the oldest completion off the ready list.
    pub(crate) fn deliver(&mut self) -> Option<Delivery> {
        let books = &mut self.books;
        let index = books.ready.pop()?;
        books.stats.completed += 1;
        let slot = books.slab.get(index);
        if slot.front == Front::Future {
            slot.state = SlotState::Done;
            return Some(slot.waker.take().map_or(Delivery::Silent, Delivery::Wake));
        }
        let (parcel, verdict) = books.collect(index);
        Some(parcel.map_or(Delivery::Silent, |parcel| Delivery::Parcel(parcel, verdict)))
    }

    /// Blocks until a completion is likely there; spurious returns are fine.
    pub(crate) fn wait(&mut self, timeout: Option<Duration>) -> io::Result<()> {
        self.books.stats.waits += 1;
        self.backend.wait(timeout)
    }

    /// Checks the invariants that can be checked at rest.
    ///
    /// # Panics
    ///
    /// Panics with the name of what does not hold.
    pub(crate) fn validate(&self) {
        let books = &self.books;
        let count = |state| books.slab.count(state);
        assert_eq!(books.in_flight, count(SlotState::InFlight), "in flight");
        assert_eq!(books.pending.len(), count(SlotState::Pending), "pending list");
        assert_eq!(books.ready.len(), count(SlotState::Ready), "ready list");
        assert_eq!(books.slab.free_len(), count(SlotState::Free), "free list");
        assert!(books.in_flight <= self.limits.depth, "in flight above depth");
        let queues = books.pending.len() + books.ready.len() + books.enqueued;
        let held = (queues + books.in_flight) as u64;
        assert_eq!(books.stats.accepted, held + books.stats.completed, "accepted adds up");
    }
}

impl Drop for State {
    /// The kernel may still use buffers that the slots own: wait for it, or leak them.
    fn drop(&mut self) {
        loop {
            // Before the wait: the wake-up of what is there may have been answered.
            self.backend.acknowledge();
            let in_flight = &mut self.books.in_flight;
            self.backend.reap(usize::MAX, |_| *in_flight = in_flight.saturating_sub(1));
            if self.in_kernel() == 0 {
                return;
            }
            if self.backend.wait(None).is_err() {
                mem::forget(mem::replace(&mut self.books.slab, Slab::new(0)));
                if let Some(inbox) = &self.inbox {
                    inbox.lose();
                }
                return;
            }
        }
    }
}
