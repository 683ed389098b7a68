//! The kernel's interfaces.

use aio_reap::BackendKind;

/// The kernel's interfaces, and io_uring with deferred work.
pub(crate) const VARIANTS: [(BackendKind, bool); 4] = [
    (BackendKind::Uring, false),
    (BackendKind::Uring, true),
    (BackendKind::Aio, false),
    (BackendKind::Threads, false),
];
