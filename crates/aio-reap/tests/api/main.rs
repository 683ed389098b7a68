//! Tests of the engine that share one process.
//!
//! Tests that need their own allocator, process limit or fork are separate programs.
#![cfg(not(offlock_model))]

mod admission;
mod backends;
mod buffers;
mod callbacks;
mod cancels;
#[path = "../common/mod.rs"]
mod common;
#[path = "../common/count.rs"]
mod count;
#[path = "../common/counted.rs"]
mod counted;
mod direct;
#[path = "../common/direct.rs"]
mod direct_file;
mod endings;
mod engine_model;
mod files;
#[path = "../model/mod.rs"]
mod model;
#[path = "../common/readable.rs"]
mod readable;
mod reap_modes;
mod reentry;
mod remote;
mod scripted;
mod stats;
mod tokio;
mod vectored;
#[path = "../common/writer.rs"]
mod writer;
