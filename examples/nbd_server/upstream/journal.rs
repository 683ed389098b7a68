//! The journal: changes that the upstream has answered since its last successful flush.
//!
//! Until a server has answered a flush, it may lose a write that it has answered. So the journal
//! keeps each answered change until then, and the device sends it again over a new connection if
//! one is lost. Of overlapping changes the journal keeps the newest. Its entries therefore do not
//! overlap and may be sent in any order: between two flushes a disk may hold any version of a
//! sector.
//!
//! Above its limit the journal drops the bytes and keeps the ranges. The loss of a connection is
//! then a loss of data.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

/// Most ranges that are kept without bytes. Above it one range covers all of them. A guess.
const MOST_RANGES: usize = 1 << 16;
/// Memory of an entry in addition to its bytes. A guess.
const OVERHEAD: usize = 128;

/// The content that a change has written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Content {
    /// A range of a buffer, which several entries may share.
    Bytes(Arc<[u8]>, Range<usize>),
    /// Zeros; with `no_hole` the server keeps space for them.
    Zeros { no_hole: bool },
    /// The journal has dropped the bytes.
    Dropped,
}

impl Content {
    /// Returns a part of the content. The part shares the buffer if it is at least half of it; a
    /// smaller part is copied, so that a small remainder does not keep a large buffer alive.
    fn part(&self, part: Range<u64>) -> Self {
        match self {
            Self::Bytes(bytes, range) => {
                let part = range.start + part.start as usize..range.start + part.end as usize;
                if 2 * part.len() < bytes.len() {
                    Self::Bytes(bytes[part.clone()].into(), 0..part.len())
                } else {
                    Self::Bytes(Arc::clone(bytes), part)
                }
            }
            other => other.clone(),
        }
    }
}

#[derive(Debug)]
struct Entry {
    end: u64,
    content: Content,
    /// The number of the change.
    number: u64,
}

/// See the [module](self).
#[derive(Debug)]
pub(super) struct Journal {
    /// By start offset; the entries do not overlap.
    entries: BTreeMap<u64, Entry>,
    /// The number that the next change gets.
    next: u64,
    /// Bytes of all entries; a shared buffer counts for each entry.
    held: usize,
    limit: usize,
    /// The journal has dropped bytes.
    has_dropped: bool,
}

impl Journal {
    /// Makes a journal that keeps at most `limit` bytes.
    pub(super) fn new(limit: usize) -> Self {
        Self { entries: BTreeMap::new(), next: 0, held: 0, limit, has_dropped: false }
    }

    #[cfg(test)]
    fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// Returns whether the journal is half full and should be emptied by a flush.
    pub(super) fn wants_flush(&self) -> bool {
        self.held > self.limit / 2 || self.has_dropped
    }

    /// Returns whether the journal has dropped bytes, so that it cannot be sent again.
    pub(super) fn has_dropped_bytes(&self) -> bool {
        self.has_dropped
    }

    /// The number of the next change. A flush that is sent now covers all changes with lower
    /// numbers.
    pub(super) fn next(&self) -> u64 {
        self.next
    }

    /// Adds a change that the server has answered.
    pub(super) fn add(&mut self, range: Range<u64>, content: Content) {
        self.remove(&range);
        let number = self.next;
        self.next += 1;
        if self.has_dropped {
            return self.add_dropped(range, number);
        }
        self.held += size(&content);
        self.entries.insert(range.start, Entry { end: range.end, content, number });
        if self.held > self.limit {
            self.drop_bytes();
        }
    }

    /// Drops the bytes of all entries, and keeps their ranges.
    fn drop_bytes(&mut self) {
        self.has_dropped = true;
        self.held = 0;
        for (start, entry) in std::mem::take(&mut self.entries) {
            self.add_dropped(start..entry.end, entry.number);
        }
    }

    fn add_dropped(&mut self, mut range: Range<u64>, mut number: u64) {
        if self.entries.len() >= MOST_RANGES {
            for (start, entry) in std::mem::take(&mut self.entries) {
                range = range.start.min(start)..range.end.max(entry.end);
                number = number.max(entry.number);
            }
        }
        let before = self.entries.range(..range.start).next_back();
        if let Some((&start, entry)) = before.filter(|(_, entry)| entry.end == range.start) {
            (range.start, number) = (start, number.max(entry.number));
        }
        let entry = Entry { end: range.end, content: Content::Dropped, number };
        self.entries.insert(range.start, entry);
    }

