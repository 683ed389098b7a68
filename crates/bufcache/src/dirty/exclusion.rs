//! Ranges of a device of which no block may be cached, because the device discards, zeroes or
//! writes them past the cache.
//!
//! A thread that excludes a range adds it here, and then takes the lock of the home of each of its
//! blocks. A thread that inserts a block holds the lock of the block's home, and checks here first.
//! Whichever takes that lock first, the other one sees its change.

use std::collections::BTreeMap;
use std::future::poll_fn;
use std::ops::Range;
use std::pin::pin;

use offlock_sync::atomic::{AtomicUsize, Ordering};
use offlock_sync::std_lock::Mutex;
use offlock_sync::{WaitSet, check, step};

use crate::wait::wake_all;

#[derive(Debug)]
pub(crate) struct Exclusion {
    /// The number of excluded ranges.
    count: AtomicUsize,
    /// A lock of `std`, as a miss takes it: `parking_lot` allocates when a thread first waits.
    state: Mutex<State>,
    /// The tasks and threads that wait for the end of an exclusion.
    waiters: WaitSet,
}

#[derive(Debug, Default)]
struct State {
    ranges: Vec<Range<u64>>,
    /// Ranges that wait for their turn, by the numbers of their calls.
    waiting: BTreeMap<u64, Range<u64>>,
    /// The number of ranges asked for so far.
    count: u64,
}

impl State {
    fn overlaps(&self, range: &Range<u64>) -> bool {
        self.ranges.iter().any(|other| overlap(other, range))
    }

    /// Excludes the range with that number, unless it overlaps an excluded one, or a waiting one with
    /// a smaller number. Updates `count`, the number of excluded ranges.
    fn try_add(&mut self, count: &AtomicUsize, number: u64, range: &Range<u64>) -> bool {
        let mut earlier = self.waiting.range(..number);
        let is_free = !self.overlaps(range) && !earlier.any(|(_, other)| overlap(other, range));
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
            waiters: WaitSet::new(),
        }
    }

    /// Waits until no excluded range, and no range that was asked for earlier, overlaps a range of
    /// sectors, and excludes it. The order keeps small ranges from overtaking a large one for ever.
    pub(crate) async fn enter(&self, range: Range<u64>) -> Excluded<'_> {
        let mut entering = Entering { of: self, range, number: 0 };
        let mut waiter = pin!(self.waiters.waiter());
        poll_fn(|context| waiter.as_mut().poll(context, || entering.try_add())).await;
        Excluded { of: self, range: entering.range.clone() }
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
        // No model needs the pair, because a full fence of the load's slot comes between.
        self.count.store(state.ranges.len(), Ordering::Release);
        drop(state);
        step!("exclusion: wake those who wait", wake_all(self.waiters.take(None)));
    }

    /// Returns whether a sector is excluded. The caller has the lock of the sector's home.
    #[inline]
    pub(crate) fn has(&self, sector: u64) -> bool {
        // Ordering: Acquire pairs with the Release in `leave`; it carries the unsynced sectors that
        // were noted for the range. The locks of the homes carry the range itself.
        let has = self.count.load(Ordering::Acquire) > 0
            && self.state.lock().overlaps(&(sector..sector + 1));
        !check!("insert: the sector is not excluded", !has)
    }

    /// Returns the first sector of a range that is excluded.
    pub(crate) fn first(&self) -> Option<u64> {
        self.state.lock().ranges.iter().find(|range| !range.is_empty()).map(|range| range.start)
    }

    /// Waits until the sector is not excluded.
    pub(crate) async fn wait(&self, sector: u64) {
        let is_excluded = || self.state.lock().overlaps(&(sector..sector + 1));
        let mut waiter = pin!(self.waiters.waiter());
        let look = || (!is_excluded()).then_some(());
        poll_fn(|context| waiter.as_mut().poll(context, look)).await;
    }
}

/// A range that waits to be excluded. Its drop ends the wait.
struct Entering<'e> {
    of: &'e Exclusion,
    range: Range<u64>,
    /// The number of the call, or 0 before the first look.
    number: u64,
}

impl Entering<'_> {
    /// Excludes the range if it is its turn.
    fn try_add(&mut self) -> Option<()> {
        let mut state = self.of.state.lock();
        if self.number == 0 {
            state.count += 1;
            self.number = state.count;
        }
        if state.try_add(&self.of.count, self.number, &self.range) {
            state.waiting.remove(&self.number);
            return Some(());
        }
        state.waiting.entry(self.number).or_insert_with(|| self.range.clone());
        None
    }
}

impl Drop for Entering<'_> {
    fn drop(&mut self) {
        let waited = self.of.state.lock().waiting.remove(&self.number);
        if waited.is_some() {
            // Ranges that were asked for later may have waited for this one alone.
            wake_all(self.of.waiters.take(None));
        }
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

#[cfg(all(test, not(offlock_model)))]
mod tests {
    use std::future::Future;
    use std::sync::atomic::AtomicBool;
    use std::task::Context;
    use std::thread;

    use testkit::WakeCount;

    use super::*;
    use crate::wait::block_on;

    /// The third range waits for the second alone, which is given up.
    #[test]
    fn a_range_that_is_given_up_lets_those_behind_it_go_on() {
        let (all, woken) = (Exclusion::new(), WakeCount::new());
        let waker = woken.waker();
        let mut context = Context::from_waker(&waker);
        let first = block_on(all.enter(0..10));
        let mut second = Box::pin(all.enter(5..20));
        let mut third = Box::pin(all.enter(15..30));
        assert!(second.as_mut().poll(&mut context).is_pending());
        assert!(third.as_mut().poll(&mut context).is_pending());
        assert_eq!(woken.count(), 0);
        drop(second);
        assert_eq!(woken.count(), 1);
        assert!(third.as_mut().poll(&mut context).is_ready());
        drop(first);
    }

    #[test]
    fn a_large_range_is_not_overtaken_by_small_ones() {
        let all = Exclusion::new();
        let first = block_on(all.enter(0..10));
        let wide_is_over = AtomicBool::new(false);
        let waiting = |count| {
            while all.state.lock().waiting.len() < count {
                thread::yield_now();
            }
        };
        thread::scope(|scope| {
            scope.spawn(|| {
                let wide = block_on(all.enter(0..100));
                wide_is_over.store(true, Ordering::SeqCst);
                drop(wide);
            });
            waiting(1);
            scope.spawn(|| {
                let little = block_on(all.enter(50..60));
                assert!(wide_is_over.load(Ordering::SeqCst), "overtaken");
                drop(little);
            });
            drop(block_on(all.enter(200..300))); // overlaps no other range
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
