//! For who reads and writes a device by other means than the cache's.

use std::fmt;
use std::future::Future;
use std::ops::Range;
use std::pin::Pin as Pinned;
use std::task::{Context, Poll, ready};

use percpu::sync::{hint, mutant, step};

use super::Device;
use crate::cache::{Forget, Load};
use crate::error::GetError;
use crate::table::Place;
use crate::word::{IO, Key, WRITE};

/// Log of a sector's bytes.
const SECTOR: u32 = 9;
/// Looks at a block that another thread takes apart, before the task lets others go on. A guess.
const LOOKS: u32 = if cfg!(any(offlock_loom, offlock_shuttle)) { 1 } else { 16 };

impl Device {
    /// The load of a block that is not there, for the caller to fill and to [finish](Load::finish): as
    /// when one read of the device brings many blocks. Gets of the block wait for it.
    ///
    /// `None` where the block is there, or is being read, or no buffer is free; nothing is waited for.
    /// Whoever waits for the block before it has ended the load waits for itself: after as long as the cache
    /// waits for a buffer that is [`GetError::WouldDeadlock`]. A load that is given to another thread and
    /// forgotten there is not seen.
    ///
    /// Read the device after this, not before: what is written to it meanwhile is then either read, or
    /// [forgotten](Self::invalidation).
    ///
    /// # Errors
    ///
    /// [`GetError::OutOfRange`], [`GetError::Closed`] and [`GetError::Poisoned`].
    pub fn claim(&self, block: u64) -> Result<Option<Load>, GetError> {
        let Some(key) = self.source.key(block) else {
            return Err(GetError::OutOfRange { block, blocks: self.source.blocks });
        };
        self.shared.claim(&self.source, key, self.class)
    }

    /// Forgets blocks, each as [`invalidate`](Self::invalidate) does, but as a task: it does not block
    /// where one is being read. Blocks that the device does not have are left out.
    ///
    /// For who has changed the device: once this is done, gets see the change.
    pub fn invalidation(&self, blocks: Range<u64>) -> Invalidation {
        let end = blocks.end.min(self.source.blocks);
        let count = end.saturating_sub(blocks.start);
        // Of a long range few blocks are there: the table is the shorter way.
        let walk = (count > self.shared.places().into()).then_some(0);
        Invalidation {
            device: self.clone(),
            left: blocks.start..end,
            walk,
            begun: false,
            again: None,
            waiting: None,
            forgotten: 0,
        }
    }
}

/// Forgets blocks of a device: from [`Device::invalidation`]. Ends with how many were cached.
///
/// Dropped before, it leaves the rest as it is.
#[must_use = "nothing is forgotten until it is polled"]
pub struct Invalidation {
    device: Device,
    /// What is left to be looked at; all of it, where the table is walked.
    left: Range<u64>,
    /// Where in the table it is.
    walk: Option<Place>,
    begun: bool,
    /// A block that somebody takes apart.
    again: Option<Key>,
    /// A load that it waits for, and the block.
    waiting: Option<(Key, Waiting)>,
    forgotten: u64,
}

/// A pinned entry.
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
    /// The next block that seems to be in the table.
    fn next(&mut self) -> Option<Key> {
        let Self { device: Device { shared, source, .. }, left, walk, .. } = self;
        if let Some(place) = walk {
            let by = source.shift - SECTOR;
            let sectors = left.start << by..left.end << by;
            let (key, next) = shared.next_of(source.id, &sectors, *place)?;
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
    /// [`GetError::NoMemory`] for this thread's slots.
    fn poll(mut self: Pinned<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let this = &mut *self;
        if !this.begun {
            this.begun = true;
            this.device.shared.begin_to_forget();
        }
        loop {
            let mut next = this.again.take();
            if let Some((key, Waiting { device, place })) = &this.waiting {
                ready!(device.shared.poll_marks(*place, IO | WRITE, context))?;
                // What another load has brought since is as new as need be.
                let again = device.shared.is_at(*key, *place).then_some(*key);
                step!("invalidation: look again after the load", next = again);
                this.waiting = None;
            }
            let Some(key) = next.or_else(|| this.next()) else {
                return Poll::Ready(Ok(this.forgotten));
            };
            let mut looks = 0;
            match loop {
                match this.device.shared.forget(&this.device.source, key)? {
                    Forget::Busy if looks < LOOKS => looks += 1,
                    forgotten => break forgotten,
                }
                hint::spin_loop();
            } {
                Forget::Done(was_there) => this.forgotten += u64::from(was_there),
                Forget::Loading(place) => {
                    this.waiting = Some((key, Waiting { device: this.device.clone(), place }));
                }
                Forget::Busy if mutant("forget-overlooks-who-is-busy") => {}
                Forget::Busy => {
                    this.again = Some(key);
                    context.waker().wake_by_ref();
                    return Poll::Pending;
                }
            }
        }
    }
}

impl fmt::Debug for Invalidation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Invalidation").field("left", &self.left).finish_non_exhaustive()
    }
}
