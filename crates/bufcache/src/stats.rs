//! What a cache did.

use std::fmt;

use crate::cache::Shared;
use crate::error::GetError;

/// Counters of a cache since it was made; a snapshot, each value by itself.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct CacheStats {
    /// Buffers asked for (`xb_get`).
    pub get: u64,
    /// Buffers put into the table (`xb_miss_locked`).
    pub misses: u64,
    /// Gets that waited for another thread's load (`xb_get_locked_waited`).
    pub waited: u64,
    /// Gets that would have waited, and were asked not to (`xb_busy_locked`).
    pub busy: u64,
    /// Reads of the device (`xb_get_read`).
    pub reads: u64,
    /// Buffers that were evicted.
    pub evictions: u64,
    /// Ranges that were to be read ahead, and were not: too many waited.
    pub ahead_dropped: u64,
    /// Bytes of buffers, in use or kept for use.
    pub bytes: usize,
    /// Bytes there may be.
    pub capacity: usize,
}

impl CacheStats {
    pub(crate) fn of(shared: &Shared) -> Result<Self, GetError> {
        let counters = &shared.counters;
        let value = |counter: &percpu::PerCpuCounter| counter.sum().max(0) as u64;
        Ok(Self {
            get: shared.gets(),
            misses: value(&counters.miss_locked),
            waited: value(&counters.get_locked_waited),
            busy: value(&counters.busy_locked),
            reads: value(&counters.get_read),
            evictions: value(&counters.evictions),
            ahead_dropped: value(&counters.ahead_dropped),
            bytes: shared.bytes_in_use()?,
            capacity: shared.capacity()?,
        })
    }
}

impl fmt::Display for CacheStats {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { get, misses, waited, busy, reads, evictions, ahead_dropped, bytes, capacity } =
            self;
        write!(
            f,
            "{get} gets, {misses} misses, {waited} waited, {busy} busy; {reads} reads, {evictions} \
             evictions, {ahead_dropped} ranges not read ahead; {bytes} of {capacity} bytes",
        )
    }
}
