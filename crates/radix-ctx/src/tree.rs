//! A radix tree of slabs by key, which only grows.
//!
//! ```text
//!  root word -> | slot 0 .. slot 63 | vacant |    level 1 (shift 6)
//!                  |         |
//!                  |         +----> | slot 0 .. slot 63 | vacant |    level 0: slabs
//!                  +-> ...
//! ```
//!
//! A key consists of groups of 6 bits. Each group selects a slot, the highest group first. The root word
//! contains the level of the root, so small keys take few loads. The slab of key 0 is in the root word itself
//! while no other key was used. A *word* is an untyped pointer:
//!
//! | word | meaning |
//! |---|---|
//! | odd | absent, and a floor |
//! | low bits 10, in the root | a node and its level |
//! | any other in the root (for key 0) or at level 0 | a slab |
//! | any other above level 0 | a node |
//!
//! A *floor* is the lowest generation that the slots of the next slab of a key may use. It is 0 for a key that
//! never had a slab.
//!
//! Readers take no lock. Only the holder of the table's lock stores words and bits.
//!
//! # Invariants
//!
//! 1. A node stays in its place until the tree is dropped, and its shift never changes. Growth puts a new
//!    root above the old one. So a reader in any node, or with an old root, finds what was there when its
//!    search began.
//! 2. A bit of `vacant` is set if a key below its slot has a vacancy: it has no slab, or its slab has a
//!    vacant slot. Keys above the range of the root all have one.

use std::ptr;

use offlock_percpu::AllocError;
use offlock_sync::alloc::try_alloc;
use offlock_sync::atomic::{AtomicBool, AtomicPtr, AtomicU64, Ordering};
use offlock_sync::native::atomic::AtomicUsize;
use offlock_sync::order;
use offlock_sync::quarantine::{Watched, free};

/// Bits of a key per level. A model has small nodes, so that few steps make a high tree.
const BITS: u32 = if cfg!(offlock_model) { 1 } else { 6 };
/// Slots per node.
const FANOUT: usize = 1 << BITS;
const MASK: u64 = FANOUT as u64 - 1;
/// The bits of a node, one for each slot.
const ALL: u64 = u64::MAX >> (64 - FANOUT);
/// The levels that keys of 32 bits need.
const LEVELS: usize = 32_u32.div_ceil(BITS) as usize;

/// An untyped pointer, whose low bits give it a meaning.
pub(super) type Word = *mut ();

/// Makes the word of a floor.
pub(super) fn floor_word(floor: u32) -> Word {
    ptr::without_provenance_mut((floor as usize) << 1 | 1)
}

/// Returns the floor in a word, or 0 if the word is not a floor.
pub(super) fn floor_in(word: Word) -> u32 {
    if is_present(word) { 0 } else { (word.addr() >> 1) as u32 }
}

/// The word of a key that never had a slab.
const ABSENT: Word = ptr::without_provenance_mut(1);

/// Returns whether a word is a slab or a node.
#[inline(always)]
pub(super) fn is_present(word: Word) -> bool {
    word.addr() & 1 == 0
}

/// A node. The slots are first and aligned, so that a lookup touches one cache line of it.
#[derive(Debug)]
#[repr(C)]
#[cfg_attr(not(offlock_model), repr(align(64)))]
#[cfg_attr(offlock_model, repr(align(256)))]
struct Node {
    slots: [AtomicPtr<()>; FANOUT],
    /// Invariant 2.
    vacant: AtomicU64,
    shift: u32,
}

#[cfg(not(offlock_model))]
const _: () = assert!(size_of::<Node>() == 576);

/// The low bits of the root word if the root is a node. The level of the node is above them.
const NODE: usize = 0b10;
const TAG: usize = 0b11;
const LEVEL_SHIFT: u32 = 2;
const _: () = assert!(LEVELS <= align_of::<Node>() >> LEVEL_SHIFT);

