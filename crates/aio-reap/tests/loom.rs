//! The models under loom: every interleaving within `LOOM_MAX_PREEMPTIONS`, weak memory included.
//!
//! ```sh
//! LOOM_MAX_PREEMPTIONS=2 RUSTFLAGS='--cfg offlock_loom' cargo test -p aio-reap --profile loom --test loom
//! ```
#![cfg(offlock_loom)]

mod models;
