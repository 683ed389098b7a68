//! The waits of threads and tasks: for loads, writes, write-backs and pins, for a place in the queue of
//! writers, and for a time.
//!
//! Each wait is a future. A task is woken by its waker. A thread polls the future in
//! [`block_on`](crate::wait::block_on), whose waker ends the thread's sleep.
//!
//! ```text
//!  waiter                                       thread that ends a load, a write or the last pin
//!  pin the entry, or set WAITED                 change the word
//!  list the waker at the frame                  a pin, or WAITED? take the wakers of the frame, wake them
//!  look at the word again
//! ```
//!
//! # Locks
//!
//! Each [`WaitSet`], the queue and the timer have a lock of their own. No other lock is taken under one
//! of them, and no waker is cloned, woken or dropped under one.
//!
//! # Invariants
//!
//! 1. A waiter looks at the word after it has listed its waker. So it sees the change, or the thread
//!    that makes the change finds the waker.
//! 2. A wait for a guard ends after the patience of the cache.
//! 3. The end of a write wakes every waiter of the frame. So only the first task in the queue of a block
//!    waits for it. Each other task waits until it is the first, or for a quarter of the patience: the
//!    first one may be a future that is polled no more.

use std::collections::BTreeMap;
use std::future::poll_fn;
use std::mem;
use std::ops::RangeInclusive;
use std::pin::pin;
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use offlock_sync::{Arc, Condvar, Mutex, WaitSet, hint, spawn, step, thread};

use crate::error::GetError;
use crate::frames::Frame;
use crate::wait::{poll_again_at, wake_all};
use crate::word::Key;

/// The number of sets of waiters. Waiters at the same time rarely need the same lock.
const SETS: usize = if cfg!(offlock_model) { 2 } else { 64 };
/// The pause between two looks for an event that wakes nothing, such as the drop of a guard. Longer
/// than most guards live.
const PAUSE: Duration = Duration::from_micros(50);
/// False in a model, in which no time passes.
const HAS_TIME: bool = !cfg!(offlock_model);

/// The waiters of a cache.
pub(crate) struct Waiting {
    /// The waiters by frame.
    frames: Box<[WaitSet]>,
    /// The tasks in the queue for the lock of each block.
    queue: Mutex<Wakers<Key>>,
    timer: Timer,
    /// How long a miss waits for a buffer, and other calls for a guard.
    pub(super) patience: Duration,
}

impl Waiting {
    pub(super) fn new(patience: Duration) -> Self {
        let frames = (0..SETS).map(|_| WaitSet::new()).collect();
        Self { frames, queue: Mutex::new(Wakers::new()), timer: Timer::new(), patience }
    }

    fn set(&self, frame: Frame) -> &WaitSet {
        &self.frames[frame.0 as usize % SETS]
    }

    /// Wakes the threads and tasks that wait at a frame, which then look again. The caller holds no
    /// lock, and has changed the word of the entry.
    pub(super) fn wake(&self, frame: Frame) {
        wake_all(self.set(frame).take(Some(frame.0.into())));
    }

    /// Waits until `look` returns a value. Looks again whenever the waiters at a frame are woken. Returns
    /// `None` at the time `end`.
    pub(super) async fn wait<T>(
        &self,
        frame: Frame,
        end: Option<Instant>,
        mut look: impl FnMut() -> Option<T>,
    ) -> Option<T> {
        let mut waiter = pin!(self.set(frame).waiter_for(frame.0.into()));
        let mut alarm = self.timer.alarm();
        poll_fn(|context| match waiter.as_mut().poll(context, &mut look) {
            Poll::Ready(value) => Poll::Ready(Some(value)),
            Poll::Pending => alarm.poll(end, context).map(|()| None),
        })
        .await
    }

