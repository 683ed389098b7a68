//! The fuzz target: converts bytes to the limits and steps of `queue_ops`.
//!
//! Six bytes select the limits, and each following four bytes one step. So a part of one input
//! means the same in another.

#[path = "../queue_ops/mod.rs"]
pub(crate) mod queue_ops;

use std::cmp::Reverse;

use mq_rbtree::{Bitmap, RbTree};

use queue_ops::{Limits, Step};

/// Runs one input; returns the number of steps.
///
/// # Panics
///
/// Panics if an answer differs from the model's, or if a message is not dropped at the end.
pub(crate) fn run(input: &[u8]) -> usize {
    let Some((head, rest)) = input.split_first_chunk() else { return 0 };
    let limits = limits(head);
    let steps: Vec<Step> = rest.chunks(4).filter_map(step).collect();
    match head[0] % 3 {
        0 => queue_ops::run::<Bitmap>(&limits, &steps),
        1 => queue_ops::run::<RbTree<u32>>(&limits, &steps),
        _ => queue_ops::run::<RbTree<Reverse<u64>>>(&limits, &steps),
    }
    steps.len()
}

fn limits(&[_, size, _, first, second, habits]: &[u8; 6]) -> Limits {
    let reserves = [first, second].into_iter().filter(|reserve| *reserve != 0);
    Limits {
        messages: if size < 128 { usize::from(size % 8) + 1 } else { usize::from(size) },
        reserves: reserves.map(|reserve| (reserve / 4, reserve % 4)).collect(),
        ageing: Some(u32::from(habits >> 1 & 3)).filter(|every| *every != 0),
        no_alloc: habits >> 3 & 7 == 7,
        spare: usize::from(habits >> 6),
    }
}

fn step(bytes: &[u8]) -> Option<Step> {
    let mut four = [0; 4];
    four[..bytes.len()].copy_from_slice(bytes);
    let [what, a, b, c] = four;
    let odd = c % 2 == 1;
    Some(match what % 32 {
        0..5 => Step::Send { priority: a, late: odd },
        5..8 => Step::SendShort { priority: a, refused: c },
        8..12 => Step::Receive { late: odd },
        12 => Step::SendBatch { count: c, priority: a },
        13 => Step::ReceiveBatch { most: a },
        14 => Step::DrainFilter { modulus: a },
        15 => Step::Drain,
        16..18 => Step::WaitToReceive,
        18..21 => Step::WaitToSend { priority: a },
        21..23 => Step::PollReceive { which: a, other_waker: odd },
        23..25 => Step::PollSend { which: a, other_waker: odd },
        25..27 => Step::PollSendShort { which: a, refused: b },
        27 => Step::DropReceive { which: a },
        28 => Step::DropSend { which: a },
        29 | 30 => return None,
        _ => match a % 16 {
            15 => Step::Close,
            0..5 => Step::Guard,
            5..8 => Step::AcceptGuard { which: b },
            8..13 => Step::DropGuard { which: b },
            _ => return None,
        },
    })
}
