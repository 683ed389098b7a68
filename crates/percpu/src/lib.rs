//! Per-CPU building blocks for Linux.