    /// Waits, as a task, until it is the first in the queue for the lock of a block, or for a quarter of
    /// the rest of the patience. The place in the queue is kept until the returned value drops.
    pub(super) async fn enqueue(
        &self,
        key: Key,
        since: &mut Option<Instant>,
    ) -> Result<QueuedWaiter<'_>, GetError> {
        let end = self.end_of(self.time_left(since)? / 4);
        let mut queued = QueuedWaiter { queue: &self.queue, key, number: 0 };
        let mut alarm = self.timer.alarm();
        poll_fn(|context| match queued.poll(context) {
            Poll::Ready(()) => Poll::Ready(()),
            Poll::Pending => alarm.poll(end, context),
        })
        .await;
        self.time_left(since)?;
        Ok(queued)
    }

    /// Returns the rest of the patience. The first call of a wait stores its begin in `since`.
    fn time_left(&self, since: &mut Option<Instant>) -> Result<Duration, GetError> {
        let waited = since.get_or_insert_with(Instant::now).elapsed();
        self.patience.checked_sub(waited).filter(|left| !left.is_zero()).ok_or(GetError::Busy)
    }

    /// Returns the end of the patience. `None` beyond the range of the clock, and in a model.
    pub(super) fn end(&self, since: &mut Option<Instant>) -> Result<Option<Instant>, GetError> {
        Ok(self.end_of(self.time_left(since)?))
    }

    fn end_of(&self, left: Duration) -> Option<Instant> {
        Instant::now().checked_add(left).filter(|_| HAS_TIME)
    }

    /// Lets other threads run, for longer in each round of a wait for an event that wakes nothing. The
    /// patience of the cache limits the wait.
    pub(super) async fn pause(
        &self,
        rounds: &mut u32,
        since: &mut Option<Instant>,
    ) -> Result<(), GetError> {
        if *rounds >= 16 {
            self.time_left(since)?;
        }
        self.moment(rounds).await;
        Ok(())
    }

    /// Pauses, without a limit.
    pub(super) async fn moment(&self, rounds: &mut u32) {
        *rounds = rounds.saturating_add(1);
        match *rounds {
            ..16 => hint::spin_loop(),
            16..=32 => thread::yield_now(),
            _ => self.sleep().await,
        }
    }

    /// Sleeps for a [`PAUSE`].
    pub(super) async fn sleep(&self) {
        if !HAS_TIME {
            return thread::yield_now();
        }
        let (end, mut alarm) = (Instant::now() + PAUSE, self.timer.alarm());
        poll_fn(|context| alarm.poll(Some(end), context)).await;
    }

    /// Waits a moment for another thread to finish its change of an entry.
    pub(super) fn spin(&self, rounds: &mut u32) {
        *rounds = rounds.saturating_add(1);
        match *rounds {
            ..16 => hint::spin_loop(),
            #[cfg(not(offlock_model))]
            65.. => thread::sleep(PAUSE), // it is a load, which takes as long as the device does
            _ => thread::yield_now(),
        }
    }
}

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

/// The place of a task in the queue. Its drop wakes the next task.
pub(super) struct QueuedWaiter<'c> {
    queue: &'c Mutex<Wakers<Key>>,
    key: Key,
    /// The number of the place, or 0.
    number: u64,
}

impl QueuedWaiter<'_> {
    /// Returns ready once the task is the first. The first call joins the queue.
    fn poll(&mut self, context: &mut Context<'_>) -> Poll<()> {
        let new = context.waker().clone(); // foreign code, as is its drop: not under the lock
        let mut queue = self.queue.lock();
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
        let mut queue = self.queue.lock();
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

// Wakes tasks at a given time. A thread that blocks sleeps until the time instead.

/// The thread ends after this time without work. A guess.
const IDLE: Duration = Duration::from_secs(1);

/// Starts a thread while a task waits for a time.
struct Timer(Arc<Inner>);

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
struct Alarm<'t> {
    of: &'t Timer,
    /// The time, and the number of the wait.
    set: Option<(Instant, u64)>,
}

impl Alarm<'_> {
    /// Returns ready at the time `end`. Before that the task is polled again at that time.
    fn poll(&mut self, end: Option<Instant>, context: &Context<'_>) -> Poll<()> {
        let Some(end) = end else { return Poll::Pending };
        if Instant::now() >= end {
            return Poll::Ready(());
        }
        if !poll_again_at(end, context) {
            self.set(end, context.waker());
        }
        Poll::Pending
    }

    /// Wakes a task at a time; replaces the time and the waker of an earlier call.
    fn set(&mut self, at: Instant, waker: &Waker) {
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
    fn new() -> Self {
        let state = State { due: Wakers::new(), has_thread: false, closed: false };
        Self(Arc::new(Inner { state: Mutex::new(state), changed: Condvar::new() }))
    }

    /// Returns an alarm that is not set.
    fn alarm(&self) -> Alarm<'_> {
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
