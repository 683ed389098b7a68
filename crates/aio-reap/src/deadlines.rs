//! The times at which requests are cancelled.
//!
//! An entry becomes stale when its request completes. A stale entry is dropped when its time comes, or
//! when the heap reaches twice the number of slots. A slot has at most one entry that is not stale, so
//! cleaning costs a constant per added entry.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::time::{Duration, Instant};

use crate::slab::{Index, Slab};

/// A deadline of one use of a slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Entry {
    at: Instant,
    index: Index,
    generation: u32,
}

/// The deadlines of an engine, earliest first.
#[derive(Default)]
pub(crate) struct Deadlines {
    heap: BinaryHeap<Reverse<Entry>>,
}

impl Deadlines {
    /// Adds an entry for the request in `index`. Allocates only if the heap has more entries than ever
    /// before.
    pub(crate) fn add(&mut self, at: Instant, index: Index, slab: &Slab) {
        if self.heap.len() >= 2 * slab.capacity() {
            self.heap.retain(|Reverse(entry)| entry.is_current(slab));
        }
        let generation = slab.peek(index).generation;
        self.heap.push(Reverse(Entry { at, index, generation }));
    }

    /// Returns the time of the earliest entry.
    #[inline]
    pub(crate) fn earliest(&self) -> Option<Instant> {
        self.heap.peek().map(|Reverse(entry)| entry.at)
    }

    /// Returns `timeout`, or the time until the earliest entry if that is less.
    pub(crate) fn shorten(
        &self,
        timeout: Option<Duration>,
        now: impl FnOnce() -> Instant,
    ) -> Option<Duration> {
        let Some(at) = self.earliest() else { return timeout };
        let left = at.saturating_duration_since(now());
        Some(timeout.map_or(left, |timeout| timeout.min(left)))
    }

    /// Removes an entry that is due at `now`. Returns its slot.
    pub(crate) fn due(&mut self, now: Instant, slab: &Slab) -> Option<Index> {
        while self.earliest().is_some_and(|at| at <= now) {
            let Reverse(entry) = self.heap.pop()?;
            if entry.is_current(slab) {
                return Some(entry.index);
            }
        }
        None
    }
}

impl Entry {
    /// Returns whether the request still runs.
    fn is_current(&self, slab: &Slab) -> bool {
        slab.peek(self.index).generation == self.generation
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entries_come_in_time_and_only_for_the_use_they_were_made_for() {
        let mut slab = Slab::new(2);
        let mut deadlines = Deadlines::default();
        let (now, ms) = (Instant::now(), Duration::from_millis);
        assert_eq!((deadlines.earliest(), deadlines.shorten(None, || now)), (None, None));
        deadlines.add(now + ms(2), 1, &slab);
        deadlines.add(now + ms(1), 0, &slab);
        assert_eq!(deadlines.earliest(), Some(now + ms(1)));
        assert!(deadlines.shorten(Some(Duration::MAX), || now).unwrap() == ms(1));
        assert_eq!(deadlines.shorten(Some(Duration::ZERO), || now), Some(Duration::ZERO));
        assert_eq!(deadlines.due(now, &slab), None);
        assert_eq!(deadlines.due(now + ms(5), &slab), Some(0));
        slab.get(1).generation += 1; // the slot was used again
        assert_eq!(deadlines.due(now + ms(5), &slab), None);
        assert_eq!(deadlines.earliest(), None);
    }

    #[test]
    fn entries_that_are_over_do_not_pile_up() {
        let mut slab = Slab::new(4);
        let mut deadlines = Deadlines::default();
        let far = Instant::now() + Duration::from_secs(3600);
        for _ in 0..1000 {
            deadlines.add(far, 1, &slab);
            slab.get(1).generation += 1;
        }
        assert!(deadlines.heap.len() <= 8 && deadlines.heap.capacity() <= 16);
    }

    #[test]
    fn inv17_entries_of_requests_that_run_are_never_dropped() {
        let mut slab = Slab::new(4);
        let mut deadlines = Deadlines::default();
        let at = Instant::now();
        for index in 1..4 {
            deadlines.add(at, index, &slab);
        }
        for _ in 0..100 {
            slab.get(0).generation += 1;
            deadlines.add(at, 0, &slab);
        }
        assert!(deadlines.heap.len() <= 8, "{}", deadlines.heap.len());
        let mut due: Vec<_> = std::iter::from_fn(|| deadlines.due(at, &slab)).collect();
        due.sort_unstable();
        assert_eq!(due, [0, 1, 2, 3]);
    }
}
