//! The basic operations of a queue.

use std::future::Future;
use std::pin::pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use std::thread;
use std::time::{Duration, Instant};

use mq_rbtree::{Queue, ReceiveError, SendRefused};

#[test]
fn the_highest_priority_comes_first_and_the_oldest_of_it() {
    let queue: Queue<u32> = Queue::new(100).unwrap();
    for (n, priority) in [3, 1, 3, 32_767, 0, 1].into_iter().enumerate() {
        queue.send(n as u32, priority).unwrap();
        queue.validate();
    }
    let order: Vec<_> = std::iter::from_fn(|| queue.try_receive().ok()).collect();
    assert_eq!(order, [(3, 32_767), (0, 3), (2, 3), (1, 1), (5, 1), (4, 0)]);
    queue.validate();
    assert_eq!(queue.try_receive(), Err(ReceiveError::Empty));
    assert_eq!(
        queue.try_send(1, 32_768).unwrap_err().reason,
        SendRefused::BadPriority { priority: 32_768 }
    );
}

#[test]
fn threads_wait_for_each_other() {
    let queue: Arc<Queue<u64>> = Arc::new(Queue::new(2).unwrap());
    let sender = Arc::clone(&queue);
    let thread = thread::spawn(move || (0..10_000).for_each(|n| sender.send(n, 5).unwrap()));
    for n in 0..10_000 {
        assert_eq!(queue.receive(), Ok((n, 5)));
    }
    thread.join().unwrap();
    queue.validate();
    println!("{}", queue.stats());
}

#[test]
fn a_wait_ends_at_its_deadline_and_gives_the_message_back() {
    let queue: Queue<&str> = Queue::new(1).unwrap();
    let soon = || Instant::now() + Duration::from_millis(5);
    assert_eq!(queue.receive_deadline(soon()), Err(ReceiveError::Timeout));
    queue.send("one", 1).unwrap();
    let refused = queue.send_deadline("two", 1, soon()).unwrap_err();
    assert_eq!((refused.value, refused.reason), ("two", SendRefused::Timeout));
    queue.validate();
    queue.close();
    assert_eq!(queue.receive(), Ok(("one", 1)));
    assert_eq!(queue.receive(), Err(ReceiveError::Closed));
}

#[test]
fn a_future_gets_a_permit_and_passes_it_on() {
    let queue: Queue<u32> = Queue::new(4).unwrap();
    let mut cx = Context::from_waker(Waker::noop());
    let mut second = pin!(queue.receive_async());
    {
        let mut first = pin!(queue.receive_async());
        assert!(first.as_mut().poll(&mut cx).is_pending());
        assert!(second.as_mut().poll(&mut cx).is_pending());
        queue.send(1, 1).unwrap();
        queue.validate();
        assert_eq!(queue.stats().waiting, (0, 1));
    }
    queue.validate();
    assert_eq!(queue.stats().waiting, (0, 0), "the permit was passed on");
    assert_eq!(second.as_mut().poll(&mut cx), Poll::Ready(Ok((1, 1))));
    queue.validate();
}
