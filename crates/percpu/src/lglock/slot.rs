//! The slot of one CPU, and the raw guard that unlocks it.

use crossbeam_utils::CachePadded;
use offlock_sync::Parker;
use offlock_sync::atomic::{AtomicU64, Ordering};
use offlock_sync::cell::UnsafeCell;
use offlock_sync::order;

use crate::cpu::CpuId;

/// The word of a held slot.
///
/// It is not the id of the owner, because an exchange with a constant acquires a free word and
/// leaves a held word unchanged, and is a tenth faster than a compare-exchange.
pub(super) const HELD: u64 = 1;

/// The value of a CPU and its lock. Each is alone on its cache lines (`CachePadded`).
///
/// The fields that an unlock reads share the cache line of the word that it writes.
#[derive(Debug)]
#[repr(C)]
pub(super) struct Slot<T> {
    /// [`HELD`], or 0.
    pub(super) word: AtomicU64,
    /// The id of the thread that holds the slot. Set after the word is acquired, and cleared before
    /// the word is released.
    pub(super) owner: AtomicU64,
    pub(super) parker: Parker,
    pub(super) cpu: CpuId,
    value: UnsafeCell<T>,
}

// SAFETY: `value` is reached through guards only, and those give `&mut T` to one thread at a time
// (invariant 1 of the module), which is a move as far as `T` can tell, so `T: Send` suffices. A
// shared guard, which gives out `&T`, requires `T: Sync` itself. The rest is atomics and locks.
unsafe impl<T: Send> Sync for Slot<T> {}

impl<T> Slot<T> {
    /// Creates `count` free slots, for the CPUs from 0 on.
    pub(super) fn boxed_slice(
        count: usize,
        mut init: impl FnMut(CpuId) -> T,
    ) -> Box<[CachePadded<Self>]> {
        let slot = |index| {
            let cpu = CpuId::new(index as u32);
            CachePadded::new(Self {
                word: AtomicU64::new(0),
                owner: AtomicU64::new(0),
                parker: Parker::new(),
                cpu,
                value: UnsafeCell::new(init(cpu)),
            })
        };
        (0..count).map(slot).collect()
    }

    /// Returns a pointer for a thread that holds the slot and only reads the value.
    #[inline(always)]
    pub(super) fn as_ptr(&self) -> *const T {
        self.value.with(|value| value)
    }

    /// Returns a pointer for a thread that holds the slot.
    #[inline(always)]
    pub(super) fn as_mut_ptr(&self) -> *mut T {
        self.value.with_mut(|value| value)
    }

    /// Returns the value without locking.
    pub(super) fn get_mut(&mut self) -> &mut T {
        let value = self.as_mut_ptr();
        // SAFETY: a guard borrows the slot, so `&mut self` excludes every guard.
        unsafe { &mut *value }
    }
}

/// The lock on a slot, without access to the value; unlocks on drop.
#[derive(Debug)]
pub(super) struct RawGuard<'a> {
    word: &'a AtomicU64,
    owner: &'a AtomicU64,
    parker: &'a Parker,
}

impl<'a> RawGuard<'a> {
    /// # Safety
    ///
    /// The calling thread has acquired the slot's word and stored its id as the owner. No other
    /// `RawGuard` of the slot exists, and this one stays on the calling thread.
    #[inline(always)]
    pub(super) unsafe fn new<T>(slot: &'a Slot<T>) -> Self {
        Self { word: &slot.word, owner: &slot.owner, parker: &slot.parker }
    }
}

impl Drop for RawGuard<'_> {
    #[inline(always)]
    fn drop(&mut self) {
        // Ordering: Relaxed; only the calling thread looks for its own id.
        self.owner.store(0, Ordering::Relaxed);
        // Ordering: Release pairs with the Acquire in `try_acquire`, by which the next holder takes
        // the word. It carries the slot's value.
        self.word.store(0, order!(Release, "unlock a slot: the value"));
        self.parker.unpark_one();
    }
}

#[cfg(all(test, not(offlock_model)))]
mod tests;
