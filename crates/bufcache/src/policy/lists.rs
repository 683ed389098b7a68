//! The lists of the buffers, ordered by one of three rules.
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
//! [`Eviction::A2`] is S3-FIFO with four changes, each of which gains hits on the traces of the
//! benches:
//!
//! - The main list is filled first, so that a cache that is not full yet evicts nothing early.
//! - Hits in the newer half of probation do not count, because they belong to the same use. The
//!   flag `NEW` marks these buffers, and a hit writes nothing.
//! - One hit in the older half of probation is enough for a buffer to enter main.
//! - There are twice as many ghosts as buffers.
//!
//! [`Eviction::A2Small`] has a tenth of that probation, and a gate: a ghost enters main only if
//! main's oldest buffer has no use left; otherwise that buffer loses a use. [`Eviction::Clock`] has
//! no probation, and one visit takes all uses of a buffer. The rule may change at any time: the
//! buffers stay on their lists, and those on probation leave it by evictions under the new rule.
//!
//! S3-FIFO is by Yang, Zhang, Qiu, Yue and Rashmi (SOSP 2023).

use offlock_percpu::AllocError;

use super::ghost::Ghost;
use super::{Buffers, Eviction, Looks, is_evictable_but_dirty, mark};
use crate::frames::Frame;
use crate::nodes::{List, Nodes, On, Victim};
use crate::word::{DIRTY, Key, NEW};

const NEWER: u8 = 0;
const OLDER: u8 = 1;
const MAIN: u8 = 2;

/// Ghosts per buffer. With one, the trace P3 with room for 5 % has 2 points fewer hits.
const GHOSTS: usize = 2;

/// The lists of a cache, or of a shadow.
#[derive(Debug)]
pub(crate) struct Policy {
    newer: List,
    older: List,
    main: List,
    ghost: Ghost,
    rule: Eviction,
    /// The buffers of the cache.
    most: usize,
    /// The buffers of probation.
    probation: usize,
    /// Set until a miss finds the cache full. Later, room in the main list is not a reason to
    /// insert there: it may come from an eviction, and belong to probation.
    filling: bool,
}

impl Policy {
    /// Returns the empty lists of a cache of `most` buffers.
    ///
    /// # Errors
    ///
    /// [`AllocError`] if there is no memory for the ghosts.
    pub(crate) fn new(rule: Eviction, most: usize) -> Result<Self, AllocError> {
        let [newer, older, main] = [List::new(); 3];
        let ghost = Ghost::new(if rule == Eviction::Clock { 1 } else { most * GHOSTS })?;
        let mut new = Self { newer, older, main, ghost, rule, most, probation: 0, filling: true };
        new.set_rule(rule);
        Ok(new)
    }

    /// Sets the rule.
    pub(crate) fn set_rule(&mut self, rule: Eviction) {
        self.rule = rule;
        self.probation = match rule {
            Eviction::A2 | Eviction::Adaptive => (self.most / 10).max(1),
            Eviction::A2Small => (self.most / 100).max(1),
            Eviction::Clock => 0,
        };
    }

    pub(crate) fn rule(&self) -> Eviction {
        self.rule
    }

    /// Returns whether a miss has found the cache full since it last grew.
    pub(crate) fn is_full(&self) -> bool {
        !self.filling
    }

    /// Notes that a miss has found the cache full.
    pub(crate) fn note_full(&mut self) {
        self.filling = false;
        self.ghost.resize(self.len() * GHOSTS);
    }

    /// Sets the number of buffers of the cache.
    pub(crate) fn resize(&mut self, most: usize) {
        self.filling |= most > self.most;
        self.most = most;
        self.set_rule(self.rule);
    }

    /// Returns the number of buffers on the lists.
    pub(crate) fn len(&self) -> usize {
        self.newer.len + self.older.len + self.main.len
    }

    /// Returns the number of buffers on probation.
    fn on_probation(&self) -> usize {
        self.newer.len + self.older.len
    }

    fn list(&mut self, which: u8) -> &mut List {
        match which {
            NEWER => &mut self.newer,
            OLDER => &mut self.older,
            _ => &mut self.main,
        }
    }

    /// Returns whether a block that is not cached was evicted from probation or refused lately. If
    /// not, inserts it among the ghosts as refused, so that the next call for it returns true.
    pub(crate) fn knows(&mut self, key: Key) -> bool {
        self.ghost.knows(key)
    }

