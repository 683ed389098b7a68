//! What becomes of a completion: the result, another attempt, the rest of a short transfer.
//!
//! The half of [`State`](crate::state::State) that a backend may call while it reaps.

use std::mem;
use std::num::NonZeroI32;

use crate::error::RequestError;
use crate::file::File;
use crate::op::{AtEof, Kind, Op};
use crate::payload::{DeferredDrop, Deliver, RawResult, TakenPayload};
use crate::raw::RawCompletion;
use crate::slab::{CompletionTarget, Fifo, Index, Slab, State as SlotState};
use crate::stats::EngineStats;

/// EAGAIN and EINTR completions in a row before the error is the caller's; a guess.
const RETRY_LIMIT: u8 = 16;

pub(crate) struct CompletionState {
    pub(crate) slab: Slab,
    pub(crate) stats: EngineStats,
    /// The kernel had no room at the last submission, and nothing was reaped since.
    pub(crate) blocked: bool,
    pub(crate) in_flight: usize,
    pub(crate) pending: Fifo,
    pub(crate) ready: Fifo,
    /// EAGAIN completions of this reap.
    pub(crate) in_vain: usize,
    /// Completions put into queues that nobody was told of yet.
    pub(crate) enqueued: usize,
    /// What deliveries would have freed, to be dropped where user code may run.
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
            in_vain: 0,
            enqueued: 0,
            deferred_drops: Vec::new(),
        }
    }

    /// Sets up the slot `index`, just allocated.
    #[inline]
    pub(crate) fn queue<T: Deliver>(
        &mut self,
        index: Index,
        file: Option<File>,
        op: Op,
        at_eof: AtEof,
        target: CompletionTarget,
        payload: T,
    ) {
        let slot = self.slab.get(index);
        slot.state = SlotState::Pending;
        slot.target = target;
        slot.at_eof = at_eof;
        slot.retries = 0;
        slot.op = op;
        slot.result = RawResult { done: 0, error: None };
        debug_assert!(slot.file.is_none());
        mem::forget(mem::replace(&mut slot.file, file)); // a free slot has none to drop
        slot.payload.put(payload);
        self.stats.accepted += 1;
        if op.offset > i64::MAX as u64 {
            // Negative for the kernel, which says the same; but to io_uring -1 means the file's
            // own position.
            self.finish(index, NonZeroI32::new(libc::EINVAL));
        } else if op.transfers() && op.len == 0 {
            // The kernel would answer 0 as well, which below means end of file or a full device.
            self.finish(index, None);
        } else {
            self.pending.push(index);
        }
    }

    /// Takes note of one completion, reaped at `now`. What is usual is here, all else in calls: it
    /// becomes part of a loop.
    #[inline(always)]
    pub(crate) fn complete(&mut self, completion: RawCompletion, now: u64) {
        let RawCompletion { user_data, result } = completion;
        let Some((index, slot)) = self.slab.in_flight(user_data) else {
            return self.stray(user_data);
        };
        self.in_flight -= 1;
        let left = if slot.op.transfers() { slot.op.len - slot.result.done } else { 0 };
        if i64::from(result) != left as i64 {
            return self.complete_oddly(index, result, now);
        }
        slot.result.done += left;
        if self.stats.is_timed() {
            return self.settle(index, now);
        }
        if slot.target != CompletionTarget::Queue {
            slot.state = SlotState::Ready;
            return self.ready.push(index);
        }
        let (taken, result) = (slot.payload.take_erased(), slot.result);
        self.slab.release(index);
        self.enqueued += 1;
        if let Some(taken) = taken {
            // SAFETY: unloaded just above, from where the slab has left it.
            let deferred = unsafe { taken.deliver(result) };
            if deferred.is_some() {
                self.keep(deferred);
            }
        }
    }

    #[cold]
    #[inline(never)]
    fn keep(&mut self, deferred: Option<DeferredDrop>) {
        self.deferred_drops.extend(deferred);
    }

    #[cold]
    fn stray(&mut self, user_data: u64) {
        debug_assert!(false, "a completion for nothing in flight: {user_data:#x}");
        self.stats.stray += 1;
    }

    /// An error, or a short transfer.
    #[cold]
    fn complete_oddly(&mut self, index: Index, result: i32, now: u64) {
        self.in_vain += usize::from(result == -libc::EAGAIN);
        let slot = self.slab.get(index);
        if result < 0 {
            let errno = -result;
            let again = matches!(errno, libc::EAGAIN | libc::EINTR);
            if slot.cancel_errno().is_some() && (again || errno == libc::ECANCELED) {
                slot.result.error = slot.cancel_errno();
                return self.settle(index, now);
            }
            if again && slot.retries < RETRY_LIMIT {
                slot.retries += 1;
                self.stats.retries += 1;
                // Time may help where asking again at once would not.
                self.blocked |= errno == libc::EAGAIN;
                return self.requeue(index);
            }
            slot.result.error = NonZeroI32::new(errno);
        } else if slot.op.transfers() {
            let left = slot.op.len - slot.result.done;
            debug_assert!(result as u64 <= left);
            let moved = left.min(result as u64);
            let whole = slot.op.block.whole(moved);
            match slot.op.kind {
                _ if moved == left => slot.progress(moved),
                // Also less than a block of a direct read, which goes on at blocks.
                Kind::Read if whole == 0 => {
                    slot.progress(moved);
                    match slot.at_eof {
                        AtEof::Stop => {}
                        AtEof::ZeroFill => slot.zero_rest(),
                        AtEof::Fail => slot.result.error = Some(RequestError::END_OF_FILE),
                    }
                }
                _ if slot.cancel_errno().is_some() => {
                    slot.progress(whole); // the error tells how much was transferred
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
        self.settle(index, now);
    }

    fn requeue(&mut self, index: Index) {
        self.slab.get(index).state = SlotState::Pending;
        self.pending.push(index);
    }

    /// Passes the result on: into a queue at once, else to the ready list.
    #[inline(never)]
    fn settle(&mut self, index: Index, now: u64) {
        let slot = self.slab.get(index);
        self.stats.took(slot.payload.stamp, now);
        if slot.target != CompletionTarget::Queue {
            slot.state = SlotState::Ready;
            self.ready.push(index);
            return;
        }
        let (taken, result) = (slot.payload.take_erased(), slot.result);
        self.slab.release(index);
        self.enqueued += 1;
        if let Some(taken) = taken {
            // SAFETY: unloaded just above, from where the slab has left it.
            let deferred = unsafe { taken.deliver(result) };
            if deferred.is_some() {
                self.keep(deferred);
            }
        }
    }

    /// Ends a request that is not in flight. Also what goes to a queue takes the ready list, so
    /// that whoever turns the engine hears of it.
    pub(crate) fn finish(&mut self, index: Index, error: Option<NonZeroI32>) {
        let slot = self.slab.get(index);
        slot.state = SlotState::Ready;
        slot.result.error = error;
        self.ready.push(index);
    }

    /// Frees a `Ready` or `Done` slot. The parcel is where it was until the books are used again.
    #[inline]
    pub(crate) fn collect(&mut self, index: Index) -> (Option<TakenPayload>, RawResult) {
        let slot = self.slab.get(index);
        debug_assert!(matches!(slot.state, SlotState::Ready | SlotState::Done));
        let collected = (slot.payload.take_erased(), slot.result);
        self.slab.release(index);
        collected
    }

    /// As [`collect`](Self::collect), for who knows the cargo's type.
    ///
    /// # Safety
    ///
    /// The slot was queued with a `T` as its cargo.
    #[inline]
    pub(crate) unsafe fn collect_as<T: Deliver>(&mut self, index: Index) -> (Option<T>, RawResult) {
        let slot = self.slab.get(index);
        debug_assert!(matches!(slot.state, SlotState::Ready | SlotState::Done));
        let result = slot.result;
        // SAFETY: the caller vouches for the type.
        let payload = unsafe { slot.payload.take() };
        self.slab.release(index);
        (payload, result)
    }
}
