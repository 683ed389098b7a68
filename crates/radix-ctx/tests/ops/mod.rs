//! The table and the array driven by bytes, each compared with its model after every step.
//!
//! Shared by a test on stable and the fuzz target.

#[expect(dead_code, reason = "the strategies are of the property tests")]
#[path = "../model/mod.rs"]
mod model;
#[path = "../table_ops/mod.rs"]
mod table_ops;

use model::Op;
use table_ops::Limits;

/// Runs one input; returns the steps it made. The first byte says on which of the two.
///
/// # Panics
///
/// Panics if an operation's answer is not the model's.
pub(crate) fn run(input: &[u8]) -> usize {
    match input {
        [] => 0,
        [face, rest @ ..] if face % 3 == 0 => array(rest),
        [_, rest @ ..] => table(rest),
    }
}

/// The input in fours, the last filled up.
fn fours(input: &[u8]) -> impl Iterator<Item = [u8; 4]> {
    input.chunks(4).map(|chunk| {
        let mut four = [0; 4];
        four[..chunk.len()].copy_from_slice(chunk);
        four
    })
}

fn table(input: &[u8]) -> usize {
    let mut input = fours(input);
    let limits = Limits::decode(input.next().unwrap_or([1; 4]));
    table_ops::run_ops(limits, input.map(|four| table_ops::Op::decode(four, limits.max_index)))
}

fn array(input: &[u8]) -> usize {
    let mut both = model::Both::new();
    let steps = fours(input).map(|four| both.step(&op(four)).expect("as the model")).count();
    both.compare().expect("as the model");
    steps
}

/// Dense indices, those where levels begin and end, and the last.
fn key(a: u8, b: u8) -> u64 {
    match a % 4 {
        0 => u64::from(b) % 70,
        1 => u64::from(b).wrapping_sub(2) << (a / 4),
        2 => (1_u64 << (a / 4)).wrapping_add_signed(i64::from(b % 5) - 2),
        _ => u64::MAX - u64::from(b) % 3,
    }
}

fn op([what, a, b, c]: [u8; 4]) -> Op {
    let (at, other) = (key(a, b), key(c, b));
    let small = u64::from(c);
    let (from, to) = (at.min(other), at.max(other));
    let near = at.saturating_add(small % 20);
    let mark = usize::from(c % 3);
    match what % 28 {
        0..=2 => Op::Store(at, small),
        3 => Op::Fill(at),
        4 => Op::Insert(at, small),
        5 => Op::InsertWith(at, small),
        6..=8 => Op::Erase(at),
        9 => Op::EraseRange(from, to),
        10 if c == 0 => Op::Clear,
        10 => Op::Walk(from, to),
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
        _ => Op::Walk(at, near),
    }
}
