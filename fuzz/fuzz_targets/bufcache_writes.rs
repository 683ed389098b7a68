//! A bufcache that is written, on devices that fail, against the model of `crates/bufcache/tests`: what it
//! serves, what the devices have, and what survives a loss of power, under the address sanitizer.
#![no_main]

#[path = "../../crates/bufcache/tests/buf_writes/mod.rs"]
mod driven;

libfuzzer_sys::fuzz_target!(|input: &[u8]| {
    driven::run(input, None);
});
