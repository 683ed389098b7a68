//! Choosing sizes.

use std::time::Duration;

use percpu::fence::{Strategy, strategy};

use crate::cache::{self, Limits};
use crate::error::BuildError;
use crate::frames::MOST_UNITS;
use crate::handle::Cache;
use crate::hazard::Order;
use crate::policy::{Eviction, Policy, sampled_blocks};

/// What a [`Cache`] is to be like.
#[derive(Clone, Debug)]
#[must_use = "a builder builds nothing until it is asked to"]
pub struct Builder {
    capacity: usize,
    smallest: usize,
    largest: usize,
    eviction: Eviction,
    patience: Duration,
    membarrier: bool,
    limits: Limits,
    time_locks: bool,
}

impl Builder {
    pub(crate) fn new(capacity: usize) -> Self {
        Self {
            capacity,
            smallest: 4096,
            largest: 4096,
            eviction: Eviction::default(),
            patience: Duration::from_secs(1),
            membarrier: false,
            limits: Limits::default(),
            time_locks: false,
        }
    }

    /// The block sizes that devices may be attached with: powers of two from 512 to 65,536. By
    /// default 4,096 alone. Memory is cut into chunks of the largest, each with blocks of one size.
    pub fn block_sizes(mut self, smallest: usize, largest: usize) -> Self {
        (self.smallest, self.largest) = (smallest, largest);
        self
    }

    /// How buffers are chosen for eviction.
    pub fn eviction(mut self, eviction: Eviction) -> Self {
        self.eviction = eviction;
        self
    }

    /// How long a miss waits where all buffers are in use: a second by default.
    pub fn patience(mut self, patience: Duration) -> Self {
        self.patience = patience;
        self
    }

    /// Leaves out what a hit waits for longest, the fence after it has named its buffer; each batch of up
    /// to eight evictions interrupts the other CPUs that run threads of this process instead, which
    /// takes it some microseconds, and tens in a virtual machine.
    ///
    /// For caches with a thousand hits and more for each miss. Changes nothing where the kernel has no
    /// membarrier. Not by default.
    pub fn membarrier(mut self, membarrier: bool) -> Self {
        self.membarrier = membarrier;
        self
    }

    /// Times how long its locks are held, those of its table, of its lists and of what is dirty: two looks
    /// at the clock for each. Not by default. See [`Times::holds`](crate::Times::holds).
    pub fn time_locks(mut self, time_locks: bool) -> Self {
        self.time_locks = time_locks;
        self
    }

    /// How long a block stays dirty before the cleaner writes it: five seconds by default. Looked at five
    /// times a second.
    pub fn write_back_after(mut self, age: Duration) -> Self {
        self.limits.age = age;
        self
    }

    /// How much of the capacity may be dirty, in percent: above `begin` the cleaner writes without
    /// delay, above `most` who dirties another block writes some first. By default 10 and 75.
    pub fn dirty_limits(mut self, begin: u32, most: u32) -> Self {
        let of_256 = |percent: u32| percent.min(100) * 256 / 100;
        (self.limits.begin, self.limits.most) = (of_256(begin), of_256(most));
        self
    }

    /// Makes the cache: reserves its memory, which is touched as it is used, and allocates its table,
    /// about 5 % of that with blocks of 4,096 bytes.
    ///
    /// The capacity is rounded down to blocks of the largest size.
    ///
    /// # Errors
    ///
    /// [`BuildError`]: sizes that cannot be, or no memory.
    pub fn build(self) -> Result<Cache, BuildError> {
        for size in [self.smallest, self.largest] {
            if !size.is_power_of_two() || !(512..=65_536).contains(&size) {
                return Err(BuildError::BlockSize(size));
            }
        }
        if self.smallest > self.largest {
            return Err(BuildError::BlockSize(self.smallest));
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
        // In a model both are fences.
        let works = strategy() == Strategy::Membarrier || cfg!(any(offlock_loom, offlock_shuttle));
        let order = if self.membarrier && works { Order::Membarrier } else { Order::Fences };
        let waits = (self.patience, self.limits);
        let shared = cache::make(units, sizes, (policy, sampled), order, waits, self.time_locks)
            .map_err(|_| BuildError::NoMemory)?;
        Ok(Cache::from_shared(shared))
    }
}
