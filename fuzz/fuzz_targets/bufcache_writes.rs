//! A bufcache that is written, on devices that fail, against the model of `crates/bufcache/tests`: what it
//! serves, what the devices have, and what survives a loss of power, under the address sanitizer.
#![no_main]

#[allow(dead_code, reason = "the fuzzer makes the steps in one thread")]
#[path = "../../crates/bufcache/tests/api/machine/mod.rs"]
mod machine;

libfuzzer_sys::fuzz_target!(|input: &[u8]| {
    machine::run(input, None);
});
