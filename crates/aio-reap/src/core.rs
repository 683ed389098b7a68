//! The core of an engine. It drives [`State`] and is the only module that runs user code:
//! callbacks, wake-ups and drops, never while the state is borrowed.

use std::cell::{Cell, RefCell, RefMut};
use std::collections::VecDeque;
use std::rc::Rc;
use std::task::Waker;
use std::time::{Duration, Instant};
use std::{io, mem};

use offlock_sync::Arc;

use crate::calls::CallQueue;
use crate::completion_state::Turn;
use crate::drive::{self, BlockOnWaker, Driver};
use crate::error::{BackendKind, Fallback};
use crate::payload::{Delivery, End, Outcome, Payload, Reply};
use crate::slab::{CancelReason, CompletionTarget, Index, RequestId, SlotState};
use crate::state::State;
use crate::sys;
use crate::wake_fd::WakeFd;

/// A call of another thread.
pub(crate) type Call = Box<dyn FnOnce(&Rc<Core>) + Send>;

/// The core of an engine, which its front ends share.
pub(crate) struct Core {
    pub(crate) state: RefCell<State>,
    pub(crate) wake_fd: WakeFd,
    pub(crate) kind: BackendKind,
    pub(crate) fallbacks: Vec<Fallback>,
    reap_mode: ReapMode,
    /// The calls of other threads, and those that were taken from the queue and have not begun.
    calls: Arc<CallQueue<Call>>,
    taken_calls: RefCell<VecDeque<Call>>,
    /// The number of plugs, which hold requests back.
    pub(crate) plugs: Cell<usize>,
    pub(crate) driver: Driver,
    /// Set while user code, such as a callback, runs in a caller of the current function.
    pub(crate) is_dispatching: Cell<bool>,
}

impl Core {
    pub(crate) fn new(
        state: State,
        wake_fd: WakeFd,
        kind: BackendKind,
        fallbacks: Vec<Fallback>,
        reap_mode: ReapMode,
    ) -> Self {
        let kick = Arc::clone(&wake_fd.kick);
        let calls = CallQueue::new(state.completions.slab.capacity(), move || sys::signal(&kick));
        Self {
            state: RefCell::new(state),
            wake_fd,
            kind,
            fallbacks,
            reap_mode,
            calls: Arc::new(calls),
            taken_calls: RefCell::default(),
            plugs: Cell::new(0),
            driver: Driver::default(),
            is_dispatching: Cell::new(false),
        }
    }

    /// Returns the time for deadlines and timeouts.
    pub(crate) fn instant(&self) -> Instant {
        self.state.borrow().backend.instant()
    }

    /// Submits and reaps, unless a plug holds requests back or a callback is running. In the latter
    /// case the call that runs the callback, or the kick that it arms, submits them. A driven engine
    /// wakes its driver instead, so that the requests of all tasks that are ready now are one batch.
    ///
    /// Without `delivers` it neither reaps nor delivers.
    #[inline]
    pub(crate) fn flush_unless_held(&self, delivers: bool) {
        if self.plugs.get() == 0 && !self.is_dispatching.get() {
            self.flush(delivers);
        }
    }

    #[inline(never)]
    fn flush(&self, delivers: bool) {
        if self.driver.is_driven() {
            let waker = self.driver.request_turn();
            let _guard = self.enter_dispatch();
            return waker.into_iter().for_each(Waker::wake);
        }
        if delivers {
            self.round(self.reap_mode == ReapMode::AfterSubmit, true, false);
        } else {
            let _rearm = Rearm(self);
            let state = &mut *self.state.borrow_mut();
            state.submit(false);
            state.update_stage_limit();
        }
    }

    /// Cancels the requests whose time has come. The next round delivers them.
    #[cold]
    fn expire(&self) {
        let now = self.instant();
        let state = &mut *self.state.borrow_mut();
        while let Some(index) = state.deadlines.due(now, &state.completions.slab) {
            state.cancel(index, CancelReason::TimedOut);
        }
    }

    /// Tries to end a request early. The next turn delivers it. Returns false if there was no
    /// attempt.
    pub(crate) fn cancel(&self, index: Index) -> bool {
        let _rearm = Rearm(self);
        self.state.borrow_mut().cancel(index, CancelReason::Cancelled)
    }

    /// Tries to end a request early, if it is still in the engine. Returns false if there was no
    /// attempt.
    pub(crate) fn cancel_id(&self, RequestId(user_data): RequestId) -> bool {
        let index = self.state.borrow_mut().completions.slab.current(user_data).map(|slot| slot.0);
        index.is_some_and(|index| self.cancel(index))
    }

