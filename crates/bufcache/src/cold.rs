//! The frames of a cache under one lock, which misses take: free ones in chunks, and buffers in the
//! order of eviction.
//!
//! Nothing here allocates after `new`, and no call walks a list further than its budget.

use percpu::AllocError;

use crate::frames::Frame;
use crate::nodes::{List, Nodes, On, Victim};
use crate::policy::{Looks, Policy};
use crate::region::boxed;

/// The number of size classes: from one unit to 128.
const CLASSES: usize = 8;

/// The lists of a cache, and its chunks.
#[derive(Debug)]
pub(crate) struct Cold {
    pub(crate) nodes: Nodes,
    pub(crate) policy: Policy,
    free: [List; CLASSES],
    pub(crate) dead: List,
    /// The number of units in use of each chunk. A chunk without any is not cut into frames.
    chunks: Box<[u32]>,
    /// The binary logarithm of the units of a chunk.
    chunk: u8,
    /// The number of the first chunk that was never used.
    fresh: u32,
    /// Used chunks that are not cut into frames now.
    empty: Vec<u32>,
    /// The number of chunks that may be cut into frames.
    limit: u32,
    /// The number of chunks that are cut into frames.
    in_use: u32,
}

impl Cold {
    pub(crate) fn new(units: usize, chunk: u8, policy: Policy) -> Result<Self, AllocError> {
        let chunks = units >> chunk;
        let mut empty = Vec::new();
        empty.try_reserve_exact(chunks).map_err(|_| AllocError::new())?;
        Ok(Self {
            nodes: Nodes::new(units)?,
            policy,
            free: [const { List::new() }; CLASSES],
            dead: List::new(),
            chunks: boxed(0, chunks)?,
            chunk,
            fresh: 0,
            empty,
            limit: chunks as u32,
            in_use: 0,
        })
    }

    /// Takes a free frame of that class, if there is one.
    pub(crate) fn take(&mut self, class: u8) -> Option<Frame> {
        if self.exceeds_limit() {
            return None;
        }
        if class == self.chunk {
            // A chunk of one frame is on no list.
            let frame = self.take_chunk(class)?;
            self.nodes.of(frame).class = class;
            self.chunks[(frame.unit() >> self.chunk) as usize] = 1 << class;
            return Some(frame);
        }
        if self.free[usize::from(class)].is_empty() {
            self.carve(class)?;
        }
        let free = &mut self.free[usize::from(class)];
        let frame = self.nodes.first(free)?;
        self.nodes.remove(free, frame);
        self.chunks[(frame.unit() >> self.chunk) as usize] += 1 << class;
        Some(frame)
    }

    /// Returns whether more units are free than evictions leave: one in 64. Evictions are in
    /// batches of as many at most, by each thread that misses.
    pub(crate) fn has_room(&self, class: u8) -> bool {
        let unused = (self.limit.saturating_sub(self.in_use) as usize) << self.chunk;
        !self.exceeds_limit() && unused + self.free[usize::from(class)].units > self.limit() / 64
    }

    /// Takes an unused chunk, if there is one. Returns its first frame of that class.
    fn take_chunk(&mut self, class: u8) -> Option<Frame> {
        if self.in_use == self.limit {
            return None;
        }
        self.in_use += 1;
        let chunk = self.empty.pop().unwrap_or_else(|| {
            self.fresh += 1;
            self.fresh - 1
        });
        Some(Frame::new(chunk << self.chunk, class))
    }

    /// Cuts an unused chunk into frames. Returns `None` if there is none.
    fn carve(&mut self, class: u8) -> Option<()> {
        let first = self.take_chunk(class)?;
        for frame in self.frames_beside(first) {
            self.nodes.of(frame).class = class;
            self.nodes.push(&mut self.free[usize::from(class)], frame, On::Free);
        }
        Some(())
    }

