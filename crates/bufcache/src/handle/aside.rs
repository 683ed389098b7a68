//! Methods for users that read and write a device by means other than the cache.

use std::fmt;
use std::future::Future;
use std::ops::Range;
use std::pin::Pin as Pinned;
use std::task::{Context, Poll, ready};

use percpu::sync::{hint, step};

use super::Device;
use crate::cache::{Attempt, Load, order_invalidation};
use crate::error::GetError;
use crate::frames::Place;
use crate::word::{IO, Key, WRITE};

/// The binary logarithm of the size of a sector in bytes.
const SECTOR: u32 = 9;
/// Retries of a block that another thread takes apart, before the task yields. A guess.
const LOOKS: u32 = if cfg!(any(offlock_loom, offlock_shuttle)) { 1 } else { 16 };

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
    /// read, or followed by an [invalidation](Self::invalidation) that finds the load.
    ///
    /// # Errors
    ///
    /// [`GetError::OutOfRange`], [`GetError::Closed`] and [`GetError::Poisoned`].
    pub fn claim(&self, block: u64) -> Result<Option<Load>, GetError> {
        let key = self.checked_key(block)?;
        self.shared.claim(&self.source, key, self.class)
    }

    /// Invalidates blocks, each as [`invalidate`](Self::invalidate) does, but as a future: it does
    /// not block if one is being read. Blocks beyond the end of the device are ignored.
    ///
    /// Waits for a writer of a block without an end: for ever, if the awaiting task has an
    /// [`OwnedWriteGuard`](crate::OwnedWriteGuard) of it.
    ///
    /// Call it after a change of the device. Gets that begin after its end see the change.
    pub fn invalidation(&self, blocks: Range<u64>) -> Invalidation {
        let end = blocks.end.min(self.source.blocks);
        let count = end.saturating_sub(blocks.start);
        // A range longer than the table is searched by a walk over the table.
        let walk = (count > self.shared.places().into()).then_some(0);
        Invalidation {
            device: self.clone(),
            left: blocks.start..end,
            walk,
            begun: false,
            again: None,
            waiting: None,
            invalidated: 0,
        }
    }
}

/// A future that invalidates blocks of a device, from [`Device::invalidation`]. Its output is the
/// number of blocks that were cached.
///
/// Dropping it early leaves the remaining blocks cached.
#[must_use = "no block is invalidated until this is polled"]
pub struct Invalidation {
    device: Device,
    /// The blocks that are left; all of them if the table is walked.
    left: Range<u64>,
    /// The next entry of a walk over the table.
    walk: Option<Place>,
    begun: bool,
    /// A block to retry, because another thread takes its buffer apart.
    again: Option<Key>,
    /// The block whose load or write this waits for, and its pin.
    waiting: Option<(Key, Waiting)>,
    invalidated: u64,
}

/// A pin on an entry.
struct Waiting {
    device: Device,
    place: Place,
}

impl Drop for Waiting {
    fn drop(&mut self) {
        step!("invalidation: drop the pin", self.device.shared.unpin_place(self.place));
    }
}

impl Invalidation {
    /// Returns the next block that seems to be cached.
    fn next(&mut self) -> Option<Key> {
        let Self { device: Device { shared, source, .. }, left, walk, .. } = self;
        if let Some(place) = walk {
            let by = source.shift - SECTOR;
            let sectors = left.start << by..left.end << by;
            let (key, next) = shared.next_cached(source.id, &sectors, *place)?;
            *place = next;
            return Some(key);
        }
        left.filter_map(|block| source.key(block)).find(|&key| shared.is_cached(key))
    }
}

impl Future for Invalidation {
    type Output = Result<u64, GetError>;

    /// # Errors
    ///
    /// [`GetError::NoMemory`] if there is no memory for hazard slots of this thread.
    fn poll(mut self: Pinned<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let this = &mut *self;
        if !this.begun {
            this.begun = true;
            order_invalidation();
        }
        loop {
            let mut next = this.again.take();
            if let Some((key, Waiting { device, place })) = &this.waiting {
                ready!(device.shared.poll_marks(*place, IO | WRITE, context))?;
                // A block with another entry was loaded after the change, so it is left alone.
                let again = device.shared.is_at(*key, *place).then_some(*key);
                step!("invalidation: look again after the load", next = again);
                this.waiting = None;
            }
            let Some(key) = next.or_else(|| this.next()) else {
                return Poll::Ready(Ok(this.invalidated));
            };
            let mut looks = 0;
            match loop {
                match this.device.shared.invalidate_or_pin(&this.device.source, key)? {
                    Attempt::Busy if looks < LOOKS => looks += 1,
                    attempt => break attempt,
                }
                hint::spin_loop();
            } {
                Attempt::NotCached(was_there) => this.invalidated += u64::from(was_there),
                Attempt::Pinned(place) => {
                    this.waiting = Some((key, Waiting { device: this.device.clone(), place }));
                }
                Attempt::Busy => step!("invalidation: look again at a busy block", {
                    this.again = Some(key);
                    context.waker().wake_by_ref();
                    return Poll::Pending;
                }),
            }
        }
    }
}

impl fmt::Debug for Invalidation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Invalidation").field("left", &self.left).finish_non_exhaustive()
    }
}