    /// Refuses later requests, and wakes the futures that wait for a slot.
    pub(crate) fn close(&self) {
        self.state.borrow_mut().closed = true;
        self.wake_waiting(|_| usize::MAX);
    }

    /// Returns whether another turn makes progress without a wake-up. `state` is borrowed from this
    /// core.
    pub(crate) fn has_work(&self, state: &State) -> bool {
        state.has_work() || state.has_remote && self.has_calls()
    }

    fn has_calls(&self) -> bool {
        !self.taken_calls.borrow().is_empty() || self.calls.has_calls()
    }

    /// Returns the queue of the calls of other threads, for a new sender.
    #[cold]
    pub(crate) fn call_queue(&self) -> &Arc<CallQueue<Call>> {
        self.state.borrow_mut().has_remote = true;
        self.wake_fd.shared_kick();
        &self.calls
    }

    /// Takes the queued calls of other threads, and with `close` refuses later ones. Returns the number
    /// of calls that have not begun.
    fn take_calls(&self, close: bool) -> usize {
        let mut taken = self.taken_calls.borrow_mut();
        if close {
            self.calls.close(&mut taken)
        } else {
            self.calls.take(&mut taken)
        }
        taken.len()
    }

    /// Returns the oldest call that was taken and has not begun.
    fn next_call(&self) -> Option<Call> {
        self.taken_calls.borrow_mut().pop_front()
    }

    /// Runs the calls of other threads that are queued now; with `close` the queue refuses later ones.
    ///
    /// If a call panics, the other ones stay with the engine, and the next turn runs them.
    pub(crate) fn run_calls(self: &Rc<Self>, close: bool) {
        let count = self.take_calls(close);
        if count == 0 {
            return;
        }
        let rearm = Rearm(self); // if a call panics
        let guard = self.enter_dispatch();
        for _ in 0..count {
            // A call may wait for the engine, and that turn runs the rest.
            let Some(call) = self.next_call() else { break };
            call(self);
        }
        drop(guard);
        mem::forget(rearm); // a round follows
    }

    /// Drops the queued calls of other threads, and refuses later ones.
    pub(crate) fn drop_calls(&self) {
        self.take_calls(true);
        while let Some(call) = self.next_call() {
            drop(call); // user code
        }
    }

    /// Wakes futures that may take a slot now.
    pub(crate) fn admit(&self) {
        self.wake_waiting(|state| state.completions.slab.free_len());
    }

    /// Wakes the first `count` of the futures that wait for a slot.
    fn wake_waiting(&self, count: impl Fn(&State) -> usize) {
        loop {
            let mut state = self.state.borrow_mut();
            let count = count(&state);
            let Some(waker) = state.waiting.next_to_wake(count) else { return };
            drop(state);
            let _guard = self.enter_dispatch();
            waker.wake();
        }
    }

    /// Performs one submission, one reap (with `reap`) and one delivery (with `delivers`). Returns the
    /// number of completions delivered.
    ///
    /// It does not loop, because it would never return on a device that completes inside submit.
    /// With `sleep` the submission may wait for a completion.
    fn round(&self, reap: bool, delivers: bool, sleep: bool) -> usize {
        let enqueued = {
            let mut state = self.state.borrow_mut();
            state.submit(sleep);
            if reap && state.reap() {
                self.wake_fd.progress();
            }
            state.update_stage_limit();
            let enqueued = state.take_enqueued();
            if state.can_only_wait() {
                // The usual case: no callback is ready and no work is left.
                self.wake_fd.wake_at(state.deadlines.earliest());
                return enqueued;
            }
            enqueued
        };
        let _rearm = Rearm(self); // also if a callback panics
        self.drop_deferred();
        let delivered = enqueued + if delivers { self.dispatch() } else { 0 };
        if self.state.borrow().completions.slab.promised > 0 {
            self.admit();
        }
        delivered
    }

    /// Drops the completion queues without an owner, and the buffers in them, which is user code.
    fn drop_deferred(&self) {
        let deferred = mem::take(&mut self.state.borrow_mut().completions.deferred_drops);
        if !deferred.is_empty() {
            let _guard = self.enter_dispatch();
            drop(deferred);
        }
    }

