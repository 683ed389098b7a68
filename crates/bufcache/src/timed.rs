//! Locks that optionally measure how long they are held.

use std::ops::{Deref, DerefMut};
use std::time::Instant;

use percpu::sync::{Arc, WordGuard, WordLock};

use crate::times::Counts;

/// The histogram of the hold times, if they are measured.
pub(crate) type Holds = Option<Arc<Counts>>;

/// Measures the time from its creation to its drop.
pub(crate) struct Timing<'c>(Option<(Instant, &'c Counts)>);

impl<'c> Timing<'c> {
    /// Begins a measurement.
    #[inline(always)]
    pub(crate) fn begin(holds: &'c Holds) -> Self {
        Self(holds.as_deref().map(|counts| (Instant::now(), counts)))
    }
}

impl Drop for Timing<'_> {
    #[inline(always)]
    fn drop(&mut self) {
        if let Some((began, counts)) = self.0 {
            end(began, counts);
        }
    }
}

/// Ends a measurement. Not inline, so that a guard that measures nothing drops in place.
#[cold]
#[inline(never)]
fn end(began: Instant, counts: &Counts) {
    counts.add(began);
}

/// A [`WordLock`] that measures how long it is held.
#[derive(Debug)]
pub(crate) struct TimedLock<T> {
    lock: WordLock<T>,
    holds: Holds,
}

impl<T> TimedLock<T> {
    pub(crate) fn new(value: T, holds: Holds) -> Self {
        Self { lock: WordLock::new(value), holds }
    }

    /// Takes the lock, as [`WordLock::lock`] does.
    #[inline(always)]
    pub(crate) fn lock(&self) -> TimedGuard<'_, T> {
        TimedGuard { guard: self.lock.lock(), _timing: Timing::begin(&self.holds) }
    }
}

/// The guard of a [`TimedLock`]. The measurement ends after the lock is released, because fields
/// drop in the order of their declaration.
pub(crate) struct TimedGuard<'l, T> {
    guard: WordGuard<'l, T>,
    _timing: Timing<'l>,
}

impl<T> Deref for TimedGuard<'_, T> {
    type Target = T;

    #[inline(always)]
    fn deref(&self) -> &T {
        &self.guard
    }
}

impl<T> DerefMut for TimedGuard<'_, T> {
    #[inline(always)]
    fn deref_mut(&mut self) -> &mut T {
        &mut self.guard
    }
}

#[cfg(all(test, not(any(offlock_loom, offlock_shuttle))))]
mod tests {
    use crate::{Cache, MemoryDevice};

    #[test]
    fn locks_are_timed_where_that_is_asked_for() {
        let holds = |time_locks| {
            let cache = Cache::builder(1 << 16).time_locks(time_locks).build().unwrap();
            let device = cache.attach(MemoryDevice::new(vec![0; 1 << 16]), 4096).unwrap();
            let before = cache.times().holds.map(|holds| holds.count());
            device.get_mut(1).unwrap().fill(1);
            let after = cache.times().holds.map(|holds| holds.count());
            before.zip(after)
        };
        assert_eq!(holds(false), None);
        // The table, the lists and what is dirty.
        assert!(holds(true).is_some_and(|(before, after)| after >= before + 3));
    }
}
