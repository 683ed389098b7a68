//! Limits of a queue, and its core.
#![cfg(not(offlock_model))]

use mq_rbtree::{BuildError, Core, Levels, PRIORITIES, Queue, RbTree, SendRefused};

/// Returns the reason why a message is refused now.
fn refused<T, L: Levels>(
    queue: &Queue<T, L>,
    value: T,
    priority: L::Priority,
) -> Option<SendRefused> {
    queue.try_send(value, priority).err().map(|error| error.reason)
}

#[test]
fn limits_that_leave_no_room_are_refused() {
    let build = |messages, reserves: &[(u32, usize)]| {
        let builder = Queue::<u8>::builder(messages);
        let builder = reserves.iter().fold(builder, |builder, r| builder.reserve(r.0, r.1));
        builder.build().map(drop)
    };
    let most = (1usize << 32) - 64;
    let limits = |messages, reserved| Err(BuildError::Limits { messages, reserved });
    for (messages, reserves, result) in [
        (0, &[][..], limits(0, 0)),
        (1, &[], Ok(())),
        (most, &[], Ok(())),
        (most + 1, &[], limits(most + 1, 0)),
        (usize::MAX, &[], limits(usize::MAX, 0)),
        (5, &[(1, 5)], limits(5, 5)),
        (5, &[(1, 4)], Ok(())),
        (5, &[(1, 2), (2, 3)], limits(5, 5)),
        (5, &[(1, usize::MAX), (2, 2)], limits(5, usize::MAX)),
        (5, &[(PRIORITIES, 1)], Err(BuildError::BadPriority { priority: PRIORITIES })),
        (5, &[(PRIORITIES - 1, 1)], Ok(())),
    ] {
        assert_eq!(build(messages, reserves), result, "{messages} {reserves:?}");
    }
    // The nodes are allocated one by one: no number of them is too large.
    assert!(Queue::<u8, RbTree<u32>>::builder_with_keys(1).spare_nodes(usize::MAX).build().is_ok());
}

/// Any number of messages is the limit of the slots, also one that ends in the middle of a chunk.
#[test]
fn the_slots_end_at_the_limit() {
    for (messages, no_alloc) in (1..70).chain(180..200).flat_map(|n| [(n, false), (n, true)]) {
        let builder = Queue::<usize>::builder(messages);
        let builder = if no_alloc { builder.no_alloc() } else { builder };
        let queue = builder.build().unwrap();
        for round in 0..2 {
            (0..messages).for_each(|n| queue.try_send(n, 1).unwrap());
            assert_eq!(refused(&queue, 0, 9), Some(SendRefused::Full), "{messages} {round}");
            queue.validate();
            assert!(queue.drain().into_iter().map(|(n, _)| n).eq(0..messages));
            queue.validate();
        }
        assert_eq!(queue.stats().slab_fallback, 0);
    }
}

#[test]
fn a_reservation_beyond_the_indices_is_refused() {
    let mut core: Core<u8> = Core::new(0);
    core.push(1, 1).unwrap();
    for messages in [(1 << 32) - 63, 1 << 32, usize::MAX] {
        assert!(core.reserve(messages).is_err());
    }
    (1..64).for_each(|_| core.push(1, 1).unwrap());
    core.validate();
    assert_eq!((core.capacity(), core.pop()), (64, Some((1, 1))));
    assert_eq!(core.push(PRIORITIES, 7), Err(7));
    core.validate(); // the hint tells of the free slot
}
