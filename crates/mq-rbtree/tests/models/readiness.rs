//! The descriptor for event loops.

use std::os::fd::AsRawFd;

use mq_rbtree::{Bitmap, Interest, Queue, Readiness, ReceiveError};
use offlock_sync::{Arc, thread};

use super::payload::{Payload, Shared, finish, received, run, spawn, thoroughly, with};

type Ready = Readiness<Shared<Bitmap>>;

/// Returns whether an event loop would wake.
fn is_readable(ready: &Ready) -> bool {
    let mut poll = libc::pollfd { fd: ready.as_raw_fd(), events: libc::POLLIN, revents: 0 };
    // SAFETY: the pointer is to one structure of this frame, and the timeout is 0.
    unsafe { libc::poll(&raw mut poll, 1, 0) == 1 }
}

/// An event loop clears the descriptor, and receives a message or none. If a message is left, the
/// descriptor is readable.
#[test]
fn inv14_message_races_clear() {
    run(|| {
        let queue = with::<Bitmap>(2, 0);
        let ready = Readiness::new(Arc::clone(&queue), Interest::Readable).unwrap();
        let sender =
            spawn(&queue, |queue| (0..2).for_each(|id| queue.send(Payload::new(id), 0).unwrap()));
        ready.clear();
        let got = received(queue.try_receive(), ReceiveError::Empty);
        ready.clear();
        sender.join().unwrap();
        assert!(!queue.is_empty());
        assert!(is_readable(&ready), "the event loop would not wake");
        drop(ready);
        assert_eq!(finish(&queue), 2 - got);
    });
}

/// An event loop clears the descriptor beside a sender that has claimed its slot, and does not wait for it.
/// The descriptor is readable until the message is seen.
#[test]
fn inv22_clear_comes_back_for_a_stopped_sender() {
    thoroughly(|| {
        let queue = with::<Bitmap>(2, 1);
        let ready = Readiness::new(Arc::clone(&queue), Interest::Readable).unwrap();
        assert_eq!(queue.try_receive().unwrap().0.seen(), 0);
        let publish = queue.claim(Payload::new(1), 0).expect("signalled, so not armed");
        ready.clear();
        assert!(is_readable(&ready), "the event loop would not come back");
        let later = queue.claim(Payload::new(2), 0).expect("the ring is open");
        let clears = thread::spawn(move || {
            ready.clear();
            ready
        });
        publish();
        later();
        let ready = clears.join().unwrap();
        assert!(is_readable(&ready), "the event loop would not wake");
        ready.clear();
        assert!(is_readable(&ready));
        drop(ready);
        assert_eq!(finish(&queue), 2);
    });
}

/// An event loop clears the descriptor while room is made. If it has seen the queue full, the
/// descriptor is readable.
#[test]
fn inv14_room_races_clear() {
    thoroughly(|| {
        let queue = with::<Bitmap>(1, 1);
        let ready: Ready = Readiness::new(Arc::clone(&queue), Interest::Writable).unwrap();
        let receiver = spawn(&queue, |queue| received(queue.try_receive(), ReceiveError::Empty));
        ready.clear();
        let full = |queue: &Queue<Payload>| queue.len() == 1;
        let seen_full = full(&queue);
        assert_eq!(receiver.join().unwrap(), 1);
        assert!(!full(&queue));
        assert!(!seen_full || is_readable(&ready), "the event loop would not wake");
        drop(ready);
        assert_eq!(finish(&queue), 0);
    });
}
