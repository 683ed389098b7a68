//! Tests of RCU. They take turns, because a process has one domain.
#![cfg(not(offlock_model))]

mod alone;
mod domain;
