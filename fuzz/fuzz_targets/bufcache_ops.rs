//! A bufcache against the model of `crates/bufcache/tests`, on devices that fail: guards and pins look
//! at their buffers as long as they live, under the address sanitizer.
#![no_main]

#[path = "../../crates/bufcache/tests/buf_ops/mod.rs"]
mod driven;

libfuzzer_sys::fuzz_target!(|input: &[u8]| {
    driven::run(input);
});
