//! Waiting tasks.
//!
//! A future contains its node, which is on a list only while the future waits. A sender, or a
//! receiver that makes room, gives the first waiting task a permit: it takes the node off the list
//! and wakes the task, which polls again. Another thread or task may take the message or the room
//! before. Then the task waits again, at its former position. A future that is dropped with a
//! permit passes it on.

use std::ptr::NonNull;
use std::task::Waker;

use percpu::sync::step;

use crate::core::Levels;
use crate::queue::{Deferred, Queue, State};
use crate::waiter::Waiter;

/// Writes what both futures have: the end of one that is dropped.
macro_rules! operation {
    ($name:ident, |$this:ident| $queue:expr) => {
        impl<T, L: Levels> Drop for $name<'_, T, L> {
            #[inline]
            fn drop(&mut self) {
                let $this = &*self;
                if let Some(waiter) = &$this.waiter {
                    drop(leave($queue, waiter));
                }
            }
        }

        // SAFETY: the future shares its node with other threads, under the queue's lock. A message
        // moves with the future. `Sync` is for the borrowed queue, whose configuration threads read
        // without the lock.
        unsafe impl<T: Send, L: Levels> Send for $name<'_, T, L> where L::Priority: Send + Sync {}
    };
}

mod receive;
mod send;
#[cfg(feature = "stream")]
mod stream;

pub use self::receive::ReceiveFuture;
pub use self::send::SendFuture;
#[cfg(feature = "stream")]
pub use self::stream::ReceiveStream;

/// A task's node that was taken off its list.
struct Detached {
    was_listed: bool,
    had_permit: bool,
    /// The old waker, which is dropped after the unlock.
    _waker: Option<Waker>,
}

/// Takes a task's node off its list, and ends its permit.
///
/// # Safety
///
/// The caller holds the lock of the state, and no reference to the part of the node that it protects. The
/// node is on a list of this state or on none, and does not move until it is off.
unsafe fn detach<T, L: Levels>(
    state: &mut State<T, L>,
    waiter: &Waiter<T, L::Priority>,
) -> Detached {
    let node = NonNull::from(waiter);
    // SAFETY: the caller holds the lock, and the reference ends in this line.
    let demand = unsafe { Waiter::inner_of(node) }.demand; // a listed sender has one, a receiver none
    let list = if demand.is_some() { &mut state.senders } else { &mut state.receivers };
    // SAFETY: the caller holds the lock, and the node is alive, and on this list or on none.
    let was_listed = unsafe { list.remove(node) };
    // SAFETY: the caller holds the lock, and this is the only reference.
    let inner = unsafe { Waiter::inner_of(node) };
    let had_permit = std::mem::take(&mut inner.permit);
    if had_permit {
        match demand {
            Some(_) => state.release_send_permit(),
            None => state.release_receive_permit(),
        }
    }
    Detached { was_listed, had_permit, _waker: inner.take_waker() }
}

/// Ends the wait of a task, and passes its permit on. Then the node is on no list, and no other thread
/// knows it. The drop of the result resumes the panic of a waker.
#[cold]
#[inline(never)]
fn leave<T, L: Levels>(queue: &Queue<T, L>, waiter: &Waiter<T, L::Priority>) -> Deferred {
    let mut section = queue.section();
    let detached;
    {
        // While others wait, the ring is shut and drained.
        let mut state = queue.lock_undrained();
        // SAFETY: the lock is held. The future is pinned, and only this queue's list had its node.
        detached = unsafe { detach(&mut state, waiter) };
        // The message or room of the permit is for another waiter now; also that of a permit from
        // before a poll that panicked. The room that a message needed may have blocked the senders
        // behind it.
        step!("future dropped: serve the other waiters", state.serve_waiters(&mut section));
    }
    queue.run_and_keep_panic(&mut section.deferred);
    drop(detached);
    section.deferred
}
