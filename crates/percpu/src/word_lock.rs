//! A small mutex over one value: an unlock that finds nobody waiting is one plain store.
//!
//! `std`'s unlock is an exchange, so that it learns who waits. Here that is a load of its own, and
//! whoever waits pays for the order between the two ([`crate::park`]): half the price of a lock and
//! unlock that meet nobody, and a system call more where somebody waits.
//!
//! ```text
//!  lock -> | word | waiters | value ...                one cache line, as far as the value fits
//! ```
//!
//! # Invariants
//!
//! 1. `value` is used only by the thread that took `word` from 0, until it stores 0.
//! 2. A release and a wait do not miss each other: see [`crate::park`].

use std::fmt;
use std::marker::PhantomData;
use std::ops::{Deref, DerefMut};

use crate::park::{Parker, SpinLimit};
use crate::sync::atomic::{AtomicU32, Ordering};
use crate::sync::cell::UnsafeCell;
use crate::sync::mutant;

const HELD: u32 = 1;

/// A mutual exclusion lock whose unlock is a plain store and a load, unless somebody waits.
///
/// Neither fair nor recursive: a thread that locks what it holds waits for itself for ever. Whoever
/// waits looks some microseconds apart, then sleeps; so threads that want it all the time have it
/// for some microseconds each, in which the value stays in their CPU's caches. No
/// poison: a panic inside a guard unlocks. A forgotten guard leaves it locked for ever.
#[repr(C, align(64))]
pub struct WordLock<T> {
    /// [`HELD`], or 0.
    word: AtomicU32,
    parker: Parker,
    value: UnsafeCell<T>,
}

// SAFETY: `value` is reached through the guard only, which one thread at a time has (invariant 1),
// and `&mut T` on one thread at a time is a move as far as `T` can tell; so `T: Send` suffices. A
// shared guard, and with it `&T`, asks for `T: Sync` itself. The rest is atomics and locks.
unsafe impl<T: Send> Sync for WordLock<T> {}

impl<T> WordLock<T> {
    /// Makes an unlocked lock. Allocates nothing.
    pub fn new(value: T) -> Self {
        Self { word: AtomicU32::new(0), parker: Parker::new(), value: UnsafeCell::new(value) }
    }

    /// Locks. Blocks while another thread holds the lock.
    #[inline]
    pub fn lock(&self) -> WordGuard<'_, T> {
        if !self.try_acquire() {
            self.lock_slow();
        }
        self.guard()
    }

    /// Locks if no thread holds the lock. Wait-free.
    #[inline]
    pub fn try_lock(&self) -> Option<WordGuard<'_, T>> {
        self.try_acquire().then(|| self.guard())
    }

    /// The value, without locking: `&mut self` proves that nobody else can reach it.
    #[inline]
    pub fn get_mut(&mut self) -> &mut T {
        let value = self.value.with_mut(|value| value);
        // SAFETY: `&mut self` says that nobody else has the lock.
        unsafe { &mut *value }
    }

    /// Takes the value out.
    pub fn into_inner(self) -> T {
        self.value.into_inner()
    }

    #[inline(always)]
    fn try_acquire(&self) -> bool {
        let acquire =
            if mutant("word-lock-lock-is-relaxed") { Ordering::Relaxed } else { Ordering::Acquire };
        // Ordering: Acquire pairs with the Release in `WordGuard::drop`; it carries the value.
        // Relaxed on failure: the word found there says nothing about the value.
        if cfg!(any(offlock_loom, offlock_shuttle)) {
            if mutant("word-lock-takes-what-is-held") {
                return true;
            }
            // The same for a word of two values; loom lets an exchange that read HELD undo a release.
            self.word.compare_exchange(0, HELD, acquire, Ordering::Relaxed).is_ok()
        } else {
            self.word.swap(HELD, acquire) == 0
        }
    }

    /// The guard of the thread that has just taken the word.
    #[inline(always)]
    fn guard(&self) -> WordGuard<'_, T> {
        WordGuard { lock: self, _not_send: PhantomData }
    }

    #[cold]
    #[inline(never)]
    fn lock_slow(&self) {
        self.parker.wait(SpinLimit::LONG, || {
            // Ordering: Relaxed; only spares the holder an exchange of its line.
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
        // Ordering: Relaxed; for the eye only.
        let held = self.word.load(Ordering::Relaxed) != 0;
        f.debug_struct("WordLock").field("held", &held).finish_non_exhaustive()
    }
}

/// The right to use what a [`WordLock`] protects; unlocks on drop.
#[must_use = "it unlocks when the guard drops"]
pub struct WordGuard<'a, T> {
    lock: &'a WordLock<T>,
    /// Neither `Send` nor `Sync`; the latter is given back where `T` allows it.
    _not_send: PhantomData<*mut ()>,
}

// SAFETY: a shared guard gives `&T`, for which `T: Sync`; unlocking takes the guard itself.
unsafe impl<T: Sync> Sync for WordGuard<'_, T> {}

impl<T> Deref for WordGuard<'_, T> {
    type Target = T;

    #[inline(always)]
    fn deref(&self) -> &T {
        let value = self.lock.value.with(|value| value);
        // SAFETY: invariant 1; `&self` keeps `deref_mut` away.
        unsafe { &*value }
    }
}

impl<T> DerefMut for WordGuard<'_, T> {
    #[inline(always)]
    fn deref_mut(&mut self) -> &mut T {
        let value = self.lock.value.with_mut(|value| value);
        // SAFETY: invariant 1; `&mut self` keeps other references away.
        unsafe { &mut *value }
    }
}

impl<T> Drop for WordGuard<'_, T> {
    #[inline(always)]
    fn drop(&mut self) {
        let release = if mutant("word-lock-unlock-is-relaxed") {
            Ordering::Relaxed
        } else {
            Ordering::Release
        };
        // Ordering: Release pairs with the Acquire in `try_acquire`; it carries the value.
        self.lock.word.store(0, release);
        if !mutant("word-lock-unlock-wakes-nobody") {
            self.lock.parker.unpark_one();
        }
    }
}

impl<T: fmt::Debug> fmt::Debug for WordGuard<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("WordGuard").field(&**self).finish()
    }
}

/// What may cross threads.
const _: () = {
    const fn send_and_sync<T: Send + Sync>() {}
    const fn sync<T: Sync>() {}
    send_and_sync::<WordLock<std::cell::Cell<u8>>>();
    sync::<WordGuard<'_, u8>>();
};

#[cfg(all(test, not(any(offlock_loom, offlock_shuttle))))]
mod tests;
