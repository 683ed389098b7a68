//! What misses need under a lock: which frames are free, and which buffers are to go first.
//!
//! Every frame has a node, which is on one list at a time: free, of the policy, or dead. Nothing here
//! allocates, and no list is walked further than a call's budget.

use percpu::AllocError;

use crate::frames::Frame;
use crate::policy::{Looks, Policy};
use crate::region::boxed;
use crate::table::Place;

pub(crate) const NIL: u32 = u32::MAX;

/// Which list a node is on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum On {
    /// None: the frame is in somebody's hands, or is not the first unit of a frame.
    None,
    Free,
    /// Of the policy; which of its lists is its own business.
    Policy(u8),
    /// Read once: the first to go.
    Scanned,
    /// Invalidated: free once nobody looks at it.
    Dead,
}

#[derive(Clone, Debug)]
pub(crate) struct Node {
    prev: u32,
    next: u32,
    pub(crate) on: On,
    class: u8,
    /// Passes of the evictor it survives.
    pub(crate) weight: u8,
    /// Read by somebody who will not come again.
    pub(crate) once: bool,
}

/// A list through the nodes: newest first.
#[derive(Clone, Copy, Debug)]
pub(crate) struct List {
    first: u32,
    last: u32,
    pub(crate) len: usize,
    /// The same, in units.
    pub(crate) units: usize,
}

/// The nodes of all units.
#[derive(Debug)]
pub(crate) struct Nodes(Box<[Node]>);

impl List {
    pub(crate) const fn new() -> Self {
        Self { first: NIL, last: NIL, len: 0, units: 0 }
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.first == NIL
    }
}

impl Nodes {
    pub(crate) fn new(units: usize) -> Result<Self, AllocError> {
        let node = Node { prev: NIL, next: NIL, on: On::None, class: 0, weight: 0, once: false };
        Ok(Self(boxed(node, units)?))
    }

    pub(crate) fn of(&mut self, frame: Frame) -> &mut Node {
        &mut self.0[frame.unit() as usize]
    }

    fn frame(&self, unit: u32) -> Frame {
        Frame::new(unit, self.0[unit as usize].class)
    }

    /// The oldest of a list.
    pub(crate) fn last(&self, list: &List) -> Option<Frame> {
        (list.last != NIL).then(|| self.frame(list.last))
    }

    /// The first of a list.
    fn first(&self, list: &List) -> Option<Frame> {
        (list.first != NIL).then(|| self.frame(list.first))
    }

    /// Puts a frame that is on no list in front.
    pub(crate) fn push(&mut self, list: &mut List, frame: Frame, on: On) {
        let unit = frame.unit();
        let node = &mut self.0[unit as usize];
        debug_assert!(node.on == On::None);
        (node.prev, node.next, node.on) = (NIL, list.first, on);
        match list.first {
            NIL => list.last = unit,
            first => self.0[first as usize].prev = unit,
        }
        list.first = unit;
        list.len += 1;
        list.units += 1 << frame.class();
    }

    /// Puts a frame that is on no list behind the others.
    pub(crate) fn push_last(&mut self, list: &mut List, frame: Frame, on: On) {
        let unit = frame.unit();
        let node = &mut self.0[unit as usize];
        debug_assert!(node.on == On::None);
        (node.prev, node.next, node.on) = (list.last, NIL, on);
        match list.last {
            NIL => list.first = unit,
            last => self.0[last as usize].next = unit,
        }
        list.last = unit;
        list.len += 1;
        list.units += 1 << frame.class();
    }

    /// Takes a frame off the list it is on.
    pub(crate) fn remove(&mut self, list: &mut List, frame: Frame) {
        let node = &mut self.0[frame.unit() as usize];
        debug_assert!(node.on != On::None);
        node.on = On::None;
        let (prev, next) = (node.prev, node.next);
        match prev {
            NIL => list.first = next,
            prev => self.0[prev as usize].next = next,
        }
        match next {
            NIL => list.last = prev,
            next => self.0[next as usize].prev = prev,
        }
        list.len -= 1;
        list.units -= 1 << frame.class();
    }
}

/// Sizes from one unit to 128.
const CLASSES: usize = 8;

