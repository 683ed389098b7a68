//! The pauses between the polls of a task that waits for readers.
//!
//! A reader wakes no task when it leaves, so the task must poll again. The first polls follow at once,
//! because most readers leave within microseconds. The others follow after pauses that grow. One thread
//! sleeps for all paused tasks of the process. It starts with the first pause, and ends when no task has
//! paused for [`IDLE`].

use std::task::Waker;
use std::time::{Duration, Instant};

/// The number of polls that follow at once. A guess.
const AT_ONCE: u32 = 8;
/// The first pause and the longest one, as in the waits with a timeout.
const FIRST: Duration = Duration::from_micros(10);
const LONGEST: Duration = Duration::from_millis(1);

/// The polls and the pauses of one future.
#[derive(Debug, Default)]
pub(super) struct Pauses {
    polls: u32,
    last: Option<Paused>,
}

#[derive(Debug)]
struct Paused {
    until: Instant,
    pause: Duration,
    waker: Waker,
}

impl Pauses {
    /// Wakes the task at once or after a pause.
    pub(super) fn wake_later(&mut self, waker: &Waker) {
        if self.polls < AT_ONCE || cfg!(any(offlock_loom, offlock_shuttle)) {
            self.polls += 1;
            return waker.wake_by_ref();
        }
        let now = Instant::now();
        let pause = match &self.last {
            // Another event has woken the task. The pause goes on.
            Some(last) if now < last.until && last.waker.will_wake(waker) => return,
            Some(last) => (last.pause * 2).min(LONGEST),
            None => FIRST,
        };
        let until = now + pause;
        self.last = Some(Paused { until, pause, waker: waker.clone() });
        if let Err(waker) = timer::wake_at(until, waker.clone()) {
            waker.wake(); // no memory, or no thread: polls again at once
        }
    }
}

#[cfg(any(offlock_loom, offlock_shuttle))]
mod timer {
    use super::{Instant, Waker};

    pub(super) fn wake_at(_: Instant, waker: Waker) -> Result<(), Waker> {
        Err(waker)
    }
}

#[cfg(not(any(offlock_loom, offlock_shuttle)))]
mod timer {
    use std::cmp::Ordering;
    use std::collections::BinaryHeap;
    use std::mem::MaybeUninit;

    use percpu::sync::{Condvar, Mutex, spawn};

    use super::super::panics::contained;
    use super::{Duration, Instant, Waker};

    /// The thread ends after this time without a paused task. A guess.
    const IDLE: Duration = Duration::from_secs(1);

    static TIMER: Mutex<Timer> = Mutex::new(Timer { alarms: BinaryHeap::new(), runs: false });
    static ADDED: Condvar = Condvar::new();

    struct Timer {
        alarms: BinaryHeap<Alarm>,
        /// The thread runs, or is about to.
        runs: bool,
    }

    struct Alarm {
        at: Instant,
        waker: Waker,
    }

    /// The greatest alarm of the heap is the earliest one.
    impl Ord for Alarm {
        fn cmp(&self, other: &Self) -> Ordering {
            other.at.cmp(&self.at)
        }
    }

    impl PartialOrd for Alarm {
        fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
            Some(self.cmp(other))
        }
    }

    impl PartialEq for Alarm {
        fn eq(&self, other: &Self) -> bool {
            self.at == other.at
        }
    }

    impl Eq for Alarm {}

    /// Wakes a task at a time. Returns the waker if there is no memory or no thread.
    pub(super) fn wake_at(at: Instant, waker: Waker) -> Result<(), Waker> {
        let mut timer = TIMER.lock();
        if timer.alarms.try_reserve(1).is_err() {
            return Err(waker);
        }
        if !timer.runs {
            timer.runs = spawn("radix-ctx-timer".to_string(), run).is_ok();
            if !timer.runs {
                return Err(waker);
            }
        }
        let is_next = timer.alarms.peek().is_none_or(|next| at < next.at);
        timer.alarms.push(Alarm { at, waker });
        drop(timer);
        if is_next {
            ADDED.notify_one();
        }
        Ok(())
    }

    fn run() {
        block_signals();
        let mut timer = TIMER.lock();
        loop {
            let now = Instant::now();
            let left = timer.alarms.peek().map(|next| next.at.saturating_duration_since(now));
            match left {
                Some(Duration::ZERO) => {
                    let alarm = timer.alarms.pop();
                    drop(timer);
                    contained(|| alarm.into_iter().for_each(|alarm| alarm.waker.wake()));
                    timer = TIMER.lock();
                }
                Some(left) => _ = ADDED.wait_for(&mut timer, left),
                None => {
                    _ = ADDED.wait_for(&mut timer, IDLE);
                    if timer.alarms.is_empty() {
                        timer.runs = false;
                        return;
                    }
                }
            }
        }
    }

    /// Leaves the signals of the process to its own threads.
    fn block_signals() {
        let mut all = MaybeUninit::<libc::sigset_t>::uninit();
        // SAFETY: the pointer is valid for a set of signals, which the call fills.
        unsafe { libc::sigfillset(all.as_mut_ptr()) };
        // SAFETY: the set was filled, and the old mask is not asked for.
        unsafe { libc::pthread_sigmask(libc::SIG_BLOCK, all.as_ptr(), std::ptr::null_mut()) };
    }
}
