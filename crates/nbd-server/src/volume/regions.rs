//! Which parts of a volume have data, and by which keys.
//!
//! A region of 1 GiB has 64 granules of 16 MiB. A granule that is trimmed begins its next generation, in which none of
//! its blocks has a key yet. So a TRIM of any range is one record for each region with data, and at most 255
//! deletions at each end, whatever was written.

use std::collections::BTreeMap;
use std::mem;
use std::ops::Range;
use std::sync::Arc;

use async_trait::async_trait;
use offlock_sync::Mutex;
use slatedb::bytes::Bytes;
use slatedb::{
    CompactionFilter, CompactionFilterDecision, CompactionFilterError, CompactionFilterSupplier,
    CompactionJobContext, RowEntry,
};

use super::patch::BLOCK;

/// Bytes of a region.
pub(super) const REGION: u64 = 1 << 30;
/// Bytes of a granule.
pub(super) const GRANULE: u64 = 16 << 20;
const GRANULES: usize = (REGION / GRANULE) as usize;
/// Bytes of a granule's record.
const RECORD: usize = 5;

/// The key of the header.
pub(super) const HEADER: [u8; 1] = [0];

pub(super) fn region_key(region: u32) -> Bytes {
    let [a, b, c, d] = region.to_be_bytes();
    Bytes::copy_from_slice(&[1, a, b, c, d])
}

/// The last byte halves the requests of a read: the index of a table has the shortest key between two neighbours,
/// and if that were the whole key of a block, the database would look for older values in the block before.
pub(super) fn block_key(region: u32, generation: u32, block: u16) -> Bytes {
    let mut key = vec![2];
    key.extend_from_slice(&region.to_be_bytes());
    key.extend_from_slice(&generation.to_be_bytes());
    key.extend_from_slice(&block.to_be_bytes());
    key.push(0);
    key.into()
}

/// Returns the region, the generation and the block of a key.
pub(super) fn block_of_key(key: &[u8]) -> Option<(u32, u32, u16)> {
    let &[2, a, b, c, d, e, f, g, h, i, j, 0] = key else { return None };
    let (region, generation) = ([a, b, c, d], [e, f, g, h]);
    let block = u16::from_be_bytes([i, j]);
    Some((u32::from_be_bytes(region), u32::from_be_bytes(generation), block))
}

/// The blocks of a granule that are read and written.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Granule {
    pub(super) generation: u32,
    /// A block was written in this generation.
    pub(super) has_data: bool,
}

/// The granules of a region: one record if they are all alike.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Region(Vec<Granule>);

impl Default for Region {
    fn default() -> Self {
        Self(vec![Granule::default()])
    }
}

impl Region {
    pub(super) fn value(&self) -> Bytes {
        let record = |granule: &Granule| {
            let [a, b, c, d] = granule.generation.to_be_bytes();
            [a, b, c, d, granule.has_data.into()]
        };
        self.0.iter().flat_map(record).collect()
    }

    pub(super) fn of_value(value: &[u8]) -> Option<Self> {
        let granule = |record: &[u8]| {
            let &[a, b, c, d, has_data @ 0..=1] = record else { return None };
            let generation = u32::from_be_bytes([a, b, c, d]);
            Some(Granule { generation, has_data: has_data == 1 })
        };
        let granules: Vec<_> = value.chunks(RECORD).map(granule).collect::<Option<_>>()?;
        [1, GRANULES].contains(&granules.len()).then_some(Self(granules))
    }

    /// Returns the granule that has a byte of the region.
    pub(super) fn granule_at(&self, byte: u64) -> Granule {
        if self.0.len() == 1 { self.0[0] } else { self.0[(byte / GRANULE) as usize] }
    }

    /// Changes the granule that has a byte of the region.
    pub(super) fn set(&mut self, byte: u64, granule: Granule) {
        let one = self.0[0];
        self.0.resize(GRANULES, one);
        self.0[(byte / GRANULE) as usize] = granule;
        if self.0.iter().all(|other| *other == granule) {
            self.0.truncate(1);
        }
    }
}

/// The regions of a volume.
#[derive(Debug, Default)]
pub(super) struct Regions {
    /// A region that is not there has had no data since the volume was made.
    now: BTreeMap<u32, Region>,
    /// The regions as the store has confirmed them.
    confirmed: BTreeMap<u32, Region>,
    /// The changes that the store has not confirmed, by the numbers of their batch and region.
    pub(super) unconfirmed: BTreeMap<(u64, u32), Region>,
}

impl Regions {
    /// Returns regions that are read from the store.
    pub(super) fn of_store(all: BTreeMap<u32, Region>) -> Self {
        Self { confirmed: all.clone(), now: all, unconfirmed: BTreeMap::new() }
    }

