//! A forked child that finds percpu's first use done.

/// [`testkit::child::in_child`]. No other thread is in percpu's first use at the fork: the child would
/// wait for it forever.
pub(crate) fn in_child(f: impl FnOnce() -> bool) -> bool {
    let _ = percpu::capabilities();
    testkit::child::in_child(f)
}
