//! The models under shuttle: random schedules, sequentially consistent.
//!
//! ```sh
//! cargo xtask models aio-reap --checker shuttle
//! ```
#![cfg(offlock_shuttle)]

mod models;
