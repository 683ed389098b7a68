//! Messages in guards: they keep their places, and come back unless they are accepted.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::task::Waker;

use mq_rbtree::{Queue, ReceiveError};

use crate::panicking::poll;

#[test]
fn inv25_a_consumer_that_panics_or_is_cancelled_loses_nothing() {
    let queue: Queue<Box<u32>> = Queue::new(1).unwrap();
    queue.send(Box::new(1), 7).unwrap();
    let consumer = || {
        let mut message = queue.receive_guard().unwrap();
        **message += 1;
        panic!("in the consumer");
    };
    assert!(catch_unwind(AssertUnwindSafe(consumer)).is_err());
    let mut task = Box::pin(async {
        let mut message = queue.receive_guard_async().await.unwrap();
        **message += 1;
        std::future::pending::<()>().await;
        message.accept()
    });
    assert!(poll(&mut task, Waker::noop().clone()).is_pending());
    assert_eq!(queue.try_receive(), Err(ReceiveError::Empty));
    drop(task);
    assert_eq!(queue.receive(), Ok((Box::new(3), 7)));
}