impl Node {
    /// Returns the slot of the lowest [`BITS`] bits of `index`.
    #[inline(always)]
    fn slot(&self, index: u64) -> &AtomicPtr<()> {
        &self.slots[(index & MASK) as usize]
    }

    /// Returns the word in a slot.
    #[inline(always)]
    fn load(&self, index: u64) -> Word {
        // Ordering: Acquire pairs with the Release in `Tree::publish`; it carries the node or the slab.
        self.slot(index).load(Ordering::Acquire)
    }

    /// Returns the first slab or node in slot `index` or behind it.
    #[inline]
    fn first(&self, index: u64) -> Option<(u64, Word)> {
        (index..FANOUT as u64)
            .map(|index| (index, self.load(index)))
            .find(|(_, word)| is_present(*word))
    }

    fn vacant(&self) -> u64 {
        // Ordering: Relaxed; the table's lock orders it.
        self.vacant.load(Ordering::Relaxed)
    }
}

/// Returns the word of the node in a root word and its shift, if the root is a node.
#[inline(always)]
fn untag(root: Word) -> Option<(Word, u32)> {
    let low = root.addr() & (align_of::<Node>() - 1);
    let is_node = low & TAG == NODE;
    is_node.then(|| (root.map_addr(|addr| addr - low), (low >> LEVEL_SHIFT) as u32 * BITS))
}

/// A radix tree of slabs.
#[derive(Debug)]
pub(super) struct Tree {
    root: AtomicPtr<()>,
    /// The bit of key 0 while the root is not a node.
    root_vacant: AtomicBool,
    /// The number of nodes: a statistic.
    nodes: AtomicUsize,
}

impl Tree {
    /// Makes an empty tree. Does not allocate.
    pub(super) fn new() -> Self {
        Self {
            root: AtomicPtr::new(ABSENT),
            root_vacant: AtomicBool::new(true),
            nodes: AtomicUsize::new(0),
        }
    }

    /// Returns the node in a root word and its shift, if the root is a node.
    #[inline(always)]
    fn root_node(&self, root: Word) -> Option<(&Watched<Node>, u32)> {
        let (node, shift) = untag(root)?;
        // SAFETY: the word is that of a node of this tree.
        Some((unsafe { self.node(node) }, shift))
    }

    /// Returns the node of a word.
    ///
    /// # Safety
    ///
    /// The word is that of a node of this tree, without a tag.
    #[inline(always)]
    unsafe fn node(&self, word: Word) -> &Watched<Node> {
        // SAFETY: a node is freed by the drop of the tree only (invariant 1), which `&self` excludes.
        unsafe { &*word.cast() }
    }

    /// Returns the word of `key`: a slab, or the floor of a key without one.
    ///
    /// Wait-free: one load for the root and one for each level.
    #[inline(always)]
    pub(super) fn load(&self, key: u64) -> Word {
        // Ordering: Acquire pairs with the Release in `publish`; it carries the nodes or the slab.
        let root = self.root.load(Ordering::Acquire);
        if root.addr() & (align_of::<Node>() - 1) == 0 && key == 0 {
            return root; // the only slab of a small table
        }
        // The usual heights have code of their own, where each shift is a constant, and the tag in the root
        // word is the displacement of a load.
        macro_rules! of_level {
            ($($level:literal)+) => {$(
                let tag = $level << LEVEL_SHIFT | NODE;
                if root.addr() & (align_of::<Node>() - 1) == tag {
                    if key >> (BITS * $level) > MASK {
                        return ABSENT;
                    }
                    // SAFETY: the word is that of a node of this tree.
                    let mut node = unsafe { self.node(root.map_addr(|addr| addr - tag)) };
                    let mut level = $level;
                    loop {
                        let word = node.load(key >> (BITS * level));
                        if level == 0 || !is_present(word) {
                            return word;
                        }
                        // SAFETY: the word is present and above level 0, so it is a node.
                        node = unsafe { self.node(word) };
                        level -= 1;
                    }
                }
            )+};
        }
        of_level!(0 1 2);
        if untag(root).is_none() {
            return if key == 0 { root } else { ABSENT };
        }
        self.load_from(root, key)
    }

