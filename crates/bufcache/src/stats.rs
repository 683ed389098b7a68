//! The counters of a cache.

use std::fmt;
#[cfg(offlock_model)]
use std::sync::atomic::Ordering::Relaxed;

#[cfg(not(offlock_model))]
pub(crate) use offlock_percpu::PerCpuCounter as Counter;
use offlock_sync::atomic::{AtomicU64, Ordering};
use offlock_sync::load_own;

use crate::cache::Shared;
use crate::policy::Eviction;

/// A counter of the cache. The models of `percpu` check its counters. Here they would only order
/// the threads that count, because a section of a model holds a lock of the checker.
#[cfg(offlock_model)]
#[derive(Debug, Default)]
pub(crate) struct Counter(std::sync::atomic::AtomicI64);

// Ordering: Relaxed in all methods; a statistic.
#[cfg(offlock_model)]
impl Counter {
    pub(crate) fn add(&self, delta: i64) {
        self.0.fetch_add(delta, Relaxed);
    }

    pub(crate) fn sum(&self) -> i64 {
        self.0.load(Relaxed)
    }
}

/// A snapshot of the counters of a cache since it was built. Each value is read by itself.
///
/// The counters have the meanings of those of the XFS buffer cache, whose names are in parentheses.
/// While no thread uses the cache, `get` is `hits + misses + busy`. `created` is `misses`, plus the
/// buffers whose thread lost a race for the block.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct CacheStats {
    /// Buffers asked for (`xb_get`), including readahead of blocks that were not cached.
    pub get: u64,
    /// Buffers allocated (`xb_create` and `xb_page_found`).
    pub created: u64,
    /// Gets that found their buffer, at once or later (`xb_get_locked`), including refused ones.
    pub hits: u64,
    /// Buffers inserted into the table (`xb_miss_locked`).
    pub misses: u64,
    /// Gets that waited for another thread's load (`xb_get_locked_waited`).
    pub waited: u64,
    /// Gets that failed because they would have waited (`xb_busy_locked`).
    pub busy: u64,
    /// Reads of the device (`xb_get_read`).
    pub reads: u64,
    /// Pauses of threads that needed a buffer while all were in use (`xb_page_retries`).
    pub page_retries: u64,
    /// Evicted buffers.
    pub evictions: u64,
    /// Ranges that were not read ahead because too many waited.
    pub ahead_dropped: u64,
    /// Blocks that [`Device::claim`](crate::Device::claim) refused because few requests hit.
    pub claims_refused: u64,
    /// Blocks written to devices.
    pub written: u64,
    /// Write calls to devices.
    pub write_calls: u64,
    /// Syncs of devices.
    pub syncs: u64,
    /// Bytes of dirty buffers.
    pub dirty: usize,
    /// Bytes of buffers in use.
    pub bytes: usize,
    /// The capacity in bytes.
    pub capacity: usize,
    /// The rule of eviction in force: the one that [`Eviction::Adaptive`] has chosen, or the one
    /// set.
    pub eviction: Eviction,
}

impl CacheStats {
    pub(crate) fn collect(shared: &Shared) -> Self {
        let counters = &shared.counters;
        let value = |counter: &Counter| counter.sum().max(0) as u64;
        // A get is counted before its miss. So misses are read first: a get in between appears as a
        // hit.
        let misses = value(&counters.miss_locked);
        let busy = value(&counters.busy_locked);
        let get = shared.gets();
        let (bytes, eviction) = shared.frames.state();
        Self {
            get,
            created: value(&counters.create),
            hits: get.saturating_sub(misses + busy),
            misses,
            waited: value(&counters.get_locked_waited),
            busy,
            page_retries: value(&counters.page_retries),
            reads: value(&counters.get_read),
            evictions: value(&shared.frames.evictions),
            ahead_dropped: value(&counters.ahead_dropped),
            claims_refused: value(&shared.frames.claims_refused),
            written: value(&counters.written),
            write_calls: value(&counters.write_calls),
            syncs: value(&counters.syncs),
            dirty: shared.write_back.dirty_bytes(),
            bytes,
            capacity: shared.frames.capacity(),
            eviction,
        }
    }
}

impl fmt::Display for CacheStats {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { get, created, hits, misses, waited, busy, reads, .. } = self;
        let Self { page_retries, evictions, ahead_dropped, claims_refused, .. } = self;
        let Self { written, write_calls, syncs, dirty, bytes, capacity, eviction, .. } = self;
        write!(
            f,
            "{get} gets: {hits} hits ({waited} waited), {misses} misses, {busy} busy; {created} \
             buffers taken, {page_retries} pauses for one; {reads} reads, {evictions} evictions, \
             {ahead_dropped} ranges not read ahead, {claims_refused} claims refused; {written} \
             blocks written by {write_calls} calls, {syncs} syncs; {bytes} of {capacity} bytes, \
             {dirty} dirty; evicts by {eviction:?}",
        )
    }
}

// Counts of hits: each thread counts in a word of its own, by a load and a store.
//
// A word belongs to the hazard record with its number, and so to the thread that owns the record.
// Records with numbers from `WORDS` on have no word; the caller counts their hits elsewhere.

/// The number of words. More than the CPUs of most machines, for 8 KiB of each cache.
const WORDS: usize = if cfg!(offlock_model) { 2 } else { 64 };

#[derive(Debug)]
#[repr(align(128))]
struct HitCount(AtomicU64);

/// The words of a cache.
#[derive(Debug)]
pub(crate) struct HitCounters(Box<[HitCount]>);

impl HitCounters {
    pub(crate) fn new() -> Self {
        Self((0..WORDS).map(|_| HitCount(AtomicU64::new(0))).collect())
    }

    /// Counts a hit in the word of the record with that number, which this thread owns. Returns
    /// whether the record has a word.
    #[inline(always)]
    pub(crate) fn count(&self, record: u32) -> bool {
        let Some(HitCount(own)) = self.0.get(record as usize) else { return false };
        // Ordering: Relaxed; a statistic. The exchange on the record's `owner` in `hazard` carries
        // the count of the owner before to this thread.
        own.store(load_own(own) + 1, Ordering::Relaxed);
        true
    }

    /// Returns the sum of all counts.
    pub(crate) fn sum(&self) -> u64 {
        // Ordering: Relaxed; exact for the counts that happened before this call, as after a join.
        self.0.iter().map(|HitCount(own)| own.load(Ordering::Relaxed)).sum()
    }
}
