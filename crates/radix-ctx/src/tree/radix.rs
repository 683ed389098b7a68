//! The tree, and loads by readers.

use percpu::sync::atomic::{AtomicPtr, Ordering};
use percpu::sync::cell::UnsafeCell;
use percpu::sync::native::atomic::{AtomicU64, AtomicUsize};

use super::node::NodePtr;
use super::pool::Pool;
use super::word::{BITS, FANOUT, MASK, Word, absent, floor_word, is_present};

/// A radix tree of words with floors.
#[derive(Debug)]
pub(crate) struct Tree {
    pub(super) root: AtomicPtr<()>,
    /// Accessed by the writer only.
    pub(super) state: UnsafeCell<State>,
    /// The number of nodes in the tree: a statistic that only the writer stores.
    pub(super) nodes: AtomicUsize,
    /// The floor of the keys above the root's range. Written by the writer.
    pub(super) top_floor: AtomicU64,
}

// SAFETY: only the writer accesses `state`, and by the contract of `edit` there is one writer at a time. The
// other fields are atomic. The owner of the tree is responsible for what the words point to.
unsafe impl Sync for Tree {}
// SAFETY: nodes and the pool's memory may be freed on any thread. The owner of the tree is responsible for
// what the words point to.
unsafe impl Send for Tree {}

#[derive(Debug)]
pub(super) struct State {
    /// The full bit of the entry in the root word.
    pub(super) root_full: bool,
    /// Memory for new nodes.
    pub(super) pool: Pool,
}

impl Tree {
    /// Makes an empty tree. Does not allocate.
    pub(crate) fn new() -> Self {
        Self {
            root: AtomicPtr::new(absent()),
            state: UnsafeCell::new(State { root_full: false, pool: Pool::new() }),
            nodes: AtomicUsize::new(0),
            top_floor: AtomicU64::new(0),
        }
    }

    /// Returns the word of `key`: a floor if the key is absent.
    ///
    /// Wait-free: one load for the root and one for each level.
    ///
    /// # Safety
    ///
    /// The caller is in an RCU section, or is the writer.
    #[inline(always)]
    pub(crate) unsafe fn load(&self, key: u64) -> Word {
        // Ordering: Acquire, here and in `step`, pairs with the Release in `Edit::publish`; it carries the
        // nodes and the memory of the entry.
        let root = self.root.load(Ordering::Acquire);
        // The usual heights have code of their own, where each shift is a constant, and the tag in the root
        // word is the displacement of a load.
        macro_rules! of_height {
            ($($level:literal)+) => {$(
                if let Some(mut node) = NodePtr::of_root_at::<$level>(root) {
                    if key >> (BITS * $level) > MASK {
                        return absent();
                    }
                    let mut level = $level;
                    loop {
                        // SAFETY: the node was found in the tree by a reader or the writer (invariant 2).
                        let word = unsafe { step(node, key >> (BITS * level)) };
                        if level == 0 || !is_present(word) {
                            return word;
                        }
                        // SAFETY: the word is present and above level 0, so it is a node.
                        node = unsafe { NodePtr::of_word(word) };
                        level -= 1;
                    }
                }
            )+};
        }
        of_height!(0 1 2);
        if NodePtr::of_root(root).is_none() {
            return if key == 0 { root } else { absent() };
        }
        // SAFETY: the caller is in an RCU section or is the writer, and `root` was loaded by this call.
        unsafe { Self::load_from(root, key) }
    }

    /// Returns the word of `key` in the tree of a root word, of any height.
    ///
    /// # Safety
    ///
    /// The caller is in an RCU section or is the writer, and has loaded `root` in it.
    #[cold]
    #[inline(never)]
    unsafe fn load_from(root: Word, key: u64) -> Word {
        let Some((mut node, mut shift)) = NodePtr::of_root(root) else {
            return if key == 0 { root } else { absent() };
        };
        if key >> shift > MASK {
            return absent();
        }
        loop {
            // SAFETY: the node was found in the tree by a reader or the writer (invariant 2).
            let word = unsafe { step(node, key >> shift) };
            if shift == 0 || !is_present(word) {
                return word;
            }
            // SAFETY: the word is present and above level 0, so it is a node.
            node = unsafe { NodePtr::of_word(word) };
            shift -= BITS;
        }
    }