    /// Returns the word of `key` in the tree of a root word, of any height.
    #[cold]
    #[inline(never)]
    fn load_from(&self, root: Word, key: u64) -> Word {
        let Some((mut node, mut shift)) = self.root_node(root) else { return ABSENT };
        if key >> shift > MASK {
            return ABSENT;
        }
        loop {
            let word = node.load(key >> shift);
            if shift == 0 || !is_present(word) {
                return word;
            }
            // SAFETY: the word is present and above level 0, so it is a node.
            node = unsafe { self.node(word) };
            shift -= BITS;
        }
    }

    /// Iterates over the slabs whose key is at least `from`, in ascending order.
    ///
    /// It returns a slab that is present throughout once. It may or may not return one that comes or leaves
    /// meanwhile.
    pub(super) fn iter_from(&self, from: u64) -> Cursor<'_> {
        Cursor { tree: self, leaf: None, next: from }
    }

    /// Returns the slab with the lowest key that is at least `from`, and its node.
    fn find(&self, from: u64) -> Option<(u64, Word, Option<&Watched<Node>>)> {
        // Ordering: Acquire pairs with the Release in `publish`; it carries the nodes or the slab.
        let root = self.root.load(Ordering::Acquire);
        let Some((top, top_shift)) = self.root_node(root) else {
            return (from == 0 && is_present(root)).then_some((0, root, None));
        };
        let mut key = from;
        'from_the_root: while key >> top_shift <= MASK {
            let (mut node, mut shift) = (top, top_shift);
            loop {
                let index = key >> shift & MASK;
                let Some((first, word)) = node.first(index) else {
                    key = ((key >> shift | MASK) + 1) << shift; // behind this node
                    continue 'from_the_root;
                };
                if first != index {
                    key = (key >> shift & !MASK | first) << shift;
                }
                if shift == 0 {
                    return Some((key, word, Some(node)));
                }
                // SAFETY: the word is present and above level 0, so it is a node.
                node = unsafe { self.node(word) };
                shift -= BITS;
            }
        }
        None
    }

    /// Returns the highest key that the root has a place for.
    pub(super) fn last_key(&self) -> u64 {
        // Ordering: Relaxed; the word is not followed.
        untag(self.root.load(Ordering::Relaxed)).map_or(0, |(_, shift)| ((MASK + 1) << shift) - 1)
    }

    /// Returns the number of levels of nodes.
    pub(super) fn height(&self) -> u32 {
        // Ordering: Relaxed; the word is not followed.
        untag(self.root.load(Ordering::Relaxed)).map_or(0, |(_, shift)| shift / BITS + 1)
    }

    /// Returns the number of nodes: a statistic, which is not ordered with anything.
    pub(super) fn node_count(&self) -> usize {
        self.nodes.load(Ordering::Relaxed)
    }

    /// Returns the size of the nodes.
    pub(super) fn bytes(&self) -> usize {
        self.node_count() * size_of::<Watched<Node>>()
    }
}

/// An iterator over slabs. Returned by [`Tree::iter_from`].
#[derive(Clone, Debug)]
pub(super) struct Cursor<'t> {
    tree: &'t Tree,
    /// The node of level 0 that has `next`, if it is known.
    leaf: Option<&'t Watched<Node>>,
    next: u64,
}

impl Iterator for Cursor<'_> {
    type Item = (u64, Word);

    /// Wait-free.
    #[inline]
    fn next(&mut self) -> Option<(u64, Word)> {
        let in_leaf = self.leaf.and_then(|leaf| leaf.first(self.next & MASK));
        let (key, word) = if let Some((index, word)) = in_leaf {
            (self.next & !MASK | index, word)
        } else {
            if self.leaf.is_some() {
                self.next = (self.next | MASK) + 1;
            }
            let (key, word, leaf) = self.tree.find(self.next)?;
            self.leaf = leaf;
            (key, word)
        };
        self.next = key + 1;
        if self.next & MASK == 0 {
            self.leaf = None;
        }
        Some((key, word))
    }
}

