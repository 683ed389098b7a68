//! The table of radix-ctx against the model of `crates/radix-ctx/tests`.
#![no_main]

#[path = "../../crates/radix-ctx/tests/ops/mod.rs"]
mod driven;

libfuzzer_sys::fuzz_target!(|input: &[u8]| {
    driven::run(input);
});
