//! Nodes, and how words lead to them.

use std::alloc::{Layout, alloc, dealloc};
use std::mem::{ManuallyDrop, offset_of};
use std::ptr::NonNull;

use percpu::AllocError;
use percpu::rcu::{Batch, RetireHead};
use percpu::sync::atomic::{AtomicBool, AtomicPtr, AtomicU64, Ordering};
use percpu::sync::cell::UnsafeCell;
use percpu::sync::quarantine::{Watched, free};

use super::word::{BITS, FANOUT, MARKS, MASK, MAX_HEIGHT, Word};

/// A node: its slots first, so that a lookup touches one line of it.
#[derive(Debug)]
#[repr(C)]
#[cfg_attr(not(any(offlock_loom, offlock_shuttle)), repr(align(64)))]
#[cfg_attr(any(offlock_loom, offlock_shuttle), repr(align(256)))]
pub(super) struct Node {
    slots: [AtomicPtr<()>; FANOUT],
    head: RetireHead,
    /// A bit for each slot, per mark. Written by the writer.
    pub(super) marks: [AtomicU64; MARKS],
    /// `None` for the root. The writer's.
    parent: UnsafeCell<Option<NodePtr>>,
    /// A bit for each slot. The writer's.
    full: UnsafeCell<u64>,
    /// Slots with an entry or a node. The writer's.
    count: UnsafeCell<u8>,
    pub(super) shift: u8,
    /// Its slot in its parent; 0 in the root, which can only ever be child 0.
    pub(super) offset: u8,
    /// Out of the tree. Written by the writer.
    dead: AtomicBool,
}

#[cfg(not(any(offlock_loom, offlock_shuttle)))]
const _: () = assert!(size_of::<Node>() == 576);

impl Node {
    fn new(shift: u32, offset: u64, fill: Word) -> Self {
        // SAFETY: such a head is retired by `NodePtr::retire` only, as a `Node`.
        let head = unsafe { RetireHead::new(free_node) };
        Self {
            slots: std::array::from_fn(|_| AtomicPtr::new(fill)),
            head,
            marks: std::array::from_fn(|_| AtomicU64::new(0)),
            parent: UnsafeCell::new(None),
            full: UnsafeCell::new(0),
            count: UnsafeCell::new(0),
            shift: shift as u8,
            offset: offset as u8,
            dead: AtomicBool::new(false),
        }
    }

    /// Slot `index`, of which the lowest [`BITS`] bits count.
    #[inline(always)]
    pub(super) fn slot(&self, index: u64) -> &AtomicPtr<()> {
        &self.slots[(index & MASK) as usize]
    }

    /// The node above.
    pub(super) fn parent(&self) -> Option<NodePtr> {
        // SAFETY: only the writer calls this, and nobody else writes it.
        self.parent.with(|parent| unsafe { *parent })
    }

    pub(super) fn set_parent(&self, to: Option<NodePtr>) {
        // SAFETY: only the writer calls this, and nobody else looks at it.
        self.parent.with_mut(|parent| unsafe { *parent = to });
    }

    pub(super) fn full(&self) -> u64 {
        // SAFETY: as in `parent`.
        self.full.with(|full| unsafe { *full })
    }

    pub(super) fn set_full(&self, to: u64) {
        // SAFETY: as in `set_parent`.
        self.full.with_mut(|full| unsafe { *full = to });
    }

    pub(super) fn count(&self) -> u8 {
        // SAFETY: as in `parent`.
        self.count.with(|count| unsafe { *count })
    }

    pub(super) fn set_count(&self, to: u8) {
        // SAFETY: as in `set_parent`.
        self.count.with_mut(|count| unsafe { *count = to });
    }

    /// Whether it is out of the tree.
    #[inline]
    pub(super) fn is_dead(&self) -> bool {
        // Ordering: Relaxed; who was told of a change made after the death sees it by that, and to
        // everyone else it may just have happened.
        self.dead.load(Ordering::Relaxed)
    }
}

const LAYOUT: Layout = Layout::new::<Watched<Node>>();

/// Memory for one node, not initialised.
#[derive(Debug)]
pub(super) struct Memory(NonNull<Watched<Node>>);

impl Memory {
    /// The size of one node.
    pub(super) const BYTES: usize = LAYOUT.size();

    pub(super) fn new() -> Result<Self, AllocError> {
        // SAFETY: the layout is not of size 0.
        let at = unsafe { alloc(LAYOUT) };
        NonNull::new(at.cast()).map(Self).ok_or(AllocError::new())
    }

    /// # Safety
    ///
    /// `at` is what [`into_raw`](Self::into_raw) returned, and no other `Memory` owns it.
    pub(super) unsafe fn from_raw(at: NonNull<Watched<Node>>) -> Self {
        Self(at)
    }

