//! A set of numbers in ranges: which sectors were written and are not known to be durable.

use std::collections::BTreeMap;
use std::ops::Range;

/// Ranges that neither touch nor overlap.
#[derive(Clone, Debug, Default)]
pub(crate) struct Extents {
    /// Start to end.
    ranges: BTreeMap<u64, u64>,
}

impl Extents {
    pub(crate) fn is_empty(&self) -> bool {
        self.ranges.is_empty()
    }

    /// Returns the number of ranges.
    pub(crate) fn len(&self) -> usize {
        self.ranges.len()
    }

    pub(crate) fn insert(&mut self, range: Range<u64>) {
        let (mut start, mut end) = (range.start, range.end);
        if start >= end {
            return;
        }
        // Merges the ranges that touch the new one, from the right. All but the leftmost begin
        // inside it.
        while let Some((&at, &till)) = self.ranges.range(..=end).next_back() {
            if till < start {
                break;
            }
            (start, end) = (start.min(at), end.max(till));
            self.ranges.remove(&at);
        }
        self.ranges.insert(start, end);
    }

    pub(crate) fn remove(&mut self, range: &Range<u64>) {
        if range.is_empty() {
            return;
        }
        // Cuts the ranges that overlap, from the right.
        while let Some((&at, &till)) = self.ranges.range(..range.end).next_back() {
            if till <= range.start {
                break;
            }
            self.ranges.remove(&at);
            if range.end < till {
                self.ranges.insert(range.end, till);
            }
            if at < range.start {
                self.ranges.insert(at, range.start);
                break;
            }
        }
    }

    /// Inserts all numbers between the first and the last.
    pub(crate) fn insert_hull(&mut self) {
        let start = self.ranges.first_key_value().map(|(&start, _)| start);
        let end = self.ranges.last_key_value().map(|(_, &end)| end);
        if let Some((start, end)) = start.zip(end) {
            self.insert(start..end);
        }
    }

    /// Returns the number of numbers in the set.
    pub(crate) fn count(&self) -> u64 {
        self.iter().map(|range| range.end - range.start).sum()
    }

    /// Returns whether the set has a number of the range.
    pub(crate) fn touches(&self, range: &Range<u64>) -> bool {
        self.ranges.range(..range.end).next_back().is_some_and(|(_, &till)| till > range.start)
    }

    /// Moves all numbers of `other` into this set.
    pub(crate) fn append(&mut self, other: &mut Self) {
        if self.is_empty() {
            return std::mem::swap(self, other);
        }
        for (start, end) in std::mem::take(&mut other.ranges) {
            self.insert(start..end);
        }
    }

    /// Returns the ranges of the set that overlap `range`, the last first.
    pub(crate) fn overlapping(&self, range: &Range<u64>) -> impl Iterator<Item = Range<u64>> {
        let start = range.start;
        let before = self.ranges.range(..range.end).rev();
        before.map(|(&at, &till)| at..till).take_while(move |other| other.end > start)
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = Range<u64>> {
        self.ranges.iter().map(|(&start, &end)| start..end)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(ranges: &[Range<u64>]) -> Extents {
        let mut extents = Extents::default();
        ranges.iter().cloned().for_each(|range| extents.insert(range));
        extents
    }

    #[test]
    fn ranges_that_touch_are_one() {
        let extents = of(&[10..20, 30..40, 20..30, 5..5, 0..9]);
        assert_eq!(extents.iter().collect::<Vec<_>>(), [0..9, 10..40]);
        let one = of(&[3..4, 7..9, 12..20, 1..15]);
        assert!(one.iter().eq(std::iter::once(1..20)));
    }

    #[test]
    fn the_hull_is_one_range() {
        let mut extents = of(&[10..20, 40..50, 30..31]);
        extents.insert_hull();
        assert!(extents.iter().eq(std::iter::once(10..50)));
        let mut none = Extents::default();
        none.insert_hull();
        assert!(none.is_empty());
    }

    #[test]
    fn touching_is_told_at_both_ends() {
        let extents = of(&[10..20, 40..50]);
        for (range, touches) in
            [(0..10, false), (0..11, true), (19..20, true), (20..40, false), (20..41, true)]
        {
            assert_eq!(extents.touches(&range), touches, "{range:?}");
        }
    }

    #[test]
    fn against_a_set_of_bits() {
        let mut state = 1_u64;
        let mut random = |below: u64| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            (state >> 33) % below
        };
        let (mut extents, mut bits) = (Extents::default(), [false; 200]);
        for round in 0..2000 {
            let start = random(190);
            let end = start + random(10);
            let put = random(3) > 0;
            if put {
                extents.insert(start..end);
            } else {
                extents.remove(&(start..end));
            }
            bits[start as usize..end as usize].fill(put);
            let told = |at: usize| extents.touches(&(at as u64..at as u64 + 1));
            assert!(bits.iter().enumerate().all(|(at, bit)| told(at) == *bit));
            assert_eq!(extents.count(), bits.iter().filter(|bit| **bit).count() as u64);
            let some = start..end + 30;
            let overlaps = |range: &Range<u64>| range.start < some.end && some.start < range.end;
            let there = extents.iter().filter(overlaps).count();
            assert_eq!(extents.overlapping(&some).count(), there);
            let ranges: Vec<_> = extents.iter().collect();
            assert!(ranges.windows(2).all(|two| two[0].end < two[1].start), "{ranges:?}");
            if round % 50 == 0 {
                (extents, bits) = (Extents::default(), [false; 200]);
            }
        }
    }
}
