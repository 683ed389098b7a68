//! The waits of threads and tasks: for loads, writes, write-backs and pins, for the operations of a batch, for a
//! place in the queue of writers, and for a time.
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
//!    The issuer of a batch looks at its count in the same way.
//! 2. A wait for a guard ends after the patience of the cache.
//! 3. The end of a write wakes every waiter of the frame. So only the first task in the queue of a block
//!    waits for it. Each other task waits until it is the first, or for a quarter of the patience: the
//!    first one may be a future that is polled no more.

use std::collections::{BTreeMap, BTreeSet};
use std::future::poll_fn;
use std::mem;
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
    /// The waiters by frame, and by batch of operations.
    sets: Box<[WaitSet]>,
    queue: Queue,
    timer: Timer,
    /// How long a miss waits for a buffer, and other calls for a guard.
    pub(super) patience: Duration,
}

impl Waiting {
    pub(super) fn new(patience: Duration) -> Self {
        let sets = (0..SETS).map(|_| WaitSet::new()).collect();
        Self { sets, queue: Queue::default(), timer: Timer::new(), patience }
    }

    fn set(&self, key: u64) -> &WaitSet {
        let hash = key.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32; // that of a frame, or an address
        &self.sets[hash as usize % SETS]
    }

    /// Wakes the threads and tasks that wait at a frame, which then look again. The caller holds no
    /// lock, and has changed the word of the entry.
    pub(super) fn wake(&self, frame: Frame) {
        self.wake_at(frame.0.into());
    }

    /// Wakes the waiters with that key. The caller holds no lock, and has changed what they wait for.
    pub(super) fn wake_at(&self, key: u64) {
        wake_all(self.set(key).take(Some(key)));
    }

    /// Waits until `look` returns a value. Looks again whenever the waiters with that key, of a frame its
    /// number, are woken. Returns `None` at the time `end`.
    pub(super) async fn wait<T>(
        &self,
        key: u64,
        end: Option<Instant>,
        look: impl FnMut() -> Option<T>,
    ) -> Option<T> {
        self.wait_in(self.set(key), key, end, look).await
    }

    async fn wait_in<T>(
        &self,
        set: &WaitSet,
        key: u64,
        end: Option<Instant>,
        mut look: impl FnMut() -> Option<T>,
    ) -> Option<T> {
        let mut waiter = pin!(set.waiter_for(key));
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
        let number = self.queue.join(key);
        let queued = QueuedWaiter { queue: &self.queue, key, number };
        let look = || (self.queue.first(key) == Some(number)).then_some(());
        self.wait_in(&self.queue.waiters, number, end, look).await;
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

/// The tasks in the queue for the lock of each block.
#[derive(Default)]
struct Queue {
    places: Mutex<Places>,
    /// The waiters by the numbers of their places.
    waiters: WaitSet,
}

#[derive(Default)]
struct Places {
    taken: BTreeSet<(Key, u64)>,
    /// The number of places so far.
    count: u64,
}

impl Places {
    fn first(&self, key: Key) -> Option<u64> {
        self.taken.range((key, 0)..=(key, u64::MAX)).next().map(|&(_, number)| number)
    }
}

impl Queue {
    /// Takes the last place in the queue of a block. Returns its number.
    fn join(&self, key: Key) -> u64 {
        let mut places = self.places.lock();
        places.count += 1;
        let number = places.count;
        places.taken.insert((key, number));
        number
    }

    /// Returns the number of the first place in the queue of a block.
    fn first(&self, key: Key) -> Option<u64> {
        self.places.lock().first(key)
    }
}

/// The place of a task in the queue. Its drop wakes the next task.
pub(super) struct QueuedWaiter<'c> {
    queue: &'c Queue,
    key: Key,
    number: u64,
}

impl Drop for QueuedWaiter<'_> {
    fn drop(&mut self) {
        let mut places = self.queue.places.lock();
        let was_first = places.first(self.key) == Some(self.number);
        places.taken.remove(&(self.key, self.number));
        let next = places.first(self.key).filter(|_| was_first);
        drop(places);
        if let Some(next) = next {
            step!("queue: wake the next", wake_all(self.queue.waiters.take(Some(next))));
        }
    }
}

// Wakes tasks at a given time. A thread that blocks sleeps until the time instead.

/// The thread ends after this time without work.
const IDLE: Duration = Duration::from_secs(1);

/// Starts a thread while a task waits for a time.
struct Timer(Arc<Inner>);

struct Inner {
    state: Mutex<State>,
    changed: Condvar,
}

struct State {
    /// The wakers by time, and by the number of the alarm.
    due: BTreeMap<(Instant, u64), Waker>,
    /// The number of alarms so far.
    count: u64,
    has_thread: bool,
    closed: bool,
}

/// A time at which a task is woken. Its drop forgets the task.
struct Alarm<'t> {
    of: &'t Timer,
    /// The time, and the number of the alarm.
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
        let old = self.set.take().and_then(|set| state.due.remove(&set));
        let is_next = state.due.first_key_value().is_none_or(|(first, _)| at < first.0);
        state.count += 1;
        let set = (at, state.count);
        self.set = Some(set);
        state.due.insert(set, new);
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
        let removed = set.and_then(|set| self.of.0.state.lock().due.remove(&set));
        drop(removed); // perhaps the last handle of the task: not under the lock
    }
}

impl Timer {
    fn new() -> Self {
        let state = State { due: BTreeMap::new(), count: 0, has_thread: false, closed: false };
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
            let next = state.due.first_key_value().map(|(&(at, _), _)| at);
            if next.is_some_and(|next| next <= now) {
                let later = state.due.split_off(&(now, u64::MAX));
                let due = mem::replace(&mut state.due, later);
                drop(state);
                wake_all(due.into_values());
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
