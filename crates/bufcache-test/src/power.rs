//! A recording of a device's operations, which tells the contents that a power loss may leave.
//!
//! ```text
//!  moments   1 2 3 4 5 6 7 8 ...
//!  write A   b-a-e                 b: begins, a: applied, e: ends
//!  write B       b-a---e
//!  sync              b---e
//! ```
//!
//! At moment 8 A is durable, because it had ended when the sync began. B was applied before that,
//! too, but had not ended, so it may survive or not. A change is durable from the end of the
//! successful sync on, or from its own end if it is a durable write. A change that had ended when a
//! sync began that fails is never made durable by another sync, because the system may have dropped
//! it. Later changes of the same sector supersede it.

use std::collections::{BTreeMap, BTreeSet};

/// The unit that a power loss leaves whole, in bytes.
pub(super) const SECTOR: u64 = 512;

/// The new contents of a change.
#[derive(Clone, Copy, Debug)]
pub(super) enum Change<'b> {
    Bytes(&'b [u8]),
    Zeros(u64),
}

impl Change<'_> {
    pub(super) fn len(&self) -> u64 {
        match self {
            Self::Bytes(bytes) => bytes.len() as u64,
            Self::Zeros(len) => *len,
        }
    }
}

/// The outcome of an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Outcome {
    /// The operation has not ended, or it panicked.
    InFlight,
    /// The operation succeeded.
    Done,
    /// The operation failed.
    Failed,
}

/// The kind of an operation on a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Operation {
    /// [`BlockDevice::read`](bufcache::BlockDevice::read).
    Read,
    /// [`BlockDevice::write`](bufcache::BlockDevice::write), durable or not.
    Write,
    /// [`BlockDevice::zero`](bufcache::BlockDevice::zero).
    Zero,
    /// [`BlockDevice::discard`](bufcache::BlockDevice::discard).
    Discard,
    /// [`BlockDevice::sync`](bufcache::BlockDevice::sync).
    Sync,
}

/// A change of a device, or a sync. From [`FaultDevice::recorded`](crate::FaultDevice::recorded).
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Recorded {
    /// The kind of the operation.
    pub operation: Operation,
    /// The first byte; 0 for a sync.
    pub offset: u64,
    /// The number of bytes; 0 for a sync.
    pub len: u64,
    /// The moment at which it began.
    pub begin: u64,
    /// The moment at which it ended.
    pub end: Option<u64>,
    /// The outcome of the operation.
    pub outcome: Outcome,
    /// The moment at which a change became durable.
    pub durable: Option<u64>,
}

#[derive(Debug)]
struct Entry {
    recorded: Recorded,
    /// `None`: zeros.
    bytes: Option<Vec<u8>>,
    /// The moment at which the inner device was changed.
    applied: Option<u64>,
    /// Set for a durable write.
    through: bool,
    /// Set if a sync failed that would have made it durable.
    given_up: bool,
}

/// All operations since the recording began.
#[derive(Debug)]
pub(super) struct Log {
    /// The contents when the recording began.
    original: Vec<u8>,
    entries: Vec<Entry>,
    now: u64,
}

impl Log {
    pub(super) fn new(original: Vec<u8>) -> Self {
        Self { original, entries: Vec::new(), now: 0 }
    }

    pub(super) fn now(&self) -> u64 {
        self.now
    }

    pub(super) fn recorded(&self) -> Vec<Recorded> {
        self.entries.iter().map(|entry| entry.recorded.clone()).collect()
    }

    fn tick(&mut self) -> u64 {
        self.now += 1;
        self.now
    }

    /// Records the begin of an operation. Returns its number for the other calls.
    pub(super) fn begin(
        &mut self,
        operation: Operation,
        offset: u64,
        change: Change<'_>,
        through: bool,
    ) -> usize {
        let begin = self.tick();
        let bytes = match change {
            Change::Bytes(bytes) => Some(bytes.to_vec()),
            Change::Zeros(_) => None,
        };
        let recorded = Recorded {
            operation,
            offset,
            len: change.len(),
            begin,
            end: None,
            outcome: Outcome::InFlight,
            durable: None,
        };
        self.entries.push(Entry { recorded, bytes, applied: None, through, given_up: false });
        self.entries.len() - 1
    }

    /// Records that the inner device has the change or a part of it.
    pub(super) fn applied(&mut self, number: usize) {
        let now = self.tick();
        self.entries[number].applied = Some(now);
    }

    pub(super) fn end(&mut self, number: usize, good: bool) {
        let now = self.tick();
        let entry = &mut self.entries[number];
        entry.recorded.end = Some(now);
        entry.recorded.outcome = if good { Outcome::Done } else { Outcome::Failed };
        if good && entry.through {
            entry.recorded.durable = Some(now);
        }
    }

    pub(super) fn begin_sync(&mut self) -> usize {
        self.begin(Operation::Sync, 0, Change::Zeros(0), false)
    }

    pub(super) fn begin_of(&self, number: usize) -> u64 {
        self.entries[number].recorded.begin
    }

