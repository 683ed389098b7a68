//! The buffer of a request, from the moment at which its address is taken.

use std::mem::{ManuallyDrop, MaybeUninit};

/// A buffer whose address an operation has.
///
/// To move a `Box`, also inside another value, asserts that no other pointer reaches its memory: a
/// pointer that was taken before is invalid afterwards under Stacked Borrows, and the kernel would
/// use it. `MaybeUninit` makes no such assertion. So the address is taken from a buffer in here, and
/// the buffer leaves only after the completion, or if the request was not accepted.
pub(crate) struct HeldBuf<B>(MaybeUninit<B>);

impl<B> HeldBuf<B> {
    #[inline]
    pub(crate) fn new(buf: B) -> Self {
        Self(MaybeUninit::new(buf))
    }

    /// Returns the buffer, from which no address was taken yet.
    #[inline]
    pub(crate) fn get(&self) -> &B {
        // SAFETY: the buffer is initialised from `new` until `into_inner` or the drop, which
        // consume `self`.
        unsafe { self.0.assume_init_ref() }
    }

    /// Returns the buffer, to take its address.
    #[inline]
    pub(crate) fn get_mut(&mut self) -> &mut B {
        // SAFETY: the buffer is initialised from `new` until `into_inner` or the drop, which
        // consume `self`.
        unsafe { self.0.assume_init_mut() }
    }

    /// Returns the buffer. The address is not used any more.
    #[inline]
    pub(crate) fn into_inner(self) -> B {
        let this = ManuallyDrop::new(self);
        // SAFETY: the buffer is initialised, and read once, because `this` is not dropped.
        unsafe { this.0.assume_init_read() }
    }
}

impl<B> Drop for HeldBuf<B> {
    #[inline]
    fn drop(&mut self) {
        // SAFETY: the buffer is initialised, and not used after its drop.
        unsafe { self.0.assume_init_drop() }
    }
}
