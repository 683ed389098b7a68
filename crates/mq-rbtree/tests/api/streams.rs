//! A queue as a stream.

use std::pin::Pin;
use std::task::{Context, Poll, Waker};

use futures_core::{FusedStream, Stream};
use mq_rbtree::{Queue, ReceiveStream};

use crate::panicking::{bomb, panics, poll};

type Next = Poll<Option<(u32, u32)>>;

/// Polls a stream once, with a waker that does nothing.
fn next(stream: &mut Pin<Box<ReceiveStream<'_, u32>>>) -> Next {
    stream.as_mut().poll_next(&mut Context::from_waker(Waker::noop()))
}

#[test]
fn a_stream_ends_when_the_queue_is_closed_and_empty() {
    let (sender, receiver) = Queue::<u32>::builder(4).channel().unwrap();
    let mut stream = Box::pin(receiver.into_stream());
    assert_eq!(next(&mut stream), Poll::Pending);
    sender.send(1, 1).unwrap();
    sender.send(2, 2).unwrap();
    assert_eq!(next(&mut stream), Poll::Ready(Some((2, 2))));
    assert_eq!(next(&mut stream), Poll::Ready(Some((1, 1))));
    assert_eq!([(); 2].map(|()| next(&mut stream)), [Poll::Pending; 2]);
    assert_eq!(sender.stats().waiting, (0, 1));
    sender.send(3, 3).unwrap();
    assert!(!sender.is_closed(), "its handle is in it");
    drop(sender);
    assert_eq!(next(&mut stream), Poll::Ready(Some((3, 3))));
    assert!(!stream.is_terminated());
    assert_eq!((next(&mut stream), stream.is_terminated()), (Poll::Ready(None), true));
    assert_eq!(next(&mut stream), Poll::Ready(None));
    assert!(format!("{stream:?}").contains("ended: true"));
}

/// A stream that unwound, because a waker that it called panicked, has not ended.
#[test]
fn a_stream_goes_on_after_a_panicking_waker() {
    let queue: Queue<u32> = Queue::new(1).unwrap();
    queue.send(1, 1).unwrap();
    let mut send = Box::pin(queue.send_async(2, 2));
    assert!(poll(&mut send, bomb()).is_pending());
    let mut stream = Box::pin(queue.stream());
    assert!(panics(|| next(&mut stream)));
    assert!(!stream.is_terminated());
    queue.send(3, 3).unwrap();
    assert_eq!(next(&mut stream), Poll::Ready(Some((3, 3))));
    queue.validate();
}

/// A stream that has received a message waits behind the other one. A stream that is dropped with a
/// permit passes it on.
#[test]
fn inv10_a_stream_takes_its_turn() {
    let queue: Queue<u32> = Queue::new(4).unwrap();
    let (mut first, mut second) = (Box::pin(queue.stream()), Box::pin(queue.stream()));
    let mut urgent = Box::pin(queue.stream());
    for stream in [&mut first, &mut second, &mut urgent] {
        assert_eq!(next(stream), Poll::Pending);
    }
    // The stream that is woken takes the message, and waits again.
    for n in 0..2 {
        queue.send(n, 0).unwrap();
        assert_eq!(next(&mut urgent), Poll::Ready(Some((n, 0))));
        assert_eq!(next(&mut urgent), Poll::Pending);
    }
    drop(urgent);
    for n in 2..6 {
        queue.send(n, 0).unwrap();
        let one = if n % 2 == 0 { &mut first } else { &mut second };
        assert_eq!(next(one), Poll::Ready(Some((n, 0))));
        assert_eq!(next(one), Poll::Pending);
    }
    queue.send(6, 0).unwrap(); // wakes the first stream
    drop(first);
    assert_eq!(next(&mut second), Poll::Ready(Some((6, 0))));
    drop(second);
    queue.validate();
    assert_eq!(queue.stats().waiting, (0, 0));
}
