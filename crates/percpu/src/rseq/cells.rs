//! The sections of percpu-list, whose values are in cells of blocks.
//!
//! ```text
//!  list -> shards: | cpu 0: current block, ...  | cpu 1: ...      SHARD bytes each
//!                      v
//!  block: | home | adds | seen | misses | special ... | states | remote ... | 64 cells |
//! ```
//!
//! A cell is occupied if and only if its bit of `home ^ remote` is 1. Only a section on the CPU of
//! the block changes `home`, by one store that is claim and publication at once. Any other
//! thread changes `remote`, by an atomic operation. `seen` is what the CPU of the block remembers of
//! `remote` and `held`, so an addition reads their cache line only when the block seems full.
//!
//! | section | runs on | refused if | commits |
//! |---|---|---|---|
//! | [`insert`](CellSections::insert) | any CPU | the list is closed; the current block seems full | the bit in `home`, and `adds + 1` |
//! | [`refill`](CellSections::refill) | the CPU of the block | | `seen` and `misses` |
//! | [`remove`](CellSections::remove) | the CPU of the block | there is a snapshot; a walk has marked the entry | the bit in `home` |
//! | [`remove_remote`](CellSections::remove_remote) | any CPU | the same | the bit in `remote` |
//!
//! # Invariants
//!
//! 1. A section copies a value into a cell before it commits that the cell is occupied, and out of
//!    a cell after its tests and before it commits that the cell is free.
//! 2. `seen` never shows a cell as free that is occupied or held.
//! 3. A section that removes tests the gate and the mark of the entry. After a thread has changed
//!    one of these and called [`heavy_rseq`](crate::fence::heavy_rseq), no section that saw the
//!    former value can commit.

use std::mem::MaybeUninit;

use offlock_sync::atomic::{AtomicPtr, AtomicU32, AtomicU64};
#[cfg(offlock_model)]
use offlock_sync::cell::UnsafeCell;

pub use super::Refused;
#[cfg(not(offlock_model))] // percpu-list has those of a model
pub use super::imp::Sections;

/// The largest number of cells of a block.
pub const CELLS: usize = if cfg!(offlock_model) { 2 } else { 64 };
/// The number of bytes of a shard.
pub const SHARD: usize = 128;
/// The offset of the first cell in a block.
pub const VALUES: usize = 384;
/// The CPU of a block that belongs to none. A section compares it with the id of its thread, so it is
/// neither a CPU nor what a thread without an id has: -1 or -2.
pub const NO_CPU: u32 = i32::MAX as u32;
/// The state of a free cell that was freed outside a section.
pub const FREE: u32 = 3 << 30;

/// The fields of a list that sections read.
#[repr(C, align(64))]
#[derive(Debug)]
pub struct Head {
    /// The number of snapshots. Removals by sections are refused while it is not 0.
    pub gate: AtomicU64,
    /// Additions are refused while it is not 0.
    pub add_gate: AtomicU64,
    /// The shard of CPU 0. The others follow, `stride` bytes each, which are [`SHARD`] outside a
    /// model. A shard begins with the current block of its CPU.
    pub shards: *const AtomicPtr<Block>,
    /// The number of bytes of a shard.
    pub stride: usize,
}

/// The header of a block. The cells follow, at [`VALUES`].
#[repr(C, align(64))]
#[derive(Debug)]
pub struct Block {
    /// Changed by sections of `cpu` only.
    pub home: AtomicU64,
    /// Additions; committed with `home`.
    pub adds: AtomicU64,
    /// `home ^ seen` is 0 for each cell that the CPU may take.
    pub seen: AtomicU64,
    /// Removals through `remote` that a refill has found; committed with `seen`.
    pub misses: AtomicU64,
    /// The entries that a walk has marked.
    pub special: AtomicU64,
    /// The cells that exist.
    pub mask: u64,
    /// The place of the current block, in the block's shard.
    pub current: *const AtomicPtr<Block>,
    /// The CPU of the block, or [`NO_CPU`].
    pub cpu: u32,
    /// The CPU of the block's shard.
    pub slot: u32,
    /// For each cell, pins and how far its removal is.
    pub states: [AtomicU32; CELLS],
    /// Changed by atomic operations of any thread.
    pub remote: AtomicU64,
    /// Cells off the list that a walk still pins.
    pub held: AtomicU64,
    /// A copy of `special`, for removals on other CPUs.
    pub special_remote: AtomicU64,
    /// The next block of the shard.
    pub next: AtomicPtr<Block>,
    /// The list, for a pin that may outlive its handle.
    pub list: *const (),
    /// Entries that the thread of a snapshot has dropped.
    pub deferred: AtomicU64,
    /// Links the blocks that have such entries, and those that a trim has unlinked.
    pub link: AtomicPtr<Block>,
    /// Ascending in a shard.
    pub serial: u64,
    /// For the checker of a model: an access of each cell, and whether the block was freed.
    #[cfg(offlock_model)]
    pub accessed: ([UnsafeCell<()>; CELLS], UnsafeCell<bool>),
}

