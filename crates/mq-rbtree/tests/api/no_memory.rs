//! Without memory, operations return that as their error, or need none.
#![cfg(not(offlock_model))]

use std::future::Future;
use std::pin::pin;
use std::task::{Context, Poll, Waker};

use mq_rbtree::{BuildError, Queue, ReceiveError};

use testkit::alloc::refuse_after;

/// A batch uses the room that its vector has.
#[test]
fn a_batch_without_memory_takes_what_has_room() {
    let queue: Queue<u32> = Queue::new(8).unwrap();
    let mut cx = Context::from_waker(Waker::noop());
    for async_batch in [false, true] {
        let mut receive = |out: &mut Vec<_>| match async_batch {
            false => queue.try_receive_batch(out, 8),
            true => match pin!(queue.receive_batch_async(out, 8)).poll(&mut cx) {
                Poll::Ready(result) => result,
                Poll::Pending => Err(ReceiveError::Empty),
            },
        };
        let mut out = Vec::new();
        assert_eq!(refuse_after(0, || receive(&mut out)), Err(ReceiveError::NoMemory));
        (0..8).for_each(|n| queue.send(n, 8 - n).unwrap());
        assert_eq!(refuse_after(0, || receive(&mut out)), Err(ReceiveError::NoMemory));
        assert_eq!((queue.len(), out.capacity()), (8, 0), "no message was taken");
        out.reserve_exact(3);
        let room = out.capacity();
        assert_eq!(refuse_after(0, || receive(&mut out)), Ok(room));
        assert_eq!(refuse_after(0, || receive(&mut out)), Err(ReceiveError::NoMemory));
        assert_eq!(receive(&mut out), Ok(8 - room));
        assert!(out.iter().map(|&(n, _)| n).eq(0..8));
        let mut with_room = Vec::with_capacity(1);
        assert_eq!(refuse_after(0, || receive(&mut with_room)), Err(ReceiveError::Empty));
    }
    queue.validate();
}

#[test]
fn a_queue_without_memory_for_its_messages_is_not_made() {
    // The three allocations before are the hint and the bitmap's.
    let build = || Queue::<u8>::builder(8).no_alloc().build().map(drop);
    assert_eq!(refuse_after(3, build), Err(BuildError::NoMemory));
    assert_eq!(build(), Ok(()));
}
