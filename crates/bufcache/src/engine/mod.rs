//! The I/O engines of a thread, which the thread turns while it waits.

#[cfg(feature = "aio-reap")]
mod local;

/// For the models: not part of the interface.
#[cfg(all(feature = "aio-reap", offlock_model))]
pub mod lent;

#[cfg(all(feature = "aio-reap", offlock_model))]
pub(crate) use self::lent::{turn_engine, wait_by_engine};
#[cfg(feature = "aio-reap")]
pub use self::local::{LentEngine, lend_engine};
#[cfg(feature = "aio-reap")]
pub(crate) use self::local::{ThreadEngine, lent_engine, write_engine};
#[cfg(all(feature = "aio-reap", not(offlock_model)))]
pub(crate) use self::local::{turn_engine, wait_by_engine, wait_for_writes};
#[cfg(not(feature = "aio-reap"))]
pub(crate) use self::none::{turn_engine, wait_by_engine};

/// Without the feature no thread has an engine.
#[cfg(not(feature = "aio-reap"))]
mod none {
    use std::task::Context;

    pub(crate) fn turn_engine() -> bool {
        false
    }

    pub(crate) fn wait_by_engine(_: impl FnMut(&mut Context<'_>) -> bool) {}
}

/// Without the feature, and in a model, no thread has an engine for writes.
#[cfg(any(not(feature = "aio-reap"), offlock_model))]
pub(crate) fn wait_for_writes() -> bool {
    false
}
