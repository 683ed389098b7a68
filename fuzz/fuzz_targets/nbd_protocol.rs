//! Client bytes, server bytes: nothing panics, and pieces say the same as the whole.
#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| nbd_protocol::fuzzing::run(input));
