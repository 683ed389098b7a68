//! Nodes, and the words of nodes.

use std::alloc::{Layout, alloc, dealloc};
use std::mem::{ManuallyDrop, offset_of};
use std::ptr::NonNull;

use percpu::AllocError;
use percpu::rcu::{Batch, RetireHead};
use percpu::sync::atomic::{AtomicBool, AtomicPtr, Ordering};
use percpu::sync::cell::UnsafeCell;
use percpu::sync::quarantine::{Watched, free};

use super::word::{BITS, FANOUT, MASK, MAX_HEIGHT, Word};

/// A node. The slots are first and aligned, so that a lookup touches one cache line of it.
#[derive(Debug)]
#[repr(C)]
#[cfg_attr(not(any(offlock_loom, offlock_shuttle)), repr(align(64)))]
#[cfg_attr(any(offlock_loom, offlock_shuttle), repr(align(256)))]
pub(super) struct Node {
    slots: [AtomicPtr<()>; FANOUT],
    head: RetireHead,
    /// The node above, or `None` for the root. Accessed by the writer only.
    parent: UnsafeCell<Option<NodePtr>>,
    /// A bit for each slot. Accessed by the writer only.
    full: UnsafeCell<u64>,
    /// The number of slots with an entry or a node. Accessed by the writer only.
    count: UnsafeCell<u8>,
    pub(super) shift: u8,
    /// The slot of this node in its parent. 0 in the root, which can only become child 0.
    pub(super) offset: u8,
    /// Whether the node has left the tree. Written by the writer.
    dead: AtomicBool,
}

#[cfg(not(any(offlock_loom, offlock_shuttle)))]
const _: () = assert!(size_of::<Node>() == 576);

impl Node {
    fn new(shift: u32, offset: u64, fill: Word) -> Self {
        // SAFETY: `free_node` is for the heads of nodes, and this head will lie in one.
        let head = unsafe { RetireHead::new(free_node) };
        Self {
            slots: std::array::from_fn(|_| AtomicPtr::new(fill)),
            head,
            parent: UnsafeCell::new(None),
            full: UnsafeCell::new(0),
            count: UnsafeCell::new(0),
            shift: shift as u8,
            offset: offset as u8,
            dead: AtomicBool::new(false),
        }
    }

    /// Returns the slot of the lowest [`BITS`] bits of `index`.
    #[inline(always)]
    pub(super) fn slot(&self, index: u64) -> &AtomicPtr<()> {
        &self.slots[(index & MASK) as usize]
    }

    /// Returns the node above, or `None` for the root.
    pub(super) fn parent(&self) -> Option<NodePtr> {
        // SAFETY: only the writer calls this function, and no other thread accesses the field.
        self.parent.with(|parent| unsafe { *parent })
    }

    pub(super) fn set_parent(&self, to: Option<NodePtr>) {
        // SAFETY: only the writer calls this function, and no other thread accesses the field.
        self.parent.with_mut(|parent| unsafe { *parent = to });
    }

    pub(super) fn full(&self) -> u64 {
        // SAFETY: only the writer calls this function, and no other thread accesses the field.
        self.full.with(|full| unsafe { *full })
    }

    pub(super) fn set_full(&self, to: u64) {
        // SAFETY: only the writer calls this function, and no other thread accesses the field.
        self.full.with_mut(|full| unsafe { *full = to });
    }

    pub(super) fn count(&self) -> u8 {
        // SAFETY: only the writer calls this function, and no other thread accesses the field.
        self.count.with(|count| unsafe { *count })
    }

    pub(super) fn set_count(&self, to: u8) {
        // SAFETY: only the writer calls this function, and no other thread accesses the field.
        self.count.with_mut(|count| unsafe { *count = to });
    }

    /// Returns whether the node has left the tree.
    #[inline]
    pub(super) fn is_dead(&self) -> bool {
        // Ordering: Relaxed; the flag carries no data. A thread that has learned of a later change also
        // sees the store. For any other thread the node may have left just now.
        self.dead.load(Ordering::Relaxed)
    }
}

const LAYOUT: Layout = Layout::new::<Watched<Node>>();

/// Uninitialised memory for one node.
#[derive(Debug)]
pub(super) struct Memory(NonNull<Watched<Node>>);

impl Memory {
    /// The size of the memory.
    pub(super) const BYTES: usize = LAYOUT.size();

    pub(super) fn new() -> Result<Self, AllocError> {
        // SAFETY: the size of the layout is not 0.
        let at = unsafe { alloc(LAYOUT) };
        NonNull::new(at.cast()).map(Self).ok_or(AllocError::new())
    }

    /// Takes memory back from a pointer.
    ///
    /// # Safety
    ///
    /// `at` is from [`into_raw`](Self::into_raw), and no other `Memory` owns it.
    pub(super) unsafe fn from_raw(at: NonNull<Watched<Node>>) -> Self {
        Self(at)
    }

    pub(super) fn into_raw(self) -> NonNull<Watched<Node>> {
        ManuallyDrop::new(self).0
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: the memory is from `alloc` with this layout, and `self` owns it.
        unsafe { dealloc(self.0.as_ptr().cast(), LAYOUT) };
    }
}

