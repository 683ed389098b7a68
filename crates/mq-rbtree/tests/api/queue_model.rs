//! Queues with all kinds of limits against a model, on one thread: messages, levels, and wake-ups.
#![cfg(not(offlock_model))]

use crate::mq_ops::queue_ops;

use std::cmp::Reverse;

use mq_rbtree::{Bitmap, RbTree};
use proptest::prelude::*;

use queue_ops::{Limits, Step, run};

/// The number of cases: `PROPTEST_CASES`, or a few.
fn cases() -> ProptestConfig {
    let asked = std::env::var("PROPTEST_CASES").ok();
    ProptestConfig::with_cases(asked.map_or(25, |cases| cases.parse().expect("a number")))
}

fn message() -> impl Strategy<Value = Step> {
    let late = prop::bool::weighted(0.2);
    (any::<u8>(), late).prop_map(|(priority, late)| Step::Send { priority, late })
}

fn received() -> impl Strategy<Value = Step> {
    prop::bool::weighted(0.2).prop_map(|late| Step::Receive { late })
}

fn guarded() -> impl Strategy<Value = Step> {
    prop_oneof![
        3 => Just(Step::Guard),
        1 => any::<u8>().prop_map(|which| Step::AcceptGuard { which }),
        2 => any::<u8>().prop_map(|which| Step::DropGuard { which }),
    ]
}

/// Steps without waits.
fn plain() -> impl Strategy<Value = Step> {
    prop_oneof![
        12 => message(),
        8 => received(),
        2 => any::<[u8; 2]>().prop_map(|[count, priority]| Step::SendBatch { count, priority }),
        2 => any::<u8>().prop_map(|most| Step::ReceiveBatch { most }),
        1 => any::<u8>().prop_map(|modulus| Step::DrainFilter { modulus }),
        4 => guarded(),
    ]
}

/// Steps with waits.
fn mixed() -> impl Strategy<Value = Step> {
    prop_oneof![
        16 => plain(),
        4 => Just(Step::WaitToReceive),
        6 => any::<u8>().prop_map(|priority| Step::WaitToSend { priority }),
        8 => (any::<u8>(), any::<bool>())
            .prop_map(|(which, other_waker)| Step::PollReceive { which, other_waker }),
        8 => (any::<u8>(), any::<bool>())
            .prop_map(|(which, other_waker)| Step::PollSend { which, other_waker }),
        3 => any::<u8>().prop_map(|which| Step::DropReceive { which }),
        3 => any::<u8>().prop_map(|which| Step::DropSend { which }),
        2 => any::<[u8; 2]>()
            .prop_map(|[priority, refused]| Step::SendShort { priority, refused }),
        2 => any::<[u8; 2]>()
            .prop_map(|[which, refused]| Step::PollSendShort { which, refused }),
        1 => Just(Step::Drain),
    ]
}

/// Steps with more waiters than there is room for.
fn crowded() -> impl Strategy<Value = Step> {
    prop_oneof![
        6 => any::<u8>().prop_map(|priority| Step::WaitToSend { priority }),
        3 => (any::<u8>(), any::<bool>())
            .prop_map(|(which, other_waker)| Step::PollSend { which, other_waker }),
        3 => received(),
        2 => message(),
        2 => guarded(),
        1 => any::<u8>().prop_map(|most| Step::ReceiveBatch { most: most % 6 }),
        1 => any::<u8>().prop_map(|modulus| Step::DrainFilter { modulus }),
        1 => mixed(),
    ]
}

/// Steps of a queue that is open mostly: the close comes late, if at all.
fn steps(of: impl Strategy<Value = Step>) -> impl Strategy<Value = Vec<Step>> {
    let open = prop::collection::vec(of, 1..200);
    (open, prop::bool::weighted(0.3), any::<prop::sample::Index>()).prop_map(
        |(mut steps, closes, at)| {
            if closes {
                steps.insert(at.index(steps.len()), Step::Close);
            }
            steps
        },
    )
}

fn limits() -> impl Strategy<Value = Limits> {
    (
        prop_oneof![3 => 1_usize..8, 2 => 8_usize..300],
        prop::collection::vec((any::<u8>(), 1_u8..4), 0..3),
        prop::option::weighted(0.3, 1_u32..5),
        prop::bool::weighted(0.2),
        0_usize..4,
    )
        .prop_map(|(messages, reserves, ageing, no_alloc, spare)| Limits {
            messages,
            reserves,
            ageing,
            no_alloc,
            spare,
        })
}

proptest! {
    #![proptest_config(cases())]

    #[test]
    fn inv01_a_bitmap_queue_gives_the_oldest_message_of_the_highest_priority(
        limits in limits(), steps in steps(plain()),
    ) {
        run::<Bitmap>(&limits, &steps);
    }

    #[test]
    fn inv01_a_tree_queue_gives_the_oldest_message_of_the_highest_priority(
        limits in limits(), steps in steps(plain()),
    ) {
        run::<RbTree<u32>>(&limits, &steps);
    }

    /// With reversed keys, the least key comes first.
    #[test]
    fn inv03_a_tree_queue_follows_the_order_of_its_keys(
        limits in limits(), steps in steps(plain()),
    ) {
        run::<RbTree<Reverse<u64>>>(&limits, &steps);
    }

    /// The model compares lengths, bytes, levels and waiters, and the order of the wake-ups.
    #[test]
    fn inv02_a_bitmap_queue_with_waiting_tasks_matches_the_model(
        limits in limits(), steps in steps(mixed()),
    ) {
        run::<Bitmap>(&limits, &steps);
    }

    #[test]
    fn inv02_a_tree_queue_with_waiting_tasks_matches_the_model(
        limits in limits(), steps in steps(mixed()),
    ) {
        run::<RbTree<u32>>(&limits, &steps);
    }

    /// Few places and many senders: each is woken once, in the order of arrival. A sender
    /// that only a reserve keeps out does not block the others.
    #[test]
    fn inv10_tasks_are_woken_in_the_order_of_arrival(
        mut limits in limits(), steps in steps(crowded()),
    ) {
        limits.messages = limits.messages.min(8);
        run::<Bitmap>(&limits, &steps);
    }
}
