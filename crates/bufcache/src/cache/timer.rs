//! Wakes operations of tasks at a given time: for waits with a timeout, and for waits on events
//! that wake nothing, such as the drop of a guard.

use std::time::{Duration, Instant};

use std::task::Waker;

use percpu::sync::{Arc, Condvar, Mutex, spawn, thread};

use crate::wait::wake_all;

/// False in a model, in which no time passes.
pub(super) const HAS_TIME: bool = !cfg!(any(offlock_loom, offlock_shuttle));
/// The thread ends after this time without work. A guess.
const IDLE: Duration = Duration::from_secs(1);

/// Starts a thread while an operation waits for a time.
pub(super) struct Timer(Arc<Inner>);

struct Inner {
    state: Mutex<State>,
    changed: Condvar,
}

struct State {
    /// The earliest time of each operation.
    due: Vec<(Instant, Waker)>,
    has_thread: bool,
    closed: bool,
}

impl Timer {
    pub(super) fn new() -> Self {
        let state = State { due: Vec::new(), has_thread: false, closed: false };
        Self(Arc::new(Inner { state: Mutex::new(state), changed: Condvar::new() }))
    }

    /// Wakes an operation at a time or earlier. In a model, wakes it after other threads had a
    /// turn.
    pub(super) fn add(&self, at: Instant, waker: &Waker) {
        if !HAS_TIME {
            thread::yield_now();
            return waker.wake_by_ref();
        }
        let mut state = self.0.state.lock();
        match state.due.iter_mut().find(|(_, known)| known.will_wake(waker)) {
            Some((known, _)) => *known = at.min(*known),
            None => state.due.push((at, waker.clone())),
        }
        if !state.has_thread {
            let inner = Arc::clone(&self.0);
            let started = spawn("bufcache-timer".into(), move || inner.work()).is_ok();
            if !started {
                // Without a thread the operation polls.
                state.due.retain(|(_, known)| !known.will_wake(waker));
                drop(state);
                thread::yield_now();
                return waker.wake_by_ref();
            }
            state.has_thread = true;
        }
        drop(state);
        self.0.changed.notify_one();
    }

    /// Forgets an operation that was woken before its time.
    pub(super) fn remove(&self, waker: &Waker) {
        if !HAS_TIME {
            return;
        }
        let mut state = self.0.state.lock();
        let at = state.due.iter().position(|(_, known)| known.will_wake(waker));
        let removed = at.map(|at| state.due.swap_remove(at));
        drop(state);
        drop(removed); // perhaps the last handle of the operation: not under the lock
    }
}

impl Drop for Timer {
    fn drop(&mut self) {
        // No operation is left, because each keeps the cache alive.
        self.0.state.lock().closed = true;
        self.0.changed.notify_one();
    }
}

impl Inner {
    fn work(&self) {
        let mut state = self.state.lock();
        let mut idle_since = Instant::now();
        while !state.closed {
            let now = Instant::now();
            let due: Vec<_> = state.due.extract_if(.., |(at, _)| *at <= now).collect();
            if !due.is_empty() {
                drop(state);
                wake_all(due.into_iter().map(|(_, waker)| waker));
                idle_since = Instant::now();
                state = self.state.lock();
                continue;
            }
            let next = state.due.iter().map(|(at, _)| *at).min();
            let left = next.unwrap_or(idle_since + IDLE).saturating_duration_since(now);
            if left.is_zero() {
                break;
            }
            self.changed.wait_for(&mut state, left);
        }
        state.has_thread = false;
    }
}

#[cfg(all(test, not(any(offlock_loom, offlock_shuttle))))]
mod tests {
    use super::*;

    struct Task;

    impl std::task::Wake for Task {
        fn wake(self: std::sync::Arc<Self>) {}
    }

    #[test]
    fn an_operation_that_was_woken_before_its_time_is_not_kept() {
        let (timer, task) = (Timer::new(), std::sync::Arc::new(Task));
        let wakers = [Waker::from(std::sync::Arc::clone(&task)), std::sync::Arc::new(Task).into()];
        for waker in &wakers {
            timer.add(Instant::now() + Duration::from_secs(3600), waker);
        }
        timer.remove(&wakers[0]);
        timer.remove(&wakers[0]);
        assert_eq!(std::sync::Arc::strong_count(&task), 2, "of this test");
        assert_eq!(timer.0.state.lock().due.len(), 1);
    }
}
