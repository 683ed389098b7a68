//! The guard that may change threads.

use super::domain::domain;

/// Keeps what is read from being reclaimed; may change threads. From [`pin_send`].
///
/// [`mem::forget`](std::mem::forget) of a guard is safe, and nothing that is retired from then on is
/// reclaimed.
#[must_use = "what was loaded under a guard is gone when the guard is"]
#[derive(Debug)]
pub struct SendGuard {
    parity: usize,
}

/// Starts to read like [`pin`](super::pin), with a guard that is `Send`.
///
/// It may live across an `.await` and end on another thread: two per-CPU counts (rseq sections
/// where there are any, else one atomic addition each), some three times a [`pin`](super::pin).
/// Lock-free; does not fail: where there is no memory for the counters, which the first call in
/// the process makes, it counts in one place for all CPUs.
///
/// A task that waits in [`synchronize`](super::synchronize) for its own `SendGuard` waits for ever;
/// that cannot be detected, as the guard belongs to no thread.
///
/// # Examples
///
/// ```
/// use percpu::rcu;
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
