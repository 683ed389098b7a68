//! The table of radix-ctx against the model of `crates/radix-ctx/tests`.
#![no_main]

#[path = "../../crates/radix-ctx/tests/api/table_ops.rs"]
mod table_ops;

libfuzzer_sys::fuzz_target!(|input: &[u8]| {
    table_ops::run(input);
});