/// What the holder of the table's lock does.
impl Tree {
    /// Stores `word`, from where readers find what it points to.
    fn publish(place: &AtomicPtr<()>, word: Word) {
        // Ordering: Release pairs with the Acquire in `load`, `find` and `Node::load`; it carries the nodes and
        // the slab.
        place.store(word, order!(Release, "publish: the nodes are built"));
    }

    fn root(&self) -> Word {
        // Ordering: Relaxed; only the holder of the lock stores this word.
        self.root.load(Ordering::Relaxed)
    }

    /// Makes a node, all of whose slots are absent. Returns its word.
    fn make_node(&self, shift: u32) -> Result<Word, AllocError> {
        let at = try_alloc::<Watched<Node>>()?;
        let slots = std::array::from_fn(|_| AtomicPtr::new(ABSENT));
        let node = Node { slots, vacant: AtomicU64::new(ALL), shift };
        // SAFETY: the memory was just allocated with the layout of a node.
        unsafe { at.write(Watched::new(node)) };
        self.nodes.fetch_add(1, Ordering::Relaxed);
        Ok(at.as_ptr().cast())
    }

    /// Grows the tree until `key` has a slot.
    ///
    /// # Errors
    ///
    /// There is no memory for a node; the nodes that were made before stay.
    pub(super) fn make_slot(&self, key: u64) -> Result<(), AllocError> {
        let (mut node, mut shift) = loop {
            let old = self.root();
            let (below, shift, vacant) = match untag(old) {
                Some((word, shift)) => {
                    // SAFETY: the word is that of a node of this tree.
                    let node = unsafe { self.node(word) };
                    if key >> shift <= MASK {
                        break (node, shift);
                    }
                    (word, shift + BITS, node.vacant() != 0)
                }
                None if key == 0 => return Ok(()),
                // Ordering: Relaxed; the table's lock orders it.
                None => (old, 0, self.root_vacant.load(Ordering::Relaxed)),
            };
            let word = self.make_node(shift)?;
            // SAFETY: the word of a node that this call has made.
            let node = unsafe { self.node(word) };
            // Ordering: Relaxed, both; the `publish` of the root orders them.
            node.slot(0).store(below, Ordering::Relaxed);
            node.vacant.store(ALL & !u64::from(!vacant), Ordering::Relaxed);
            let tag = ((shift / BITS) as usize) << LEVEL_SHIFT | NODE;
            Self::publish(&self.root, word.map_addr(|addr| addr | tag));
        };
        while shift > 0 {
            let place = node.slot(key >> shift);
            // Ordering: Relaxed; only the holder of the lock stores this word.
            let mut word = place.load(Ordering::Relaxed);
            shift -= BITS;
            if !is_present(word) {
                word = self.make_node(shift)?;
                Self::publish(place, word);
            }
            // SAFETY: the word is present and above level 0, so it is a node.
            node = unsafe { self.node(word) };
        }
        Ok(())
    }

    /// Calls `f` with each node above the slot of `key`, from level 0 upwards, until it returns false. The key
    /// has a slot, in a node.
    fn for_each_above(
        &self,
        top: (&Watched<Node>, u32),
        key: u64,
        mut f: impl FnMut(&Node) -> bool,
    ) {
        let (mut node, mut shift) = top;
        let mut path = [node; LEVELS];
        while shift > 0 {
            // Ordering: Relaxed; only the holder of the lock stores this word.
            let word = node.slot(key >> shift).load(Ordering::Relaxed);
            shift -= BITS;
            // SAFETY: the key has a slot, so the word is that of a node.
            node = unsafe { self.node(word) };
            path[(shift / BITS) as usize] = node;
        }
        let levels = (top.1 / BITS) as usize + 1;
        let _ = path[..levels].iter().all(|node| f(node));
    }

