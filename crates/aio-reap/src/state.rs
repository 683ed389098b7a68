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
use std::task::Waker;
use std::time::Duration;

use crate::backend::{Backend, RawCompletion, Stop, Sub};
use crate::cargo::Cargo;
use crate::file::File;
use crate::op::{Kind, Op};
use crate::slab::{Fifo, Front, Index, Slab, State as SlotState};
use crate::stats::EngineStats;

/// EAGAIN and EINTR completions in a row before the error is the caller's; a guess.
const RETRY_LIMIT: u8 = 16;

pub(crate) struct Limits {
    /// Most requests the kernel holds at a time.
    pub(crate) depth: usize,
    /// Most requests the engine holds at a time.
    pub(crate) capacity: usize,
    /// Most requests in one submission.
    pub(crate) max_batch: usize,
    /// Most completions taken by one reap.
    pub(crate) reap_budget: usize,
}

pub(crate) struct State {
    pub(crate) slab: Slab,
    pub(crate) backend: Box<dyn Backend>,
    pub(crate) limits: Limits,
    pub(crate) stats: EngineStats,
    pub(crate) closed: bool,
    /// The kernel had no room at the last submission, and nothing was reaped since.
    blocked: bool,
    /// The last reap used up its budget: more may be there, and no wake-up will say so.
    more: bool,
    in_flight: usize,
    pending: Fifo,
    ready: Fifo,
    /// Reused by every submission and reap.
    batch: Vec<Sub>,
    raw: Vec<RawCompletion>,
}

/// One completion on its way to whoever waits for it.
pub(crate) enum Delivery {
    Cargo(Cargo, io::Result<usize>),
    Wake(Waker),
    /// A future nobody has polled yet: it will find its result.
    Silent,
}

impl State {
    pub(crate) fn new(backend: Box<dyn Backend>, limits: Limits) -> Self {
        Self {
            slab: Slab::new(limits.capacity),
            stats: EngineStats::new(limits.depth),
            closed: false,
            blocked: false,
            more: false,
            in_flight: 0,
            pending: Fifo::new(),
            ready: Fifo::new(),
            batch: Vec::with_capacity(limits.max_batch),
            raw: Vec::with_capacity(limits.reap_budget),
            backend,
            limits,
        }
    }

    pub(crate) fn pending(&self) -> usize {
        self.pending.len()
    }

    pub(crate) fn in_flight(&self) -> usize {
        self.in_flight
    }

    /// Requests a completion can be expected from: accepted by the kernel, not yet reaped.
    pub(crate) fn in_kernel(&self) -> usize {
        self.in_flight - self.backend.backlog()
    }

    /// Nothing will turn the engine by itself: the retry timer must.
    pub(crate) fn needs_retry(&self) -> bool {
        (self.blocked || self.backend.backlog() > 0) && self.in_kernel() == 0
    }

    /// Complete, on the way to whoever waits for it.
    pub(crate) fn ready(&self) -> usize {
        self.ready.len()
    }

    /// Whether another turn would get somewhere without any wake-up.
    pub(crate) fn has_work(&self) -> bool {
        let can_submit = self.pending.len() > 0 && self.in_flight < self.limits.depth;
        self.more
            || self.ready.len() > 0
            || (!self.blocked && (can_submit || self.backend.backlog() > 0))
    }

    pub(crate) fn queue(
        &mut self,
        index: Index,
        file: Option<File>,
        op: Op,
        zero_fill: bool,
        front: Front,
        cargo: Cargo,
    ) {
        let slot = self.slab.get(index);
        slot.front = front;
        slot.zero_fill = zero_fill;
        slot.retries = 0;
        slot.op = op;
        slot.done = 0;
        slot.file = file;
        slot.cargo = Some(cargo);
        self.stats.accepted += 1;
        if op.offset > i64::MAX as u64 {
            // Negative for the kernel, which says the same; but to io_uring -1 means the file's
            // own position.
            self.finish(index, Err(libc::EINVAL));
        } else if op.transfers() && op.len == 0 {
            // The kernel would answer 0 as well, which below means end of file or a full device.
            self.finish(index, Ok(0));
        } else {
            slot.state = SlotState::Pending;
            self.slab.push(&mut self.pending, index);
        }
    }

    /// Submits one batch.
    pub(crate) fn submit(&mut self) {
        loop {
            let room = (self.limits.depth - self.in_flight).min(self.limits.max_batch);
            self.batch.clear();
            for index in self.slab.iter(&self.pending).take(room) {
                let user_data = self.slab.user_data(index);
                self.batch.push(Sub { user_data, op: self.slab.peek(index).next_op() });
            }
            if self.batch.is_empty() && self.backend.backlog() == 0 {
                self.blocked = false;
                return;
            }
            let submitted = self.backend.submit(&self.batch);
            debug_assert!(submitted.accepted <= self.batch.len());
            for _ in 0..submitted.accepted {
                let index = self.slab.pop(&mut self.pending).expect("the batch came from here");
                self.slab.get(index).state = SlotState::InFlight;
            }
            self.in_flight += submitted.accepted;
            self.stats.submitted(submitted.accepted, self.in_flight);
            match submitted.stop {
                None => {
                    self.blocked = false;
                    return;
                }
                Some(Stop::Busy) => {
                    self.stats.busy += 1;
                    self.blocked = true;
                    return;
                }
                Some(Stop::Failed(errno)) => {
                    // The first request not accepted is at fault; those behind it are not.
                    let Some(index) = self.slab.pop(&mut self.pending) else {
                        self.blocked = true; // a backlog failed: only time can help
                        return;
                    };
                    self.finish(index, Err(errno));
                }
            }
        }
    }

