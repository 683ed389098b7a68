//! The models under loom: every interleaving within `LOOM_MAX_PREEMPTIONS`, weak memory included.
#![cfg(offlock_loom)]

mod models;
