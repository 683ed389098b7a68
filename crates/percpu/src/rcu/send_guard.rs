//! The guard of a reader that may change threads.

use super::domain::domain;

/// Protects the values loaded under it from being freed, and may change threads. Returned by
/// [`pin_send`].
///
/// [`mem::forget`](std::mem::forget) of a guard is safe. No object that is retired from then on is
/// freed.
///
/// ```
/// use offlock_percpu::rcu;
///
/// let guard: rcu::SendGuard = rcu::pin_send();
/// std::thread::spawn(move || drop(guard)).join().unwrap();
/// ```
#[must_use = "values loaded under a guard are valid only while the guard lives"]
#[derive(Debug)]
pub struct SendGuard {
    parity: usize,
}

/// Starts to read like [`pin`](super::pin), with a guard that is `Send`.
///
/// The guard may live across an `.await` and end on another thread. It costs two per-CPU counts
/// (rseq sections if they are available, otherwise one atomic addition each), about three times a
/// [`pin`](super::pin). Lock-free. It does not fail: the first call in the process allocates the
/// counters. Without memory for them all CPUs share one counter, and later calls try again.
///
/// A task that calls [`synchronize`](super::synchronize) while it holds its own `SendGuard` waits
/// for ever. This cannot be detected, because the guard belongs to no thread.
///
/// ```
/// use offlock_percpu::rcu;
/// use std::sync::Arc;
///
/// let shared = Arc::new(rcu::Atomic::new(7));
/// let guard = rcu::pin_send();
/// std::thread::spawn(move || assert_eq!(shared.load(&guard), &7)).join().unwrap();
/// ```
#[inline]
pub fn pin_send() -> SendGuard {
    SendGuard { parity: domain().send.lock() }
}

impl Drop for SendGuard {
    #[inline]
    fn drop(&mut self) {
        domain().send.unlock(self.parity);
    }
}
