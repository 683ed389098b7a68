//! The writer: makes and fills slots, grows and shrinks the tree, retires nodes.

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
use super::word::{BITS, FANOUT, MASK, Word, floor_in, floor_word, height_for, is_present};

/// The writer's access to a tree. [`finish`](Self::finish) returns the removed nodes, which are to be
/// retired after the owner's lock is released.
///
/// The drop of an edit retires them too. A retire needs no lock, and can run drops of other objects.
#[must_use = "finish it, and retire what it returns after unlocking"]
pub(crate) struct Edit<'t> {
    pub(super) tree: &'t Tree,
    /// The removed nodes. They stay until the edit ends, so that no [`Slot`] dangles.
    retired: Cell<Batch>,
}

/// The position of a key's word. Valid until the next call that makes or removes nodes: `make_slot`,
/// `abandon`, or a `set` of an absent word.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Slot<'e> {
    /// `None` for the root word, which is the slot of key 0.
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

impl Tree {
    /// Begins an edit.
    ///
    /// # Safety
    ///
    /// The caller holds the owner's lock of this tree until the edit is finished.
    #[inline]
    pub(crate) unsafe fn edit(&self) -> Edit<'_> {
        Edit { tree: self, retired: Cell::new(Batch::new()) }
    }
}

impl<'t> Edit<'t> {
    /// Ends the edit. Returns the removed nodes, which are to be retired after the lock is released.
    pub(crate) fn finish(self) -> Batch {
        self.retired.take()
    }

    pub(super) fn at(&self, node: NodePtr) -> &Watched<Node> {
        // SAFETY: only the writer calls this function, on nodes of this tree; a removed node is freed after
        // the edit.
        unsafe { node.get() }
    }

    pub(super) fn root(&self) -> Word {
        // Ordering: Relaxed; only the writer stores this word.
        self.tree.root.load(Ordering::Relaxed)
    }

    pub(super) fn with_state<R>(&self, f: impl FnOnce(&mut State) -> R) -> R {
        // SAFETY: only the writer calls this function, and no `f` in this module calls it again.
        self.tree.state.with_mut(|state| f(unsafe { &mut *state }))
    }

    fn place(&self, slot: Slot<'_>) -> &AtomicPtr<()> {
        match slot.node {
            // SAFETY: only the writer has a `Slot`, and a removed node is freed after the edit.
            Some(node) => unsafe { node.get() }.slot(slot.index()),
            None => &self.tree.root,
        }
    }

    /// Stores `word`, from where readers find what it points to.
    fn publish(&self, place: &AtomicPtr<()>, word: Word) {
        // Ordering: Release pairs with the Acquire in `Tree::load`, `load_or_floor`, `is_marked`,
        // `any_marked`, `find` and `prev`, in `step`, `Node::first` and `Node::last`; it carries the nodes
        // and the memory of the entry.
        place.store(word, order!(Release, "publish: the nodes are built"));
    }

    /// Returns the word in a slot.
    pub(crate) fn get(&self, slot: Slot<'_>) -> Word {
        // Ordering: Relaxed; only the writer stores this word.
        self.place(slot).load(Ordering::Relaxed)
    }

