//! The tree itself, and the loads of readers.

use percpu::sync::atomic::{AtomicPtr, AtomicU32, Ordering};
use percpu::sync::cell::UnsafeCell;
use percpu::sync::native::atomic::{AtomicU64, AtomicUsize};

use super::node::NodePtr;
use super::pool::Pool;
use super::word::{BITS, FANOUT, MASK, Word, absent, floor_word, is_present};

/// A `const fn`, where the types of the facade allow it: not in a build for a model checker.
macro_rules! const_fn {
    ($(#[$meta:meta])* $vis:vis const fn $($rest:tt)*) => {
        #[cfg(not(any(offlock_loom, offlock_shuttle)))]
        $(#[$meta])* $vis const fn $($rest)*
        #[cfg(any(offlock_loom, offlock_shuttle))]
        $(#[$meta])* $vis fn $($rest)*
    };
}

/// A tree of words, with floors or without.
#[derive(Debug)]
pub(crate) struct Tree<const FLOORS: bool> {
    pub(super) root: AtomicPtr<()>,
    /// The marks of an entry in the root word; means nothing while the root is a node.
    pub(super) root_marks: AtomicU32,
    /// The writer's.
    pub(super) state: UnsafeCell<State>,
    /// Nodes in the tree: a statistic, written by the writer.
    pub(super) nodes: AtomicUsize,
    /// The floor of every key that the root does not cover. Written by the writer.
    pub(super) top_floor: AtomicU64,
}

// SAFETY: `state` is touched by the writer only, of whom `edit` says that there is one at a time; the
// nodes may be dropped on any thread. The words are the owner's, who says what they are.
unsafe impl<const FLOORS: bool> Sync for Tree<FLOORS> {}
// SAFETY: as above.
unsafe impl<const FLOORS: bool> Send for Tree<FLOORS> {}

#[derive(Debug)]
pub(super) struct State {
    /// The full bit of an entry in the root word.
    pub(super) root_full: bool,
    /// Memory for nodes to come.
    pub(super) pool: Pool,
}

impl<const FLOORS: bool> Tree<FLOORS> {
    const_fn! {
        /// A tree of nothing. Does not allocate.
        pub(crate) const fn new() -> Self {
            Self {
                root: AtomicPtr::new(absent::<FLOORS>()),
                root_marks: AtomicU32::new(0),
                state: UnsafeCell::new(State { root_full: false, pool: Pool::new() }),
                nodes: AtomicUsize::new(0),
                top_floor: AtomicU64::new(0),
            }
        }
    }

    /// The word of `key`; null or a floor if it is absent.
    ///
    /// Wait-free: a load for the root and one for each level.
    ///
    /// # Safety
    ///
    /// The caller is in an RCU section, or is the writer.
    #[inline(always)]
    pub(crate) unsafe fn load(&self, key: u64) -> Word {
        // Ordering: Acquire, here and in `step`, pairs with the Release in `Edit::publish`; it carries
        // the node that the word leads to, or what the entry leads to.
        let root = self.root.load(Ordering::Acquire);
        // The usual heights one by one: their shifts are constants, and the tag in the root is the
        // displacement of a load.
        macro_rules! of_height {
            ($($level:literal)+) => {$(
                if let Some(mut node) = NodePtr::of_root_at::<$level>(root) {
                    if key >> (BITS * $level) > MASK {
                        return absent::<FLOORS>();
                    }
                    let mut level = $level;
                    loop {
                        // SAFETY: found in the tree by a reader or the writer (invariant 2).
                        let word = unsafe { step(node, key >> (BITS * level)) };
                        if level == 0 || !is_present::<FLOORS>(word) {
                            return word;
                        }
                        // SAFETY: present, and above level 0.
                        node = unsafe { NodePtr::of_word(word) };
                        level -= 1;
                    }
                }
            )+};
        }
        of_height!(0 1 2);
        if !FLOORS {
            of_height!(3);
        }
        if NodePtr::of_root(root).is_none() {
            return if key == 0 { root } else { absent::<FLOORS>() };
        }
        // SAFETY: as here.
        unsafe { Self::load_from(root, key) }
    }

    /// [`load`](Self::load) of a tree of any height.
    ///
    /// # Safety
    ///
    /// As there.
    #[cold]
    #[inline(never)]
    unsafe fn load_from(root: Word, key: u64) -> Word {
        let Some((mut node, mut shift)) = NodePtr::of_root(root) else {
            return if key == 0 { root } else { absent::<FLOORS>() };
        };
        if key >> shift > MASK {
            return absent::<FLOORS>();
        }
        loop {
            // SAFETY: found in the tree by a reader or the writer (invariant 2).
            let word = unsafe { step(node, key >> shift) };
            if shift == 0 || !is_present::<FLOORS>(word) {
                return word;
            }
            // SAFETY: present, and above level 0.
            node = unsafe { NodePtr::of_word(word) };
            shift -= BITS;
        }
    }

    /// The word of `key`; where that is absent, the floor that covers it. Wait-free.
    ///
    /// # Safety
    ///
    /// The caller is in an RCU section, or is the writer.
    pub(crate) unsafe fn load_or_floor(&self, key: u64) -> Word {
        // Ordering: Acquire pairs with the Release in `Edit::publish`; it carries the node, and
        // `top_floor`, which is raised before the root shrinks.
        let root = self.root.load(Ordering::Acquire);
        let is_covered = match NodePtr::of_root(root) {
            Some((_, shift)) => key >> shift <= MASK,
            None => key == 0,
        };
        if !is_covered {
            // Ordering: Relaxed; a number on its own.
            return floor_word(self.top_floor.load(std::sync::atomic::Ordering::Relaxed));
        }
        // SAFETY: the caller's. From the root that covers the key: there may be another by now.
        unsafe { Self::load_from(root, key) }
    }

    /// Whether there is no entry.
    pub(crate) fn is_empty(&self) -> bool {
        // Ordering: Relaxed; the word is not followed. Invariant 3: a node has an entry below it.
        !is_present::<FLOORS>(self.root.load(Ordering::Relaxed))
    }

    /// Levels of nodes: 0 to [`MAX_HEIGHT`].
    pub(crate) fn height(&self) -> u32 {
        // Ordering: Relaxed; the word is not followed.
        NodePtr::of_root(self.root.load(Ordering::Relaxed)).map_or(0, |(_, shift)| shift / BITS + 1)
    }

    /// Nodes in the tree. A statistic: wait-free, not ordered with anything.
    pub(crate) fn node_count(&self) -> usize {
        self.nodes.load(std::sync::atomic::Ordering::Relaxed)
    }

    /// Bytes of those nodes.
    pub(crate) fn bytes(&self) -> usize {
        self.node_count() * NodePtr::BYTES
    }

    /// Takes everything out: frees the nodes at once, and hands each entry with its key to `entry`,
    /// in ascending order. Floors are forgotten.
    ///
    /// If `entry` panics, what is left leaks.
    pub(crate) fn destroy(&mut self, mut entry: impl FnMut(u64, Word)) {
        // Ordering: Relaxed, both; `&mut self` orders it.
        let root = self.root.load(Ordering::Relaxed);
        self.root.store(absent::<FLOORS>(), Ordering::Relaxed);
        self.nodes.store(0, std::sync::atomic::Ordering::Relaxed);
        self.top_floor.store(0, std::sync::atomic::Ordering::Relaxed);
        match NodePtr::of_root(root) {
            // SAFETY: `&mut self`: no reader can be inside, and nobody finds the nodes any more.
            Some((node, shift)) => unsafe { destroy::<FLOORS>(node, shift, 0, &mut entry) },
            None if is_present::<FLOORS>(root) => entry(0, root),
            None => {}
        }
    }
}

/// The word in slot `index` of a node, of which the lowest bits count.
///
/// # Safety
///
/// As for [`NodePtr::get`].
#[inline(always)]
unsafe fn step(node: NodePtr, index: u64) -> Word {
    // SAFETY: the caller's.
    let slot = unsafe { node.get() }.slot(index);
    // Ordering: see `Tree::load`.
    slot.load(Ordering::Acquire)
}

/// Frees a node and those below it.
///
/// # Safety
///
/// Nobody else can reach them.
unsafe fn destroy<const FLOORS: bool>(
    node: NodePtr,
    shift: u32,
    base: u64,
    entry: &mut impl FnMut(u64, Word),
) {
    for index in 0..FANOUT as u64 {
        // SAFETY: the caller's.
        // Ordering: Relaxed; nobody else has it.
        let word = unsafe { node.get() }.slot(index).load(Ordering::Relaxed);
        if !is_present::<FLOORS>(word) {
            continue;
        }
        let key = base | index << shift;
        if shift == 0 {
            entry(key, word);
        } else {
            // SAFETY: present, and above level 0.
            let child = unsafe { NodePtr::of_word(word) };
            // SAFETY: the caller's.
            unsafe { destroy::<FLOORS>(child, shift - BITS, key, entry) };
        }
    }
    // SAFETY: the caller's.
    unsafe { node.free() };
}

impl<const FLOORS: bool> Drop for Tree<FLOORS> {
    fn drop(&mut self) {
        self.destroy(|_, _| {});
    }
}
