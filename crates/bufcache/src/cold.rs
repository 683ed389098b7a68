//! The frames of a cache under one lock, which misses take: free ones, and buffers in the order of
//! eviction.
//!
//! Nothing here allocates after `new`, and no call walks a list further than its budget.

use offlock_percpu::AllocError;

use crate::frames::Frame;
use crate::nodes::{List, Nodes, On};
use crate::policy::{Looks, Policy};

/// The lists of a cache.
#[derive(Debug)]
pub(crate) struct Cold {
    pub(crate) nodes: Nodes,
    pub(crate) policy: Policy,
    pub(crate) dead: List,
    /// The number of the first frame that was never used.
    fresh: u32,
    /// Used frames that are free now. The one that was freed last is taken first.
    free: Vec<Frame>,
    /// The number of frames that may be in use.
    limit: usize,
    in_use: usize,
}

impl Cold {
    pub(crate) fn new(frames: usize, policy: Policy) -> Result<Self, AllocError> {
        let mut free = Vec::new();
        free.try_reserve_exact(frames).map_err(|_| AllocError::new())?;
        let (nodes, dead) = (Nodes::new(frames)?, List::new());
        Ok(Self { nodes, policy, dead, fresh: 0, free, limit: frames, in_use: 0 })
    }

    /// Takes a free frame, if there is one.
    pub(crate) fn take(&mut self) -> Option<Frame> {
        if self.in_use >= self.limit {
            return None;
        }
        self.in_use += 1;
        let freed = self.free.pop();
        Some(freed.unwrap_or_else(|| {
            self.fresh += 1;
            Frame(self.fresh - 1)
        }))
    }

    /// Frees a frame that is on no list. Returns whether its memory can be released, because the
    /// cache has more frames than its limit.
    pub(crate) fn give(&mut self, frame: Frame) -> bool {
        let over = self.exceeds_limit();
        self.in_use -= 1;
        self.free.push(frame); // within the capacity reserved in `new`
        over
    }

    /// Returns whether more frames are free than evictions leave: one in 64. Evictions are in
    /// batches of as many at most, by each thread that misses.
    pub(crate) fn has_room(&self) -> bool {
        self.limit.saturating_sub(self.in_use) > self.limit / 64
    }

    /// Removes a buffer from the list that it may be evicted from. Returns whether it was on one.
    pub(crate) fn withdraw(&mut self, frame: Frame) -> bool {
        let Self { nodes, policy, .. } = self;
        let On::Policy(list) = nodes.of(frame).on else { return false };
        policy.remove(nodes, frame, list);
        true
    }

    /// Puts a buffer that was not evicted back, as the last to be evicted.
    pub(crate) fn keep(&mut self, frame: Frame, looks: &mut Looks) {
        self.policy.keep(&mut self.nodes, frame);
        looks.main += 1;
    }

    /// Returns the `number`th used frame that is free now.
    pub(crate) fn unused(&self, number: usize) -> Option<Frame> {
        self.free.get(number).copied()
    }

    /// Limits the frames in use. Frames beyond the limit stay in use until they are freed.
    pub(crate) fn set_limit(&mut self, frames: usize) {
        self.limit = frames.min(self.free.capacity());
        self.policy.resize(self.limit);
    }

    /// Returns whether more frames are in use than the limit.
    pub(crate) fn exceeds_limit(&self) -> bool {
        self.in_use > self.limit
    }

    /// Returns whether a miss has found the cache full, and not much has become free since.
    pub(crate) fn is_nearly_full(&self) -> bool {
        self.policy.is_full() && 16 * self.policy.len() >= 15 * self.limit
    }

    /// Returns the number of frames in use.
    pub(crate) fn in_use(&self) -> usize {
        self.in_use
    }

    /// Returns the limit in frames.
    pub(crate) fn limit(&self) -> usize {
        self.limit
    }
}