    pub(super) fn into_raw(self) -> NonNull<Watched<Node>> {
        ManuallyDrop::new(self).0
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: from `alloc` with this layout, and ours.
        unsafe { dealloc(self.0.as_ptr().cast(), LAYOUT) };
    }
}

/// A node in the tree, or on its way into or out of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct NodePtr(NonNull<Watched<Node>>);

/// Low bits of the root word: a node, and above that the number of its level.
const NODE: usize = 0b10;
const TAG: usize = 0b11;
const LEVEL_SHIFT: u32 = 2;
const _: () = assert!(MAX_HEIGHT <= align_of::<Node>() >> LEVEL_SHIFT);

impl NodePtr {
    /// Of one node.
    pub(super) const BYTES: usize = size_of::<Watched<Node>>();

    /// Makes a node of `memory`.
    pub(super) fn new(memory: Memory, shift: u32, offset: u64, fill: Word) -> Self {
        let at = memory.into_raw();
        // SAFETY: memory for one, which is ours.
        unsafe { at.write(Watched::new(Node::new(shift, offset, fill))) };
        Self(at)
    }

    /// The node in the root word and its shift, if there is one.
    #[inline(always)]
    pub(super) fn of_root(word: Word) -> Option<(Self, u32)> {
        if word.addr() & TAG != NODE {
            return None;
        }
        let level = (word.addr() & (align_of::<Node>() - 1)) >> LEVEL_SHIFT;
        let node = word.map_addr(|addr| addr & !(align_of::<Node>() - 1)).cast();
        // SAFETY: `to_root` made the word of a node, and no address of a node is below its alignment.
        Some((Self(unsafe { NonNull::new_unchecked(node) }), level as u32 * BITS))
    }

    /// The node in the root word, if it is one of level `LEVEL`.
    #[inline(always)]
    pub(super) fn of_root_at<const LEVEL: usize>(word: Word) -> Option<Self> {
        let tag = LEVEL << LEVEL_SHIFT | NODE;
        if word.addr() & (align_of::<Node>() - 1) != tag {
            return None;
        }
        let node = word.map_addr(|addr| addr - tag).cast();
        // SAFETY: as in `of_root`.
        Some(Self(unsafe { NonNull::new_unchecked(node) }))
    }

    /// The root word for it as the root.
    pub(super) fn to_root(self) -> Word {
        // SAFETY: the writer's call, on a node that is in the tree or will be.
        let level = u32::from(unsafe { self.get() }.shift) / BITS;
        self.to_word().map_addr(|addr| addr | (level as usize) << LEVEL_SHIFT | NODE)
    }

    /// The node in a slot.
    ///
    /// # Safety
    ///
    /// The word is from [`to_word`](NodePtr::to_word): present, and not at level 0.
    #[inline(always)]
    pub(super) unsafe fn of_word(word: Word) -> Self {
        // SAFETY: the caller's: not null.
        Self(unsafe { NonNull::new_unchecked(word.cast()) })
    }

    pub(super) fn to_word(self) -> Word {
        self.0.as_ptr().cast()
    }

    /// # Safety
    ///
    /// The node is not freed during `'a`: the caller is in an RCU section since before it found the
    /// node, or is the writer and has it from this edit.
    #[inline(always)]
    pub(super) unsafe fn get<'a>(self) -> &'a Watched<Node> {
        // SAFETY: the caller's.
        unsafe { self.0.as_ref() }
    }

    /// Has the node freed a grace period after `batch` is retired.
    ///
    /// # Safety
    ///
    /// It is out of the tree, by the one writer, and only now.
    pub(super) unsafe fn retire(self, batch: &mut Batch) {
        // SAFETY: the writer's, not freed before the batch is retired.
        let node = unsafe { self.get() };
        // Ordering: Relaxed; see `is_dead`.
        node.dead.store(true, Ordering::Relaxed);
        // SAFETY: inside of the node.
        let head = unsafe { self.0.byte_add(HEAD) }.cast::<RetireHead>();
        // SAFETY: `free_node` fits; new readers do not find the node (the caller's).
        unsafe { batch.push(head, Self::BYTES) };
    }

    /// Frees it now.
    ///
    /// # Safety
    ///
    /// Nobody else has it, and nobody uses it any more.
    pub(super) unsafe fn free(self) {
        // SAFETY: `Memory` was allocated with the layout of a box; ours (the caller's).
        free(unsafe { Box::from_raw(self.0.as_ptr()) });
    }
}

const HEAD: usize = Watched::<Node>::OFFSET + offset_of!(Node, head);

/// Frees the node around `head`.
///
/// # Safety
///
/// The head is a node's, which nobody uses any more.
unsafe fn free_node(head: NonNull<RetireHead>) {
    // SAFETY: `retire` added as much, to a pointer that is good for all of the node.
    let node = unsafe { head.byte_sub(HEAD) }.cast();
    // SAFETY: the caller's.
    unsafe { NodePtr(node).free() };
}
