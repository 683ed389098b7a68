//! An `Arc` whose constructor returns an error if memory is exhausted.

use std::mem::ManuallyDrop;
use std::ops::Deref;
use std::process;
use std::ptr::NonNull;

use super::try_box;
use crate::AllocError;
use crate::atomic::{AtomicUsize, Ordering};
use crate::quarantine::{self, Watched};
use crate::{fence, order};

/// A counted reference to a shared value. The drop of the last one drops the value.
#[derive(Debug)]
pub struct TryArc<T>(NonNull<Watched<Counted<T>>>);

struct Counted<T> {
    references: AtomicUsize,
    value: T,
}

// SAFETY: the value is shared, and dropped by the thread that drops the last reference.
unsafe impl<T: Send + Sync> Send for TryArc<T> {}
// SAFETY: a `&TryArc` gives other threads a `&T` and clones, of which the last one drops the value there.
unsafe impl<T: Send + Sync> Sync for TryArc<T> {}

impl<T> TryArc<T> {
    /// Allocates memory for the value, and moves it there.
    ///
    /// # Errors
    ///
    /// [`AllocError`] if the allocation fails; the value is dropped.
    pub fn try_new(value: T) -> Result<Self, AllocError> {
        let counted = try_box(Watched::new(Counted { references: AtomicUsize::new(1), value }));
        counted
            .map(|counted| Self(NonNull::from(Box::leak(counted))))
            .map_err(|_| AllocError::new())
    }

    #[inline(always)]
    fn counted(&self) -> &Counted<T> {
        // SAFETY: this reference is counted, so the memory is alive, and only shared.
        unsafe { self.0.as_ref() }
    }

    /// Returns whether both are references to the same value.
    #[must_use]
    pub fn ptr_eq(this: &Self, other: &Self) -> bool {
        this.0 == other.0
    }

    /// Returns the number of references. Other threads may change it at any time.
    #[must_use]
    pub fn references(this: &Self) -> usize {
        // Ordering: Relaxed; the number says nothing about the value.
        this.counted().references.load(Ordering::Relaxed)
    }

    /// Turns the reference into a pointer. [`from_raw`](Self::from_raw) turns it back.
    #[must_use = "the value leaks unless `from_raw` turns the pointer back"]
    pub fn into_raw(this: Self) -> *const () {
        ManuallyDrop::new(this).0.as_ptr().cast_const().cast()
    }

    /// Turns a pointer back into the reference.
    ///
    /// # Safety
    ///
    /// [`into_raw`](Self::into_raw) of this type has returned the pointer. At most one of the references
    /// that are made of it is dropped, and none is used after that drop.
    #[must_use]
    pub unsafe fn from_raw(raw: *const ()) -> Self {
        // SAFETY: the caller guarantees a pointer of `into_raw`, which is not null.
        Self(unsafe { NonNull::new_unchecked(raw.cast_mut().cast()) })
    }
}

impl<T> Deref for TryArc<T> {
    type Target = T;

    #[inline(always)]
    fn deref(&self) -> &T {
        &self.counted().value
    }
}

impl<T> Clone for TryArc<T> {
    #[inline]
    fn clone(&self) -> Self {
        // Ordering: Relaxed; this reference keeps the count above 0, and the count publishes nothing.
        if self.counted().references.fetch_add(1, Ordering::Relaxed) > isize::MAX as usize {
            process::abort(); // like `Arc`, because so many forgotten clones could overflow the count
        }
        Self(self.0)
    }
}

impl<T> Drop for TryArc<T> {
    #[inline]
    fn drop(&mut self) {
        let release = order!(Release, "reference drop: after its last use");
        // Ordering: Release pairs with the Acquire fence below in the drop of the last reference; it
        // carries the uses of the value through this one.
        if self.counted().references.fetch_sub(1, release) == 1 {
            // Ordering: Acquire fence, pairs with the Release of the other references' drops; it carries
            // the uses of the value through them.
            fence!(Acquire, "reference free: after the uses of the others");
            // SAFETY: `try_new` has leaked the box, and this was the last reference.
            quarantine::free(unsafe { Box::from_raw(self.0.as_ptr()) });
        }
    }
}

#[cfg(all(test, not(offlock_model)))]
mod tests;