    /// Marks that user code runs while the returned guard lives.
    fn enter_dispatch(&self) -> DispatchGuard<'_> {
        DispatchGuard { core: self, is_outermost: !self.is_dispatching.replace(true) }
    }

    /// Delivers the completions that are ready now. User code runs here, and no borrow is held.
    ///
    /// Completions that become ready during the call are left. Otherwise it would never return if
    /// each callback made another request that needs no kernel.
    fn dispatch(&self) -> usize {
        let ready = self.state.borrow().ready();
        if ready == 0 {
            return 0;
        }
        let _guard = self.enter_dispatch();
        for delivered in 0..ready {
            let mut state = self.state.borrow_mut();
            let completions = &mut state.completions;
            let Some(index) = completions.ready.pop() else {
                return delivered; // a callback called `wait`, which delivered the rest
            };
            completions.stats.completed += 1;
            let slot = completions.slab.get(index);
            if slot.target != CompletionTarget::Future {
                Self::end(state, index, End::Deliver);
                continue;
            }
            slot.state = SlotState::Done;
            let waker = slot.waker.take();
            drop(state);
            // Without a waker the future was not polled yet, and will find its result.
            if let Some(waker) = waker {
                waker.wake();
            }
        }
        ready
    }

    /// Frees a completed slot, and then ends its request, which is user code.
    #[inline]
    fn end(state: RefMut<'_, State>, index: Index, end: End) {
        let result = state.completions.slab.peek(index).result;
        let payload = RefMut::map(state, |state| state.completions.slab.release(index));
        Payload::end_outside(payload, result, end);
    }

    /// Turns the engine; without `delivers`, inside a callback, it only submits and reaps. With `sleep`
    /// the submission may wait for a completion.
    pub(crate) fn turn(self: &Rc<Self>, delivers: bool, sleep: bool) -> Turn {
        self.wake_fd.clear();
        let mut state = self.state.borrow_mut();
        state.backend.acknowledge();
        let timed = state.deadlines.earliest().is_some();
        let has_remote = state.has_remote;
        drop(state);
        if has_remote && delivers {
            self.run_calls(false);
        } else if has_remote && self.has_calls() {
            self.wake_fd.kick(); // their wake-up may have been cleared above
        }
        if timed && delivers {
            self.expire();
        }
        let delivered = self.round(true, delivers, sleep);
        self.state.borrow().report(delivered)
    }

    /// Frees a completed slot and returns its outcome. Returns `None` if the request has not completed.
    ///
    /// # Safety
    ///
    /// The slot was queued with a buffer `B`, a result `T` and the receiver `()`.
    pub(crate) unsafe fn collect_done<B: 'static, T: Reply<B>>(
        &self,
        index: Index,
    ) -> Option<Outcome<B, T>> {
        let mut state = self.state.borrow_mut();
        let slab = &mut state.completions.slab;
        let slot = slab.get(index);
        if slot.state != SlotState::Done {
            return None;
        }
        let result = slot.result;
        // SAFETY: by the contract of this function the payload has these types.
        let buf = unsafe { slot.payload.take::<B, T>() }.expect("a slot in use holds its payload");
        slab.release(index);
        drop(state); // the outcome of an open makes system calls
        Some(Delivery::<B, (), T>::outcome(buf, result))
    }

    /// Stores the waker of a request. Returns false if the request has completed.
    pub(crate) fn register_waker(&self, index: Index, waker: &Waker) -> bool {
        // The clone and the drop of a waker are user code, which may turn the engine, so no borrow
        // is held.
        let waker = waker.clone();
        let mut state = self.state.borrow_mut();
        let slot = state.completions.slab.get(index);
        if slot.state == SlotState::Done {
            drop(state);
            return false;
        }
        let old = slot.waker.replace(waker);
        drop(state);
        drop(old);
        true
    }

    /// Detaches a request from its dropped operation. The request keeps its buffer until it completes.
    pub(crate) fn orphan(&self, index: Index) {
        let mut state = self.state.borrow_mut();
        let completions = &mut state.completions;
        let slot = completions.slab.get(index);
        let _waker = slot.waker.take(); // its drop is user code: after the borrow
        let _admit = AdmitOnDrop(self);
        if slot.state == SlotState::Done {
            Self::end(state, index, End::Abandon);
        } else {
            slot.target = CompletionTarget::Orphan;
            drop(state);
        }
    }
}

/// On drop, kicks or sets the time of a retry if work is left, so that another turn follows. A panic that
/// unwinds always causes a turn: it may have left completions whose notification was cleared, and
/// futures that may take a slot.
struct Rearm<'c>(&'c Core);

