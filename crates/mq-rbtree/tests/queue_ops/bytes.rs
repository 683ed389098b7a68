//! Converts bytes to limits and steps: for the fuzz target and the property tests.
//!
//! Six bytes select the kind of queue, the limits and the style of the steps, and each following four bytes
//! one step. So a part of one input means the same in another.

use std::cmp::Reverse;

use mq_rbtree::{Bitmap, RbTree};

use super::{Limits, Step};

/// Runs one input; returns the number of steps.
///
/// # Panics
///
/// Panics if an answer differs from the model's, or if a message is not dropped at the end.
pub(crate) fn run(input: &[u8]) -> usize {
    let Some((head, rest)) = input.split_first_chunk() else { return 0 };
    let limits = limits(head);
    let style = STYLES[usize::from(head[2] / 2) % STYLES.len()];
    let steps: Vec<Step> = rest.chunks(4).filter_map(|bytes| step(style, bytes)).collect();
    match head[0] % 3 {
        0 => super::run::<Bitmap>(&limits, &steps),
        1 => super::run::<RbTree<u32>>(&limits, &steps),
        _ => super::run::<RbTree<Reverse<u64>>>(&limits, &steps),
    }
    steps.len()
}

pub(crate) fn limits(&[_, size, style, first, second, habits]: &[u8; 6]) -> Limits {
    let reserves = [first, second].into_iter().filter(|reserve| *reserve != 0);
    let ageing = Some(u32::from(habits >> 1 & 3)).filter(|every| *every != 0);
    Limits {
        messages: if size < 128 { usize::from(size % 8) + 1 } else { usize::from(size) },
        reserves: reserves.map(|reserve| (reserve / 4, reserve % 4)).collect(),
        ageing,
        no_alloc: habits >> 3 & 7 == 7,
        spare: usize::from(habits >> 6),
        // A message that is alone in the ring is not counted for ageing, because no other one waits.
        quiet: style % 2 == 1 && ageing.is_none(),
    }
}

/// How often each step comes, of 32.
#[derive(Clone, Copy, PartialEq)]
#[allow(dead_code, reason = "threads use some of them")]
pub(crate) enum Style {
    Mixed,
    /// No waits.
    Plain,
    /// More waiting senders than there is room for.
    Crowded,
    /// For one of several threads: only sends, only receives, or both, with futures.
    Sends,
    Receives,
    Exchange,
    /// As the three before, but only of operations that take effect at one moment: no batches.
    SingleSends,
    SingleReceives,
    SingleExchange,
}

pub(crate) const STYLES: [Style; 3] = [Style::Mixed, Style::Plain, Style::Crowded];

pub(crate) fn step(style: Style, bytes: &[u8]) -> Option<Step> {
    let mut four = [0; 4];
    four[..bytes.len()].copy_from_slice(bytes);
    let [what, a, b, c] = four;
    let odd = c % 2 == 1;
    // The steps below in their order, and how often each comes.
    let often = match style {
        Style::Mixed => [5, 3, 4, 1, 1, 1, 1, 2, 3, 2, 2, 2, 1, 1, 3, 0, 0],
        Style::Plain => [11, 0, 9, 2, 2, 1, 0, 0, 0, 0, 0, 0, 0, 0, 7, 0, 0],
        Style::Crowded => [3, 0, 5, 0, 1, 1, 0, 1, 10, 0, 5, 1, 0, 1, 4, 0, 0],
        Style::Sends => [14, 0, 0, 2, 0, 0, 0, 0, 12, 0, 0, 0, 0, 0, 0, 4, 0],
        Style::Receives => [0, 0, 16, 0, 3, 1, 1, 11, 0, 0, 0, 0, 0, 0, 0, 0, 0],
        Style::Exchange => [2, 0, 2, 0, 0, 0, 0, 3, 3, 6, 6, 0, 5, 5, 0, 0, 0],
        Style::SingleSends => [16, 0, 0, 0, 0, 0, 0, 0, 9, 0, 0, 0, 0, 0, 0, 6, 1],
        Style::SingleReceives => [0, 0, 19, 0, 0, 0, 2, 10, 0, 0, 0, 0, 0, 0, 0, 0, 1],
        Style::SingleExchange => [4, 0, 12, 0, 0, 0, 1, 2, 1, 0, 0, 0, 0, 0, 0, 11, 1],
    };
    let (mut which, mut left) = (0, what % 32);
    while left >= often[which] {
        left -= often[which];
        which += 1;
    }
    Some(match which {
        0 => Step::Send { priority: a, late: odd, refused: 0 },
        1 => Step::Send { priority: a, late: false, refused: c },
        2 => Step::Receive { late: odd },
        3 => Step::SendBatch { count: c, priority: a },
        4 => Step::ReceiveBatch { most: a },
        5 => Step::DrainFilter { modulus: a },
        6 => Step::Drain,
        7 => Step::WaitToReceive,
        8 => Step::WaitToSend { priority: a },
        9 => Step::PollReceive { which: a, other_waker: odd },
        10 => Step::PollSend { which: a, other_waker: odd, refused: 0 },
        11 => Step::PollSend { which: a, other_waker: false, refused: b },
        12 => Step::DropReceive { which: a },
        13 => Step::DropSend { which: a },
        14 => match a % 16 {
            // Rare, because little happens after it.
            15 if b % 8 == 0 => Step::Close,
            0..5 => Step::Guard,
            5..8 => Step::AcceptGuard { which: b },
            8..13 => Step::DropGuard { which: b },
            13 | 14 => Step::Clear { writable: odd },
            _ => return None,
        },
        15 => Step::SendPaused { priority: a, pause: c },
        _ => Step::Len,
    })
}
