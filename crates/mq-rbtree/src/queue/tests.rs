//! Sends through the ring, or not, as only the ring itself can tell.

use std::future::Future;
use std::pin::pin;
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use super::park::Spin;
use super::{Queue, Wait};
use crate::ReceiveError;

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

/// Creates an empty queue of 8 messages that has its memory and had so many messages before.
fn used(accepted: u64) -> Queue<u64> {
    let mut queue = Queue::new(8).unwrap();
    (0..8).for_each(|n| queue.try_send(n, 0).unwrap());
    queue.drain();
    queue.ring.as_ref().unwrap().start_at(&mut queue.state.get_mut().cursor, accepted);
    queue.drain();
    queue
}

/// A slot's number has 32 bits; each way from the old numbers over the point where they are equal, or
/// compare the other way round, to those of today.
#[test]
fn inv21_sequence_numbers_of_sends_under_the_lock_are_not_outdated() {
    for begin in [(1 << 31) - 20, 1 << 31, 3 << 30, (1 << 32) - 20, (1 << 33) - 4] {
        for locked in 0..12 {
            let queue = used(begin);
            for n in 0..40 {
                for n in n..n + locked {
                    assert_eq!(queue.send_batch(&mut [(n, 0)].into()), Ok(1));
                    assert_eq!(queue.try_receive(), Ok((n, 0)));
                }
                let ring = queue.ring.as_ref().unwrap();
                let next = queue.lock().cursor.accepted();
                assert!(!ring.was_published(next), "a receiver would not sleep");
                assert_eq!(queue.try_receive(), Err(ReceiveError::Empty));
                let publish = queue.claim(n, 5).unwrap();
                queue.try_send(n + 1, 9).unwrap();
                assert!(queue.lock_undrained().awaits_sender(ring), "no hole is reported");
                let now = Instant::now();
                assert_eq!(queue.receive_deadline(now), Err(ReceiveError::Timeout), "not `Empty`");
                publish();
                assert_eq!(queue.drain(), [(n + 1, 9), (n, 5)]);
            }
        }
    }
}

#[test]
fn inv21_a_spinning_receiver_sees_a_batch() {
    let queue = used(100);
    let next = queue.lock().cursor.accepted();
    let mut batch = [(1, 0), (2, 0), (3, 0)].into();
    assert_eq!(queue.send_batch(&mut batch), Ok(3));
    let ring = queue.ring.as_ref().unwrap();
    // Also for the 16 positions before: other receivers have taken those messages, so a receiver that spins for
    // one of them must look at the queue again.
    assert!((next - 16..next + 3).all(|position| ring.was_published(position)));
}

/// The message that a receiver spins for stays published while the sender behind it is waited for.
#[test]
fn inv22_a_receiver_does_not_spin_at_a_hole() {
    let queue = used(100);
    let position = queue.lock().cursor.accepted();
    queue.try_send(1, 0).unwrap();
    let publish = queue.claim(2, 0).unwrap();
    queue.try_send(3, 0).unwrap();
    let (begin, wait) = (Instant::now(), Wait::Until(Instant::now() + Duration::from_secs(60)));
    assert!(queue.spin_to_receive(wait, position).is_none());
    assert!(begin.elapsed() < Duration::from_secs(30));
    publish();
    assert_eq!(queue.drain(), [(1, 0), (2, 0), (3, 0)]);
}

/// A wait looks at the queue once more after its deadline: a message may have come since its last look.
#[test]
fn a_wait_looks_after_its_deadline() {
    let queue: Queue<u64> = Queue::new(1).unwrap();
    queue.try_send(1, 5).unwrap();
    let look = || queue.look_to_receive(Wait::Past);
    let received = queue.wait_by(queue.receivers.waiter(), Wait::Past, true, look);
    assert_eq!(received, Some(Ok((1, 5))));
}

#[test]
fn a_core_takes_no_slot_beyond_its_limit() {
    let mut queue: Queue<u64> = Queue::new(1).unwrap();
    let core = &mut queue.state.get_mut().core;
    assert_eq!((core.push(1, 1), core.push(1, 2)), (Ok(()), Err(2)));
}

/// A wait that ends after the spins shortens those of the next wait.
#[test]
fn spins_adapt_to_the_waits_before() {
    let spin = Spin::new(true);
    let most = spin.spins();
    assert!(spin.until(Wait::No, 1, |spun| spun > 0));
    assert_eq!(spin.spins(), most);
    assert!(!spin.until(Wait::No, 1, |_| false));
    assert_eq!(spin.spins(), most / 2);
}
