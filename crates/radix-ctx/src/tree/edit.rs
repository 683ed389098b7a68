//! What the writer does: slots made and filled, nodes that die, growth and shrinking.

use std::cell::Cell;
use std::marker::PhantomData;

use percpu::AllocError;
use percpu::rcu::Batch;
use percpu::sync::atomic::{AtomicPtr, Ordering};
use percpu::sync::native::atomic::Ordering::Relaxed;
use percpu::sync::order;
use percpu::sync::quarantine::Watched;

use super::node::{Node, NodePtr};
use super::pool::Pool;
use super::radix::{State, Tree};
use super::word::{
    BITS, FANOUT, MARKS, MASK, Word, absent, floor_in, floor_word, height_for, is_present,
};

/// The one writer's access to a tree. Finish it, unlock, and only then retire what died.
///
/// Dropping it does the last: it needs no lock, and drops of other objects may run then.
#[must_use = "finish it, and retire what it returns after unlocking"]
pub(crate) struct Edit<'t, const FLOORS: bool> {
    pub(super) tree: &'t Tree<FLOORS>,
    /// Nodes that died: memory until the edit is over, so that no [`Slot`] dangles.
    retired: Cell<Batch>,
}

/// The place of a key's word. Good until the next call that makes or kills nodes: `make_slot`, `set` of
/// an absent word, `abandon`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Slot<'e> {
    /// `None`: the root word, of key 0.
    node: Option<NodePtr>,
    index: u8,
    _edit: PhantomData<&'e ()>,
}

impl Slot<'_> {
    fn root() -> Self {
        Self { node: None, index: 0, _edit: PhantomData }
    }

    fn of(node: NodePtr, index: u64) -> Self {
        Self { node: Some(node), index: index as u8, _edit: PhantomData }
    }

    pub(super) fn node(self) -> Option<NodePtr> {
        self.node
    }

    pub(super) fn index(self) -> u64 {
        u64::from(self.index)
    }
}

impl<const FLOORS: bool> Tree<FLOORS> {
    /// The one writer's access.
    ///
    /// # Safety
    ///
    /// Until the edit is finished, the caller holds the lock that is over this tree.
    #[inline]
    pub(crate) unsafe fn edit(&self) -> Edit<'_, FLOORS> {
        Edit { tree: self, retired: Cell::new(Batch::new()) }
    }
}

impl<'t, const FLOORS: bool> Edit<'t, FLOORS> {
    /// The nodes that died in this edit. To be retired when the lock is given back.
    pub(crate) fn finish(self) -> Batch {
        self.retired.take()
    }

