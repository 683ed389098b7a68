//! Every structure of percpu against the model of `crates/percpu/tests/model`.
#![no_main]

#[path = "../../crates/percpu/tests/model/mod.rs"]
mod model;

libfuzzer_sys::fuzz_target!(|input: &[u8]| {
    model::run(input);
});
