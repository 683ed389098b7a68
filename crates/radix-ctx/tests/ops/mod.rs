//! Operations of a table, decoded from bytes. Each step is compared with the model.
//!
//! A test on stable Rust and the fuzz target share this module.

#[path = "../table_ops/mod.rs"]
mod table_ops;

use table_ops::{Limits, Op};

/// Runs an input, and returns the number of steps. The first four bytes select the limits of the table.
///
/// # Panics
///
/// Panics if the result of an operation differs from that of the model.
pub(crate) fn run(input: &[u8]) -> usize {
    let mut groups = input.chunks(4).map(|chunk| {
        let mut four = [0; 4];
        four[..chunk.len()].copy_from_slice(chunk);
        four
    });
    let limits = Limits::decode(groups.next().unwrap_or([1; 4]));
    table_ops::run_ops(limits, groups.map(Op::decode))
}
