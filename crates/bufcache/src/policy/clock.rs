//! Second chances: one circle, and a hand that takes what was not used since it came by last.

use super::{Buffers, Looks, mark};
use crate::cold::{List, Nodes, On, Victim};
use crate::frames::Frame;

/// The circle is a list: what the hand passes goes to its front.
#[derive(Debug)]
pub(crate) struct Clock {
    all: List,
}

impl Clock {
    pub(crate) fn new() -> Self {
        Self { all: List::new() }
    }

    pub(crate) fn len(&self) -> usize {
        self.all.len
    }

    pub(crate) fn insert(&mut self, nodes: &mut Nodes, frame: Frame) {
        nodes.push(&mut self.all, frame, On::Policy(0));
    }

    pub(crate) fn pick(
        &mut self,
        nodes: &mut Nodes,
        buffers: &impl Buffers,
        looks: &mut Looks,
    ) -> Option<Victim> {
        while looks.left > 0 {
            looks.left -= 1;
            let frame = nodes.last(&self.all)?;
            nodes.remove(&mut self.all, frame);
            let node = nodes.of(frame);
            let entry = buffers.entry(frame);
            if looks.outweighs(&mut node.weight)
                || (entry.take_used(|_| 0) > 0 && looks.count_uses())
            {
                looks.lowered = true;
            } else if mark(entry) {
                return Some(buffers.victim(frame, On::Policy(0)));
            }
            self.insert(nodes, frame);
        }
        None
    }

    pub(crate) fn put_back(&mut self, nodes: &mut Nodes, frame: Frame) {
        nodes.push_last(&mut self.all, frame, On::Policy(0));
    }

    pub(crate) fn remove(&mut self, nodes: &mut Nodes, frame: Frame) {
        nodes.remove(&mut self.all, frame);
    }
}
