//! Helpers that the tests and benches of several crates share.
//!
//! | Module | Contents |
//! |---|---|
//! | [`alloc`] | allocators that count calls and bytes, and refuse on request |
//! | [`block_on`](mod@block_on) | an executor for one future, and a waker that counts its calls |
//! | [`canary`] | values that detect a use after their drop, and a count of the living ones |
//! | [`child`] | tests in a process of their own: this test program run again |
//! | [`corpus`] | the replay of a fuzz target's committed inputs |
//! | [`pin`] | the CPUs of the process, and the affinity of a thread |
//! | [`planted`] | the checks that each planted bug of a crate fails its model |
//! | [`replacement`] | cache policies of the literature, simulated on a trace |
//! | [`rng`] | random numbers whose seed is printed on failure |
//! | [`rseq`] | threads without a registered rseq area |
//! | [`signals`] | a timer that signals one thread |
//! | [`stress`] | how long a stress test runs |
//! | [`traces`] | traces of block numbers, in the formats of the caching literature |
//! | [`wait`] | waiting for another thread's effect |
//! | [`watchdog`] | the end of a test that makes no progress |
//!
//! This crate is never published and depends on no member of the workspace.

pub mod alloc;
pub mod block_on;
pub mod canary;
pub mod child;
pub mod corpus;
pub mod pin;
pub mod planted;
pub mod replacement;
pub mod rng;
pub mod rseq;
pub mod signals;
pub mod stress;
pub mod traces;
pub mod wait;
pub mod watchdog;

pub use block_on::{TestTask, WakeCount, block_on};
pub use rng::Rng;
pub use wait::{in_time, wait_until};