    /// Records the end of a sync. One that was `interrupted` will be retried, so no change is given
    /// up.
    pub(super) fn end_sync(&mut self, number: usize, good: bool, interrupted: bool) {
        self.end(number, good);
        if interrupted {
            return;
        }
        let (begin, now) = (self.entries[number].recorded.begin, self.now);
        for entry in &mut self.entries {
            let recorded = &mut entry.recorded;
            let covered = recorded.end.is_some_and(|end| end < begin)
                && recorded.outcome == Outcome::Done
                && recorded.operation != Operation::Sync
                && recorded.durable.is_none();
            if covered && !good {
                entry.given_up = true;
            } else if covered && !entry.given_up {
                recorded.durable = Some(now);
            }
        }
    }

    /// Returns the length of the device, which writes may have extended since the recording began.
    fn len(&self) -> u64 {
        let writes = self.entries.iter().filter(|entry| entry.bytes.is_some());
        let done = writes.filter(|entry| entry.recorded.outcome == Outcome::Done);
        let ends = done.map(|entry| entry.recorded.offset + entry.recorded.len);
        ends.max().unwrap_or(0).max(self.original.len() as u64)
    }

    /// Gives up the changes that had ended before that moment and are not durable, as a page cache
    /// does whose write-back failed. Returns the sectors without a newer change and the bytes of
    /// their version before, which the caller writes to the inner device.
    pub(super) fn give_up(&mut self, moment: u64) -> Vec<(u64, Vec<u8>)> {
        let sectors_of = |recorded: &Recorded| {
            recorded.offset / SECTOR..(recorded.offset + recorded.len).div_ceil(SECTOR)
        };
        let mut gone = BTreeSet::new();
        for entry in &mut self.entries {
            let recorded = &entry.recorded;
            let covered = recorded.outcome == Outcome::Done
                && !entry.given_up
                && recorded.durable.is_none()
                && recorded.end.is_some_and(|end| end < moment);
            if covered {
                entry.given_up = true;
                gone.extend(sectors_of(recorded));
            }
        }
        let mut changes: Vec<&Entry> = self.entries.iter().collect();
        changes.sort_by_key(|entry| entry.applied.or(entry.recorded.end).unwrap_or(u64::MAX));
        let len = self.len();
        let version_before = |sector: u64| {
            let start = sector * SECTOR;
            let end = (start + SECTOR).min(len);
            if end <= start {
                return None; // only zeros, which do not extend the device
            }
            let original = self.original.get(start as usize..).unwrap_or_default();
            let mut image = original[..original.len().min(SECTOR as usize)].to_vec();
            image.resize((end - start) as usize, 0); // zeros behind the original end
            let of_sector = |entry: &&&Entry| sectors_of(&entry.recorded).contains(&sector);
            for entry in changes.iter().rev().filter(of_sector) {
                if entry.recorded.durable.is_some() {
                    entry.put_into(sector, &mut image, start);
                    break;
                }
                if !entry.given_up {
                    return None; // a change that is newer or partial: the sector stays as it is
                }
            }
            Some((start, image))
        };
        gone.into_iter().filter_map(version_before).collect()
    }

    pub(super) fn after_power_cut(
        &self,
        moments: u64,
        mut choose: impl FnMut(u64, usize) -> usize,
    ) -> Vec<u8> {
        let mut changes: Vec<&Entry> = self
            .entries
            .iter()
            .filter(|entry| entry.recorded.begin <= moments && entry.recorded.len > 0)
            .collect();
        // A change that is not applied yet may survive, too.
        changes.sort_by_key(|entry| entry.applied.or(entry.recorded.end).unwrap_or(u64::MAX));
        // The possible versions of each sector, the oldest first. `None` is the original.
        let mut versions = BTreeMap::<u64, Vec<Option<&Entry>>>::new();
        for change in changes {
            let Recorded { offset, len, durable, .. } = change.recorded;
            let is_durable = durable.is_some_and(|at| at <= moments);
            for sector in offset / SECTOR..(offset + len).div_ceil(SECTOR) {
                let versions = versions.entry(sector).or_insert_with(|| vec![None]);
                if is_durable {
                    versions.clear();
                }
                versions.push(Some(change));
            }
        }
        let (mut bytes, len) = (self.original.clone(), self.len());
        for (sector, versions) in versions {
            let chosen = match versions.len() {
                1 => 0,
                count => choose(sector, count).min(count - 1),
            };
            if let Some(change) = versions[chosen] {
                let Recorded { offset, len: written, .. } = change.recorded;
                let end = ((sector + 1) * SECTOR).min(offset + written).min(len) as usize;
                if change.bytes.is_some() && bytes.len() < end {
                    bytes.resize(end, 0);
                }
                change.put(sector, &mut bytes);
            }
        }
        bytes
    }
}

impl Entry {
    /// Copies the part of this change in a sector to the bytes of the device.
    fn put(&self, sector: u64, bytes: &mut [u8]) {
        self.put_into(sector, bytes, 0);
    }

    /// Copies the part of this change in a sector to `bytes`, which begin at the offset `base`.
    fn put_into(&self, sector: u64, bytes: &mut [u8], base: u64) {
        let Recorded { offset, len, .. } = self.recorded;
        let from = (sector * SECTOR).max(offset);
        let end = ((sector + 1) * SECTOR).min(offset + len).min(base + bytes.len() as u64);
        if from >= end {
            return; // beyond the end of the device, which has refused it
        }
        let there = &mut bytes[(from - base) as usize..(end - base) as usize];
        match &self.bytes {
            Some(new) => there.copy_from_slice(&new[(from - offset) as usize..][..there.len()]),
            None => there.fill(0),
        }
    }
}
