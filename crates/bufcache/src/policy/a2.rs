//! S3-FIFO with three changes.
//!
//! ```text
//!           ┌─ evicted lately ──────────────────────┐
//!  insert ──┤                                       ▼
//!           └─► probation: newer half │ older half ──► main ◄─┐
//!                                      │   used     │    └────┘ used
//!                                      ▼ not used   ▼ not used
//!                                     ghost        gone
//! ```
//!
//! Probation is a tenth. Changed, each because it gained hits on the traces of the benches:
//!
//! - The main list is filled first, so that a cache that is not full yet evicts nothing early.
//! - Hits in the newer half of probation do not count: they are the same use, a moment later. The bit
//!   `NEW` says so, and a hit there writes nothing.
//! - One hit in the older half is enough to stay.
//!
//! The original is by Yang, Zhang, Qiu, Yue and Rashmi (SOSP 2023).

use percpu::AllocError;

use super::ghost::Ghost;
use super::{Buffers, Looks, mark};
use crate::cold::{List, Nodes, On, Victim};
use crate::frames::Frame;
use crate::word::{Key, NEW};

const NEWER: u8 = 0;
const OLDER: u8 = 1;
const MAIN: u8 = 2;

#[derive(Debug)]
pub(crate) struct A2 {
    newer: List,
    older: List,
    main: List,
    ghost: Ghost,
    /// Units of all, and of probation.
    units: usize,
    probation: usize,
    /// Nothing was evicted yet. Room in the main list says nothing later on: each eviction from it
    /// leaves some, which is probation's if that has too little.
    filling: bool,
}

/// Probation has one unit in so many.
const PROBATION: usize = 10;

impl A2 {
    pub(crate) fn new(units: usize) -> Result<Self, AllocError> {
        let probation = (units / PROBATION).max(1);
        let [newer, older, main] = [List::new(); 3];
        let ghost = Ghost::new(units)?;
        Ok(Self { newer, older, main, ghost, units, probation, filling: true })
    }

    pub(crate) fn resize(&mut self, units: usize) {
        self.filling |= units > self.units;
        self.units = units;
        self.probation = (units / PROBATION).max(1);
        self.ghost.resize(units);
    }

    pub(crate) fn len(&self) -> usize {
        self.newer.len + self.older.len + self.main.len
    }

    fn list(&mut self, which: u8) -> &mut List {
        match which {
            NEWER => &mut self.newer,
            OLDER => &mut self.older,
            _ => &mut self.main,
        }
    }

    pub(crate) fn insert(
        &mut self,
        nodes: &mut Nodes,
        buffers: &impl Buffers,
        frame: Frame,
        key: Key,
    ) {
        let room = self.main.units + (1 << frame.class()) + self.probation <= self.units;
        if self.ghost.take(key) || (self.filling && room) {
            nodes.push(&mut self.main, frame, On::Policy(MAIN));
            return;
        }
        buffers.entry(frame).change(NEW, 0);
        nodes.push(&mut self.newer, frame, On::Policy(NEWER));
        // One comes in, one grows old.
        if self.newer.units > self.probation / 2 {
            if let Some(aged) = nodes.last(&self.newer) {
                nodes.remove(&mut self.newer, aged);
                buffers.entry(aged).change(0, NEW);
                nodes.push(&mut self.older, aged, On::Policy(OLDER));
            }
        }
    }

    pub(crate) fn pick(
        &mut self,
        nodes: &mut Nodes,
        buffers: &impl Buffers,
        looks: &mut Looks,
    ) -> Option<Victim> {
        self.filling = false;
        while looks.left > 0 {
            looks.left -= 1;
            let on_probation = self.newer.units + self.older.units;
            let which =
                if on_probation < self.probation && looks.has_more(looks.main, self.main.len) {
                    MAIN
                } else if !self.older.is_empty() {
                    OLDER
                } else if !self.newer.is_empty() {
                    NEWER
                } else {
                    MAIN
                };
            let list = self.list(which);
            let frame = nodes.last(list)?;
            nodes.remove(list, frame);
            let entry = buffers.entry(frame);
            let node = nodes.of(frame);
            let stays = if looks.outweighs(&mut node.weight) {
                true
            } else if which == MAIN {
                entry.take_used(|used| used.saturating_sub(1)) > 0 && looks.count_uses()
            } else {
                entry.take_used(|_| 0) > 0 && looks.count_uses()
            };
            looks.lowered |= stays;
            if !stays && mark(entry) {
                if which != MAIN {
                    self.ghost.add(entry.key());
                }
                return Some(buffers.victim(frame, On::Policy(which)));
            }
            if which == NEWER {
                entry.change(0, NEW);
            }
            self.keep(nodes, frame);
            if stays && which == MAIN {
                looks.lower();
            } else {
                looks.main += 1;
            }
        }
        None
    }

    pub(crate) fn keep(&mut self, nodes: &mut Nodes, frame: Frame) {
        nodes.push(&mut self.main, frame, On::Policy(MAIN));
    }

    pub(crate) fn put_back(&mut self, nodes: &mut Nodes, frame: Frame, list: u8) {
        nodes.push_last(self.list(list), frame, On::Policy(list));
    }

    pub(crate) fn lose(&mut self, list: u8, key: Key) {
        if list != MAIN {
            self.ghost.add(key);
        }
    }

    pub(crate) fn remove(&mut self, nodes: &mut Nodes, frame: Frame, list: u8) {
        nodes.remove(self.list(list), frame);
    }
}
