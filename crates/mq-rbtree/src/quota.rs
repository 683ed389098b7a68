//! A limit on the bytes of several queues together.

use std::fmt;

use percpu::sync::Arc;
use percpu::sync::atomic::{AtomicU64, Ordering};

use crate::error::BuildError;

/// A limit on the bytes that several queues may need, as `RLIMIT_MSGQUEUE` is for kernel queues.
///
/// A queue is charged when it is made, with the most memory that its messages can take, and gives
/// the bytes back when it is dropped. A clone shares the limit.
///
/// ```
/// use mq_rbtree::{BuildError, Queue, Quota};
///
/// let quota = Quota::new(1_000);
/// let queue = Queue::<[u8; 16]>::builder(30).quota(&quota).build()?; // 30 * (16 + 8) bytes
/// assert_eq!((queue.charged(), quota.used()), (720, 720));
/// let refused = Queue::<[u8; 16]>::builder(30).quota(&quota).build();
/// assert_eq!(refused.err(), Some(BuildError::Quota { needed: 720, left: 280 }));
/// drop(queue);
/// assert_eq!(quota.used(), 0);
/// # Ok::<(), mq_rbtree::BuildError>(())
/// ```
#[derive(Clone)]
pub struct Quota {
    shared: Arc<Shared>,
}

struct Shared {
    limit: u64,
    used: AtomicU64,
}

impl Quota {
    /// Creates a quota of `limit` bytes.
    #[must_use]
    pub fn new(limit: u64) -> Self {
        Self { shared: Arc::new(Shared { limit, used: AtomicU64::new(0) }) }
    }

    /// Returns the limit in bytes.
    #[must_use]
    pub fn limit(&self) -> u64 {
        self.shared.limit
    }

    /// Returns the bytes that are charged to queues.
    #[must_use]
    pub fn used(&self) -> u64 {
        // Ordering: Relaxed; the number publishes no other memory.
        self.shared.used.load(Ordering::Relaxed)
    }

    /// Charges `needed` bytes, or none if they exceed what is left.
    pub(crate) fn charge(&self, needed: u64) -> Result<Charge, BuildError> {
        let limit = self.shared.limit;
        let add = |used: u64| used.checked_add(needed).filter(|&sum| sum <= limit);
        // Ordering: Relaxed, both; the number publishes no other memory.
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

/// The bytes charged for one queue. They are given back on drop.
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
        // Ordering: Relaxed; the number publishes no other memory.
        self.quota.shared.used.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}