    /// Removes a range, because a durable change has replaced it.
    pub(super) fn remove(&mut self, range: &Range<u64>) {
        let first = self.entries.range(..=range.start).next_back().map(|(&start, _)| start);
        let from = first.unwrap_or(range.start);
        let found: Vec<u64> =
            self.entries.range(from..range.end).map(|(&start, _)| start).collect();
        for start in found {
            if self.entries[&start].end <= range.start {
                continue;
            }
            let Some(Entry { end, content, number }) = self.entries.remove(&start) else {
                continue;
            };
            self.held -= size(&content).min(self.held);
            let mut keep = |start: u64, end: u64, content: Content| {
                self.held += if self.has_dropped { 0 } else { size(&content) };
                self.entries.insert(start, Entry { end, content, number });
            };
            if start < range.start {
                keep(start, range.start, content.part(0..range.start - start));
            }
            if end > range.end {
                keep(range.end, end, content.part(range.end - start..end - start));
            }
        }
    }

    /// Removes the changes with numbers below `before`, which a flush has made durable.
    pub(super) fn flushed(&mut self, before: u64) {
        self.entries.retain(|_, entry| entry.number >= before);
        if self.entries.is_empty() {
            (self.has_dropped, self.held) = (false, 0);
        } else if !self.has_dropped {
            self.held = self.entries.values().map(|entry| size(&entry.content)).sum();
        }
    }

    /// Returns all entries, to be sent again.
    pub(super) fn all(&self) -> impl Iterator<Item = (Range<u64>, Content)> {
        self.entries.iter().map(|(&start, entry)| (start..entry.end, entry.content.clone()))
    }

    /// Returns whether some of the range was changed since the last flush.
    pub(super) fn overlaps(&self, range: &Range<u64>) -> bool {
        let mut before = self.entries.range(..range.end).rev();
        before.next().is_some_and(|(_, entry)| entry.end > range.start)
    }
}

fn size(content: &Content) -> usize {
    match content {
        Content::Bytes(_, range) => range.len() + OVERHEAD,
        Content::Zeros { .. } => OVERHEAD,
        Content::Dropped => 0,
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn bytes(value: u8, len: u64) -> Content {
        Content::Bytes(vec![value; len as usize].into(), 0..len as usize)
    }

    /// Returns the content of a disk of 64 bytes after the journal was sent again.
    fn replayed(journal: &Journal) -> Vec<Option<u8>> {
        let mut disk = vec![None; 64];
        for (range, content) in journal.all() {
            let disk = &mut disk[range.start as usize..range.end as usize];
            assert!(disk.iter().all(Option::is_none), "entries overlap");
            match content {
                Content::Bytes(bytes, range) => {
                    assert_eq!(range.len(), disk.len());
                    disk.iter_mut().zip(&bytes[range]).for_each(|(to, from)| *to = Some(*from));
                }
                _ => disk.fill(Some(0)),
            }
        }
        disk
    }

    proptest! {
        /// Compares the journal with an array of the newest value of each byte and the number of
        /// its change.
        #[test]
        fn the_newest_change_of_each_byte_is_kept_until_a_flush(
            steps in prop::collection::vec((0u8..5, 0u64..64, 1u64..24), 0..60)
        ) {
            let mut journal = Journal::new(usize::MAX);
            let mut model: Vec<Option<(u8, u64)>> = vec![None; 64];
            for (nr, (kind, start, len)) in (1..).zip(steps) {
                let range = start..(start + len).min(64);
                let number = journal.next();
                let places = range.start as usize..range.end as usize;
                match kind {
                    0 => { journal.remove(&range); model[places].fill(None); }
                    1 => {
                        journal.add(range, Content::Zeros { no_hole: false });
                        model[places].fill(Some((0, number)));
                    }
                    2 => {
                        let before = number.saturating_sub(start % 8);
                        journal.flushed(before);
                        model.iter_mut().for_each(|at| *at = at.filter(|at| at.1 >= before));
                    }
                    _ => {
                        journal.add(range.clone(), bytes(nr, range.end - range.start));
                        model[places].fill(Some((nr, number)));
                    }
                }
                let expected: Vec<_> = model.iter().map(|at| at.map(|at| at.0)).collect();
                prop_assert_eq!(replayed(&journal), expected);
                for at in 0..64 {
                    prop_assert_eq!(journal.overlaps(&(at..at + 1)), model[at as usize].is_some());
                }
                let held: usize = journal.all().map(|(_, content)| size(&content)).sum();
                prop_assert_eq!(held, journal.held);
            }
        }

        /// After the bytes are dropped, the ranges of all changes are still known.
        #[test]
        fn past_the_limit_the_ranges_are_kept(
            steps in prop::collection::vec((0u64..64, 1u64..24), 1..60)
        ) {
            let mut journal = Journal::new(4 * OVERHEAD);
            let mut changed = [false; 64];
            for (start, len) in steps {
                let range = start..(start + len).min(64);
                journal.add(range.clone(), bytes(1, range.end - range.start));
                changed[range.start as usize..range.end as usize].fill(true);
                for at in 0..64 {
                    prop_assert_eq!(journal.overlaps(&(at..at + 1)), changed[at as usize]);
                }
            }
            journal.flushed(journal.next());
            prop_assert!(journal.is_empty() && !journal.has_dropped_bytes());
        }
    }
}