    /// The tree.
    pub(crate) fn tree(&self) -> &'t Tree<FLOORS> {
        self.tree
    }

    pub(super) fn at(&self, node: NodePtr) -> &Watched<Node> {
        // SAFETY: of this tree, by the writer: what dies is freed after this edit.
        unsafe { node.get() }
    }

    pub(super) fn root(&self) -> Word {
        // Ordering: Relaxed; the writer's own word.
        self.tree.root.load(Ordering::Relaxed)
    }

    pub(super) fn with_state<R>(&self, f: impl FnOnce(&mut State) -> R) -> R {
        // SAFETY: the writer's, and no `f` here calls this again.
        self.tree.state.with_mut(|state| f(unsafe { &mut *state }))
    }

    fn place(&self, slot: Slot<'_>) -> &AtomicPtr<()> {
        match slot.node {
            // SAFETY: as in `at`.
            Some(node) => unsafe { node.get() }.slot(slot.index()),
            None => &self.tree.root,
        }
    }

    /// Lets readers find what `word` leads to.
    fn publish(&self, place: &AtomicPtr<()>, word: Word) {
        // Ordering: Release pairs with the Acquire in `Tree::load`, `Tree::find` and the like; it
        // carries the nodes, and the entry's own memory.
        place.store(word, order!(Release, "publish: the nodes are built"));
    }

    /// The word in a slot.
    pub(crate) fn get(&self, slot: Slot<'_>) -> Word {
        // Ordering: Relaxed; the writer's own word.
        self.place(slot).load(Ordering::Relaxed)
    }

    /// The slot of `key`, if there is one: for a present key always.
    pub(crate) fn slot(&self, key: u64) -> Option<Slot<'_>> {
        self.descend(key).ok()
    }

    /// The slot, or the word above it that has no node.
    fn descend(&self, key: u64) -> Result<Slot<'_>, Word> {
        let Some((mut node, mut shift)) = NodePtr::of_root(self.root()) else {
            return if key == 0 { Ok(Slot::root()) } else { Err(self.top_floor()) };
        };
        if key >> shift > MASK {
            return Err(self.top_floor());
        }
        while shift > 0 {
            // Ordering: Relaxed; the writer's own word.
            let word = self.at(node).slot(key >> shift).load(Ordering::Relaxed);
            if !is_present::<FLOORS>(word) {
                return Err(word);
            }
            // SAFETY: present, and above level 0.
            node = unsafe { NodePtr::of_word(word) };
            shift -= BITS;
        }
        Ok(Slot::of(node, key & MASK))
    }

    fn top_floor(&self) -> Word {
        // Ordering: Relaxed; the writer's own number.
        if FLOORS { floor_word(self.tree.top_floor.load(Relaxed)) } else { absent::<FLOORS>() }
    }

    /// The floor that covers `key`; 0 if there is none, or if it is present.
    pub(crate) fn floor_of(&self, key: u64) -> u64 {
        let word = match self.descend(key) {
            Ok(slot) => self.get(slot),
            Err(word) => word,
        };
        if is_present::<FLOORS>(word) { 0 } else { floor_in(word) }
    }

    /// The slot of `key`, with the nodes it needs. Fill it, or [`abandon`](Edit::abandon) it.
    ///
    /// # Errors
    ///
    /// There is no memory; nothing has changed.
    pub(crate) fn make_slot(&self, key: u64) -> Result<Slot<'_>, AllocError> {
        let Some((mut node, mut shift)) = NodePtr::of_root(self.root()) else {
            return if key == 0 { Ok(Slot::root()) } else { self.grow(key, 0) };
        };
        if key >> shift > MASK {
            return self.grow(key, shift / BITS + 1);
        }
        while shift > 0 {
            let at = self.at(node);
            let place = at.slot(key >> shift);
            // Ordering: Relaxed; the writer's own word.
            let word = place.load(Ordering::Relaxed);
            if is_present::<FLOORS>(word) {
                // SAFETY: present, and above level 0.
                node = unsafe { NodePtr::of_word(word) };
                shift -= BITS;
                continue;
            }
            let mut fresh = self.take((shift / BITS) as usize)?;
            let child = self.make(&mut fresh, shift - BITS, key >> shift & MASK, word);
            let slot = self.extend(&mut fresh, child, key, word);
            self.at(child).set_parent(Some(node));
            at.set_count(at.count() + 1);
            self.publish(place, child.to_word());
            return Ok(slot);
        }
        Ok(Slot::of(node, key & MASK))
    }

    fn take(&self, nodes: usize) -> Result<Pool, AllocError> {
        self.with_state(|state| state.pool.take(nodes))
    }

    fn make(&self, fresh: &mut Pool, shift: u32, offset: u64, fill: Word) -> NodePtr {
        let Some(memory) = fresh.pop() else { unreachable!("taken as many as are made") };
        // Ordering: Relaxed, both; a statistic, which only the writer writes.
        self.tree.nodes.store(self.tree.nodes.load(Relaxed) + 1, Relaxed);
        NodePtr::new(memory, shift, offset, fill)
    }

    /// Makes the nodes below `node`, which readers do not know yet, on the way to `key`.
    fn extend(&self, fresh: &mut Pool, mut node: NodePtr, key: u64, fill: Word) -> Slot<'_> {
        loop {
            let at = self.at(node);
            let shift = u32::from(at.shift);
            if shift == 0 {
                return Slot::of(node, key & MASK);
            }
            let index = key >> shift & MASK;
            let child = self.make(fresh, shift - BITS, index, fill);
            self.at(child).set_parent(Some(node));
            at.set_count(at.count() + 1);
            // Ordering: Relaxed; `publish` of the uppermost node publishes all.
            at.slot(index).store(child.to_word(), Ordering::Relaxed);
            node = child;
        }
    }

    /// Puts as many levels above the root as `key` needs, and makes its slot.
    fn grow(&self, key: u64, height: u32) -> Result<Slot<'_>, AllocError> {
        let root = self.root();
        let levels = height_for(key);
        let is_empty = !is_present::<FLOORS>(root);
        // Above an empty tree only the new root; there is nothing to lead to.
        let above = if is_empty { 1 } else { levels - height };
        let mut fresh = self.take((above + levels - 1) as usize)?;

        let top_floor = self.top_floor();
        let mut child = NodePtr::of_root(root).map(|(node, _)| node);
        let mut summary = self.root_summary();
        for level in levels - above..levels {
            let node = self.make(&mut fresh, level * BITS, 0, top_floor);
            let at = self.at(node);
            let below = match child {
                Some(child) => child.to_word(),
                None if FLOORS && is_empty => floor_word(floor_in(root).max(floor_in(top_floor))),
                None => root,
            };
            // Ordering: Relaxed, here and below: readers do not know the node.
            at.slot(0).store(below, Ordering::Relaxed);
            if !is_empty {
                at.set_count(1);
                for (mark, &is_set) in summary.0.iter().enumerate() {
                    at.marks[mark].store(u64::from(is_set), Ordering::Relaxed);
                }
                at.set_full(u64::from(summary.1));
                summary = self.summary(node);
            }
            if let Some(child) = child {
                self.at(child).set_parent(Some(node));
            }
            child = Some(node);
        }
        let Some(top) = child else { unreachable!("the key is above what the root covers") };
        let slot = self.extend(&mut fresh, top, key, top_floor);
        self.publish(&self.tree.root, top.to_root());
        Ok(slot)
    }

    /// The bits that a node above the root would have for it.
    fn root_summary(&self) -> ([bool; MARKS], bool) {
        match NodePtr::of_root(self.root()) {
            Some((root, _)) => self.summary(root),
            None => {
                let slot = Slot::root();
                let full = self.with_state(|state| state.root_full);
                (std::array::from_fn(|mark| self.mark(slot, mark)), full)
            }
        }
    }

    /// Puts `word` into the slot, and returns what was there.
    ///
    /// An entry in the place of an entry keeps its marks and its full bit. Null or a floor takes them
    /// away first, and lets nodes die that have no entry any more: then this slot is no longer good.
    pub(crate) fn set(&self, slot: Slot<'_>, word: Word) -> Word {
        let word = if word.is_null() { absent::<FLOORS>() } else { word };
        let old = self.get(slot);
        let (was, is) = (is_present::<FLOORS>(old), is_present::<FLOORS>(word));
        if was && !is {
            for mark in 0..MARKS {
                self.clear_mark(slot, mark);
            }
            self.clear_full(slot);
        }
        self.publish(self.place(slot), word);
        if let Some(node) = slot.node {
            let at = self.at(node);
            debug_assert!(!at.is_dead());
            at.set_count(at.count() + u8::from(is) - u8::from(was));
        }
        if !is {
            self.abandon(slot);
        }
        old
    }

    /// Takes back what `make_slot` made for a slot that is not filled. Nothing happens if it is.
    pub(crate) fn abandon(&self, slot: Slot<'_>) {
        if let Some(node) = slot.node {
            if self.at(node).count() == 0 {
                self.prune(node);
            }
        }
        self.shrink();
    }

    /// Takes a node without entries out, and those above it that have no other child.
    fn prune(&self, mut node: NodePtr) {
        loop {
            let at = self.at(node);
            let floor = if FLOORS { self.max_floor(node, 0) } else { absent::<FLOORS>() };
            let Some(parent) = at.parent() else {
                self.raise_top_floor(floor);
                // Ordering: Relaxed; published with the root just below.
                self.tree.root_marks.store(0, Ordering::Relaxed);
                self.with_state(|state| state.root_full = false);
                self.publish(&self.tree.root, floor);
                // SAFETY: the root word is absent now, and was the only way to it.
                return unsafe { self.retire(node) };
            };
            let above = self.at(parent);
            self.publish(above.slot(u64::from(at.offset)), floor);
            above.set_count(above.count() - 1);
            // SAFETY: its slot is absent now, and was the only way to it.
            unsafe { self.retire(node) };
            if above.count() > 0 {
                return;
            }
            node = parent;
        }
    }

    /// The highest floor in slot `from` and after it, as a word.
    fn max_floor(&self, node: NodePtr, from: u64) -> Word {
        let floors = (from..FANOUT as u64).map(|index| {
            // Ordering: Relaxed; the writer's own word.
            floor_in(self.at(node).slot(index).load(Ordering::Relaxed))
        });
        floor_word(floors.max().unwrap_or(0))
    }

    fn raise_top_floor(&self, floor: Word) {
        if FLOORS {
            // Ordering: Relaxed; the writer's own number, and a hint for others.
            self.tree.top_floor.fetch_max(floor_in(floor), Relaxed);
        }
    }

    /// Makes the root's child 0 the root as long as there is no other.
    fn shrink(&self) {
        while let Some((root, shift)) = NodePtr::of_root(self.root()) {
            let at = self.at(root);
            // Ordering: Relaxed, here and below; the writer's own words.
            let only = at.slot(0).load(Ordering::Relaxed);
            if at.count() != 1 || !is_present::<FLOORS>(only) {
                return;
            }
            if FLOORS {
                self.raise_top_floor(self.max_floor(root, 1));
            }
            if shift == 0 {
                let marks = (0..MARKS).fold(0, |marks, mark| {
                    let bit = at.marks[mark].load(Ordering::Relaxed) & 1;
                    marks | (bit as u32) << mark
                });
                // Ordering: Relaxed; published with the root just below.
                self.tree.root_marks.store(marks, Ordering::Relaxed);
                self.with_state(|state| state.root_full = at.full() & 1 == 1);
                self.publish(&self.tree.root, only);
            } else {
                // SAFETY: present, and above level 0.
                let child = unsafe { NodePtr::of_word(only) };
                self.at(child).set_parent(None);
                self.publish(&self.tree.root, child.to_root());
            }
            // SAFETY: there is another root, and it was no child of a node.
            unsafe { self.retire(root) };
        }
    }

    /// Takes a node that is just out of the tree.
    ///
    /// # Safety
    ///
    /// No word of the tree leads to it any more, and it is retired once.
    unsafe fn retire(&self, node: NodePtr) {
        // Ordering: Relaxed, both; a statistic, which only the writer writes.
        self.tree.nodes.store(self.tree.nodes.load(Relaxed) - 1, Relaxed);
        let mut retired = self.retired.take();
        // SAFETY: out of the tree, and not retired before, says the caller.
        unsafe { node.retire(&mut retired) };
        self.retired.set(retired);
    }

    /// Has memory for `nodes` nodes kept, so that as many are made without the allocator.
    ///
    /// # Errors
    ///
    /// There is no memory; as many are kept as before.
    pub(crate) fn keep_nodes(&self, nodes: usize) -> Result<(), AllocError> {
        self.with_state(|state| state.pool.fill(nodes))
    }

    /// Frees what is kept. Nothing of it was ever in the tree, so no grace period is needed.
    pub(crate) fn free_kept_nodes(&self) {
        let pool = self.with_state(|state| std::mem::replace(&mut state.pool, Pool::new()));
        drop(pool);
    }

    /// How many nodes there are to be made, at most, for all of `from..=to`.
    pub(crate) fn nodes_wanted(&self, from: u64, to: u64) -> usize {
        if from > to {
            return 0;
        }
        let (root, height) = match NodePtr::of_root(self.root()) {
            Some((node, shift)) => (Some(node), shift / BITS + 1),
            None => (None, 0),
        };
        let levels = height_for(to).max(height);
        let all = (1..=levels).map(|level| {
            let shift = level * BITS;
            let (first, last) =
                if shift < u64::BITS { (from >> shift, to >> shift) } else { (0, 0) };
            (last - first) as usize + 1
        });
        let mut wanted = all.fold(0_usize, usize::saturating_add);
        if levels > height && from > 0 {
            // The way down to what is there now.
            wanted = wanted.saturating_add((levels - height) as usize);
        }
        if let Some(root) = root {
            wanted = wanted.saturating_sub(self.count_nodes(root, 0, from, to));
        }
        wanted
    }

    /// How many nodes of the subtree have keys in `from..=to`.
    fn count_nodes(&self, node: NodePtr, base: u64, from: u64, to: u64) -> usize {
        let at = self.at(node);
        let shift = u32::from(at.shift);
        let last =
            base | if shift + BITS >= u64::BITS { u64::MAX } else { (1 << (shift + BITS)) - 1 };
        if last < from || base > to {
            return 0;
        }
        if shift == 0 {
            return 1;
        }
        let children = (0..FANOUT as u64).map(|index| {
            // Ordering: Relaxed; the writer's own word.
            let word = at.slot(index).load(Ordering::Relaxed);
            if !is_present::<FLOORS>(word) {
                return 0;
            }
            // SAFETY: present, and above level 0.
            let child = unsafe { NodePtr::of_word(word) };
            self.count_nodes(child, base | index << shift, from, to)
        });
        1 + children.sum::<usize>()
    }
}
