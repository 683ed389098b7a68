//! Lists of frames: each frame has a node, which is on at most one list.
//!
//! Nothing here allocates after `new`.

use offlock_percpu::AllocError;

use crate::frames::{Frame, NIL, Place};
use crate::region::boxed;

/// The list that a node is on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum On {
    /// No list: the frame is free, or a thread owns it.
    None,
    /// A list of the policy, which defines the numbers.
    Policy(u8),
    /// The list of invalidated buffers, which are freed when no slot and no pin holds them.
    Dead,
}

/// The links of one frame.
#[derive(Clone, Debug)]
pub(crate) struct Node {
    prev: u32,
    next: u32,
    pub(crate) on: On,
    /// The list of the policy from which the buffer would have been evicted if it were not dirty.
    pub(crate) due: Option<u8>,
}

/// A doubly linked list through the nodes, the newest first.
#[derive(Clone, Copy, Debug)]
pub(crate) struct List {
    first: u32,
    last: u32,
    pub(crate) len: usize,
}

/// The nodes of all frames.
#[derive(Debug)]
pub(crate) struct Nodes(Box<[Node]>);

impl List {
    pub(crate) const fn new() -> Self {
        Self { first: NIL, last: NIL, len: 0 }
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.first == NIL
    }
}

impl Nodes {
    pub(crate) fn new(frames: usize) -> Result<Self, AllocError> {
        let (prev, next, on) = (NIL, NIL, On::None);
        let node = Node { prev, next, on, due: None };
        Ok(Self(boxed(node, frames)?))
    }

    pub(crate) fn of(&mut self, frame: Frame) -> &mut Node {
        &mut self.0[frame.0 as usize]
    }

    /// Returns the last frame of a list, the oldest.
    pub(crate) fn last(&self, list: &List) -> Option<Frame> {
        (list.last != NIL).then_some(Frame(list.last))
    }

    /// Returns the frame that is newer than another one on a list of the policy.
    pub(crate) fn before(&self, frame: Frame) -> Option<Frame> {
        let node = &self.0[frame.0 as usize];
        (matches!(node.on, On::Policy(_)) && node.prev != NIL).then_some(Frame(node.prev))
    }

    /// Inserts a frame that is on no list at the front.
    pub(crate) fn push(&mut self, list: &mut List, frame: Frame, on: On) {
        let number = frame.0;
        let node = &mut self.0[number as usize];
        debug_assert!(node.on == On::None);
        (node.prev, node.next, node.on) = (NIL, list.first, on);
        match list.first {
            NIL => list.last = number,
            first => self.0[first as usize].prev = number,
        }
        list.first = number;
        list.len += 1;
    }

    /// Inserts a frame that is on no list at the back.
    pub(crate) fn push_last(&mut self, list: &mut List, frame: Frame, on: On) {
        let number = frame.0;
        let node = &mut self.0[number as usize];
        debug_assert!(node.on == On::None);
        (node.prev, node.next, node.on) = (list.last, NIL, on);
        match list.last {
            NIL => list.first = number,
            last => self.0[last as usize].next = number,
        }
        list.last = number;
        list.len += 1;
    }

    /// Removes a frame from the list that it is on.
    pub(crate) fn remove(&mut self, list: &mut List, frame: Frame) {
        let node = &mut self.0[frame.0 as usize];
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
    }
}

/// A buffer to evict: its frame and its entry.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Victim {
    pub(crate) frame: Frame,
    pub(crate) place: Place,
}

impl Victim {
    pub(crate) const NONE: Self = Self { frame: Frame(0), place: 0 };
}
