//! A small mutex over one value, whose uncontended unlock is a plain store and a load.
//!
//! `std`'s unlock is an exchange, which also tells whether a thread waits. Here that is a separate
//! load, and the waiter pays for the order between the store and the load ([`crate::park`]). This
//! halves the cost of an uncontended lock and unlock, and costs one more system call if a thread
//! waits.
//!
//! ```text
//!  lock -> | word | waiters | value ...                one cache line, if the value fits
//! ```
//!
//! # Invariants
//!
//! 1. Only the thread that changed `word` from 0 uses `value`, until it stores 0.
//! 2. No wake-up is lost: see [`crate::park`].

use std::fmt;
use std::marker::PhantomData;
use std::ops::{Deref, DerefMut};

use crate::atomic::{AtomicU32, Ordering};
use crate::cell::UnsafeCell;
use crate::park::Parker;
use crate::{check, order, step};

const HELD: u32 = 1;

/// A mutual exclusion lock whose unlock is a plain store and a load, unless a thread waits.
///
/// The lock is neither fair nor recursive: a thread that locks it twice waits for itself for ever.
/// A waiter makes attempts some microseconds apart and then sleeps. So each of several threads that
/// lock all the time keeps the lock for some microseconds, while the value stays in its CPU's
/// cache. There is no poisoning: a panic inside a guard unlocks. A forgotten guard leaves the lock
/// locked for ever.
#[repr(C, align(64))]
pub struct WordLock<T> {
    /// [`HELD`], or 0.
    word: AtomicU32,
    parker: Parker,
    value: UnsafeCell<T>,
}

// The value begins on the cache line of the word and of the parker, which an unlock reads.
#[cfg(not(offlock_model))]
const _: () = {
    assert!(size_of::<WordLock<[u64; 3]>>() == 64 && align_of::<WordLock<u8>>() == 64);
    assert!(std::mem::offset_of!(WordLock<[u64; 3]>, value) <= 40);
};

// SAFETY: `value` is reached through the guard only, which one thread at a time has (invariant 1),
// and `&mut T` on one thread at a time is a move as far as `T` can tell, so `T: Send` suffices. A
// shared guard, which gives out `&T`, requires `T: Sync` itself. The rest is atomics and locks.
unsafe impl<T: Send> Sync for WordLock<T> {}

impl<T> WordLock<T> {
    /// Creates an unlocked lock. Does not allocate.
    pub fn new(value: T) -> Self {
        Self { word: AtomicU32::new(0), parker: Parker::new(), value: UnsafeCell::new(value) }
    }

    /// Locks the value. Blocks while another thread holds the lock.
    #[inline]
    pub fn lock(&self) -> WordGuard<'_, T> {
        if !self.try_acquire() {
            self.lock_slow();
        }
        self.guard()
    }

    /// Locks the value if no thread holds the lock. Wait-free.
    #[inline]
    pub fn try_lock(&self) -> Option<WordGuard<'_, T>> {
        self.try_acquire().then(|| self.guard())
    }

    /// Returns the value without locking: `&mut self` proves that no guard exists.
    #[inline]
    pub fn get_mut(&mut self) -> &mut T {
        let value = self.as_mut_ptr();
        // SAFETY: a guard borrows the lock, so `&mut self` excludes every guard.
        unsafe { &mut *value }
    }

    /// Returns a pointer to the value, for a thread that has forgotten a guard and only reads.
    #[inline(always)]
    pub fn as_ptr(&self) -> *const T {
        self.value.with(|value| value)
    }

    /// Returns a pointer to the value, for a thread that has forgotten a guard.
    #[inline(always)]
    pub fn as_mut_ptr(&self) -> *mut T {
        self.value.with_mut(|value| value)
    }

    /// Unlocks in place of a guard.
    ///
    /// # Safety
    ///
    /// The calling thread has forgotten the guard, and nothing uses the value any more.
    #[inline(always)]
    pub unsafe fn unlock(&self) {
        drop(self.guard());
    }

    #[inline(always)]
    fn try_acquire(&self) -> bool {
        let acquire = order!(Acquire, "lock: the value");
        // Ordering: Acquire pairs with the Release in `WordGuard::drop`; it carries the value.
        // Relaxed on failure: the word found there says nothing about the value.
        if cfg!(offlock_model) {
            // Equivalent, because the word has two values. loom lets a swap that read HELD undo a
            // release.
            let free = self.word.compare_exchange(0, HELD, acquire, Ordering::Relaxed).is_ok();
            check!("lock: the word is free", free)
        } else {
            self.word.swap(HELD, acquire) == 0
        }
    }

    /// Creates the guard of the thread that has just acquired the word.
    #[inline(always)]
    fn guard(&self) -> WordGuard<'_, T> {
        WordGuard { lock: self, _not_send: PhantomData }
    }

    #[cold]
    #[inline(never)]
    fn lock_slow(&self) {
        self.parker.wait(|| {
            // Ordering: Relaxed; this load only avoids an exchange on the holder's cache line.
            let free = self.word.load(Ordering::Relaxed) == 0;
            (free && self.try_acquire()).then_some(())
        });
    }
}

impl<T: Default> Default for WordLock<T> {
    fn default() -> Self {
        Self::new(T::default())
    }
}

impl<T> fmt::Debug for WordLock<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Ordering: Relaxed; the value is only printed.
        let held = self.word.load(Ordering::Relaxed) != 0;
        f.debug_struct("WordLock").field("held", &held).finish_non_exhaustive()
    }
}

/// Exclusive access to the value of a [`WordLock`]; unlocks on drop.
#[must_use = "it unlocks when the guard drops"]
pub struct WordGuard<'a, T> {
    lock: &'a WordLock<T>,
    /// Makes the guard `!Send` and `!Sync`; the `impl` below restores `Sync` for `T: Sync`.
    _not_send: PhantomData<*mut ()>,
}

// SAFETY: a shared guard only gives out `&T`, for which `T: Sync` suffices; unlocking consumes the
// guard.
unsafe impl<T: Sync> Sync for WordGuard<'_, T> {}

impl<T> Deref for WordGuard<'_, T> {
    type Target = T;

    #[inline(always)]
    fn deref(&self) -> &T {
        // SAFETY: invariant 1: this guard's thread holds the word. `&self` excludes `deref_mut`.
        unsafe { &*self.lock.as_ptr() }
    }
}

impl<T> DerefMut for WordGuard<'_, T> {
    #[inline(always)]
    fn deref_mut(&mut self) -> &mut T {
        // SAFETY: invariant 1: this guard's thread holds the word. `&mut self` excludes other
        // references.
        unsafe { &mut *self.lock.as_mut_ptr() }
    }
}

impl<T> Drop for WordGuard<'_, T> {
    #[inline(always)]
    fn drop(&mut self) {
        // Ordering: Release pairs with the Acquire in `try_acquire`; it carries the value.
        self.lock.word.store(0, order!(Release, "unlock: the value"));
        step!("unlock: wake a waiter", self.lock.parker.unpark_one());
    }
}
