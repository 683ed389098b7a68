//! The descriptors of a `Readiness` in a real epoll set.
#![cfg(not(offlock_model))]

use std::future::Future;
use std::io;
use std::ops::ControlFlow;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst};
use std::task::{Context, Poll, Waker};
use std::thread;
use std::time::{Duration, Instant};

use mq_rbtree::{Interest, Queue, RbTree, Readiness, ReceiveError};

use testkit::wait_until;

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

/// The results of an event loop on one side of a queue.
struct Loop<'q> {
    queue: &'q Queue<u64>,
    stop: &'q AtomicBool,
    steps: &'q AtomicUsize,
}

impl Loop<'_> {
    /// Waits for a descriptor, level or edge triggered, clears it, and repeats `work` until that is
    /// refused. Ends when `work` breaks.
    fn run(&self, interest: Interest, flags: i32, mut work: impl FnMut() -> ControlFlow<()>) {
        let ready = Readiness::new(self.queue, interest).unwrap();
        let epoll = Epoll::on(&ready, flags);
        loop {
            assert!(epoll.wait(60_000), "a lost wake-up");
            ready.clear();
            if work().is_break() {
                return;
            }
            self.steps.fetch_add(1, SeqCst);
        }
    }

    fn send_until_stopped(&self, flags: i32) -> (u64, u64) {
        let (mut count, mut sum) = (0, 0);
        self.run(Interest::Writable, flags, || {
            while !self.stop.load(SeqCst) {
                if self.queue.try_send(count, count as u32 % 64).is_err() {
                    return ControlFlow::Continue(());
                }
                count += 1;
                sum += count;
            }
            ControlFlow::Break(())
        });
        (count, sum)
    }

    fn receive_until_closed(&self, flags: i32) -> (u64, u64) {
        let (mut count, mut sum) = (0, 0);
        self.run(Interest::Readable, flags, || {
            loop {
                match self.queue.try_receive() {
                    Ok((message, _)) => {
                        count += 1;
                        sum += message + 1;
                    }
                    Err(ReceiveError::Empty) => return ControlFlow::Continue(()),
                    Err(error) => {
                        assert_eq!(error, ReceiveError::Closed);
                        return ControlFlow::Break(());
                    }
                }
            }
        });
        (count, sum)
    }

    /// Takes a message from the loop's queue now and then, or waits for one and gives up.
    fn interfere(&self) -> (u64, u64) {
        let (mut count, mut sum) = (0, 0);
        let mut cx = Context::from_waker(Waker::noop());
        for n in 0.. {
            if self.stop.load(SeqCst) {
                break;
            }
            let short = Instant::now() + Duration::from_micros(n % 50);
            let received = match n % 3 {
                0 => self.queue.try_receive(),
                1 => self.queue.receive_deadline(short),
                _ => match pin!(self.queue.receive_async()).poll(&mut cx) {
                    Poll::Ready(received) => received,
                    Poll::Pending => Err(ReceiveError::Empty), // dropped
                },
            };
            if let Ok((message, _)) = received {
                count += 1;
                sum += message + 1;
            }
            thread::sleep(Duration::from_micros(50)); // most messages are left to the loop
        }
        (count, sum)
    }
}

/// Runs two event loops and an interfering thread on a queue that is full or empty most of the
/// time.
fn event_loops(max: usize, flags: i32) {
    let queue: Queue<u64> = Queue::new(max).unwrap();
    let (stop, steps) = (AtomicBool::new(false), AtomicUsize::new(0));
    let each = Loop { queue: &queue, stop: &stop, steps: &steps };
    thread::scope(|scope| {
        let sends = scope.spawn(|| each.send_until_stopped(flags));
        let receives = scope.spawn(|| each.receive_until_closed(flags));
        let interferes = scope.spawn(|| each.interfere());
        thread::sleep(Duration::from_millis(20));
        wait_until(|| steps.load(SeqCst) > 100);
        stop.store(true, SeqCst);
        let (meddled, sent) = (interferes.join().unwrap(), sends.join().unwrap());
        assert!(queue.close()); // wakes the receiving loop
        let got = receives.join().unwrap();
        assert_eq!(sent, (got.0 + meddled.0, got.1 + meddled.1), "what was sent, and received");
    });
    assert_eq!(queue.len(), 0);
    queue.validate();
}

#[test]
fn inv14_event_loops_on_both_sides_lose_no_wake_up() {
    for flags in [libc::EPOLLIN, libc::EPOLLIN | libc::EPOLLET] {
        event_loops(2, flags);
    }
}

#[test]
#[ignore = "stress: seconds of threads"]
fn stress_inv14_event_loops_lose_no_wake_up() {
    let until = Instant::now() + testkit::stress::stress_time(5);
    let mut rounds = 0;
    while rounds < 4 || Instant::now() < until {
        let flags = [libc::EPOLLIN, libc::EPOLLIN | libc::EPOLLET][rounds % 2];
        event_loops([1, 3, 100][rounds / 2 % 3], flags);
        rounds += 1;
    }
    println!("{rounds} rounds");
}
