//! Per-CPU building blocks for Linux.

#[doc(hidden)]
pub mod sync;
