//! The models under shuttle: random schedules, sequentially consistent.
#![cfg(offlock_shuttle)]

#[path = "common/ledger.rs"]
mod ledger;
mod models;
#[expect(dead_code, reason = "the models use a part of it")]
mod queue_ops;

use models::payload::block_on;
