//! The builder of a cache.

use std::time::Duration;

use crate::cache::{self, Limits};
use crate::error::BuildError;
use crate::frames::MOST_UNITS;
use crate::handle::Cache;
use crate::policy::{Eviction, Policy, sampled_blocks};

/// The options of a [`Cache`] to build.
#[derive(Clone, Debug)]
#[must_use = "a builder makes no cache before `build`"]
pub struct Builder {
    capacity: usize,
    smallest: usize,
    largest: usize,
    eviction: Eviction,
    patience: Duration,
    limits: Limits,
}

impl Cache {
    /// Creates a cache of `capacity` bytes, in blocks of 4,096 bytes.
    ///
    /// # Errors
    ///
    /// As [`Builder::build`].
    pub fn new(capacity: usize) -> Result<Self, BuildError> {
        Self::builder(capacity).build()
    }

    /// Returns a builder of a cache of `capacity` bytes, to choose block sizes, eviction and limits.
    pub fn builder(capacity: usize) -> Builder {
        Builder::new(capacity)
    }
}

impl Builder {
    fn new(capacity: usize) -> Self {
        Self {
            capacity,
            smallest: 4096,
            largest: 4096,
            eviction: Eviction::default(),
            patience: Duration::from_secs(1),
            limits: Limits::default(),
        }
    }

    /// Sets the block sizes with which devices may be attached: the powers of two from `smallest`
    /// to `largest`, within 512 to 65,536. Only 4,096 by default. The memory is cut into chunks of
    /// the largest size, each with blocks of one size.
    ///
    /// A chunk gets blocks of another size once none of its buffers is in use, so one pinned block
    /// holds its chunk.
    pub fn block_sizes(mut self, smallest: usize, largest: usize) -> Self {
        (self.smallest, self.largest) = (smallest, largest);
        self
    }

    /// Sets how buffers are chosen for eviction.
    pub fn eviction(mut self, eviction: Eviction) -> Self {
        self.eviction = eviction;
        self
    }

    /// Sets how long a miss waits if all buffers are in use, and other calls for guards of other
    /// threads: one second by default.
    pub fn patience(mut self, patience: Duration) -> Self {
        self.patience = patience;
        self
    }

    /// Sets how long a block stays dirty before the cleaner writes it: five seconds by default. The
    /// cleaner checks five times per second.
    pub fn write_back_after(mut self, age: Duration) -> Self {
        self.limits.age = age;
        self
    }

    /// Sets the limits of the dirty share of the capacity, in percent: 10 and 75 by default. Above
    /// `begin`, the cleaner writes without delay. Above `most`, a thread that dirties another block
    /// writes some blocks first.
    pub fn dirty_limits(mut self, begin: u32, most: u32) -> Self {
        let of_256 = |percent: u32| percent.min(100) * 256 / 100;
        (self.limits.begin, self.limits.most) = (of_256(begin), of_256(most));
        self
    }

    /// Builds the cache. Reserves its memory, which the system provides at first use, and allocates
    /// its table, about 5 % of the capacity with blocks of 4,096 bytes.
    ///
    /// The capacity is rounded down to blocks of the largest size.
    ///
    /// # Errors
    ///
    /// [`BuildError::BlockSize`], [`BuildError::BlockSizes`] and [`BuildError::Capacity`] for a size
    /// out of range, and [`BuildError::NoMemory`].
    pub fn build(self) -> Result<Cache, BuildError> {
        for size in [self.smallest, self.largest] {
            if !size.is_power_of_two() || !(512..=65_536).contains(&size) {
                return Err(BuildError::BlockSize(size));
            }
        }
        if self.smallest > self.largest {
            return Err(BuildError::BlockSizes { smallest: self.smallest, largest: self.largest });
        }
        let capacity = self.capacity & !(self.largest - 1);
        let units = capacity / self.smallest;
        if units == 0 || units > MOST_UNITS {
            return Err(BuildError::Capacity(self.capacity));
        }
        let sizes = (self.smallest.ilog2(), self.largest.ilog2());
        let (rule, sampled) = match self.eviction {
            Eviction::Adaptive => (Eviction::A2, sampled_blocks(units)),
            fixed => (fixed, 0),
        };
        let policy = Policy::new(rule, units).map_err(|_| BuildError::NoMemory)?;
        let waits = (self.patience, self.limits);
        let shared = cache::make(units, sizes, (policy, sampled), waits)
            .map_err(|_| BuildError::NoMemory)?;
        Ok(Cache::from_shared(shared))
    }
}