    /// Stores the slab or the floor of `key`, which has a slot.
    pub(super) fn set(&self, key: u64, word: Word) {
        match self.root_node(self.root()) {
            None => Self::publish(&self.root, word),
            Some(top) => self.for_each_above(top, key, |leaf| {
                Self::publish(leaf.slot(key), word);
                false
            }),
        }
    }

    /// Records whether `key`, which has a slot, has a vacancy.
    pub(super) fn set_vacant(&self, key: u64, is_vacant: bool) {
        // Ordering: Relaxed, all; the table's lock orders them.
        match self.root_node(self.root()) {
            None => self.root_vacant.store(is_vacant, Ordering::Relaxed),
            Some(top) => self.for_each_above(top, key, |node| {
                let bit = 1 << (key >> node.shift & MASK);
                let (old, rest) = (node.vacant(), node.vacant() & !bit);
                let new = if is_vacant { rest | bit } else { rest };
                node.vacant.store(new, Ordering::Relaxed);
                (old == 0) != (new == 0) // the node above has to follow
            }),
        }
    }

    /// Returns the lowest key that has a vacancy. It may be one without a slot.
    pub(super) fn lowest_vacant(&self) -> u64 {
        let Some((mut node, mut shift)) = self.root_node(self.root()) else {
            // Ordering: Relaxed; the table's lock orders it.
            return u64::from(!self.root_vacant.load(Ordering::Relaxed));
        };
        let mut key = 0;
        loop {
            let bits = node.vacant();
            if bits == 0 {
                return (MASK + 1) << shift; // the root is full
            }
            let index = u64::from(bits.trailing_zeros());
            key |= index << shift;
            // Ordering: Relaxed; only the holder of the lock stores this word.
            let word = node.slot(index).load(Ordering::Relaxed);
            if shift == 0 || !is_present(word) {
                return key;
            }
            // SAFETY: the word is present and above level 0, so it is a node.
            node = unsafe { self.node(word) };
            shift -= BITS;
        }
    }

    /// Takes every slab out and passes it to `slab`. Frees the nodes.
    pub(super) fn destroy(&mut self, mut slab: impl FnMut(Word)) {
        // Ordering: Relaxed; `&mut self` excludes other threads.
        let root = self.root.swap(ABSENT, Ordering::Relaxed);
        match untag(root) {
            // SAFETY: `&mut self` excludes readers, and no word leads to the nodes any more.
            Some((node, shift)) => unsafe { free_nodes(node, shift, &mut slab) },
            None if is_present(root) => slab(root),
            None => {}
        }
    }

    /// Checks invariant 2 and the shifts, for tests. `has_vacancy` returns whether a slab has a vacant slot.
    pub(super) fn validate(&self, has_vacancy: impl Fn(Word) -> bool) {
        let mut nodes = 0;
        if let Some((node, shift)) = self.root_node(self.root()) {
            self.validate_node(node, shift, &has_vacancy, &mut nodes);
        }
        assert_eq!(nodes, self.node_count(), "nodes");
    }

    fn validate_node(
        &self,
        node: &Node,
        shift: u32,
        has_vacancy: &impl Fn(Word) -> bool,
        nodes: &mut usize,
    ) {
        assert_eq!(node.shift, shift, "the shift of a node");
        *nodes += 1;
        for index in 0..FANOUT as u64 {
            let word = node.load(index);
            let expected = if !is_present(word) {
                true
            } else if shift == 0 {
                has_vacancy(word)
            } else {
                // SAFETY: the word is present and above level 0, so it is a node.
                let child = unsafe { self.node(word) };
                self.validate_node(child, shift - BITS, has_vacancy, nodes);
                child.vacant() != 0
            };
            assert_eq!(node.vacant() >> index & 1 == 1, expected, "shift {shift}, slot {index}");
        }
    }
}

