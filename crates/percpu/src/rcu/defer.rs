//! Closures that run after a grace period.

use std::ptr::NonNull;

use super::bag::RetireHead;
use super::reclaim::retire_raw;
use crate::error::NewError;
use crate::sync::alloc::try_box;

/// A closure with the head that retires it.
#[repr(C)]
struct Deferred<F> {
    head: RetireHead,
    f: F,
}

/// Runs `f` once every current reader has left.
///
/// `f` runs on any thread, at any later time, without any lock of this module. A panic of `f` is
/// caught and counted like a panic of a drop. `bytes` is the memory that `f` will free, for the
/// byte bound and the statistics. Lock-free. Allocates a node first;
/// [`Unlinked::retire`](super::Unlinked::retire) does not allocate.
///
/// ```
/// use offlock_percpu::rcu;
///
/// let (sender, receiver) = std::sync::mpsc::channel();
/// rcu::defer(0, move || sender.send("no reader is left").unwrap());
/// rcu::barrier()?;
/// assert_eq!(receiver.recv().unwrap(), "no reader is left");
/// # Ok::<(), rcu::SynchronizeError>(())
/// ```
///
/// # Aborts
///
/// Aborts if there is no memory for the node; [`try_defer`] returns `f` instead.
pub fn defer<F: FnOnce() + Send + 'static>(bytes: usize, f: F) {
    if try_defer(bytes, f).is_err() {
        std::alloc::handle_alloc_error(std::alloc::Layout::new::<Deferred<F>>());
    }
}

/// Runs `f` like [`defer`], and returns an error if there is no memory.
///
/// ```
/// use offlock_percpu::rcu;
///
/// if let Err(error) = rcu::try_defer(0, || println!("no reader is left")) {
///     rcu::synchronize()?;
///     (error.0)();
/// }
/// # Ok::<(), rcu::SynchronizeError>(())
/// ```
///
/// # Errors
///
/// [`NewError`] returns `f`: there is no memory for the node.
pub fn try_defer<F: FnOnce() + Send + 'static>(bytes: usize, f: F) -> Result<(), NewError<F>> {
    // SAFETY: the head is retired below as part of a boxed `Deferred<F>`, which `run::<F>` frees.
    let head = unsafe { RetireHead::new(run::<F>) };
    let node = match try_box(Deferred { head, f }) {
        Ok(node) => NonNull::from(Box::leak(node)),
        Err(node) => return Err(NewError(node.f)),
    };
    let bytes = bytes.saturating_add(size_of::<Deferred<F>>());
    // SAFETY:
    // - The pointer is that of the whole node, whose first field is the head (`repr(C)`), and the
    //   node is retired once.
    // - No reader can find the node, because no other thread has its address.
    // - `f` is `Send` and `'static`, so it may run on any thread at any later time.
    unsafe { retire_raw(node.cast(), bytes) };
    Ok(())
}

/// Runs the closure of a node and frees the node.
///
/// # Safety
///
/// `head` is the head of a boxed `Deferred<F>`, and no other code uses the box from now on.
unsafe fn run<F: FnOnce()>(head: NonNull<RetireHead>) {
    // SAFETY: the caller promises a boxed `Deferred<F>` that only this function uses.
    let node = unsafe { Box::from_raw(head.cast::<Deferred<F>>().as_ptr()) };
    (node.f)();
}
