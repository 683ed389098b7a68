//! Methods for users that read and write a device by means other than the cache.

use super::Device;
use crate::cache::Load;
use crate::error::GetError;

impl Device {
    /// Begins a load of a block that is not cached, for the caller to fill and to
    /// [finish](Load::finish), for example when one read of the device brings many blocks. Gets of
    /// the block wait for the load. Does not wait.
    ///
    /// Returns `None` if the block is cached or being read, if no buffer is free, or if other
    /// devices are attached and this one has its share of the cache in loads that have not ended. A
    /// cache with [`Eviction::Adaptive`](crate::Eviction::Adaptive) also refuses the first claim of a
    /// block while hardly a buffer is free (one in 64 may be) and fewer than one request in eight
    /// hits, because most blocks would be evicted before they are used. It grants the second claim, if not
    /// much else was claimed in between. It stops refusing where that costs the whole cache more than
    /// about one hit in 55 requests, or one in 24 if it has 128 buffers only; a device with few of
    /// the requests may lose half of its hits for a time. A refused claim counts neither as a get nor
    /// as a miss.
    ///
    /// The bytes of the load are those that the buffer had before: any, also of another device. The
    /// caller fills all that it [finishes](Load::finish) with.
    ///
    /// A thread that holds the load and gets the block waits for itself. If it is the thread that
    /// called this method, the get ends with [`GetError::WouldDeadlock`] after as long as the cache
    /// waits for a buffer. In another thread the wait is not detected.
    ///
    /// Read the device after this call, not before. A write to the device in between is then either
    /// read, or followed by an [`invalidate`](Self::invalidate) that finds the load.
    ///
    /// # Errors
    ///
    /// [`GetError::OutOfRange`], [`GetError::Closed`] and [`GetError::Poisoned`].
    pub fn claim(&self, block: u64) -> Result<Option<Load>, GetError> {
        let key = self.checked_key(block)?;
        self.shared.claim(&self.source, key, self.class)
    }
}
