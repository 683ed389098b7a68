//! The engine on a scripted device against the model of `crates/aio-reap/tests/api/engine_model.rs`.
#![no_main]

#[path = "../../crates/aio-reap/tests/model/mod.rs"]
mod model;
#[path = "../../crates/aio-reap/tests/common/readable.rs"]
mod readable;

libfuzzer_sys::fuzz_target!(|input: &[u8]| {
    model::run(input);
});
