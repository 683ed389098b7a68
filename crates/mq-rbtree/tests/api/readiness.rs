//! The descriptors of a `Readiness` in a real epoll set.

use std::io;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};
use std::sync::Arc;

use mq_rbtree::{Interest, Queue, RbTree, Readiness, ReceiveError};

/// An epoll set with one descriptor.
struct Epoll(OwnedFd);

impl Epoll {
    fn on(fd: &impl AsFd, flags: i32) -> Self {
        // SAFETY: `epoll_create1` takes an integer.
        let epoll = unsafe { libc::epoll_create1(libc::EPOLL_CLOEXEC) };
        assert!(epoll >= 0, "epoll_create1: {}", io::Error::last_os_error());
        // SAFETY: the descriptor was just made, and nothing else owns it.
        let epoll = unsafe { OwnedFd::from_raw_fd(epoll) };
        let mut event = libc::epoll_event { events: flags as u32, u64: 7 };
        let (at, fd) = (epoll.as_raw_fd(), fd.as_fd().as_raw_fd());
        // SAFETY: both descriptors are open, and `event` is initialised.
        let rc = unsafe { libc::epoll_ctl(at, libc::EPOLL_CTL_ADD, fd, &mut event) };
        assert_eq!(rc, 0, "epoll_ctl: {}", io::Error::last_os_error());
        Self(epoll)
    }

    /// Returns whether the descriptor is readable within so many milliseconds; if negative, waits.
    fn wait(&self, milliseconds: i32) -> bool {
        let mut event = libc::epoll_event { events: 0, u64: 0 };
        let n = loop {
            // SAFETY: the pointer is to room for one event.
            let n = unsafe { libc::epoll_wait(self.0.as_raw_fd(), &mut event, 1, milliseconds) };
            if n >= 0 {
                break n;
            }
            // A process that is stopped and continued is interrupted, even if no handler ran.
            let error = io::Error::last_os_error();
            assert_eq!(error.kind(), io::ErrorKind::Interrupted, "epoll_wait: {error}");
        };
        assert!(n == 0 || { event.u64 } == 7);
        n == 1
    }
}

#[test]
fn inv14_epoll_sees_a_message_that_came_before_or_after() {
    for flags in [libc::EPOLLIN, libc::EPOLLIN | libc::EPOLLET] {
        let queue: Queue<u32> = Queue::new(4).unwrap();
        let ready = Readiness::new(&queue, Interest::Readable).unwrap();
        let epoll = Epoll::on(&ready, flags);
        assert!(!epoll.wait(0), "nothing is there");
        for round in 0..3 {
            queue.send(round, 1).unwrap();
            assert!(epoll.wait(0));
            ready.clear();
            assert!(epoll.wait(0), "it is there still");
            assert_eq!(queue.try_receive(), Ok((round, 1)));
            ready.clear();
            assert!(!epoll.wait(0), "it was cleared after the last");
            assert_eq!(queue.try_receive(), Err(ReceiveError::Empty));
        }
        queue.close();
        assert!(epoll.wait(0), "readable, because the queue is closed");
        ready.clear();
        assert!(epoll.wait(0));
    }
    // First the messages, then the descriptor.
    let queue: Queue<u32, RbTree<u32>> = Queue::with_keys(4).unwrap();
    queue.send(1, 1).unwrap();
    let ready = Readiness::new(&queue, Interest::Readable).unwrap();
    assert!(Epoll::on(&ready, libc::EPOLLIN).wait(0));
}

#[test]
fn a_direction_has_one_descriptor_at_a_time() {
    let queue: Arc<Queue<u32>> = Arc::new(Queue::new(4).unwrap());
    let open = |interest| Readiness::new(Arc::clone(&queue), interest);
    let (readable, writable) = (open(Interest::Readable), open(Interest::Writable));
    assert!(readable.is_ok() && writable.is_ok());
    for interest in [Interest::Readable, Interest::Writable] {
        assert_eq!(open(interest).unwrap_err().reason.raw_os_error(), Some(libc::EBUSY));
    }
    drop(readable);
    queue.send(1, 1).unwrap();
    let readable = open(Interest::Readable).unwrap();
    assert!(format!("{readable:?}").contains("Readable"));
    assert!(Epoll::on(&readable, libc::EPOLLIN).wait(0), "what came in between is seen");
    // A dropped descriptor is not signalled any more, and does not keep the queue alive.
    drop((readable, writable));
    queue.drain();
    queue.send(2, 2).unwrap();
    assert_eq!(Arc::strong_count(&queue), 1);
}