    /// Returns the word of `key`, or the floor of the key if it is absent. Wait-free.
    ///
    /// # Safety
    ///
    /// The caller is in an RCU section, or is the writer.
    pub(crate) unsafe fn load_or_floor(&self, key: u64) -> Word {
        // Ordering: Acquire pairs with the Release in `Edit::publish`; it carries the nodes, and `top_floor`,
        // which is raised before the root shrinks.
        let root = self.root.load(Ordering::Acquire);
        let is_covered = match NodePtr::of_root(root) {
            Some((_, shift)) => key >> shift <= MASK,
            None => key == 0,
        };
        if !is_covered {
            // Ordering: Relaxed; the load of the root orders it.
            return floor_word(self.top_floor.load(std::sync::atomic::Ordering::Relaxed));
        }
        // SAFETY: the caller is in an RCU section or is the writer, and `root` was loaded by this call. A
        // second load could find a root that does not cover the key.
        unsafe { Self::load_from(root, key) }
    }

    /// Returns the number of levels of nodes: 0 to `MAX_HEIGHT`.
    pub(crate) fn height(&self) -> u32 {
        // Ordering: Relaxed; the word is not followed.
        NodePtr::of_root(self.root.load(Ordering::Relaxed)).map_or(0, |(_, shift)| shift / BITS + 1)
    }

    /// Returns the number of nodes in the tree: a statistic, which is not ordered with anything.
    pub(crate) fn node_count(&self) -> usize {
        self.nodes.load(std::sync::atomic::Ordering::Relaxed)
    }

    /// Returns the size of the nodes in the tree.
    pub(crate) fn bytes(&self) -> usize {
        self.node_count() * NodePtr::BYTES
    }

    /// Removes everything: frees the nodes at once, calls `entry` with each key and entry in ascending
    /// order, and forgets the floors.
    ///
    /// If `entry` panics, the remaining nodes and entries leak.
    pub(crate) fn destroy(&mut self, mut entry: impl FnMut(u64, Word)) {
        // Ordering: Relaxed, here and below; `&mut self` excludes other threads.
        let root = self.root.load(Ordering::Relaxed);
        self.root.store(absent(), Ordering::Relaxed);
        self.nodes.store(0, std::sync::atomic::Ordering::Relaxed);
        self.top_floor.store(0, std::sync::atomic::Ordering::Relaxed);
        match NodePtr::of_root(root) {
            // SAFETY: `&mut self` excludes readers, and no word leads to the nodes any more.
            Some((node, shift)) => unsafe { destroy(node, shift, 0, &mut entry) },
            None if is_present(root) => entry(0, root),
            None => {}
        }
    }
}

/// Returns the word in the slot of the lowest bits of `index`.
///
/// # Safety
///
/// The conditions of [`NodePtr::get`] hold during this call.
#[inline(always)]
unsafe fn step(node: NodePtr, index: u64) -> Word {
    // SAFETY: by the contract of this function the node is not freed during this call.
    let slot = unsafe { node.get() }.slot(index);
    // Ordering: Acquire pairs with the Release in `Edit::publish`; it carries the nodes and the memory of the
    // entry.
    slot.load(Ordering::Acquire)
}

/// Frees a node and the nodes below it, and calls `entry` with each key and entry.
///
/// # Safety
///
/// No other thread uses these nodes or can find them.
unsafe fn destroy(node: NodePtr, shift: u32, base: u64, entry: &mut impl FnMut(u64, Word)) {
    for index in 0..FANOUT as u64 {
        // SAFETY: the node is freed only at the end of this function.
        // Ordering: Relaxed; no other thread uses the node.
        let word = unsafe { node.get() }.slot(index).load(Ordering::Relaxed);
        if !is_present(word) {
            continue;
        }
        let key = base | index << shift;
        if shift == 0 {
            entry(key, word);
        } else {
            // SAFETY: the word is present and above level 0, so it is a node.
            let child = unsafe { NodePtr::of_word(word) };
            // SAFETY: a node below this one, which no other thread uses or can find either.
            unsafe { destroy(child, shift - BITS, key, entry) };
        }
    }
    // SAFETY: no other thread uses the node or can find it, and this is its only visit.
    unsafe { node.free() };
}

impl Drop for Tree {
    fn drop(&mut self) {
        self.destroy(|_, _| {});
    }
}
