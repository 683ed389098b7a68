//! Ranges of a device of which no block may be cached, because the device discards, zeroes or
//! writes them past the cache.
//!
//! A thread that excludes a range adds it here, and then takes the lock of the home of each of its
//! blocks. A thread that inserts a block holds the lock of the block's home, and checks here first.
//! Whichever takes that lock first, the other one sees its change.

use std::ops::Range;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use percpu::sync::atomic::{AtomicUsize, Ordering};
use percpu::sync::std_lock::{Condvar, Mutex};
use percpu::sync::{check, order, step};

use crate::wait::{Bell, Mode, add_waker, wake_all};

#[derive(Debug)]
pub(crate) struct Exclusion {
    /// The number of excluded ranges.
    count: AtomicUsize,
    /// A lock of `std`, as a miss takes it: `parking_lot` allocates when a thread first waits.
    state: Mutex<State>,
    gone: Condvar,
    /// Wakes the threads that wait to exclude a range.
    bell: Arc<Bell>,
}

#[derive(Debug, Default)]
struct State {
    ranges: Vec<Range<u64>>,
    /// Ranges that wait for their turn, with their numbers, in the order of the calls.
    waiting: Vec<(u64, Range<u64>)>,
    /// The number of ranges asked for so far.
    count: u64,
    wakers: Vec<Waker>,
}

impl State {
    fn overlaps(&self, range: &Range<u64>) -> bool {
        self.ranges.iter().any(|other| overlap(other, range))
    }

    /// Returns whether the range with that number may be excluded: it overlaps no excluded range,
    /// and no waiting one with a smaller number.
    fn is_free(&self, number: u64, range: &Range<u64>) -> bool {
        let mut earlier = self.waiting.iter().take_while(|(other, _)| *other < number);
        !self.overlaps(range) && !earlier.any(|(_, other)| overlap(other, range))
    }

    /// Excludes the range with that number if it [may be](Self::is_free). Updates `count`, the
    /// number of excluded ranges.
    fn try_add(&mut self, count: &AtomicUsize, number: u64, range: &Range<u64>) -> bool {
        let is_free = self.is_free(number, range);
        if !check!("exclusion: no other range overlaps", is_free) {
            return false;
        }
        self.ranges.push(range.clone());
        // Ordering: Relaxed; the locks of the homes carry it.
        count.store(self.ranges.len(), Ordering::Relaxed);
        true
    }
}

fn overlap(a: &Range<u64>, b: &Range<u64>) -> bool {
    a.start.max(b.start) < a.end.min(b.end) // so an empty range overlaps none
}

impl Exclusion {
    pub(crate) fn new() -> Self {
        Self {
            count: AtomicUsize::new(0),
            state: Mutex::new(State::default()),
            gone: Condvar::new(),
            bell: Bell::new(),
        }
    }

