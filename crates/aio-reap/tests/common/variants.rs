//! The variants of the real backends.

use aio_reap::BackendKind;

/// The real backends, and io_uring with deferred work.
pub(crate) const VARIANTS: [(BackendKind, bool); 4] = [
    (BackendKind::Uring, false),
    (BackendKind::Uring, true),
    (BackendKind::Aio, false),
    (BackendKind::Threads, false),
];