    /// Frees a frame that is on no list. Returns whether its memory can be released: its chunk has
    /// no frame in use, and the cache has more chunks than its limit.
    pub(crate) fn give(&mut self, frame: Frame) -> bool {
        let class = frame.class();
        let chunk = frame.unit() >> self.chunk;
        let used = &mut self.chunks[chunk as usize];
        *used -= 1 << class;
        let free = &mut self.free[usize::from(class)];
        if *used > 0 {
            self.nodes.push(free, frame, On::Free);
            return false;
        }
        // The last frame of its chunk in use: the chunk is not cut into frames any more.
        for at in (0..1_u32 << self.chunk).step_by(1 << class) {
            let other = Frame::new((chunk << self.chunk) + at, class);
            if other != frame {
                self.nodes.remove(free, other);
            }
        }
        let over = self.exceeds_limit();
        self.in_use -= 1;
        self.empty.push(chunk); // within the capacity reserved in `new`
        over
    }

    /// Removes a buffer from the list that it may be evicted from. Returns whether it was on one.
    pub(crate) fn withdraw(&mut self, frame: Frame) -> bool {
        let Self { nodes, policy, .. } = self;
        let On::Policy(list) = nodes.of(frame).on else { return false };
        policy.remove(nodes, frame, list);
        true
    }

    /// Puts a buffer back on its list, as the next to be evicted.
    pub(crate) fn put_back(&mut self, victim: Victim) {
        if let On::Policy(list) = victim.on {
            self.policy.put_back(&mut self.nodes, victim.frame, list);
        }
    }

    /// Puts a buffer that was not evicted back, as the last to be evicted.
    pub(crate) fn keep(&mut self, frame: Frame, looks: &mut Looks) {
        self.policy.keep(&mut self.nodes, frame);
        looks.main += 1;
    }

    /// Takes a given free frame.
    pub(crate) fn hold(&mut self, frame: Frame) {
        self.nodes.remove(&mut self.free[usize::from(frame.class())], frame);
        self.chunks[(frame.unit() >> self.chunk) as usize] += 1 << frame.class();
    }

    /// Returns whether a frame of that class may need a whole chunk that has smaller frames.
    pub(crate) fn may_need_chunk(&self, class: u8) -> bool {
        class > 0 || (self.chunk > 0 && self.exceeds_limit())
    }

    /// Returns the class of the frames to evict for one of `class`: whole chunks if the cache is
    /// over its limit.
    pub(crate) fn wanted(&self, class: u8) -> u8 {
        if self.exceeds_limit() { self.chunk } else { class }
    }

    /// Returns all frames of the chunk of `frame`.
    pub(crate) fn frames_beside(&self, frame: Frame) -> impl Iterator<Item = Frame> + use<> {
        let (class, first) = (frame.class(), self.chunk_of(frame).unit());
        (first..first + (1 << self.chunk)).step_by(1 << class).map(move |at| Frame::new(at, class))
    }

    /// Returns the chunk of `frame`, as one frame.
    pub(crate) fn chunk_of(&self, frame: Frame) -> Frame {
        Frame::new(frame.unit() >> self.chunk << self.chunk, self.chunk)
    }

    /// Returns the `number`th used chunk that is not cut into frames now, as one frame.
    pub(crate) fn unused(&self, number: usize) -> Option<Frame> {
        self.empty.get(number).map(|&chunk| Frame::new(chunk << self.chunk, self.chunk))
    }

    /// Limits the units in use, rounded down to chunks. Chunks beyond the limit stay in use until
    /// they are freed.
    pub(crate) fn set_limit(&mut self, units: usize) {
        let chunks = (units >> self.chunk).min(self.chunks.len());
        self.limit = chunks as u32;
        self.policy.resize(chunks << self.chunk);
    }

    /// Returns whether more chunks are in use than the limit.
    pub(crate) fn exceeds_limit(&self) -> bool {
        self.in_use > self.limit
    }

    /// Returns whether a miss has found the cache full, and not much has become free since.
    pub(crate) fn is_nearly_full(&self) -> bool {
        self.policy.is_full() && 16 * self.policy.units() >= 15 * self.limit()
    }

    /// Returns the units of the chunks that are cut into frames.
    pub(crate) fn units_in_use(&self) -> usize {
        (self.in_use as usize) << self.chunk
    }

    /// Returns the limit in units.
    pub(crate) fn limit(&self) -> usize {
        (self.limit as usize) << self.chunk
    }
}
