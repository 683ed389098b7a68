//! The times at which requests are cancelled or their waits end.
//!
//! An entry becomes stale when its request completes, or, for [`Action::Wake`], when a later entry
//! for the same request replaces it. A stale entry is dropped when its time comes, or when the heap
//! reaches its limit. The limit is twice the number of slots, or twice the number of entries that
//! were not stale at the last such cleaning. A slot has at most two entries that are not stale, so
//! the heap never exceeds four times the number of slots, and cleaning costs a constant per added
//! entry.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::time::{Duration, Instant};

use crate::slab::{Index, Slab};

/// The action at a deadline.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Action {
    /// Cancel the request.
    Cancel,
    /// Wake the task that waits for the request.
    Wake,
}

/// A deadline of one use of a slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Entry {
    at: Instant,
    index: Index,
    generation: u32,
    action: Action,
    /// A number that distinguishes this entry from others of its slot.
    serial: u64,
}

/// The deadlines of an engine, earliest first.
#[derive(Default)]
pub(crate) struct Deadlines {
    heap: BinaryHeap<Reverse<Entry>>,
    /// The entry count at which stale entries are dropped, unless the slots allow more.
    limit: usize,
    /// The number of entries ever added.
    serial: u64,
    /// The serial number of the last [`Action::Wake`] of each slot. Empty before the first one.
    last_wake: Box<[u64]>,
}

impl Deadlines {
    /// Adds an entry. An [`Action::Wake`] replaces the request's earlier one. Allocates only if the
    /// heap has more entries than ever before.
    pub(crate) fn add(&mut self, at: Instant, index: Index, action: Action, slab: &Slab) {
        self.serial += 1;
        if action == Action::Wake {
            if self.last_wake.is_empty() {
                self.last_wake = vec![0; slab.capacity()].into();
            }
            self.last_wake[index as usize] = self.serial;
        }
        if self.heap.len() >= self.limit.max(2 * slab.capacity()) {
            let last_wake = &self.last_wake;
            self.heap.retain(|Reverse(entry)| entry.is_current(slab, last_wake));
            self.limit = 2 * self.heap.len();
        }
        let generation = slab.peek(index).generation;
        self.heap.push(Reverse(Entry { at, index, generation, action, serial: self.serial }));
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

    /// Removes and returns an entry that is due at `now`.
    pub(crate) fn due(&mut self, now: Instant, slab: &Slab) -> Option<(Index, Action)> {
        while self.earliest().is_some_and(|at| at <= now) {
            let Reverse(entry) = self.heap.pop()?;
            if entry.is_current(slab, &self.last_wake) {
                return Some((entry.index, entry.action));
            }
        }
        None
    }
}

impl Entry {
    /// Returns whether the request still runs and no later entry replaces this one.
    fn is_current(&self, slab: &Slab, last_wake: &[u64]) -> bool {
        let replaced = self.action == Action::Wake && last_wake[self.index as usize] != self.serial;
        !replaced && slab.peek(self.index).generation == self.generation
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
        deadlines.add(now + ms(2), 1, Action::Wake, &slab);
        deadlines.add(now + ms(1), 0, Action::Cancel, &slab);
        assert_eq!(deadlines.earliest(), Some(now + ms(1)));
        assert!(deadlines.shorten(Some(Duration::MAX), || now).unwrap() == ms(1));
        assert_eq!(deadlines.shorten(Some(Duration::ZERO), || now), Some(Duration::ZERO));
        assert_eq!(deadlines.due(now, &slab), None);
        assert_eq!(deadlines.due(now + ms(5), &slab), Some((0, Action::Cancel)));
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
            deadlines.add(far, 1, Action::Cancel, &slab);
            slab.get(1).generation += 1;
        }
        assert!(deadlines.heap.len() <= 8 && deadlines.heap.capacity() <= 16);
    }

    #[test]
    fn inv17_a_renewed_wake_replaces_the_earlier_one() {
        let slab = Slab::new(4);
        let mut deadlines = Deadlines::default();
        let (now, ms) = (Instant::now(), Duration::from_millis);
        deadlines.add(now + ms(5), 1, Action::Cancel, &slab);
        deadlines.add(now + ms(5), 2, Action::Wake, &slab);
        for _ in 0..1000 {
            deadlines.add(now + ms(1), 1, Action::Wake, &slab);
            deadlines.add(now + ms(4), 1, Action::Wake, &slab);
        }
        assert!(deadlines.heap.len() <= 8 && deadlines.heap.capacity() <= 16);
        assert_eq!(deadlines.due(now + ms(3), &slab), None);
        assert_eq!(deadlines.due(now + ms(4), &slab), Some((1, Action::Wake)));
        let mut rest = [(); 2].map(|()| deadlines.due(now + ms(5), &slab).unwrap());
        rest.sort();
        assert_eq!(rest, [(1, Action::Cancel), (2, Action::Wake)]);
    }

    #[test]
    fn inv17_entries_of_requests_that_run_are_never_dropped() {
        let slab = Slab::new(4);
        let mut deadlines = Deadlines::default();
        let at = Instant::now();
        for round in 0..100 {
            for index in 0..4 {
                if round == 0 {
                    deadlines.add(at, index, Action::Cancel, &slab);
                }
                deadlines.add(at, index, Action::Wake, &slab);
            }
        }
        assert!(deadlines.heap.len() <= 16, "{}", deadlines.heap.len());
        let due = std::iter::from_fn(|| deadlines.due(at, &slab)).count();
        assert_eq!(due, 8);
    }
}
