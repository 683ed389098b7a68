//! Client bytes, server bytes: nothing panics, and pieces say the same as the whole.
#![no_main]

#[path = "../../crates/nbd-protocol/tests/driven/mod.rs"]
mod driven;

libfuzzer_sys::fuzz_target!(|input: &[u8]| driven::run(input));
