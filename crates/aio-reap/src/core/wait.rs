//! The waits of an engine: turns until one makes progress, with a spin and a sleep between them.

use std::cell::RefMut;
use std::io;
use std::rc::Rc;
use std::time::Duration;

use super::{Core, InnerTurn};
use crate::backend::Backend;
use crate::drive::{self, Served};
use crate::reap::Spin;
use crate::state::State;
use crate::turn::{Scope, Turn};
use crate::waker::BlockOnWaker;

impl Core {
    /// Turns the engine until a completion was delivered, the time is over, or the engine is idle.
    /// With a waker, its wake-up ends the wait, and an idle engine does not.
    pub(crate) fn wait(
        self: &Rc<Self>,
        timeout: Option<Duration>,
        waker: Option<&BlockOnWaker>,
    ) -> io::Result<Turn> {
        self.wait_for(Scope::All, timeout, waker)
    }

    /// Waits for the waker like [`wait`](Self::wait), but delivers inner requests only.
    pub(crate) fn wait_inner(self: &Rc<Self>, waker: &BlockOnWaker) -> io::Result<Turn> {
        let _inner = InnerTurn::new(self);
        self.wait_for(Scope::Inner, None, Some(waker))
    }

    fn wait_for(
        self: &Rc<Self>,
        scope: Scope,
        timeout: Option<Duration>,
        waker: Option<&BlockOnWaker>,
    ) -> io::Result<Turn> {
        let deadline = timeout.and_then(|timeout| self.instant().checked_add(timeout));
        // The submission may sleep if only a completion can end the wait.
        let sleep = timeout.is_none() && waker.is_none() && !self.reap_mode.get().polls();
        loop {
            let turn = self.turn_with(scope, sleep);
            // `turn` may have cleared the waker's kick, so the flag is checked between the turn and
            // the sleep.
            if turn.delivered > 0 || waker.map_or(turn.is_idle(), BlockOnWaker::is_woken) {
                return Ok(turn);
            }
            let left = deadline.map(|at| at.saturating_duration_since(self.instant()));
            if left.is_some_and(|left| left.is_zero()) {
                return Ok(turn);
            }
            self.sleep(left, waker, scope)?;
        }
    }

    pub(crate) fn drain(self: &Rc<Self>) -> io::Result<()> {
        while !self.wait(None, None)?.is_idle() {}
        Ok(())
    }

    /// Turns the engine until no remote is left and no request is left.
    pub(crate) fn serve(self: &Rc<Self>) -> io::Result<()> {
        let turn = || match self.turn(Scope::All) {
            turn if turn.delivered > 0 => Served::Progress,
            turn if turn.is_idle() => Served::Idle,
            _ => Served::Busy,
        };
        drive::serve(|| self.has_remotes(), turn, || self.sleep(None, None, Scope::All))
    }

    /// Sleeps until a turn may make progress or the waker is woken. May return early.
    fn sleep(
        &self,
        timeout: Option<Duration>,
        waker: Option<&BlockOnWaker>,
        scope: Scope,
    ) -> io::Result<()> {
        let now = || self.instant();
        let mut timeout = self.state.borrow().deadlines.shorten(timeout, now);
        if self.reap_mode.get().polls() {
            let start = now();
            if self.spin(Spin::new(timeout, now), waker, scope) {
                return Ok(());
            }
            let spent = now().saturating_duration_since(start);
            timeout = timeout.map(|timeout| timeout.saturating_sub(spent));
            if timeout.is_some_and(|timeout| timeout.is_zero()) {
                return Ok(());
            }
        }
        let mut state = self.state.borrow_mut();
        if self.has_work_for(&state, scope) {
            return Ok(());
        }
        if state.in_kernel() > 0 && waker.is_none() && !state.has_remote {
            return state.wait(timeout);
        }
        if self.prepare_sleep(state, timeout, scope) { self.wake_fd.wait(timeout) } else { Ok(()) }
    }

    /// Prepares a sleep on the descriptors. Returns false if there is work instead.
    fn prepare_sleep(
        &self,
        mut state: RefMut<'_, State>,
        timeout: Option<Duration>,
        scope: Scope,
    ) -> bool {
        if self.has_work_for(&state, scope) {
            return false;
        }
        if state.in_kernel() > 0 {
            state.completions.stats.waits += 1;
            state.backend.before_sleep(timeout);
        } else if let Some(time) = self.wake_fd.retry_delay().into_iter().chain(timeout).min() {
            if state.backend.advance_time(time) {
                return false;
            }
        }
        state.backend.watch(); // also without a request in the kernel, to clear older notifications
        true
    }

    /// Peeks for completions as long as `spin` allows. Returns whether the sleep can be omitted.
    fn spin(&self, mut spin: Spin, waker: Option<&BlockOnWaker>, scope: Scope) -> bool {
        let mut state = self.state.borrow_mut();
        while !self.has_work_for(&state, scope) && !waker.is_some_and(BlockOnWaker::is_woken) {
            if state.in_kernel() == 0 {
                if state.needs_retry() {
                    // The last peek found EAGAIN. Clear its notification, because it would end the
                    // delay of the retry.
                    state.backend.acknowledge();
                    self.wake_fd.retry_later();
                }
                return false;
            }
            if !spin.go_on(|| state.backend.instant()) {
                return false;
            }
            state.backend.relax();
            if state.reap() {
                self.wake_fd.progress();
            }
        }
        true
    }
}
