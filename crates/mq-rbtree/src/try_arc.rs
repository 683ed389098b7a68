//! A shared reference whose allocation may fail, which that of an `Arc` may not.

use std::mem::ManuallyDrop;
use std::ops::Deref;
use std::ptr::NonNull;

use percpu::AllocError;
use percpu::alloc::try_box;
use percpu::sync::atomic::{AtomicUsize, Ordering};
use percpu::sync::{fence, order};

/// A reference to a value that is dropped with its last reference.
#[derive(Debug)]
pub(crate) struct TryArc<T>(NonNull<Counted<T>>);

struct Counted<T> {
    /// The references. 2^63 of them do not fit into memory, and a leaked one takes longer than a
    /// nanosecond.
    count: AtomicUsize,
    value: T,
}

// SAFETY: the value is shared, and dropped by the thread that drops the last reference.
unsafe impl<T: Send + Sync> Send for TryArc<T> {}
// SAFETY: a `&TryArc` gives a `&T`, and a clone, as above.
unsafe impl<T: Send + Sync> Sync for TryArc<T> {}

impl<T> TryArc<T> {
    /// Allocates memory for the value, and moves it there.
    pub(crate) fn try_new(value: T) -> Result<Self, AllocError> {
        let counted = try_box(Counted { count: AtomicUsize::new(1), value });
        counted
            .map(|counted| Self(NonNull::from(Box::leak(counted))))
            .map_err(|_| AllocError::new())
    }

    /// Turns the reference into a pointer. [`from_raw`](Self::from_raw) turns it back.
    pub(crate) fn into_raw(self) -> *const () {
        ManuallyDrop::new(self).0.as_ptr().cast_const().cast()
    }

    /// Turns a pointer back into the reference.
    ///
    /// # Safety
    ///
    /// [`into_raw`](Self::into_raw) of this type has returned the pointer. It is the only call for it, or
    /// the result is never dropped.
    pub(crate) unsafe fn from_raw(raw: *const ()) -> Self {
        // SAFETY: the caller guarantees a pointer of `into_raw`, which is not null.
        Self(unsafe { NonNull::new_unchecked(raw.cast_mut().cast()) })
    }
}

impl<T> Deref for TryArc<T> {
    type Target = T;

    #[inline(always)]
    fn deref(&self) -> &T {
        // SAFETY: this reference is counted, so the memory is alive, and only shared.
        &unsafe { self.0.as_ref() }.value
    }
}

impl<T> Clone for TryArc<T> {
    #[inline]
    fn clone(&self) -> Self {
        // SAFETY: this reference is counted, so the memory is alive, and only shared.
        let counted = unsafe { self.0.as_ref() };
        // Ordering: Relaxed; this reference keeps the count above 0, and the count publishes nothing.
        counted.count.fetch_add(1, Ordering::Relaxed);
        Self(self.0)
    }
}

impl<T> Drop for TryArc<T> {
    #[inline]
    fn drop(&mut self) {
        // SAFETY: this reference is counted, so the memory is alive, and only shared.
        let counted = unsafe { self.0.as_ref() };
        let release = order!(Release, "reference drop: after its last use");
        // Ordering: Release pairs with the Acquire fence below in the drop of the last reference; it
        // carries the uses of the value through this one.
        if counted.count.fetch_sub(1, release) == 1 {
            // Ordering: Acquire fence, pairs with the Release of the other references' drops; it carries
            // the uses of the value through them.
            fence!(Acquire, "reference free: after the uses of the others");
            // SAFETY: `try_new` has leaked the box, and this was the last reference.
            drop(unsafe { Box::from_raw(self.0.as_ptr()) });
        }
    }
}
