//! Ranges of a device that nobody caches for the moment, because they are discarded or zeroed there.
//!
//! Who excludes a range puts it here, and then goes to every home that a block of the range has. Who
//! inserts a block has the lock of its home, and looks here first. Whichever of the two has that lock
//! first, the other sees what it did.

use std::ops::Range;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use percpu::sync::atomic::{AtomicUsize, Ordering};
use percpu::sync::{Condvar, Mutex, mutant};

use crate::contain::contain;

#[derive(Debug)]
pub(crate) struct Exclusion {
    /// How many ranges there are.
    count: AtomicUsize,
    state: Mutex<State>,
    gone: Condvar,
}

#[derive(Debug, Default)]
struct State {
    ranges: Vec<Range<u64>>,
    /// Those that are waited for, with their numbers, in the order in which they were asked for.
    waiting: Vec<(u64, Range<u64>)>,
    /// How many were asked for.
    count: u64,
    wakers: Vec<Waker>,
}

impl State {
    fn overlaps(&self, range: &Range<u64>) -> bool {
        self.ranges.iter().any(|other| overlap(other, range))
    }

    /// Whether it is the turn of the one with that number.
    fn is_free(&self, number: u64, range: &Range<u64>) -> bool {
        let mut earlier = self.waiting.iter().take_while(|(other, _)| *other < number);
        !self.overlaps(range) && !earlier.any(|(_, other)| overlap(other, range))
    }
}

fn overlap(a: &Range<u64>, b: &Range<u64>) -> bool {
    a.start < b.end && b.start < a.end
}

impl Exclusion {
    pub(crate) fn new() -> Self {
        Self {
            count: AtomicUsize::new(0),
            state: Mutex::new(State::default()),
            gone: Condvar::new(),
        }
    }

    /// Excludes a range of sectors, once no other range has any of them, nor one that somebody else asked
    /// for before: who wants many of them would wait as long as others want a few.
    pub(crate) fn enter(&self, range: Range<u64>) -> Excluded<'_> {
        let mut state = self.state.lock();
        state.count += 1;
        let mine = state.count;
        if !state.is_free(mine, &range) && !mutant("exclusion-lets-all-in") {
            state.waiting.push((mine, range.clone()));
            while !state.is_free(mine, &range) {
                self.gone.wait(&mut state);
            }
            state.waiting.retain(|(number, _)| *number != mine);
        }
        state.ranges.push(range.clone());
        // Ordering: Relaxed; the locks of the homes carry it.
        self.count.store(state.ranges.len(), Ordering::Relaxed);
        drop(state);
        Excluded { of: self, range }
    }

    /// Excludes a range until [`leave`](Self::leave), if that needs no wait. Returns whether it is excluded.
    pub(crate) fn try_enter(&self, range: &Range<u64>) -> bool {
        let mut state = self.state.lock();
        let is_free = state.is_free(state.count + 1, range);
        if is_free {
            state.ranges.push(range.clone());
            // Ordering: Relaxed; the locks of the homes carry it.
            self.count.store(state.ranges.len(), Ordering::Relaxed);
        }
        is_free
    }

    /// Ends the exclusion of a range.
    pub(crate) fn leave(&self, range: &Range<u64>) {
        let mut state = self.state.lock();
        // Ranges that are excluded do not overlap, so no other is equal to it.
        state.ranges.retain(|other| other != range);
        // Ordering: Release pairs with the Acquire in `has`; it carries what was noted of the range. A
        // thread that finds the range excluded still looks again under this lock.
        self.count.store(state.ranges.len(), Ordering::Release);
        let wakers = std::mem::take(&mut state.wakers);
        drop(state);
        if !mutant("exclusion-wakes-nobody") {
            self.gone.notify_all();
        }
        if mutant("exclusion-wakes-no-task") {
            return;
        }
        for waker in wakers {
            // One that panics keeps nobody else asleep, and this may be run by a panic.
            let _ = contain(|| waker.wake());
        }
    }

    /// Whether a sector is excluded; by whoever has the lock of its home.
    #[inline]
    pub(crate) fn has(&self, sector: u64) -> bool {
        // Ordering: Acquire pairs with the Release in `leave`; it carries what was noted of
        // the range as unsynced. That a range is seen at all is carried by the locks of the homes.
        self.count.load(Ordering::Acquire) > 0
            && self.state.lock().overlaps(&(sector..sector + 1))
            && !mutant("exclusion-is-overlooked")
    }

    /// Waits until the sector is not excluded, or for about as long as that.
    pub(crate) fn wait(&self, sector: u64, patience: Duration) {
        let mut state = self.state.lock();
        if state.overlaps(&(sector..sector + 1)) {
            self.gone.wait_for(&mut state, patience);
        }
    }

    /// Whether the sector is not excluded; if it is, the task is woken when one range less is.
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

    #[test]
    fn who_wants_much_is_not_overtaken_by_those_who_want_little() {
        let all = Exclusion::new();
        let first = all.enter(0..10);
        let wide_is_over = AtomicBool::new(false);
        let waiting = |count| {
            while all.state.lock().waiting.len() < count {
                thread::yield_now();
            }
        };
        thread::scope(|scope| {
            scope.spawn(|| {
                let wide = all.enter(0..100);
                wide_is_over.store(true, Ordering::SeqCst);
                drop(wide);
            });
            waiting(1);
            scope.spawn(|| {
                let little = all.enter(50..60);
                assert!(wide_is_over.load(Ordering::SeqCst), "overtaken");
                drop(little);
            });
            drop(all.enter(200..300)); // not in anybody's way
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
