//! Tests that share one process. Tests that need an allocator have a program of their own.
#![cfg(not(offlock_model))]

mod auto_traits;
mod counters;
mod counts;
mod cpu;
mod denied;
mod fences;
mod lglock;
#[path = "../model/mod.rs"]
mod model;
mod properties;
mod rcu;
mod slots;
mod threads;
