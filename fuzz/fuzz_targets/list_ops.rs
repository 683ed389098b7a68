//! The list of percpu-list against the model of `crates/percpu-list/tests`: values are really freed, under
//! the address sanitizer.
#![no_main]

#[path = "../../crates/percpu-list/tests/api/list_ops.rs"]
mod driven;

libfuzzer_sys::fuzz_target!(|input: &[u8]| {
    driven::run(input);
});
