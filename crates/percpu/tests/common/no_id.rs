//! A thread without a CPU id, like a thread that libc did not create.

/// Unregisters this thread's rseq area, if rseq is in use. Returns the CPU id that the area then
/// holds.
pub(crate) fn take_id() -> Option<i32> {
    #[cfg(all(
        any(target_arch = "x86_64", target_arch = "aarch64"),
        target_env = "gnu",
        not(offlock_portable)
    ))]
    if offlock_percpu::capabilities().rseq_ids.is_ok() {
        return Some(testkit::rseq::unregister());
    }
    None
}
