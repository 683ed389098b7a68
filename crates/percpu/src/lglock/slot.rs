//! One CPU's slot, and the right to it.

use crate::cpu::CpuId;
use crate::error::AllocError;
use crate::park::Parker;
use crate::sync::atomic::{AtomicU64, Ordering};
use crate::sync::cell::UnsafeCell;
#[cfg(any(offlock_loom, offlock_shuttle))]
use crate::sync::cpu;
use crate::sync::mutant;

/// The word of a slot that is held. Not the owner's id: an exchange of a constant takes a free word
/// and changes nothing of a held one, and is a tenth faster than a compare-exchange.
pub(super) const HELD: u64 = 1;

/// A CPU's value and the lock over it, on lines of their own.
///
/// What an unlock looks at is beside the word that it writes, so that it misses no cache.
#[derive(Debug)]
#[repr(C, align(128))]
pub(super) struct Slot<T> {
    /// [`HELD`], or 0.
    pub(super) word: AtomicU64,
    /// The id of the thread that holds the slot, but for its first and last instructions there.
    pub(super) owner: AtomicU64,
    pub(super) parker: Parker,
    pub(super) cpu: CpuId,
    value: UnsafeCell<T>,
}

// SAFETY: `value` is reached through guards only, and those give `&mut T` to one thread at a time
// (invariant 1 of the module), which is a move as far as `T` can tell; so `T: Send` suffices. A
// guard that is shared, and with it `&T`, asks for `T: Sync` itself. The rest is atomics and locks.
unsafe impl<T: Send> Sync for Slot<T> {}

impl<T> Slot<T> {
    /// So many slots, ascending from 0, all free.
    pub(super) fn boxed_slice(
        count: usize,
        mut init: impl FnMut(CpuId) -> T,
    ) -> Result<Box<[Self]>, AllocError> {
        let end = u32::try_from(count).map_err(|_| AllocError::new())?;
        let mut slots = Vec::new();
        slots.try_reserve_exact(count).map_err(|_| AllocError::new())?;
        slots.extend((0..end).map(|index| {
            let cpu = CpuId::new(index);
            Self {
                word: AtomicU64::new(0),
                owner: AtomicU64::new(0),
                parker: Parker::new(),
                cpu,
                value: UnsafeCell::new(init(cpu)),
            }
        }));
        Ok(slots.into_boxed_slice())
    }

    /// The value, for whoever holds the slot and only reads.
    #[inline(always)]
    pub(super) fn as_ptr(&self) -> *const T {
        self.value.with(|value| value)
    }

    /// The value, for whoever holds the slot.
    #[inline(always)]
    pub(super) fn as_mut_ptr(&self) -> *mut T {
        self.value.with_mut(|value| value)
    }

    /// The value, for who has the whole lock to himself.
    pub(super) fn get_mut(&mut self) -> &mut T {
        let value = self.as_mut_ptr();
        // SAFETY: `&mut self` says that nobody else can reach it.
        unsafe { &mut *value }
    }

    pub(super) fn into_inner(self) -> T {
        self.value.into_inner()
    }
}

/// The right to a slot; gives it back on drop.
#[derive(Debug)]
pub(super) struct RawGuard<'a> {
    word: &'a AtomicU64,
    owner: &'a AtomicU64,
    parker: &'a Parker,
    /// For a planted bug: the CPU that was locked, and the word of a model's other one.
    #[cfg(any(offlock_loom, offlock_shuttle))]
    other: Option<(CpuId, &'a AtomicU64)>,
}

impl<'a> RawGuard<'a> {
    /// # Safety
    ///
    /// The calling thread has taken the slot's word and stored its id as the owner, has no other
    /// `RawGuard` of it, and keeps this one to itself.
    #[inline(always)]
    pub(super) unsafe fn new<T>(slot: &'a Slot<T>) -> Self {
        Self {
            word: &slot.word,
            owner: &slot.owner,
            parker: &slot.parker,
            #[cfg(any(offlock_loom, offlock_shuttle))]
            other: None,
        }
    }

    /// The word to release: always the one that was locked, but for a planted bug.
    #[inline(always)]
    fn word(&self) -> &'a AtomicU64 {
        #[cfg(any(offlock_loom, offlock_shuttle))]
        match self.other {
            Some((locked, other)) if mutant("lglock-unlock-asks-for-the-cpu") => {
                return if cpu::current() == locked { self.word } else { other };
            }
            _ => {}
        }
        self.word
    }

    /// Lets a planted bug release the word of the other CPU of a model.
    #[cfg(any(offlock_loom, offlock_shuttle))]
    pub(super) fn with_other_word(mut self, locked: CpuId, other: &'a AtomicU64) -> Self {
        self.other = Some((locked, other));
        self
    }
}

impl Drop for RawGuard<'_> {
    #[inline(always)]
    fn drop(&mut self) {
        // Ordering: Relaxed; only its own thread looks for its id.
        self.owner.store(0, Ordering::Relaxed);
        let release =
            if mutant("lglock-unlock-is-relaxed") { Ordering::Relaxed } else { Ordering::Release };
        // Ordering: Release pairs with the Acquire in `try_acquire`, by which the next holder takes the
        // word. It carries the slot's value.
        self.word().store(0, release);
        self.parker.unpark_one();
    }
}

#[cfg(all(test, not(any(offlock_loom, offlock_shuttle))))]
mod tests {
    use super::*;
    use crate::lglock::LgLock;
    use crate::sync::cpu;

    /// Whatever the size of the value, and with what an unlock looks at on the line of the word.
    #[test]
    fn inv18_slots_of_different_cpus_never_share_a_line() {
        fn check<T: Default>() {
            let slots = Slot::<T>::boxed_slice(cpu::possible(), |_| T::default()).unwrap();
            for slot in &slots {
                assert_eq!(std::ptr::from_ref(slot).addr() % 128, 0);
            }
            assert_eq!(size_of::<Slot<T>>() % 128, 0);
            assert!(std::mem::offset_of!(Slot<T>, parker) + size_of::<Parker>() <= 64);
        }
        check::<()>();
        check::<u8>();
        check::<[u64; 12]>();
        check::<Vec<u8>>();
    }

    /// Small values cost one line.
    #[test]
    fn a_small_value_fits_in_the_line_of_its_lock() {
        assert_eq!(size_of::<Slot<[u64; 9]>>(), 128);
        assert!(size_of::<LgLock<u8>>() <= 32);
    }
}
