//! The lists of the buffers, under one of three rules.
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
//! [`Eviction::A2`] is S3-FIFO with four changes, each of which gained hits on the traces of the benches:
//!
//! - The main list is filled first, so that a cache that is not full yet evicts nothing early.
//! - Hits in the newer half of probation do not count: they are the same use, a moment later. The bit
//!   `NEW` says so, and a hit there writes nothing.
//! - One hit in the older half is enough to stay.
//! - Twice as many ghosts as there are buffers.
//!
//! [`Eviction::A2Small`] has a tenth of that probation, and a gate: a ghost enters main only in place of main's
//! oldest buffer, if that was not used since; else that buffer loses a use. [`Eviction::Clock`] has no
//! probation, and one look takes all uses of a buffer. The rule may change at any time: the buffers stay on
//! their lists, and those on probation leave it as the new rule evicts.
//!
//! S3-FIFO is by Yang, Zhang, Qiu, Yue and Rashmi (SOSP 2023).

use percpu::AllocError;

use super::ghost::Ghost;
use super::{Buffers, Eviction, Looks, mark};
use crate::cold::{List, Nodes, On, Victim};
use crate::frames::Frame;
use crate::word::{Key, NEW};

const NEWER: u8 = 0;
const OLDER: u8 = 1;
const MAIN: u8 = 2;

/// Ghosts per unit: with one, the hits of P3 with room for 5 % were 2 points fewer.
const GHOSTS: usize = 2;

#[derive(Debug)]
pub(crate) struct Policy {
    newer: List,
    older: List,
    main: List,
    ghost: Ghost,
    rule: Eviction,
    /// Units of all, and of probation.
    units: usize,
    probation: usize,
    /// No miss has found the cache full yet. Room in the main list says nothing later on: each eviction from
    /// it leaves some, which is probation's if that has too little.
    filling: bool,
}

impl Policy {
    /// For that many units, in at most so many buffers.
    pub(crate) fn new(rule: Eviction, units: usize) -> Result<Self, AllocError> {
        let [newer, older, main] = [List::new(); 3];
        let ghost = Ghost::new(if rule == Eviction::Clock { 1 } else { units * GHOSTS })?;
        let mut new = Self { newer, older, main, ghost, rule, units, probation: 0, filling: true };
        new.set_rule(rule);
        Ok(new)
    }

    /// The rule from now on.
    pub(crate) fn set_rule(&mut self, rule: Eviction) {
        self.rule = rule;
        self.probation = match rule {
            Eviction::A2 | Eviction::Adaptive => (self.units / 10).max(1),
            Eviction::A2Small => (self.units / 100).max(1),
            Eviction::Clock => 0,
        };
    }

    pub(crate) fn rule(&self) -> Eviction {
        self.rule
    }

    /// Whether a miss has found the cache full since it got its size.
    pub(crate) fn is_full(&self) -> bool {
        !self.filling
    }

    /// A miss finds the cache full.
    pub(crate) fn note_full(&mut self) {
        self.filling = false;
    }

    /// The cache has that many units now.
    pub(crate) fn resize(&mut self, units: usize) {
        self.filling |= units > self.units;
        self.units = units;
        self.ghost.resize(units * GHOSTS);
        self.set_rule(self.rule);
    }

    /// Buffers on its lists.
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

    /// Takes in a buffer that is on no list.
    pub(crate) fn insert(
        &mut self,
        nodes: &mut Nodes,
        buffers: &impl Buffers,
        frame: Frame,
        key: Key,
    ) {
        let room = self.main.units + (1 << frame.class()) + self.probation <= self.units;
        let goes_to_main = self.rule == Eviction::Clock
            || (self.filling && room)
            || (self.ghost.take(key) && self.passes_gate(nodes, buffers));
        if goes_to_main {
            return self.keep(nodes, frame);
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

    /// Whether a ghost may enter main. Main ages with each one that may not.
    fn passes_gate(&mut self, nodes: &mut Nodes, buffers: &impl Buffers) -> bool {
        if self.rule != Eviction::A2Small {
            return true;
        }
        let Some(oldest) = nodes.last(&self.main) else { return true };
        let is_used = buffers.entry(oldest).take_used(|used| used.saturating_sub(1)) > 0;
        if is_used {
            nodes.remove(&mut self.main, oldest);
            self.keep(nodes, oldest);
        }
        !is_used
    }

    /// Takes the next to go off its list, marked `EVICT`.
    pub(crate) fn pick(
        &mut self,
        nodes: &mut Nodes,
        buffers: &impl Buffers,
        looks: &mut Looks,
    ) -> Option<Victim> {
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
            let takes_one = which == MAIN && self.rule != Eviction::Clock;
            let stays = looks.outweighs(&mut node.weight)
                || (entry.take_used(|used| if takes_one { used.saturating_sub(1) } else { 0 }) > 0
                    && looks.count_uses());
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

    /// Takes a victim back that is in use after all.
    pub(crate) fn keep(&mut self, nodes: &mut Nodes, frame: Frame) {
        nodes.push(&mut self.main, frame, On::Policy(MAIN));
    }

    /// Takes a victim back that is not needed after all: it is the next to go, as it was.
    pub(crate) fn put_back(&mut self, nodes: &mut Nodes, frame: Frame, list: u8) {
        nodes.push_last(self.list(list), frame, On::Policy(list));
    }

    /// A buffer goes that was on that list, and whose turn it was not.
    pub(crate) fn lose(&mut self, list: u8, key: Key) {
        if list != MAIN {
            self.ghost.add(key);
        }
    }

    /// Takes a buffer off whichever of the lists it is on.
    pub(crate) fn remove(&mut self, nodes: &mut Nodes, frame: Frame, list: u8) {
        nodes.remove(self.list(list), frame);
    }
}
