//! The models under shuttle: random schedules, sequentially consistent.
#![cfg(offlock_shuttle)]

mod models;
