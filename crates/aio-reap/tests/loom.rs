//! The models under loom: every interleaving within `LOOM_MAX_PREEMPTIONS`, weak memory included.
//!
//! ```sh
//! cargo xtask models aio-reap --checker loom
//! ```
#![cfg(offlock_loom)]

mod models;
