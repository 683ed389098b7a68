//! A queue as a stream and as a sink.
#![cfg(not(any(offlock_loom, offlock_shuttle)))]

use std::future::poll_fn;
use std::pin::{Pin, pin};
use std::task::{Context, Poll, Waker};
use std::thread;

use futures_core::{FusedStream, Stream};
use futures_sink::Sink;
use mq_rbtree::{Queue, ReceiveStream, SendRefused, SendSink};

use testkit::block_on;

type Next = Poll<Option<(u32, u32)>>;

/// Polls a stream once, with a waker that does nothing.
fn poll_stream(stream: &mut Pin<Box<ReceiveStream<'_, u32>>>) -> Next {
    stream.as_mut().poll_next(&mut Context::from_waker(Waker::noop()))
}

/// Returns a future that waits until the sink is ready for another message.
fn ready<'a>(sink: &'a mut Pin<Box<SendSink<'_, u32>>>) -> impl Future<Output = SendRefused> + 'a {
    poll_fn(|cx| sink.as_mut().poll_ready(cx).map(|ready| ready.unwrap_err().reason))
}

fn flush(sink: &mut Pin<Box<SendSink<'_, u32>>>) -> Poll<Result<(), SendRefused>> {
    let flushed = sink.as_mut().poll_flush(&mut Context::from_waker(Waker::noop()));
    flushed.map(|flushed| flushed.map_err(|error| error.reason))
}

#[test]
fn a_stream_ends_when_the_queue_is_closed_and_empty() {
    let (sender, receiver) = Queue::<u32>::builder(4).channel().unwrap();
    let mut stream = Box::pin(receiver.into_stream().urgency(1));
    assert_eq!(poll_stream(&mut stream), Poll::Pending);
    sender.send(1, 1).unwrap();
    sender.send(2, 2).unwrap();
    assert_eq!(poll_stream(&mut stream), Poll::Ready(Some((2, 2))));
    assert_eq!(poll_stream(&mut stream), Poll::Ready(Some((1, 1))));
    assert_eq!(
        (poll_stream(&mut stream), poll_stream(&mut stream)),
        (Poll::Pending, Poll::Pending)
    );
    assert_eq!(sender.stats().waiting, (0, 1));
    sender.send(3, 3).unwrap();
    assert!(!sender.is_closed(), "its handle is in it");
    drop(sender);
    assert_eq!(
        (poll_stream(&mut stream), stream.is_terminated()),
        (Poll::Ready(Some((3, 3))), false)
    );
    assert_eq!((poll_stream(&mut stream), stream.is_terminated()), (Poll::Ready(None), true));
    assert_eq!(poll_stream(&mut stream), Poll::Ready(None));
    assert!(format!("{stream:?}").contains("ended: true"));
}

/// A stream that has received a message waits behind the other one. A stream that is dropped with a
/// permit passes it on.
#[test]
fn inv10_a_stream_takes_its_turn() {
    let queue: Queue<u32> = Queue::new(4).unwrap();
    let (mut first, mut second) = (Box::pin(queue.stream()), Box::pin(queue.stream()));
    let mut urgent = Box::pin(queue.stream().urgency(1));
    for stream in [&mut first, &mut second, &mut urgent] {
        assert_eq!(poll_stream(stream), Poll::Pending);
    }
    // The stream that is woken takes the message, and waits again.
    for n in 0..2 {
        queue.send(n, 0).unwrap();
        assert_eq!(
            (poll_stream(&mut urgent), poll_stream(&mut urgent)),
            (Poll::Ready(Some((n, 0))), Poll::Pending)
        );
    }
    drop(urgent);
    for n in 2..6 {
        queue.send(n, 0).unwrap();
        let one = if n % 2 == 0 { &mut first } else { &mut second };
        assert_eq!(
            (poll_stream(one), poll_stream(one)),
            (Poll::Ready(Some((n, 0))), Poll::Pending)
        );
    }
    queue.send(6, 0).unwrap(); // wakes the first stream
    drop(first);
    assert_eq!(poll_stream(&mut second), Poll::Ready(Some((6, 0))));
    drop(second);
    queue.validate();
    assert_eq!(queue.stats().waiting, (0, 0));
}

#[test]
fn a_sink_keeps_one_message_until_there_is_room() {
    let (sender, receiver) = Queue::<u32>::builder(1).channel().unwrap();
    let mut sink = Box::pin(sender.into_sink().urgency(2));
    assert_eq!(flush(&mut sink), Poll::Ready(Ok(())), "nothing to flush");
    sink.as_mut().start_send((1, 1)).unwrap();
    assert!(format!("{sink:?}").contains("keeps_a_message: true"));
    assert_eq!(flush(&mut sink), Poll::Ready(Ok(())));
    sink.as_mut().start_send((2, 2)).unwrap();
    assert_eq!((flush(&mut sink), flush(&mut sink)), (Poll::Pending, Poll::Pending));
    assert_eq!(receiver.try_receive(), Ok((1, 1)));
    assert_eq!(flush(&mut sink), Poll::Ready(Ok(())));
    // An invalid message is refused at once, and a message that the queue refuses, at the flush.
    let refused = sink.as_mut().start_send((3, 40_000)).unwrap_err();
    assert_eq!((refused.value, refused.reason), (3, SendRefused::BadPriority { priority: 40_000 }));
    sink.as_mut().start_send((4, 4)).unwrap();
    assert_eq!(flush(&mut sink), Poll::Pending);
    let closes = thread::spawn(move || receiver.close());
    assert_eq!(block_on(ready(&mut sink)), SendRefused::Closed);
    assert!(closes.join().unwrap());
    assert_eq!(flush(&mut sink), Poll::Ready(Ok(())), "it came back, and is not kept");
    drop(sink);

    // A sink that is dropped while it waits drops its message and leaves no waiter.
    let queue: Queue<u32> = Queue::new(1).unwrap();
    queue.send(5, 5).unwrap();
    let mut sink = Box::pin(queue.sink());
    sink.as_mut().start_send((6, 6)).unwrap();
    assert_eq!((flush(&mut sink), queue.stats().waiting), (Poll::Pending, (1, 0)));
    drop(sink);
    queue.validate();
    assert_eq!((queue.stats().waiting, queue.drain()), ((0, 0), vec![(5, 5)]));
}

#[test]
#[should_panic(expected = "a message before there was room")]
fn a_sink_takes_no_message_before_it_is_ready() {
    let queue: Queue<u32> = Queue::new(1).unwrap();
    let mut sink = pin!(queue.sink());
    sink.as_mut().start_send((1, 1)).unwrap();
    let _ = sink.as_mut().start_send((2, 2));
}

/// One task sends and another receives all messages in order.
#[test]
fn inv17_a_sink_and_a_stream_lose_nothing() {
    const MESSAGES: u32 = 20_000;
    let (sender, receiver) = Queue::<u32>::builder(3).channel().unwrap();
    let thread = thread::spawn(move || {
        let mut sink = pin!(sender.into_sink());
        block_on(async {
            for n in 0..MESSAGES {
                poll_fn(|cx| sink.as_mut().poll_ready(cx)).await.unwrap();
                sink.as_mut().start_send((n, 1)).unwrap();
            }
            poll_fn(|cx| sink.as_mut().poll_close(cx)).await.unwrap();
        });
    });
    let mut stream = pin!(receiver.stream());
    let mut next = 0;
    while let Some((n, _)) = block_on(poll_fn(|cx| stream.as_mut().poll_next(cx))) {
        assert_eq!(n, next);
        next += 1;
    }
    thread.join().unwrap();
    assert_eq!(next, MESSAGES);
}
