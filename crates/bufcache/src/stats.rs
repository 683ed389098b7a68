//! What a cache did.

use std::fmt;

use crate::cache::Shared;
use crate::policy::Eviction;

/// Counters of a cache since it was made; a snapshot, each value by itself.
///
/// With the names that the XFS buffer cache has for them, and its meanings: while nobody uses the
/// cache, `get` is `hits + misses + busy`, and `created` is `misses`, those that lost a race for the
/// block, and uncached ones.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct CacheStats {
    /// Buffers asked for (`xb_get`), to be read ahead, too, unless they were seen to be there.
    pub get: u64,
    /// Buffers taken in hand, each with its memory (`xb_create` and `xb_page_found`).
    pub created: u64,
    /// Gets that found their buffer, in the end (`xb_get_locked`); what was refused is among them.
    pub hits: u64,
    /// Buffers put into the table (`xb_miss_locked`).
    pub misses: u64,
    /// Gets that waited for another thread's load (`xb_get_locked_waited`).
    pub waited: u64,
    /// Gets that would have waited, and were asked not to (`xb_busy_locked`).
    pub busy: u64,
    /// Reads of the device (`xb_get_read`).
    pub reads: u64,
    /// Pauses of those who wanted a buffer while all were in use (`xb_page_retries`).
    pub page_retries: u64,
    /// Buffers that were evicted.
    pub evictions: u64,
    /// Ranges that were to be read ahead, and were not: too many waited.
    pub ahead_dropped: u64,
    /// Blocks that devices were given.
    pub written: u64,
    /// In so many calls.
    pub write_calls: u64,
    /// Syncs of devices.
    pub syncs: u64,
    /// Bytes of buffers that are dirty.
    pub dirty: usize,
    /// Bytes of buffers, in use or kept for use.
    pub bytes: usize,
    /// Bytes there may be.
    pub capacity: usize,
    /// The rule by which buffers are evicted now: what [`Eviction::Adaptive`] has chosen, or what was asked for.
    pub eviction: Eviction,
}

impl CacheStats {
    pub(crate) fn of(shared: &Shared) -> Self {
        let counters = &shared.counters;
        let value = |counter: &percpu::PerCpuCounter| counter.sum().max(0) as u64;
        // Misses before gets, which are counted before them: a get in between is a hit.
        let misses = value(&counters.miss_locked);
        let busy = value(&counters.busy_locked);
        let get = shared.gets();
        Self {
            get,
            created: value(&counters.create),
            hits: get.saturating_sub(misses + busy),
            misses,
            waited: value(&counters.get_locked_waited),
            busy,
            page_retries: value(&counters.page_retries),
            reads: value(&counters.get_read),
            evictions: value(&counters.evictions),
            ahead_dropped: value(&counters.ahead_dropped),
            written: value(&counters.written),
            write_calls: value(&counters.write_calls),
            syncs: value(&counters.syncs),
            dirty: shared.dirty_bytes(),
            bytes: shared.bytes_in_use(),
            capacity: shared.capacity(),
            eviction: shared.eviction(),
        }
    }
}

impl fmt::Display for CacheStats {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { get, created, hits, misses, waited, busy, reads, .. } = self;
        let Self { page_retries, evictions, ahead_dropped, bytes, capacity, .. } = self;
        let Self { written, write_calls, syncs, dirty, eviction, .. } = self;
        write!(
            f,
            "{get} gets: {hits} hits ({waited} waited), {misses} misses, {busy} busy; {created} \
             buffers taken, {page_retries} pauses for one; {reads} reads, {evictions} evictions, \
             {ahead_dropped} ranges not read ahead; {written} blocks written by {write_calls} calls, \
             {syncs} syncs; {bytes} of {capacity} bytes, {dirty} dirty; evicts by {eviction:?}",
        )
    }
}