/// A pointer to a node, which is in the tree, not in it yet, or not in it any more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct NodePtr(NonNull<Watched<Node>>);

/// The low bits of the root word if the root is a node. The level of the node is above them.
const NODE: usize = 0b10;
const TAG: usize = 0b11;
const LEVEL_SHIFT: u32 = 2;
const _: () = assert!(MAX_HEIGHT <= align_of::<Node>() >> LEVEL_SHIFT);

impl NodePtr {
    /// The size of a node.
    pub(super) const BYTES: usize = size_of::<Watched<Node>>();

    /// Makes a node, all of whose slots are `fill`.
    pub(super) fn new(memory: Memory, shift: u32, offset: u64, fill: Word) -> Self {
        let at = memory.into_raw();
        // SAFETY: the memory has the layout of a node, and this function owns it.
        unsafe { at.write(Watched::new(Node::new(shift, offset, fill))) };
        Self(at)
    }

    /// Returns the node in a root word and the node's shift, if the root is a node.
    #[inline(always)]
    pub(super) fn of_root(word: Word) -> Option<(Self, u32)> {
        if word.addr() & TAG != NODE {
            return None;
        }
        let level = (word.addr() & (align_of::<Node>() - 1)) >> LEVEL_SHIFT;
        let node = word.map_addr(|addr| addr & !(align_of::<Node>() - 1)).cast();
        // SAFETY: `to_root` made the word of a node, whose address is not 0.
        Some((Self(unsafe { NonNull::new_unchecked(node) }), level as u32 * BITS))
    }

    /// Returns the node in a root word, if it is a node of level `LEVEL`.
    #[inline(always)]
    pub(super) fn of_root_at<const LEVEL: usize>(word: Word) -> Option<Self> {
        let tag = LEVEL << LEVEL_SHIFT | NODE;
        if word.addr() & (align_of::<Node>() - 1) != tag {
            return None;
        }
        let node = word.map_addr(|addr| addr - tag).cast();
        // SAFETY: `to_root` made the word of a node, whose address is not 0.
        Some(Self(unsafe { NonNull::new_unchecked(node) }))
    }

    /// Returns the root word for this node.
    pub(super) fn to_root(self) -> Word {
        // SAFETY: only the writer calls this function, on a node of the tree or of this edit.
        let level = u32::from(unsafe { self.get() }.shift) / BITS;
        self.to_word().map_addr(|addr| addr | (level as usize) << LEVEL_SHIFT | NODE)
    }

    /// Returns the node in a slot.
    ///
    /// # Safety
    ///
    /// The word is from [`to_word`](NodePtr::to_word): it is present, and its slot is above level 0.
    #[inline(always)]
    pub(super) unsafe fn of_word(word: Word) -> Self {
        // SAFETY: the word is from `to_word`, which never returns null.
        Self(unsafe { NonNull::new_unchecked(word.cast()) })
    }

    /// Returns the word of this node for a slot.
    pub(super) fn to_word(self) -> Word {
        self.0.as_ptr().cast()
    }

    /// Returns the node.
    ///
    /// # Safety
    ///
    /// The node is not freed during `'a`: the calling thread is in an RCU section since before it found
    /// the node, or it is the writer and found the node in this edit.
    #[inline(always)]
    pub(super) unsafe fn get<'a>(self) -> &'a Watched<Node> {
        // SAFETY: by the contract of this function the node is not freed during `'a`.
        unsafe { self.0.as_ref() }
    }

    /// Adds the node to `batch`, which frees it after a grace period.
    ///
    /// # Safety
    ///
    /// The caller is the writer, and has just taken the node out of the tree.
    pub(super) unsafe fn retire(self, batch: &mut Batch) {
        // SAFETY: the node is not freed before the batch is retired.
        let node = unsafe { self.get() };
        // Ordering: Relaxed; the flag carries no data, see `is_dead`.
        node.dead.store(true, Ordering::Relaxed);
        // SAFETY: the offset is within the node.
        let head = unsafe { self.0.byte_add(HEAD) }.cast::<RetireHead>();
        // SAFETY: the head was made for `free_node`, and new readers do not find the node.
        unsafe { batch.push(head, Self::BYTES) };
    }

    /// Frees the node now.
    ///
    /// # Safety
    ///
    /// No other thread uses the node or can find it, and it is freed once.
    pub(super) unsafe fn free(self) {
        // SAFETY: the memory was allocated with the layout of the box, and no thread uses the node.
        free(unsafe { Box::from_raw(self.0.as_ptr()) });
    }
}

const HEAD: usize = Watched::<Node>::OFFSET + offset_of!(Node, head);

/// Frees the node of `head`.
///
/// # Safety
///
/// The head is that of a node that no thread uses any more.
unsafe fn free_node(head: NonNull<RetireHead>) {
    // SAFETY: `retire` made `head` from a pointer to the whole node by adding this offset.
    let node = unsafe { head.byte_sub(HEAD) }.cast();
    // SAFETY: by the contract of this function no thread uses the node any more.
    unsafe { NodePtr(node).free() };
}