    /// Inserts a buffer that is on no list.
    pub(crate) fn insert(
        &mut self,
        nodes: &mut Nodes,
        buffers: &impl Buffers,
        frame: Frame,
        key: Key,
    ) {
        let room = self.main.len + 1 + self.probation <= self.most;
        let goes_to_main = self.rule == Eviction::Clock
            || (self.filling && room)
            || (self.ghost.take(key) && self.passes_gate(nodes, buffers));
        let entry = buffers.entry(frame);
        // A load that is likely to be used again has the flag from its beginning.
        if entry.word().has(NEW) == goes_to_main {
            entry.change(NEW * u64::from(!goes_to_main), NEW);
        }
        if goes_to_main {
            return self.keep(nodes, frame);
        }
        nodes.push(&mut self.newer, frame, On::Policy(NEWER));
        // The oldest buffer of the newer half moves to the older half.
        if self.newer.len > self.probation / 2 {
            if let Some(aged) = nodes.last(&self.newer) {
                nodes.remove(&mut self.newer, aged);
                buffers.entry(aged).change(0, NEW);
                nodes.push(&mut self.older, aged, On::Policy(OLDER));
            }
        }
    }

    /// Returns whether a ghost may enter main. Otherwise main's oldest buffer loses a use.
    fn passes_gate(&mut self, nodes: &mut Nodes, buffers: &impl Buffers) -> bool {
        // After a change of the rule, main has room until probation has become small. With a room of
        // probation's part alone, the trace P3 with room for 5 % has 2 points fewer hits.
        if self.rule != Eviction::A2Small || self.on_probation() > 2 * self.probation {
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

    /// Removes the next victim from its list and marks it `EVICT`. Returns `None` if `looks` allows
    /// no further visit.
    pub(crate) fn pick(
        &mut self,
        nodes: &mut Nodes,
        buffers: &impl Buffers,
        looks: &mut Looks,
    ) -> Option<Victim> {
        while looks.left > 0 && !looks.has_met_dirty {
            looks.left -= 1;
            let which = self.next_list(looks);
            let list = self.list(which);
            let frame = nodes.last(list)?;
            nodes.remove(list, frame);
            let entry = buffers.entry(frame);
            let takes_one = which == MAIN && self.rule != Eviction::Clock;
            let stays = entry.take_used(|used| if takes_one { used.saturating_sub(1) } else { 0 })
                > 0
                && looks.count_uses();
            looks.lowered |= stays;
            if !stays && mark(entry) {
                if which != MAIN {
                    self.ghost.add(entry.key());
                }
                return Some(buffers.victim(frame));
            }
            if !stays && looks.until_dirty && is_evictable_but_dirty(entry.word()) {
                self.put_back(nodes, frame, which);
                looks.has_met_dirty = true;
                return None;
            }
            if which == NEWER {
                entry.change(0, NEW);
            }
            nodes.of(frame).due = (!stays && entry.word().has(DIRTY)).then_some(which);
            self.keep(nodes, frame);
            if stays && which == MAIN {
                looks.lower();
            } else {
                looks.main += 1;
            }
        }
        None
    }

    /// Returns the list that has the next victim.
    fn next_list(&self, looks: &Looks) -> u8 {
        if self.on_probation() < self.probation && looks.has_more(looks.main, self.main.len) {
            MAIN
        } else if !self.older.is_empty() {
            OLDER
        } else if !self.newer.is_empty() {
            NEWER
        } else {
            MAIN
        }
    }

    /// Returns the buffer that would be the next victim, or that would be it after another one.
    pub(crate) fn next_due(&self, nodes: &Nodes, after: Option<Frame>) -> Option<Frame> {
        if let Some(frame) = after {
            return nodes.before(frame);
        }
        nodes.last(match self.next_list(&Looks::new(None)) {
            NEWER => &self.newer,
            OLDER => &self.older,
            _ => &self.main,
        })
    }

    /// Inserts a buffer into main, at the back of the order of eviction.
    pub(crate) fn keep(&mut self, nodes: &mut Nodes, frame: Frame) {
        nodes.push(&mut self.main, frame, On::Policy(MAIN));
    }

    /// Puts a victim that was not evicted back on its list, as the next victim.
    pub(crate) fn put_back(&mut self, nodes: &mut Nodes, frame: Frame, list: u8) {
        nodes.push_last(self.list(list), frame, On::Policy(list));
    }

    /// Makes a buffer that was due for eviction, but dirty, the next victim. The caller has written
    /// the frame's block; by now the frame may be free, or have another block.
    pub(crate) fn evict_next(&mut self, nodes: &mut Nodes, frame: Frame) {
        let node = nodes.of(frame);
        // If the buffer is on no list, an evictor is about to keep it.
        if node.on == On::Policy(MAIN) {
            if let Some(list) = node.due.take() {
                nodes.remove(&mut self.main, frame);
                self.put_back(nodes, frame, list);
            }
        }
    }

    /// Removes a buffer from the given list, which it is on.
    pub(crate) fn remove(&mut self, nodes: &mut Nodes, frame: Frame, list: u8) {
        nodes.remove(self.list(list), frame);
    }
}