impl Drop for Rearm<'_> {
    fn drop(&mut self) {
        let state = self.0.state.borrow(); // user code never runs under a borrow
        let has_work = self.0.has_work(&state);
        if has_work || std::thread::panicking() {
            self.0.wake_fd.kick();
        }
        if !has_work && state.needs_retry() {
            self.0.wake_fd.retry_later(); // also during a panic, because a drop may wait
        }
        self.0.wake_fd.wake_at(state.deadlines.earliest());
    }
}

/// On drop, wakes the futures that may take a slot now. If a panic unwinds, it causes a turn, which
/// does so.
pub(crate) struct AdmitOnDrop<'c>(pub(crate) &'c Core);

impl Drop for AdmitOnDrop<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.0.wake_fd.kick();
        } else {
            self.0.admit();
        }
    }
}

/// Marks that user code runs. The drop ends the mark, also if a callback panics.
struct DispatchGuard<'c> {
    core: &'c Core,
    is_outermost: bool,
}

impl Drop for DispatchGuard<'_> {
    fn drop(&mut self) {
        if self.is_outermost {
            self.core.is_dispatching.set(false);
        }
    }
}

impl Core {
    /// Turns the engine until a completion was delivered, the time is over, or the engine is idle.
    /// With a waker, its wake-up ends the wait, and an idle engine does not.
    pub(crate) fn wait(
        self: &Rc<Self>,
        timeout: Option<Duration>,
        waker: Option<&BlockOnWaker>,
    ) -> io::Result<Turn> {
        let deadline = timeout.and_then(|timeout| self.instant().checked_add(timeout));
        // The submission may sleep if only a completion can end the wait.
        let sleep = timeout.is_none() && waker.is_none();
        loop {
            let turn = self.turn(true, sleep);
            if turn.delivered > 0 || waker.map_or(turn.is_idle(), |waker| waker.woken.is_set()) {
                return Ok(turn);
            }
            let left = deadline.map(|at| at.saturating_duration_since(self.instant()));
            if left.is_some_and(|left| left.is_zero()) {
                return Ok(turn);
            }
            self.sleep(left, waker)?;
        }
    }

    pub(crate) fn drain(self: &Rc<Self>) -> io::Result<()> {
        while !self.wait(None, None)?.is_idle() {}
        Ok(())
    }

    /// Turns the engine until no request, no remote and no call of one is left.
    pub(crate) fn serve(self: &Rc<Self>) -> io::Result<()> {
        let may_have_calls =
            || !self.taken_calls.borrow().is_empty() || self.calls.may_have_calls();
        drive::serve(may_have_calls, || self.turn(true, false), || self.sleep(None, None))
    }

    /// Sleeps until a turn may make progress or the waker is woken. May return early.
    fn sleep(&self, timeout: Option<Duration>, waker: Option<&BlockOnWaker>) -> io::Result<()> {
        let mut state = self.state.borrow_mut();
        if self.has_work(&state) {
            return Ok(());
        }
        let timeout = state.deadlines.shorten(timeout, || state.backend.instant());
        // The backend's own wait does not end for the retry.
        let only_completions = waker.is_none() && !state.has_remote && !state.needs_retry();
        if only_completions && state.in_kernel() > 0 {
            return state.wait(timeout);
        }
        let time = self.wake_fd.retry_delay().into_iter().chain(timeout).min();
        if state.in_kernel() > 0 {
            state.completions.stats.waits += 1;
            state.backend.before_sleep(time);
        } else if time.is_some_and(|time| state.backend.advance_time(time)) {
            return Ok(());
        }
        state.backend.watch(); // also without a request in the kernel, to clear older notifications
        drop(state);
        let sleep = || self.wake_fd.wait(time);
        // A wake-up before this sleep has set the flag, but not signalled the kick.
        waker.map_or_else(sleep, |waker| waker.woken.sleep(sleep).unwrap_or(Ok(())))
    }
}

/// The times at which an engine looks for completions, set by
/// [`EngineBuilder::reap_mode`](crate::EngineBuilder::reap_mode).
///
/// In both modes [`turn`](crate::Engine::turn) and [`wait`](crate::Engine::wait) reap.
///
/// ```
/// use aio_reap::{Engine, ReapMode};
///
/// # fn main() -> std::io::Result<()> {
/// let engine = Engine::builder().reap_mode(ReapMode::OnTurn).build()?;
/// engine.nop().submit()?.wait().0?; // the submission has run no callback
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum ReapMode {
    /// Only in a turn or a wait. A submission only submits. It runs no callbacks, except those of
    /// requests that need no kernel or that the kernel refused.
    OnTurn,
    /// Also right after each submission. Completions that are there by then cost no wake-up.
    #[default]
    AfterSubmit,
}