    /// Returns the slot of `key`, if the tree has one. A present key always has one.
    pub(crate) fn slot(&self, key: u64) -> Option<Slot<'_>> {
        self.descend(key).ok()
    }

    /// Returns the slot of `key`, or the absent word above it.
    fn descend(&self, key: u64) -> Result<Slot<'_>, Word> {
        let Some((mut node, mut shift)) = NodePtr::of_root(self.root()) else {
            return if key == 0 { Ok(Slot::root()) } else { Err(self.top_floor()) };
        };
        if key >> shift > MASK {
            return Err(self.top_floor());
        }
        while shift > 0 {
            // Ordering: Relaxed; only the writer stores this word.
            let word = self.at(node).slot(key >> shift).load(Ordering::Relaxed);
            if !is_present(word) {
                return Err(word);
            }
            // SAFETY: the word is present and above level 0, so it is a node.
            node = unsafe { NodePtr::of_word(word) };
            shift -= BITS;
        }
        Ok(Slot::of(node, key & MASK))
    }

    /// Returns the word of a key above the root's range.
    fn top_floor(&self) -> Word {
        // Ordering: Relaxed; only the writer stores this number.
        floor_word(self.tree.top_floor.load(Relaxed))
    }

    /// Returns the floor of `key`, or 0 if the key has no floor or is present.
    pub(crate) fn floor_of(&self, key: u64) -> u64 {
        let word = match self.descend(key) {
            Ok(slot) => self.get(slot),
            Err(word) => word,
        };
        if is_present(word) { 0 } else { floor_in(word) }
    }

    /// Returns the slot of `key`, and makes the nodes that it needs. The caller fills the slot or
    /// [abandons](Edit::abandon) it.
    ///
    /// # Errors
    ///
    /// There is no memory for a node; the tree has not changed.
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
            // Ordering: Relaxed; only the writer stores this word.
            let word = place.load(Ordering::Relaxed);
            if is_present(word) {
                // SAFETY: the word is present and above level 0, so it is a node.
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

    /// Returns memory for `nodes` nodes.
    fn take(&self, nodes: usize) -> Result<Pool, AllocError> {
        self.with_state(|state| state.pool.take(nodes))
    }

    /// Makes a node, all of whose slots are `fill`.
    fn make(&self, fresh: &mut Pool, shift: u32, offset: u64, fill: Word) -> NodePtr {
        let Some(memory) = fresh.pop() else { unreachable!("taken as many as are made") };
        // Ordering: Relaxed, both; a statistic that only the writer stores.
        self.tree.nodes.store(self.tree.nodes.load(Relaxed) + 1, Relaxed);
        NodePtr::new(memory, shift, offset, fill)
    }

    /// Makes the nodes from `node`, which is not published yet, down to the slot of `key`.
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
            // Ordering: Relaxed; the `publish` of the uppermost node orders it.
            at.slot(index).store(child.to_word(), Ordering::Relaxed);
            node = child;
        }
    }

    /// Adds the levels that `key` needs above the root, and makes its slot.
    fn grow(&self, key: u64, height: u32) -> Result<Slot<'_>, AllocError> {
        let root = self.root();
        let levels = height_for(key);
        let is_empty = !is_present(root);
        // An empty tree needs only the new root above, because the levels in between would have no entry.
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
                None if is_empty => floor_word(floor_in(root).max(floor_in(top_floor))),
                None => root,
            };
            // Ordering: Relaxed, here and below; the `publish` of the new root orders it.
            at.slot(0).store(below, Ordering::Relaxed);
            if !is_empty {
                at.set_count(1);
                at.set_full(u64::from(summary));
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

    /// Returns the full bit that a node above the root has for it.
    fn root_summary(&self) -> bool {
        match NodePtr::of_root(self.root()) {
            Some((root, _)) => self.summary(root),
            None => self.with_state(|state| state.root_full),
        }
    }

    /// Stores `word` in the slot, and returns the old word.
    ///
    /// An entry that replaces an entry keeps its full bit. A floor clears it first, and removes the nodes that have no entry any more. The slot is invalid then.
    pub(crate) fn set(&self, slot: Slot<'_>, word: Word) -> Word {
        let old = self.get(slot);
        let (was, is) = (is_present(old), is_present(word));
        if was && !is {
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

    /// Removes the nodes that `make_slot` made for the slot if the slot was not filled.
    pub(crate) fn abandon(&self, slot: Slot<'_>) {
        if let Some(node) = slot.node {
            if self.at(node).count() == 0 {
                self.prune(node);
            }
        }
        self.shrink();
    }

    /// Removes a node without entries, and the nodes above that have no other child.
    fn prune(&self, mut node: NodePtr) {
        loop {
            let at = self.at(node);
            let floor = self.max_floor(node, 0);
            let Some(parent) = at.parent() else {
                self.raise_top_floor(floor);
                self.with_state(|state| state.root_full = false);
                self.publish(&self.tree.root, floor);
                // SAFETY: the root word was the only one that led to the node, and it is absent now.
                return unsafe { self.retire(node) };
            };
            let above = self.at(parent);
            self.publish(above.slot(u64::from(at.offset)), floor);
            above.set_count(above.count() - 1);
            // SAFETY: the parent's slot was the only word that led to the node, and it is absent now.
            unsafe { self.retire(node) };
            if above.count() > 0 {
                return;
            }
            node = parent;
        }
    }

    /// Returns the word of the highest floor in slot `from` or behind it.
    fn max_floor(&self, node: NodePtr, from: u64) -> Word {
        let floors = (from..FANOUT as u64).map(|index| {
            // Ordering: Relaxed; the writer's own word.
            floor_in(self.at(node).slot(index).load(Ordering::Relaxed))
        });
        floor_word(floors.max().unwrap_or(0))
    }

    fn raise_top_floor(&self, floor: Word) {
        // Ordering: Relaxed; only the writer stores this number, and `publish` of the root orders it.
        self.tree.top_floor.fetch_max(floor_in(floor), Relaxed);
    }

    /// Replaces the root by its child 0 while that is the only child.
    fn shrink(&self) {
        while let Some((root, shift)) = NodePtr::of_root(self.root()) {
            let at = self.at(root);
            // Ordering: Relaxed, here and below; only the writer stores these words.
            let only = at.slot(0).load(Ordering::Relaxed);
            if at.count() != 1 || !is_present(only) {
                return;
            }
            self.raise_top_floor(self.max_floor(root, 1));
            if shift == 0 {
                self.with_state(|state| state.root_full = at.full() & 1 == 1);
                self.publish(&self.tree.root, only);
            } else {
                // SAFETY: the word is present and above level 0, so it is a node.
                let child = unsafe { NodePtr::of_word(only) };
                self.at(child).set_parent(None);
                self.publish(&self.tree.root, child.to_root());
            }
            // SAFETY: the root word was the only one that led to the node, and it leads to another root now.
            unsafe { self.retire(root) };
        }
    }

    /// Keeps a node that has left the tree until the edit ends.
    ///
    /// # Safety
    ///
    /// No word of the tree leads to the node any more, and this function is called once for it.
    unsafe fn retire(&self, node: NodePtr) {
        // Ordering: Relaxed, both; a statistic that only the writer stores.
        self.tree.nodes.store(self.tree.nodes.load(Relaxed) - 1, Relaxed);
        let mut retired = self.retired.take();
        // SAFETY: the node has just left the tree, and is retired once.
        unsafe { node.retire(&mut retired) };
        self.retired.set(retired);
    }
}