#[derive(Debug)]
pub(crate) struct Cold {
    pub(crate) nodes: Nodes,
    pub(crate) policy: Policy,
    free: [List; CLASSES],
    pub(crate) dead: List,
    pub(crate) scanned: List,
    /// Of each chunk: units in use. A chunk without any has no size of its own.
    chunks: Box<[u32]>,
    /// Log of the units of a chunk.
    chunk: u8,
    /// Chunks from here on were never used.
    fresh: u32,
    /// Chunks before it without a size.
    empty: Vec<u32>,
    /// Chunks that may be in use.
    limit: u32,
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
            scanned: List::new(),
            chunks: boxed(0, chunks)?,
            chunk,
            fresh: 0,
            empty,
            limit: chunks as u32,
            in_use: 0,
        })
    }

    /// A frame of that class, if there is a free one.
    pub(crate) fn take(&mut self, class: u8) -> Option<Frame> {
        if self.is_over() || (self.free[usize::from(class)].is_empty() && !self.carve(class)) {
            return None;
        }
        let free = &mut self.free[usize::from(class)];
        let frame = self.nodes.first(free)?;
        self.nodes.remove(free, frame);
        self.chunks[(frame.unit() >> self.chunk) as usize] += 1 << class;
        Some(frame)
    }

    /// Cuts a chunk without a size into frames.
    fn carve(&mut self, class: u8) -> bool {
        if self.in_use == self.limit {
            return false;
        }
        let chunk = match self.empty.pop() {
            Some(chunk) => chunk,
            None => {
                self.fresh += 1;
                self.fresh - 1
            }
        };
        self.in_use += 1;
        for at in (0..1_u32 << self.chunk).step_by(1 << class) {
            let frame = Frame::new((chunk << self.chunk) + at, class);
            self.nodes.of(frame).class = class;
            self.nodes.push(&mut self.free[usize::from(class)], frame, On::Free);
        }
        true
    }

    /// Takes a frame back that is on no list. Returns whether its chunk has none in use any more, and no
    /// place: its memory is of no use now.
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
        // The last of its chunk, which has no size then.
        for at in (0..1_u32 << self.chunk).step_by(1 << class) {
            let other = Frame::new((chunk << self.chunk) + at, class);
            if other != frame {
                self.nodes.remove(free, other);
            }
        }
        let over = self.is_over();
        self.in_use -= 1;
        self.empty.push(chunk); // there is room for all
        over
    }

    /// Takes a buffer off the list that it may be evicted from. Returns whether it was on one.
    pub(crate) fn withdraw(&mut self, frame: Frame) -> bool {
        let Self { nodes, policy, scanned, .. } = self;
        match nodes.of(frame).on {
            On::Policy(list) => policy.remove(nodes, frame, list),
            On::Scanned => nodes.remove(scanned, frame),
            On::None | On::Free | On::Dead => return false,
        }
        true
    }

    /// Puts a buffer back where the policy had it, as the next to go.
    pub(crate) fn put_back(&mut self, victim: Victim) {
        let Self { nodes, policy, scanned, .. } = self;
        match victim.on {
            On::Policy(list) => policy.put_back(nodes, victim.frame, list),
            _ => nodes.push_last(scanned, victim.frame, On::Scanned),
        }
    }

    /// Puts a buffer behind the others that stays, though it was looked at.
    pub(crate) fn keep(&mut self, frame: Frame, looks: &mut Looks) {
        let Self { nodes, policy, scanned, .. } = self;
        if nodes.of(frame).once {
            nodes.push(scanned, frame, On::Scanned);
            looks.scanned += 1;
        } else {
            policy.keep(nodes, frame);
            looks.main += 1;
        }
    }

    /// Takes a frame that is free.
    pub(crate) fn hold(&mut self, frame: Frame) {
        self.nodes.remove(&mut self.free[usize::from(frame.class())], frame);
        self.chunks[(frame.unit() >> self.chunk) as usize] += 1 << frame.class();
    }

    /// Whether a frame of that size can take a chunk that has smaller ones.
    pub(crate) fn may_need_chunk(&self, class: u8) -> bool {
        class > 0 || (self.chunk > 0 && self.is_over())
    }

    /// The class of the frames that are wanted, where one of that class is: chunks, if there are too many.
    pub(crate) fn wanted(&self, class: u8) -> u8 {
        if self.is_over() { self.chunk } else { class }
    }

    /// All frames of the chunk that one of them is in.
    pub(crate) fn frames_beside(&self, frame: Frame) -> impl Iterator<Item = Frame> + use<> {
        let (class, first) = (frame.class(), self.chunk_of(frame).unit());
        (first..first + (1 << self.chunk)).step_by(1 << class).map(move |at| Frame::new(at, class))
    }

    /// The chunk that the frame is in, as one frame.
    pub(crate) fn chunk_of(&self, frame: Frame) -> Frame {
        Frame::new(frame.unit() >> self.chunk << self.chunk, self.chunk)
    }

    /// A chunk without a size, as one frame: the `number`th of those that were used, if there are so many.
    pub(crate) fn unused(&self, number: usize) -> Option<Frame> {
        self.empty.get(number).map(|&chunk| Frame::new(chunk << self.chunk, self.chunk))
    }

    /// Lets so many units be in use, as far as there are any. What is in use beyond it stays until it
    /// is given back.
    pub(crate) fn set_limit(&mut self, units: usize) {
        let chunks = (units >> self.chunk).min(self.chunks.len());
        self.limit = chunks as u32;
        self.policy.resize(chunks << self.chunk);
    }

    /// Whether frames must be given back.
    pub(crate) fn is_over(&self) -> bool {
        self.in_use > self.limit
    }

    /// Units that buffers have, and those that are free in chunks with a size.
    pub(crate) fn units_in_use(&self) -> usize {
        (self.in_use as usize) << self.chunk
    }

    pub(crate) fn limit(&self) -> usize {
        (self.limit as usize) << self.chunk
    }
}

/// A buffer that may go: its frame and its entry, and which list it was on.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Victim {
    pub(crate) frame: Frame,
    pub(crate) place: Place,
    pub(crate) on: On,
}

impl Victim {
    pub(crate) const NONE: Self = Self { frame: Frame(0), place: 0, on: On::None };
}