// SAFETY: the atomics change as the module says, the other fields never, and the list outlives the
// block.
unsafe impl Send for Block {}
// SAFETY: `&Block` gives atomics, and pointers and numbers that never change.
unsafe impl Sync for Block {}

#[cfg(not(offlock_model))] // the atomics of a model are larger
const _: () = {
    use std::mem::offset_of;
    assert!(offset_of!(Head, add_gate) == 8 && offset_of!(Head, shards) == 16);
    assert!(offset_of!(Block, home) == 0 && offset_of!(Block, adds) == 8);
    assert!(offset_of!(Block, seen) == 16 && offset_of!(Block, misses) == 24);
    assert!(offset_of!(Block, special) == 32 && offset_of!(Block, mask) == 40);
    assert!(offset_of!(Block, current) == 48 && offset_of!(Block, cpu) == 56);
    assert!(offset_of!(Block, states) == 64 && offset_of!(Block, remote) == 320);
    assert!(offset_of!(Block, held) == 328 && offset_of!(Block, special_remote) == 336);
    assert!(size_of::<Block>() == VALUES);
};

/// The sections of the table above: in assembly, in the form for the model checkers, or none.
pub trait CellSections: Copy {
    /// Copies the value at `source` into a free cell of this CPU's current block,
    /// and returns the block and the cell. Refused if the list is closed or the block seems full.
    ///
    /// # Safety
    ///
    /// `head.shards` are the shards of all possible CPUs, and a current block is null or a block of
    /// its CPU with cells of `T`. They live during the call. If the result is not an error, the
    /// value has moved.
    unsafe fn insert<T>(
        self,
        head: *const Head,
        source: *const Cell<T>,
    ) -> Result<(*const Block, u32), Refused>;

    /// Learns which cells of a block were freed through `remote`, counts them as misses, and makes
    /// the block the current one. Refused on another CPU than that of the block.
    ///
    /// # Safety
    ///
    /// The block and its shard live during the call, and no other block of this CPU has other types
    /// of cells in that shard.
    unsafe fn refill(self, block: *const Block) -> Result<(), Refused>;

    /// Frees an occupied cell on the CPU of its block. Copies the value out, if it needs a drop.
    /// Refused on another CPU, during a snapshot, and if a walk has marked the entry.
    ///
    /// # Safety
    ///
    /// The cell is in a block of the list of `head` with cells of `T`, which lives during the call,
    /// and the caller has its entry. If the result is not an error, the entry has ended, and the
    /// value has moved to `target`.
    unsafe fn remove<T>(
        self,
        head: *const Head,
        block: *const Block,
        index: u32,
        target: *mut Cell<T>,
    ) -> Result<(), Refused>;

    /// Frees an occupied cell on any CPU, by one atomic operation. Otherwise like
    /// [`remove`](Self::remove).
    ///
    /// # Safety
    ///
    /// That of [`remove`](Self::remove).
    unsafe fn remove_remote<T>(
        self,
        head: *const Head,
        block: *const Block,
        index: u32,
        target: *mut Cell<T>,
    ) -> Result<(), Refused>;
}

/// The place of a value, a whole number of words.
#[repr(C, align(8))]
#[derive(Debug)]
pub struct Cell<T>(pub MaybeUninit<T>);

impl Block {
    /// Tells a model checker that the caller reads the value of a cell.
    #[inline(always)]
    pub fn reads(&self, _index: u32) {
        #[cfg(offlock_model)]
        self.accessed.0[_index as usize].with(|_| ());
    }

    /// Tells a model checker that the caller moves a value into a cell or out of it.
    #[inline(always)]
    pub fn moves(&self, _index: u32) {
        #[cfg(offlock_model)]
        self.accessed.0[_index as usize].with_mut(|_| ());
    }

    /// Tells a model checker that the caller uses the block.
    #[inline(always)]
    pub fn lives(&self) {
        #[cfg(offlock_model)]
        // SAFETY: the checker fails the model if a write is not ordered with this read.
        self.accessed.1.with(|freed| assert!(!unsafe { *freed }, "the block was freed"));
    }

    /// Tells a model checker that the block is freed. Returns true: the caller must keep its memory
    /// until the end of the run.
    #[cfg(offlock_model)]
    pub fn is_freed_in_model(&self) -> bool {
        self.accessed.0.iter().for_each(|cell| cell.with_mut(|_| ()));
        // SAFETY: the checker fails the model if a use is not ordered with this write.
        self.accessed.1.with_mut(|freed| unsafe { *freed = true });
        true
    }

    /// Returns the cell `index` of the block at `block`.
    ///
    /// # Safety
    ///
    /// The block has cells of `T`, more than `index`.
    #[inline(always)]
    pub unsafe fn cell<T>(block: *const Self, index: u32) -> *mut Cell<T> {
        let offset = VALUES.max(size_of::<Self>()) + index as usize * size_of::<Cell<T>>();
        // SAFETY: by the contract of this function the cell is in the block.
        unsafe { block.byte_add(offset) }.cast_mut().cast()
    }
}
