//! Sends through the ring, or not, as only the ring itself can tell.

use std::future::Future;
use std::pin::pin;
use std::task::{Context, Poll, Waker};

use super::Queue;

#[test]
fn sends_of_tasks_learn_of_the_room_of_the_ring() {
    let queue: Queue<u64> = Queue::new(8).unwrap();
    let mut cx = Context::from_waker(Waker::noop());
    for n in 0..1_000 {
        let sent = pin!(queue.send_async(n, 0)).poll(&mut cx);
        assert_eq!(sent, Poll::Ready(Ok(())));
        assert_eq!(queue.try_receive(), Ok((n, 0)));
    }
    let ring = queue.ring.as_ref().unwrap();
    let position = ring.claim().expect("the sends have told the room to those that follow");
    // SAFETY: the position has just been claimed.
    unsafe { ring.publish(position, 7, 0) };
    assert_eq!(queue.try_receive(), Ok((7, 0)));
}
