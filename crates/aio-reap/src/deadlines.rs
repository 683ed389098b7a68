//! Which requests shall end, or whose waits shall end, at a time.
//!
//! A request that completes in time leaves its entry behind: it names a use of the slot that is
//! over, and is dropped when its time comes, or earlier when such entries are most of them.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::time::{Duration, Instant};

use crate::slab::{Index, Slab};

/// What is to be done.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Action {
    /// Cancel the request.
    Cancel,
    /// Wake whoever waits for it.
    Wake,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Entry {
    at: Instant,
    index: Index,
    generation: u32,
    action: Action,
}

#[derive(Default)]
pub(crate) struct Deadlines {
    heap: BinaryHeap<Reverse<Entry>>,
}

impl Deadlines {
    /// Allocates only while more are noted than ever before.
    pub(crate) fn add(&mut self, at: Instant, index: Index, action: Action, slab: &Slab) {
        if self.heap.len() >= 2 * slab.capacity() {
            self.heap.retain(|Reverse(entry)| entry.is_current(slab));
        }
        let generation = slab.peek(index).generation;
        self.heap.push(Reverse(Entry { at, index, generation, action }));
    }

    /// When to look again.
    #[inline]
    pub(crate) fn earliest(&self) -> Option<Instant> {
        self.heap.peek().map(|Reverse(entry)| entry.at)
    }

    /// `timeout`, or less if a deadline comes before.
    pub(crate) fn cut(
        &self,
        timeout: Option<Duration>,
        now: impl FnOnce() -> Instant,
    ) -> Option<Duration> {
        let Some(at) = self.earliest() else { return timeout };
        let left = at.saturating_duration_since(now());
        Some(timeout.map_or(left, |timeout| timeout.min(left)))
    }

    /// Takes one that is due at `now`.
    pub(crate) fn due(&mut self, now: Instant, slab: &Slab) -> Option<(Index, Action)> {
        while self.earliest().is_some_and(|at| at <= now) {
            let Reverse(entry) = self.heap.pop()?;
            if entry.is_current(slab) {
                return Some((entry.index, entry.action));
            }
        }
        None
    }
}

impl Entry {
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
        assert_eq!((deadlines.earliest(), deadlines.cut(None, || now)), (None, None));
        deadlines.add(now + ms(2), 1, Action::Wake, &slab);
        deadlines.add(now + ms(1), 0, Action::Cancel, &slab);
        assert_eq!(deadlines.earliest(), Some(now + ms(1)));
        assert!(deadlines.cut(Some(Duration::MAX), || now).unwrap() == ms(1));
        assert_eq!(deadlines.cut(Some(Duration::ZERO), || now), Some(Duration::ZERO));
        assert_eq!(deadlines.due(now, &slab), None);
        assert_eq!(deadlines.due(now + ms(5), &slab), Some((0, Action::Cancel)));
        slab.get(1).generation += 1; // it was used again
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
}
