//! Wakes tasks at a given time: for waits with a timeout, and for waits on events
//! that wake nothing, such as the drop of a guard.

use std::time::{Duration, Instant};

use std::task::Waker;

use offlock_sync::{Arc, Condvar, Mutex, spawn, thread};

use crate::wait::{Wakers, wake_all};

/// False in a model, in which no time passes.
pub(super) const HAS_TIME: bool = !cfg!(offlock_model);
/// The thread ends after this time without work. A guess.
const IDLE: Duration = Duration::from_secs(1);

/// Starts a thread while a task waits for a time.
pub(super) struct Timer(Arc<Inner>);

struct Inner {
    state: Mutex<State>,
    changed: Condvar,
}

struct State {
    due: Wakers<Instant>,
    has_thread: bool,
    closed: bool,
}

/// A time at which a task is woken. Its drop forgets the task.
pub(super) struct Alarm<'t> {
    of: &'t Timer,
    /// The time, and the number of the wait.
    set: Option<(Instant, u64)>,
}

impl Alarm<'_> {
    /// Wakes a task at a time; replaces the time and the waker of an earlier call. In a model, wakes
    /// it after other threads had a turn.
    pub(super) fn set(&mut self, at: Instant, waker: &Waker) {
        if !HAS_TIME {
            thread::yield_now();
            return waker.wake_by_ref();
        }
        let new = waker.clone(); // foreign code, as is the drop of the other: not under the lock
        let mut state = self.of.0.state.lock();
        let old = self.set.take().and_then(|(at, number)| state.due.remove(at, number));
        let is_next = state.due.first().is_none_or(|first| at < first);
        self.set = Some((at, state.due.add(at, new)));
        if !state.has_thread {
            let inner = Arc::clone(&self.of.0);
            state.has_thread = spawn("bufcache-timer".into(), move || inner.work()).is_ok();
        }
        let has_thread = state.has_thread;
        drop(state);
        drop(old);
        if !has_thread {
            // Without a thread the task polls.
            thread::yield_now();
            waker.wake_by_ref();
        } else if is_next {
            self.of.0.changed.notify_one();
        }
    }
}

impl Drop for Alarm<'_> {
    fn drop(&mut self) {
        let set = self.set.take();
        let removed = set.and_then(|(at, number)| self.of.0.state.lock().due.remove(at, number));
        drop(removed); // perhaps the last handle of the task: not under the lock
    }
}

impl Timer {
    pub(super) fn new() -> Self {
        let state = State { due: Wakers::new(), has_thread: false, closed: false };
        Self(Arc::new(Inner { state: Mutex::new(state), changed: Condvar::new() }))
    }

    /// Returns an alarm that is not set.
    pub(super) fn alarm(&self) -> Alarm<'_> {
        Alarm { of: self, set: None }
    }
}

impl Drop for Timer {
    fn drop(&mut self) {
        // No task waits, because its alarm borrows the timer.
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
            let next = state.due.first();
            if let Some(first) = next.filter(|first| *first <= now) {
                let due = state.due.take(first..=now);
                drop(state);
                wake_all(due);
                idle_since = Instant::now();
                state = self.state.lock();
                continue;
            }
            let left = next.unwrap_or(idle_since + IDLE).saturating_duration_since(now);
            if left.is_zero() {
                break;
            }
            self.changed.wait_for(&mut state, left);
        }
        state.has_thread = false;
    }
}
