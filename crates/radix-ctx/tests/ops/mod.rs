//! Operations of a table and an array, decoded from bytes. Each step is compared with the model.
//!
//! A test on stable Rust and the fuzz target share this module.

#[expect(dead_code, reason = "the strategies are of the property tests")]
#[path = "../model/mod.rs"]
mod model;
#[path = "../table_ops/mod.rs"]
mod table_ops;

use model::Op;
use table_ops::Limits;

/// Runs an input, and returns the number of steps. The first byte selects the table or the array.
///
/// # Panics
///
/// Panics if the result of an operation differs from that of the model.
pub(crate) fn run(input: &[u8]) -> usize {
    match input {
        [] => 0,
        [which, rest @ ..] if which % 3 == 0 => array(rest),
        [_, rest @ ..] => table(rest),
    }
}

/// Returns the input in groups of four bytes. Zeros fill the last group.
fn groups_of_four(input: &[u8]) -> impl Iterator<Item = [u8; 4]> {
    input.chunks(4).map(|chunk| {
        let mut four = [0; 4];
        four[..chunk.len()].copy_from_slice(chunk);
        four
    })
}

fn table(input: &[u8]) -> usize {
    let mut input = groups_of_four(input);
    let limits = Limits::decode(input.next().unwrap_or([1; 4]));
    table_ops::run_ops(limits, input.map(|four| table_ops::Op::decode(four, limits.max_index)))
}

fn array(input: &[u8]) -> usize {
    let mut both = model::Both::new();
    let steps = groups_of_four(input)
        .map(|four| both.step(&op(four)).expect("the array differs from its model"))
        .count();
    both.compare().expect("the array differs from its model");
    steps
}

/// Returns a dense index, one at a limit of levels, or one of the largest.
fn key(a: u8, b: u8) -> u64 {
    match a % 4 {
        0 => u64::from(b) % 70,
        1 => u64::from(b).wrapping_sub(2) << (a / 4),
        2 => (1_u64 << (a / 4)).wrapping_add_signed(i64::from(b % 5) - 2),
        _ => u64::MAX - u64::from(b) % 3,
    }
}

fn op([kind, a, b, c]: [u8; 4]) -> Op {
    let (at, other) = (key(a, b), key(c, b));
    let small = u64::from(c);
    let (from, to) = (at.min(other), at.max(other));
    let near = at.saturating_add(small % 20);
    let mark = usize::from(c % 3);
    match kind % 28 {
        0..=2 => Op::Store(at, small),
        3 => Op::Fill(at),
        4 => Op::Insert(at, small),
        5 => Op::InsertWith(at, small),
        6..=8 => Op::Erase(at),
        9 => Op::EraseRange(from, to),
        10 if c == 0 => Op::Clear,
        10 => Op::Iterate(from, to),
        11 => Op::CompareExchange(at, None, (b % 2 == 0).then_some(small)),
        12 => Op::CompareExchange(at, Some((b % 3 == 0).then_some(small)), Some(small)),
        13 => Op::Reserve(at),
        14 => Op::ReserveAndCommit(at, small),
        15 => Op::ReserveAndDrop(at),
        16 => Op::Release(at),
        17 => Op::Alloc(at, near),
        18 => Op::AllocWith(from, to),
        19 => Op::AllocCyclic(from, to),
        20 => Op::AllocCyclicBy(at, near),
        21 => Op::ReserveLowest(at, near),
        22 => Op::SetMark(at, mark),
        23 => Op::ClearMark(at, mark),
        24 => Op::TryReserve(at, near),
        25 => Op::ShrinkToFit,
        _ => Op::Iterate(at, near),
    }
}
