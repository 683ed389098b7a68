//! The core of both faces: a radix tree of words.
//!
//! ```text
//!  root word -> | slot 0 .. slot 63 | head, bits |    level 1 (shift 6)
//!                  |         |
//!                  |         +----> | slot 0 .. slot 63 | head, bits |    level 0: entries
//!                  +-> ...
//! ```
//!
//! A key is cut into groups of [`BITS`] bits, the highest first; each picks a slot. The root word says
//! how many levels there are, so that small keys take few loads, and a single entry at key 0 is in the
//! root word itself. A *word* is a pointer without a type:
//!
//! | word | means |
//! |---|---|
//! | null, in a tree without floors | absent |
//! | odd, in a tree with floors | absent, and a floor: see below |
//! | low bits 10, in the root | a node, and the number of its level |
//! | any other in the root (then of key 0) or at level 0 | an entry, present |
//! | any other above level 0 | a node |
//!
//! So an entry is even with bit 1 clear, or odd in a tree without floors.
//!
//! A *floor* says from which generation on the absent keys it covers may be used: all keys below its
//! slot. A node without an entry dies and leaves the highest of its floors in its parent's slot; a
//! node made in the place of a floor is filled with it.
//!
//! # Who excludes whom
//!
//! Readers take no lock; they are in an RCU section, or are the writer. There is one writer at a time,
//! who has an [`Edit`]; whose lock that is, is up to the tree's owner.
//!
//! # Invariants
//!
//! 1. A node's shift, and its offset in its parent, never change. Growth puts a new root above the old
//!    one, shrinking makes the root's only child, number 0, the root.
//! 2. A node that was in the tree is freed a grace period after it was unlinked. It keeps its slots as
//!    they were: a reader inside goes on from there and finds what was present when it began.
//! 3. Between edits no node is without an entry below it, and the root has more than child 0.
//! 4. An ancestor's mark bit is the OR of its child's, its full bit the AND of its child's. An absent
//!    key has neither.
//! 5. What is not covered by the root is covered by `top_floor`.

mod bits;
mod edit;
mod node;
mod pool;
mod search;
#[cfg(all(test, not(any(offlock_loom, offlock_shuttle))))]
mod tests;
mod validate;

pub(crate) use self::edit::{Edit, Slot};
pub(crate) use self::search::{Cursor, Which};

use std::ptr;

use percpu::sync::atomic::{AtomicPtr, AtomicU32, Ordering};
use percpu::sync::cell::UnsafeCell;
use percpu::sync::native::atomic::{AtomicU64, AtomicUsize};

use self::node::NodePtr;
use self::pool::Pool;

/// Bits of a key per level. A model has small nodes, to get high trees by few steps.
pub(crate) const BITS: u32 = if cfg!(any(offlock_loom, offlock_shuttle)) { 1 } else { 6 };
/// Slots of a node.
pub(crate) const FANOUT: usize = 1 << BITS;
const MASK: u64 = FANOUT as u64 - 1;
/// A bit for each slot.
const ALL: u64 = u64::MAX >> (64 - FANOUT);
pub(crate) const MAX_HEIGHT: usize = 64_u32.div_ceil(BITS) as usize;
/// Marks of an entry.
pub(crate) const MARKS: usize = 3;

/// A pointer without a type: see the module's page.
pub(crate) type Word = *mut ();

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
    root: AtomicPtr<()>,
    /// The marks of an entry in the root word; means nothing while the root is a node.
    root_marks: AtomicU32,
    /// The writer's.
    state: UnsafeCell<State>,
    /// Nodes in the tree: a statistic, written by the writer.
    nodes: AtomicUsize,
    /// The floor of every key that the root does not cover. Written by the writer.
    top_floor: AtomicU64,
}

// SAFETY: `state` is touched by the writer only, of whom `edit` says that there is one at a time; the
// nodes may be dropped on any thread. The words are the owner's, who says what they are.
unsafe impl<const FLOORS: bool> Sync for Tree<FLOORS> {}
// SAFETY: as above.
unsafe impl<const FLOORS: bool> Send for Tree<FLOORS> {}

#[derive(Debug)]
struct State {
    /// The full bit of an entry in the root word.
    root_full: bool,
    /// Memory for nodes to come.
    pool: Pool,
}

/// The word of a floor.
#[inline]
pub(crate) fn floor_word(floor: u64) -> Word {
    debug_assert!(floor <= u64::MAX >> 1);
    ptr::without_provenance_mut((floor << 1 | 1) as usize)
}

/// The word of a key that was never there: null, or the lowest floor, so that one test tells a floor
/// from a node.
const fn absent<const FLOORS: bool>() -> Word {
    if FLOORS { ptr::without_provenance_mut(1) } else { ptr::null_mut() }
}

/// What a word says as a floor; 0 if it is none.
#[inline]
pub(crate) fn floor_in(word: Word) -> u64 {
    if word.addr() & 1 == 1 { word.addr() as u64 >> 1 } else { 0 }
}

/// Whether the word is an entry or a node, given that it is in a place for one of them.
#[inline(always)]
fn is_present<const FLOORS: bool>(word: Word) -> bool {
    if FLOORS { word.addr() & 1 == 0 } else { !word.is_null() }
}

/// The levels that a tree needs to have room for `key`; 0: the root word will do.
fn height_for(key: u64) -> u32 {
    (u64::BITS - key.leading_zeros()).div_ceil(BITS)
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

    /// The one writer's access.
    ///
    /// # Safety
    ///
    /// Until the edit is finished, the caller holds the lock that is over this tree.
    #[inline]
    pub(crate) unsafe fn edit(&self) -> Edit<'_, FLOORS> {
        Edit::new(self)
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
