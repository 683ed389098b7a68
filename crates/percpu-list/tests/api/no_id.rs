//! A thread without a CPU id, like a thread that libc did not create.

/// Unregisters this thread's rseq area, if rseq is in use.
pub(crate) fn take_id() {
    #[cfg(all(any(target_arch = "x86_64", target_arch = "aarch64"), target_env = "gnu"))]
    if offlock_percpu::capabilities().rseq_ids.is_ok() {
        testkit::rseq::unregister();
    }
}
