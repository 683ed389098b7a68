//! The state that completions change: each one ends its request, retries it, or continues a short
//! transfer.
//!
//! It is the part of [`State`](crate::state::State) that a backend uses while it reaps.

use std::num::NonZeroI32;

use crate::op::{Kind, RawCompletion};
use crate::payload::{DeferredDrop, End};
use crate::slab::{CompletionTarget, Fifo, Index, Slab, SlotState};
use crate::stats::EngineStats;

/// The number of EAGAIN and EINTR completions in a row that the engine retries. The next
/// one is the request's error.
const RETRY_LIMIT: u8 = 16;

/// The kernel's own numbers for an interrupted system call, `ERESTARTSYS` and the like. io_uring
/// returns the first for an open that a cancellation interrupted.
const RESTARTS: [i32; 4] = [512, 513, 514, 516];

/// The requests of an engine, and the counters that completions change.
pub(crate) struct CompletionState {
    pub(crate) slab: Slab,
    pub(crate) stats: EngineStats,
    /// The kernel had no room at the last submission, and no completion was reaped since.
    pub(crate) blocked: bool,
    pub(crate) in_flight: usize,
    pub(crate) pending: Fifo,
    pub(crate) ready: Fifo,
    /// The EAGAIN completions of this reap.
    pub(crate) eagain_reaped: usize,
    /// The completions put into queues that no turn has reported yet.
    pub(crate) enqueued: usize,
    /// Values that deliveries leave, to be dropped where user code may run.
    pub(crate) deferred_drops: Vec<DeferredDrop>,
}

impl CompletionState {
    pub(crate) fn new(capacity: usize, depth: usize) -> Self {
        Self {
            slab: Slab::new(capacity),
            stats: EngineStats::new(depth),
            blocked: false,
            in_flight: 0,
            pending: Fifo::new(capacity),
            ready: Fifo::new(capacity),
            eagain_reaped: 0,
            enqueued: 0,
            deferred_drops: Vec::new(),
        }
    }

    /// Processes a completion. The usual cases are inlined into the
    /// backend's loop; all others are calls.
    #[inline(always)]
    pub(crate) fn complete(&mut self, completion: RawCompletion) {
        let RawCompletion { user_data, result } = completion;
        let Some((index, slot)) = self.slab.in_flight(user_data) else {
            return self.stray(user_data);
        };
        self.in_flight -= 1;
        let left = if slot.op.transfers() { slot.op.len - slot.result.done } else { 0 };
        if i64::from(result) != left as i64 {
            return self.complete_error_or_short(index, result);
        }
        slot.result.done += left;
        if slot.target != CompletionTarget::Queue {
            return self.make_ready(index);
        }
        slot.payload.end(slot.result, End::Deliver, &mut self.deferred_drops);
        slot.vacate();
        self.slab.add_free(index);
        self.enqueued += 1;
    }

    /// Puts a result into its completion queue at once, otherwise the request on the ready list.
    fn route_result(&mut self, index: Index) {
        let slot = self.slab.get(index);
        if slot.target != CompletionTarget::Queue {
            return self.make_ready(index);
        }
        slot.payload.end(slot.result, End::Deliver, &mut self.deferred_drops);
        self.slab.release(index);
        self.enqueued += 1;
    }

    #[cold]
    fn stray(&mut self, user_data: u64) {
        debug_assert!(false, "a completion of no request in flight: {user_data:#x}");
        self.stats.stray += 1;
    }

