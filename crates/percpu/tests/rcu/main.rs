//! Tests of RCU. They take turns, because a process has one domain.
#![cfg(not(any(offlock_loom, offlock_shuttle)))]

mod alone;
mod domain;
mod edges;