    pub(super) fn get(&self, number: u32) -> Region {
        self.now.get(&number).cloned().unwrap_or_default()
    }

    /// Returns the granule of a region that has a byte of the region.
    pub(super) fn granule_at(&self, number: u32, byte: u64) -> Granule {
        self.now.get(&number).map_or_else(Granule::default, |region| region.granule_at(byte))
    }

    /// Notes the regions that a batch has changed.
    pub(super) fn change(&mut self, batch: u64, regions: impl IntoIterator<Item = (u32, Region)>) {
        for (number, region) in regions {
            self.now.insert(number, region.clone());
            self.unconfirmed.insert((batch, number), region);
        }
    }

    /// Notes that the store has confirmed all batches up to this one.
    pub(super) fn confirm(&mut self, batch: u64) {
        let rest = self.unconfirmed.split_off(&(batch + 1, 0));
        let now = mem::replace(&mut self.unconfirmed, rest);
        self.confirmed.extend(now.into_iter().map(|((_, number), region)| (number, region)));
    }

    /// Returns the first region from a byte on that has a record, and that byte or the region's first.
    pub(super) fn next(&self, byte: u64) -> Option<u64> {
        let (&number, _) = self.now.range((byte / REGION) as u32..).next()?;
        Some(byte.max(u64::from(number) * REGION))
    }

    /// Returns the granules with data of a range: for each its region, and the bytes of the region that the
    /// range and the granule have in common.
    pub(super) fn with_data(&self, range: Range<u64>) -> impl Iterator<Item = (u32, Range<u64>)> {
        let regions = (range.start / REGION) as u32..range.end.div_ceil(REGION) as u32;
        self.now.range(regions).flat_map(move |(&number, region)| {
            let start = u64::from(number) * REGION;
            let bytes = range.start.max(start) - start..range.end.min(start + REGION) - start;
            granules(bytes)
                .filter(|part| region.granule_at(part.start).has_data)
                .map(move |part| (number, part))
        })
    }

    /// Returns whether there is a hole at `at`, and where the hole or the data ends, at most at `end`.
    pub(super) fn part(&self, at: u64, end: u64) -> (bool, u64) {
        let mut data = self.with_data(at..end).map(|(number, part)| {
            let start = u64::from(number) * REGION;
            start + part.start..start + part.end
        });
        match data.next() {
            Some(first) if first.start == at => {
                let next = |till: u64, next: Range<u64>| (next.start == till).then_some(next.end);
                let (Ok(till) | Err(till)) =
                    data.try_fold(first.end, |till, part| next(till, part).ok_or(till));
                (false, till)
            }
            first => (true, first.map_or(end, |first| first.start)),
        }
    }
}

/// Splits bytes at the ends of granules.
pub(super) fn granules(bytes: Range<u64>) -> impl Iterator<Item = Range<u64>> {
    let first = bytes.start / GRANULE;
    let numbers = if bytes.is_empty() { 0..0 } else { first..bytes.end.div_ceil(GRANULE) };
    numbers.map(move |number| {
        let start = number * GRANULE;
        bytes.start.max(start)..bytes.end.min(start + GRANULE)
    })
}

/// Drops the blocks of older generations in compactions.
pub(super) struct Stale(pub(super) Arc<Mutex<Regions>>);

/// The regions that were confirmed when a compaction began.
struct StaleOf(BTreeMap<u32, Region>);

impl StaleOf {
    fn is_stale(&self, key: &[u8]) -> bool {
        let Some((region, generation, block)) = block_of_key(key) else { return false };
        let confirmed = |region: &Region| region.granule_at(u64::from(block) * BLOCK).generation;
        self.0.get(&region).is_some_and(|region| generation < confirmed(region))
    }
}

#[async_trait]
impl CompactionFilterSupplier for Stale {
    async fn create_compaction_filter(
        &self,
        _context: &CompactionJobContext,
    ) -> Result<Box<dyn CompactionFilter>, CompactionFilterError> {
        Ok(Box::new(StaleOf(self.0.lock().confirmed.clone())))
    }
}

#[async_trait]
impl CompactionFilter for StaleOf {
    async fn filter(
        &mut self,
        entry: &RowEntry,
    ) -> Result<CompactionFilterDecision, CompactionFilterError> {
        Ok(match self.is_stale(&entry.key) {
            // No key of an old generation is read again, so an older version of it may appear.
            true => CompactionFilterDecision::Drop,
            false => CompactionFilterDecision::Keep,
        })
    }

    async fn on_compaction_end(&mut self) -> Result<(), CompactionFilterError> {
        Ok(())
    }
}