    /// Takes as many completions as the budget allows. Returns whether one of them got somewhere:
    /// was anything but EAGAIN.
    pub(crate) fn reap(&mut self) -> bool {
        self.more = false;
        if self.in_flight == 0 {
            return false;
        }
        let mut raw = mem::take(&mut self.raw);
        self.backend.reap(self.limits.reap_budget, &mut raw);
        self.stats.reaped(raw.len());
        if !raw.is_empty() {
            self.blocked = false; // the kernel has room again
        }
        let mut progress = false;
        for completion in &raw {
            progress |= completion.result != -libc::EAGAIN;
            self.complete(*completion);
        }
        self.more = raw.len() >= self.limits.reap_budget && self.in_flight > 0;
        raw.clear();
        self.raw = raw;
        progress
    }

    fn complete(&mut self, RawCompletion { user_data, result }: RawCompletion) {
        let Some(index) = self.slab.in_flight(user_data) else {
            debug_assert!(false, "a completion for nothing in flight: {user_data:#x}");
            self.stats.stray += 1;
            return;
        };
        self.in_flight -= 1;
        let slot = self.slab.get(index);
        if result < 0 {
            let errno = -result;
            let again = matches!(errno, libc::EAGAIN | libc::EINTR);
            if again && slot.retries < RETRY_LIMIT {
                slot.retries += 1;
                self.stats.retries += 1;
                // Time may help where asking again at once would not.
                self.blocked |= errno == libc::EAGAIN;
                return self.requeue(index);
            }
            return self.finish(index, Err(errno));
        }
        if !slot.op.transfers() {
            return self.finish(index, Ok(0));
        }
        let moved = result as u64;
        let left = slot.op.len - slot.done;
        debug_assert!(moved <= left);
        slot.done += moved.min(left);
        if slot.done == slot.op.len {
            let done = slot.done;
            return self.finish(index, Ok(done));
        }
        match slot.op.kind {
            Kind::Read if moved == 0 || slot.ended_unaligned() => {
                let done = if slot.zero_fill { slot.zero_rest() } else { slot.done };
                self.finish(index, Ok(done));
            }
            Kind::Write if moved == 0 => self.finish(index, Err(libc::ENOSPC)),
            _ => {
                slot.retries = 0;
                self.stats.short += 1;
                self.requeue(index);
            }
        }
    }

    fn requeue(&mut self, index: Index) {
        self.slab.get(index).state = SlotState::Pending;
        self.slab.push(&mut self.pending, index);
    }

    fn finish(&mut self, index: Index, result: Result<u64, i32>) {
        let slot = self.slab.get(index);
        slot.state = SlotState::Ready;
        slot.result = result;
        self.slab.push(&mut self.ready, index);
    }

    /// Takes the oldest completion off the ready list.
    pub(crate) fn deliver(&mut self) -> Option<Delivery> {
        let index = self.slab.pop(&mut self.ready)?;
        self.stats.completed += 1;
        let slot = self.slab.get(index);
        if slot.front == Front::Future {
            slot.state = SlotState::Done;
            return Some(slot.waker.take().map_or(Delivery::Silent, Delivery::Wake));
        }
        let (cargo, result) = self.collect(index);
        Some(Delivery::Cargo(cargo, result))
    }

    /// Frees a `Ready` or `Done` slot and hands out what it held.
    pub(crate) fn collect(&mut self, index: Index) -> (Cargo, io::Result<usize>) {
        let slot = self.slab.get(index);
        debug_assert!(matches!(slot.state, SlotState::Ready | SlotState::Done));
        let cargo = slot.cargo.take().expect("a slot in use holds its cargo");
        let result = slot.result.map(|bytes| bytes as usize).map_err(io::Error::from_raw_os_error);
        self.slab.release(index);
        (cargo, result)
    }

    /// Blocks until a completion is likely there; spurious returns are fine.
    pub(crate) fn wait(&mut self, timeout: Option<Duration>) -> io::Result<()> {
        self.stats.waits += 1;
        self.backend.wait(timeout)
    }

    /// Checks the invariants that can be checked at rest.
    ///
    /// # Panics
    ///
    /// Panics with the name of what does not hold.
    pub(crate) fn validate(&self) {
        let count = |state| self.slab.count(state);
        assert_eq!(self.in_flight, count(SlotState::InFlight), "in flight");
        assert_eq!(self.pending.len(), count(SlotState::Pending), "pending list");
        assert_eq!(self.ready.len(), count(SlotState::Ready), "ready list");
        assert_eq!(self.slab.free_len(), count(SlotState::Free), "free list");
        assert!(self.in_flight <= self.limits.depth, "in flight above depth");
        let held = (self.pending.len() + self.in_flight + self.ready.len()) as u64;
        assert_eq!(self.stats.accepted, held + self.stats.completed, "accepted adds up");
    }
}

impl Drop for State {
    /// The kernel may still use buffers that the slots own: wait for it, or leak them.
    fn drop(&mut self) {
        let mut raw = mem::take(&mut self.raw);
        loop {
            // Before the wait: the wake-up of what is there may have been answered.
            self.backend.acknowledge();
            self.backend.reap(usize::MAX, &mut raw);
            self.in_flight = self.in_flight.saturating_sub(raw.len());
            raw.clear();
            if self.in_kernel() == 0 {
                return;
            }
            if self.backend.wait(None).is_err() {
                mem::forget(mem::replace(&mut self.slab, Slab::new(0)));
                return;
            }
        }
    }
}