    /// Processes an error or a short transfer.
    #[cold]
    fn complete_error_or_short(&mut self, index: Index, result: i32) {
        let slot = self.slab.get(index);
        if slot.op.kind == Kind::Close {
            // The descriptor is closed, so the call is never repeated. It may report an error of
            // earlier writes, and EINTR if it did not wait for them.
            let closed = matches!(-result, libc::EINTR | libc::EINPROGRESS);
            slot.result.error = NonZeroI32::new(if closed { 0 } else { -result });
            return self.route_result(index);
        }
        self.eagain_reaped += usize::from(result == -libc::EAGAIN);
        if result < 0 {
            let errno = if RESTARTS.contains(&-result) { libc::EINTR } else { -result };
            let again = matches!(errno, libc::EAGAIN | libc::EINTR);
            if slot.cancel_errno().is_some() && (again || errno == libc::ECANCELED) {
                slot.result.error = slot.cancel_errno();
                return self.route_result(index);
            }
            if again && slot.retries < RETRY_LIMIT {
                slot.retries += 1;
                self.stats.retries += 1;
                // A retry may succeed after a delay, not at once.
                self.blocked |= errno == libc::EAGAIN;
                return self.requeue(index);
            }
            slot.result.error = NonZeroI32::new(errno);
        } else if slot.op.kind == Kind::Open {
            slot.result.done = result as u64; // the descriptor
        } else if slot.op.transfers() {
            let left = slot.op.len - slot.result.done;
            debug_assert!(result as u64 <= left);
            let moved = left.min(result as u64);
            let whole = slot.op.block.whole(moved);
            match slot.op.kind {
                _ if moved == left => slot.progress(moved),
                // Also less than a block of a direct read, which cannot be continued inside a
                // block.
                Kind::Read if whole == 0 => {
                    slot.progress(moved);
                    if slot.zero_fill {
                        slot.zero_rest();
                    }
                }
                _ if slot.cancel_errno().is_some() => {
                    slot.progress(whole); // the error reports these bytes
                    slot.result.error = slot.cancel_errno();
                }
                Kind::Write if moved == 0 || (whole == 0 && slot.retries == RETRY_LIMIT) => {
                    slot.result.error = NonZeroI32::new(libc::ENOSPC);
                }
                _ => {
                    slot.progress(whole);
                    slot.retries = if whole == 0 { slot.retries + 1 } else { 0 };
                    self.stats.short += 1;
                    return self.requeue(index);
                }
            }
        }
        self.route_result(index);
    }

    fn requeue(&mut self, index: Index) {
        self.slab.get(index).state = SlotState::Pending;
        self.pending.push(index);
    }

    /// Ends a request that is not in flight. It goes to the ready list even if its target is a
    /// queue, so that the next turn counts it.
    pub(crate) fn finish(&mut self, index: Index, error: Option<NonZeroI32>) {
        let slot = self.slab.get(index);
        slot.result.error = error;
        self.make_ready(index);
    }

    /// Puts a completed request on the ready list.
    #[inline]
    fn make_ready(&mut self, index: Index) {
        let slot = self.slab.get(index);
        slot.state = SlotState::Ready;
        self.ready.push(index);
    }

    /// Ends a request that the kernel refused.
    #[cold]
    pub(crate) fn refuse(&mut self, index: Index, error: Option<NonZeroI32>) {
        let op = self.slab.get(index).op;
        if op.kind == Kind::Close {
            // Otherwise the descriptor would leak: the payload gives it up with every result.
            // SAFETY: the request owns the descriptor, and no backend uses it. A close uses no
            // memory.
            unsafe { crate::op::perform(&op) };
        }
        self.finish(index, error);
    }

    /// Stores the result of a request that completed while the engine is dropped. No user code runs:
    /// the kernel may still use the buffers of other requests.
    #[cold]
    pub(crate) fn complete_at_end(&mut self, completion: RawCompletion) {
        let RawCompletion { user_data, result } = completion;
        let Some((index, slot)) = self.slab.in_flight(user_data) else { return };
        slot.result.error = NonZeroI32::new(-result.min(0));
        slot.result.done += result.max(0) as u64;
        self.make_ready(index);
    }

    /// Drops the payloads of requests that were not delivered when the engine is dropped, and what
    /// their results own.
    pub(crate) fn abandon_all_ready(&mut self) {
        while let Some(index) = self.ready.pop() {
            let slot = self.slab.get(index);
            slot.payload.end(slot.result, End::Abandon, &mut self.deferred_drops);
            self.slab.release(index);
        }
    }
}

/// The report of a call that turned the engine.
///
/// ```
/// use aio_reap::Engine;
///
/// # fn main() -> std::io::Result<()> {
/// let engine = Engine::new()?;
/// let nop = engine.nop().submit()?;
/// let mut turn = engine.turn();
/// while !turn.is_idle() {
///     turn = engine.wait(None)?; // here an event loop waits for the engine's descriptor
/// }
/// assert_eq!((turn.pending, turn.in_flight, nop.is_done()), (0, 0, true));
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Turn {
    /// The number of completions that the call delivered.
    pub delivered: usize,
    /// The number of requests in the engine that are not in flight: not submitted, or complete and
    /// not delivered.
    pub pending: usize,
    /// The number of requests in flight.
    pub in_flight: usize,
}

impl Turn {
    /// Returns whether the engine has no request.
    pub fn is_idle(&self) -> bool {
        self.pending == 0 && self.in_flight == 0
    }
}
