//! Bytes that several queues share.

use std::fmt;

use percpu::sync::Arc;
use percpu::sync::atomic::{AtomicU64, Ordering};

use crate::error::BuildError;

/// A number of bytes that queues are charged to when they are made, and give back when they are
/// dropped: what `RLIMIT_MSGQUEUE` is to the kernel's. Cheap to clone; clones share it.
#[derive(Clone)]
pub struct Quota {
    shared: Arc<Shared>,
}

struct Shared {
    limit: u64,
    used: AtomicU64,
}

impl Quota {
    /// A quota of `limit` bytes.
    #[must_use]
    pub fn new(limit: u64) -> Self {
        Self { shared: Arc::new(Shared { limit, used: AtomicU64::new(0) }) }
    }

    /// Bytes in all.
    #[must_use]
    pub fn limit(&self) -> u64 {
        self.shared.limit
    }

    /// Bytes that queues have.
    #[must_use]
    pub fn used(&self) -> u64 {
        // Ordering: Relaxed, here and below; the number is the whole message.
        self.shared.used.load(Ordering::Relaxed)
    }

    /// Takes `needed` bytes, all or none.
    pub(crate) fn charge(&self, needed: u64) -> Result<Charge, BuildError> {
        let limit = self.shared.limit;
        let add = |used: u64| used.checked_add(needed).filter(|&sum| sum <= limit);
        match self.shared.used.fetch_update(Ordering::Relaxed, Ordering::Relaxed, add) {
            Ok(_) => Ok(Charge { quota: self.clone(), bytes: needed }),
            Err(used) => Err(BuildError::Quota { needed, left: limit - used }),
        }
    }
}

impl fmt::Debug for Quota {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Quota").field("limit", &self.limit()).field("used", &self.used()).finish()
    }
}

/// What one queue takes; goes back when it is dropped.
pub(crate) struct Charge {
    quota: Quota,
    bytes: u64,
}

impl Charge {
    pub(crate) fn bytes(&self) -> u64 {
        self.bytes
    }
}

impl Drop for Charge {
    fn drop(&mut self) {
        // Ordering: Relaxed; see `used`.
        self.quota.shared.used.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}
