//! Lists of frames: each unit has a node, and the node of a frame is on at most one list.
//!
//! Nothing here allocates after `new`.

use percpu::AllocError;

use crate::frames::{Frame, NIL, Place};
use crate::region::boxed;

/// The list that a node is on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum On {
    /// No list: a thread owns the frame, or the unit is not the first of a frame.
    None,
    /// The free list of its size class.
    Free,
    /// A list of the policy, which defines the numbers.
    Policy(u8),
    /// The list of invalidated buffers, which are freed when no slot and no pin holds them.
    Dead,
}

/// The links of one unit, used by the first unit of a frame.
#[derive(Clone, Debug)]
pub(crate) struct Node {
    prev: u32,
    next: u32,
    pub(crate) on: On,
    pub(crate) class: u8,
    /// The list of the policy from which the buffer would have been evicted if it were not dirty.
    pub(crate) due: Option<u8>,
}

/// A doubly linked list through the nodes, the newest first.
#[derive(Clone, Copy, Debug)]
pub(crate) struct List {
    first: u32,
    last: u32,
    pub(crate) len: usize,
    /// The size of its frames in units.
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
        let (prev, next, on) = (NIL, NIL, On::None);
        let node = Node { prev, next, on, class: 0, due: None };
        Ok(Self(boxed(node, units)?))
    }

    pub(crate) fn of(&mut self, frame: Frame) -> &mut Node {
        &mut self.0[frame.unit() as usize]
    }

    /// Returns the list that a frame is on.
    pub(crate) fn on(&self, frame: Frame) -> On {
        self.0[frame.unit() as usize].on
    }

    fn frame(&self, unit: u32) -> Frame {
        Frame::new(unit, self.0[unit as usize].class)
    }

    /// Returns the last frame of a list, the oldest.
    pub(crate) fn last(&self, list: &List) -> Option<Frame> {
        (list.last != NIL).then(|| self.frame(list.last))
    }

    /// Returns the frame that is newer than another one on a list of the policy.
    pub(crate) fn before(&self, frame: Frame) -> Option<Frame> {
        let node = &self.0[frame.unit() as usize];
        (matches!(node.on, On::Policy(_)) && node.prev != NIL).then(|| self.frame(node.prev))
    }

    /// Returns the first frame of a list, the newest.
    pub(crate) fn first(&self, list: &List) -> Option<Frame> {
        (list.first != NIL).then(|| self.frame(list.first))
    }

    /// Inserts a frame that is on no list at the front.
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

    /// Inserts a frame that is on no list at the back.
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

    /// Removes a frame from the list that it is on.
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

/// A buffer to evict: its frame, its entry, and the list that it was on.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Victim {
    pub(crate) frame: Frame,
    pub(crate) place: Place,
    pub(crate) on: On,
}

impl Victim {
    pub(crate) const NONE: Self = Self { frame: Frame(0), place: 0, on: On::None };
}
