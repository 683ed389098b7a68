//! The models under shuttle: random schedules, sequentially consistent.
//!
//! ```sh
//! RUSTFLAGS='--cfg offlock_shuttle' cargo test -p aio-reap --profile loom --test shuttle
//! ```
#![cfg(offlock_shuttle)]

mod models;
