//! Closures that run after a grace period.

use std::error::Error;
use std::fmt;
use std::io;
use std::ptr::NonNull;

use super::bag::RetireHead;
use super::reclaim::retire_raw;
use crate::alloc::try_box;

#[repr(C)]
struct Deferred<F> {
    head: RetireHead,
    f: F,
}

/// Runs `f` once every reader that is inside now is gone.
///
/// On any thread, at any later time, holding no lock of this module; a panic is caught and counted
/// like that of a drop. `bytes` is what `f` will give back, for the byte bound and the statistics.
/// Lock-free; allocates a node before anything else. [`Unlinked::retire`](super::Unlinked::retire)
/// does not allocate.
///
/// # Aborts
///
/// Aborts if there is no memory for the node; [`try_defer`] gives `f` back instead.
pub fn defer<F: FnOnce() + Send + 'static>(bytes: usize, f: F) {
    if try_defer(bytes, f).is_err() {
        std::alloc::handle_alloc_error(std::alloc::Layout::new::<Deferred<F>>());
    }
}

/// [`defer`], where lack of memory is an error.
///
/// # Errors
///
/// [`TryDeferError`] gives `f` back: there is no memory for the node.
pub fn try_defer<F: FnOnce() + Send + 'static>(bytes: usize, f: F) -> Result<(), TryDeferError<F>> {
    // SAFETY: it is retired below, as a `Deferred<F>` in a box.
    let head = unsafe { RetireHead::new(run::<F>) };
    let node = match try_box(Deferred { head, f }) {
        Ok(node) => NonNull::from(Box::leak(node)),
        Err(node) => return Err(TryDeferError(node.f)),
    };
    let bytes = bytes.saturating_add(size_of::<Deferred<F>>());
    // SAFETY: the head is the first field (`repr(C)`) of a node that nobody else knows; `f` is
    // `Send` and owns what it needs.
    unsafe { retire_raw(node.cast(), bytes) };
    Ok(())
}

/// # Safety
///
/// `head` is that of a `Deferred<F>` in a box, which nobody uses any more.
unsafe fn run<F: FnOnce()>(head: NonNull<RetireHead>) {
    // SAFETY: as the caller says.
    let node = unsafe { Box::from_raw(head.cast::<Deferred<F>>().as_ptr()) };
    (node.f)();
}

/// There was no memory to defer the closure; here it is. Maps to `ENOMEM`.
#[derive(Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct TryDeferError<F>(pub F);

impl<F> TryDeferError<F> {
    /// The error as C knows it: `ENOMEM`.
    #[must_use]
    pub fn errno(&self) -> i32 {
        libc::ENOMEM
    }
}

impl<F> fmt::Debug for TryDeferError<F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TryDeferError").finish_non_exhaustive()
    }
}

impl<F> fmt::Display for TryDeferError<F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("out of memory for a deferred closure")
    }
}

impl<F> Error for TryDeferError<F> {}

impl<F> From<TryDeferError<F>> for io::Error {
    fn from(error: TryDeferError<F>) -> Self {
        Self::from_raw_os_error(error.errno())
    }
}