/// Frees a node and the nodes below it, and calls `slab` with each slab.
///
/// # Safety
///
/// No other thread uses these nodes or can find them, and each is freed once.
unsafe fn free_nodes(node: Word, shift: u32, slab: &mut impl FnMut(Word)) {
    // SAFETY: `make_node` made the node with the layout of a box, and this call owns it.
    let node = unsafe { Box::from_raw(node.cast::<Watched<Node>>()) };
    for place in &node.slots {
        // Ordering: Relaxed; no other thread uses the node.
        let word = place.load(Ordering::Relaxed);
        if !is_present(word) {
            continue;
        }
        if shift == 0 {
            slab(word);
        } else {
            // SAFETY: a node below this one, which no other thread uses or can find either.
            unsafe { free_nodes(word, shift - BITS, slab) };
        }
    }
    free(node);
}

impl Drop for Tree {
    fn drop(&mut self) {
        self.destroy(|_| {});
    }
}

#[cfg(all(test, not(offlock_model)))]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::*;

    /// A word that looks like a slab. The last bit of its number says whether it has a vacancy.
    fn slab(number: u64) -> Word {
        ptr::without_provenance_mut((number << 2) as usize)
    }

    fn has_vacancy(word: Word) -> bool {
        word.addr() >> 2 & 1 == 1
    }

    /// Keys at the limits of levels, and some between them.
    fn keys() -> impl Strategy<Value = u64> {
        prop_oneof![
            6 => prop::sample::select(vec![0, 1, 2, 63, 64, 65, 130, 4_095, 4_096, 262_144]),
            4 => 0..200_u64,
            1 => 0..5_000_u64,
            1 => 0..1_u64 << 26,
        ]
    }

    fn lowest(map: &BTreeMap<u64, Word>) -> u64 {
        (0..)
            .find(|key| !map.get(key).is_some_and(|&word| is_present(word) && !has_vacancy(word)))
            .unwrap()
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]

        /// A tree is a map of slabs and floors, and finds the lowest vacancy.
        #[test]
        fn inv03_a_tree_is_a_map(
            dense in 0..200_u64,
            ops in prop::collection::vec((keys(), any::<bool>(), 1..1_000_u32), 1..80),
        ) {
            let mut tree = Tree::new();
            let mut map = BTreeMap::<u64, Word>::new();
            let dense = (0..dense).map(|key| (key, true, 2));
            for (key, on, number) in dense.chain(ops) {
                let word = if on { slab(number.into()) } else { floor_word(number) };
                if on || map.contains_key(&key) {
                    tree.make_slot(key).unwrap();
                    tree.set(key, word);
                    tree.set_vacant(key, !on || has_vacancy(word));
                    map.insert(key, word);
                }
                tree.validate(has_vacancy);
                prop_assert_eq!(tree.lowest_vacant(), lowest(&map));
                for key in [key, key + 1, key.saturating_sub(1), 0, 1 << 25] {
                    let expected = map.get(&key).copied().unwrap_or(ABSENT);
                    prop_assert_eq!(tree.load(key), expected);
                    let slabs = map.range(key..).filter(|(_, word)| is_present(**word));
                    let slabs: Vec<_> = slabs.map(|(&key, &word)| (key, word)).collect();
                    prop_assert_eq!(tree.iter_from(key).collect::<Vec<_>>(), slabs);
                }
                prop_assert!(map.range(tree.last_key() + 1..).next().is_none());
            }
            let mut left = Vec::new();
            tree.destroy(|word| left.push(word));
            prop_assert_eq!(left, map.into_values().filter(|word| is_present(*word)).collect::<Vec<_>>());
        }
    }

    #[test]
    fn inv03_a_slab_at_zero_needs_no_node() {
        let tree = Tree::new();
        tree.make_slot(0).unwrap();
        tree.set(0, slab(2));
        tree.set_vacant(0, false);
        assert_eq!((tree.height(), tree.bytes(), tree.lowest_vacant()), (0, 0, 1));
        tree.make_slot(1).unwrap();
        assert_eq!((tree.height(), tree.load(0), tree.lowest_vacant()), (1, slab(2), 1));
        tree.make_slot(4_096).unwrap();
        assert_eq!((tree.height(), tree.node_count(), tree.load(0)), (3, 5, slab(2)));
    }
}
