//! Tasks in queue for the lock of a block.
//!
//! The end of a write wakes every waiter of the frame. So only the first task in queue waits for it.
//! Each other task waits until it is the first, or for a quarter of the patience: the first one may
//! be a future that is polled no more.

use std::collections::BTreeMap;
use std::future::poll_fn;
use std::mem;
use std::ops::RangeInclusive;
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use offlock_sync::{Arc, Condvar, Mutex, spawn, step, thread};

use super::Shared;
use crate::error::GetError;
use crate::wait::wake_all;
use crate::word::Key;

/// Wakers by what they wait for, and for each key in the order in which the waits began.
#[derive(Debug, Default)]
struct Wakers<K> {
    waiting: BTreeMap<(K, u64), Waker>,
    /// The number of waits so far.
    count: u64,
}

impl<K: Copy + Ord> Wakers<K> {
    const fn new() -> Self {
        Self { waiting: BTreeMap::new(), count: 0 }
    }

    /// Adds a wait. Returns its number, from 1.
    fn add(&mut self, key: K, waker: Waker) -> u64 {
        self.count += 1;
        self.waiting.insert((key, self.count), waker);
        self.count
    }

    /// Replaces the waker of a wait. Returns the other one, which the caller drops without the lock,
    /// or the new one if the wait has been woken.
    fn replace(&mut self, key: K, number: u64, new: Waker) -> Waker {
        match self.waiting.get_mut(&(key, number)) {
            Some(waker) => mem::replace(waker, new),
            None => new,
        }
    }

    fn remove(&mut self, key: K, number: u64) -> Option<Waker> {
        self.waiting.remove(&(key, number))
    }

    /// Returns the least key that is waited for.
    fn first(&self) -> Option<K> {
        self.waiting.first_key_value().map(|(&(key, _), _)| key)
    }

    /// Returns the number of the first wait for `key`.
    fn first_of(&self, key: K) -> Option<u64> {
        let mut all = self.waiting.range((key, 0)..=(key, u64::MAX));
        all.next().map(|(&(_, number), _)| number)
    }

    /// Removes the waits for these keys. Returns their wakers.
    fn take(&mut self, keys: RangeInclusive<K>) -> Vec<Waker> {
        let (first, last) = keys.into_inner();
        let range = (first, 0)..=(last, u64::MAX);
        let found: Vec<_> = self.waiting.range(range).map(|(&wait, _)| wait).collect();
        found.iter().filter_map(|wait| self.waiting.remove(wait)).collect()
    }
}

/// The tasks in queue for each block.
#[derive(Debug)]
pub(super) struct WaitQueue(Mutex<Wakers<Key>>);

impl WaitQueue {
    pub(super) fn new() -> Self {
        Self(Mutex::new(Wakers::new()))
    }
}

/// The place of a task in the queue. Its drop wakes the next task.
pub(crate) struct QueuedWaiter<'c> {
    queue: &'c WaitQueue,
    key: Key,
    /// The number of the place, or 0.
    number: u64,
}

impl QueuedWaiter<'_> {
    /// Returns ready once the task is the first. The first call joins the queue.
    fn poll(&mut self, context: &mut Context<'_>) -> Poll<()> {
        let new = context.waker().clone(); // foreign code, as is its drop: not under the lock
        let mut queue = self.queue.0.lock();
        let mut old = None;
        if self.number == 0 {
            self.number = queue.add(self.key, new);
        } else {
            old = Some(queue.replace(self.key, self.number, new));
        }
        let is_first = queue.first_of(self.key).is_none_or(|first| first == self.number);
        drop(queue);
        drop(old);
        if is_first { Poll::Ready(()) } else { Poll::Pending }
    }
}

impl Drop for QueuedWaiter<'_> {
    fn drop(&mut self) {
        let mut queue = self.queue.0.lock();
        let was_first = queue.first_of(self.key).is_some_and(|first| first == self.number);
        let left = queue.remove(self.key, self.number);
        let next = queue.first_of(self.key).filter(|_| was_first);
        // Takes its waker, because a clone is foreign code: not under the lock.
        let next = next.map(|next| queue.replace(self.key, next, Waker::noop().clone()));
        drop(queue);
        drop(left);
        step!("queue: wake the next", wake_all(next));
    }
}

impl Shared {
    /// Waits, as a task, until it is the first in queue for the lock of a block, or for a quarter of
    /// the rest of the patience.
    pub(crate) async fn enqueue_waiter(
        &self,
        key: Key,
        since: &mut Option<Instant>,
    ) -> Result<QueuedWaiter<'_>, GetError> {
        let end = self.end_of_patience(self.time_left(since)? / 4);
        let mut queued = QueuedWaiter { queue: &self.wait_queue, key, number: 0 };
        let mut alarm = self.timer.alarm();
        poll_fn(|context| {
            if queued.poll(context).is_ready() || end.is_some_and(|end| Instant::now() >= end) {
                return Poll::Ready(());
            }
            end.inspect(|end| alarm.set(*end, context.waker()));
            Poll::Pending
        })
        .await;
        self.time_left(since)?;
        Ok(queued)
    }
}

// Wakes tasks at a given time: for waits with a timeout, and for waits on events
// that wake nothing, such as the drop of a guard.

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