    /// Waits until no excluded range, and no range that was asked for earlier, overlaps a range of
    /// sectors, and excludes it. The order keeps small ranges from overtaking a large one for ever.
    pub(crate) async fn enter(&self, range: Range<u64>, mode: Mode) -> Excluded<'_> {
        let mut mine = 0;
        self.bell.until(mode, |context| self.poll_enter(&mut mine, &range, context)).await;
        Excluded { of: self, range }
    }

    /// Excludes the range, or waits. The first call takes a number, which it stores in `mine`.
    fn poll_enter(&self, mine: &mut u64, range: &Range<u64>, context: &Context<'_>) -> Poll<()> {
        let mut state = self.state.lock();
        let is_first = *mine == 0;
        if is_first {
            state.count += 1;
            *mine = state.count;
        }
        if !state.try_add(&self.count, *mine, range) {
            if is_first {
                state.waiting.push((*mine, range.clone()));
            }
            add_waker(&mut state.wakers, context.waker());
            return Poll::Pending;
        }
        state.waiting.retain(|(number, _)| number != mine);
        Poll::Ready(())
    }

    /// Excludes a range until [`leave`](Self::leave), if that needs no wait. Returns whether it
    /// did.
    pub(crate) fn try_enter(&self, range: &Range<u64>) -> bool {
        let mut state = self.state.lock();
        let last = state.count + 1;
        state.try_add(&self.count, last, range)
    }

    /// Ends the exclusion of a range.
    pub(crate) fn leave(&self, range: &Range<u64>) {
        let mut state = self.state.lock();
        // Excluded ranges do not overlap, so another one that is equal is empty.
        state.ranges.retain(|other| other != range);
        // Ordering: Release pairs with the Acquire in `has`; it carries what was noted of the
        // range. A thread that finds the range excluded still looks again under this lock.
        let release = order!(Release, "exclusion: the unsynced sectors are noted");
        self.count.store(state.ranges.len(), release);
        let wakers = std::mem::take(&mut state.wakers);
        drop(state);
        step!("exclusion: wake the threads", self.gone.notify_all());
        step!("exclusion: wake the tasks", wake_all(wakers));
    }

    /// Returns whether a sector is excluded. The caller has the lock of the sector's home.
    #[inline]
    pub(crate) fn has(&self, sector: u64) -> bool {
        // Ordering: Acquire pairs with the Release in `leave`; it carries the unsynced sectors that
        // were noted for the range. The locks of the homes carry the range itself.
        let acquire = order!(Acquire, "insert: the unsynced sectors are noted");
        let has = self.count.load(acquire) > 0 && self.state.lock().overlaps(&(sector..sector + 1));
        !check!("insert: the sector is not excluded", !has)
    }

    /// Waits until the sector is not excluded, at most for about `patience`.
    pub(crate) fn wait(&self, sector: u64, patience: Duration) {
        let mut state = self.state.lock();
        if state.overlaps(&(sector..sector + 1)) {
            self.gone.wait_for(&mut state, patience);
        }
    }

    /// Returns ready if the sector is not excluded. Otherwise wakes the task when a range leaves.
    pub(crate) fn poll_gone(&self, sector: u64, context: &mut Context<'_>) -> Poll<()> {
        let new = context.waker().clone(); // which may do anything: not under the lock
        let mut state = self.state.lock();
        if !state.overlaps(&(sector..sector + 1)) {
            return Poll::Ready(());
        }
        if !state.wakers.iter().any(|waker| waker.will_wake(&new)) {
            state.wakers.push(new);
        }
        Poll::Pending
    }
}

/// A range that is excluded while this lives.
#[must_use = "the range is excluded only while this lives"]
pub(crate) struct Excluded<'e> {
    of: &'e Exclusion,
    range: Range<u64>,
}

impl Drop for Excluded<'_> {
    fn drop(&mut self) {
        self.of.leave(&self.range);
    }
}

#[cfg(all(test, not(any(offlock_loom, offlock_shuttle))))]
mod tests {
    use std::sync::atomic::AtomicBool;
    use std::thread;

    use super::*;
    use crate::wait::poll_ready;

    #[test]
    fn a_large_range_is_not_overtaken_by_small_ones() {
        let all = Exclusion::new();
        let first = poll_ready(all.enter(0..10, Mode::Thread));
        let wide_is_over = AtomicBool::new(false);
        let waiting = |count| {
            while all.state.lock().waiting.len() < count {
                thread::yield_now();
            }
        };
        thread::scope(|scope| {
            scope.spawn(|| {
                let wide = poll_ready(all.enter(0..100, Mode::Thread));
                wide_is_over.store(true, Ordering::SeqCst);
                drop(wide);
            });
            waiting(1);
            scope.spawn(|| {
                let little = poll_ready(all.enter(50..60, Mode::Thread));
                assert!(wide_is_over.load(Ordering::SeqCst), "overtaken");
                drop(little);
            });
            drop(poll_ready(all.enter(200..300, Mode::Thread))); // overlaps no other range
            for _ in 0..1000 {
                thread::yield_now();
                if all.state.lock().waiting.len() == 2 {
                    break;
                }
            }
            drop(first);
        });
        assert!(all.state.lock().waiting.is_empty());
        assert!(!all.has(5));
    }
}
