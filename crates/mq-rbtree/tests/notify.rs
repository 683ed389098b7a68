//! Notifications: one-shot callbacks, and descriptors in a real epoll set.
#![cfg(not(any(offlock_loom, offlock_shuttle)))]

use std::collections::VecDeque;
use std::future::Future;
use std::io;
use std::ops::ControlFlow;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst};
use std::task::{Context, Poll, Waker};
use std::thread::{self, ThreadId};
use std::time::{Duration, Instant};

use mq_rbtree::{Interest, Queue, RbTree, Readiness, ReceiveError, SendRefused, Wait};

use testkit::WakeCount;
use testkit::wait_until;

/// Registers a notification that counts its calls.
fn count_on(queue: &Queue<u32>, count: &Arc<AtomicUsize>) -> bool {
    let count = Arc::clone(count);
    let notification = move || {
        count.fetch_add(1, SeqCst);
    };
    queue.notify(notification).is_ok()
}

#[test]
fn inv12_a_notification_is_for_the_first_message_of_an_empty_queue_once() {
    let queue: Queue<u32> = Queue::new(4).unwrap();
    let count = Arc::new(AtomicUsize::new(0));
    // Registered on a queue with messages, it is called after the queue was empty again.
    queue.send(1, 1).unwrap();
    assert!(count_on(&queue, &count));
    queue.send(2, 2).unwrap();
    assert_eq!((queue.receive(), queue.receive()), (Ok((2, 2)), Ok((1, 1))));
    assert_eq!(count.load(SeqCst), 0, "neither a message beside others nor a receive");
    queue.send(3, 3).unwrap();
    assert_eq!(count.load(SeqCst), 1);
    queue.receive().unwrap();
    queue.send(4, 4).unwrap();
    assert_eq!(count.load(SeqCst), 1, "one shot");
    queue.drain();
    // Every way to send.
    for way in 0..4 {
        assert!(count_on(&queue, &count));
        match way {
            0 => queue.try_send(5, 5).unwrap(),
            1 => {
                let mut batch = VecDeque::from([(5, 5), (6, 6)]);
                assert!(queue.send_batch(&mut batch, Wait::NO).is_ok());
            }
            2 => queue.send_with(5, 5, Wait::until(std::time::Instant::now())).unwrap(),
            _ => {
                let mut cx = Context::from_waker(Waker::noop());
                assert!(pin!(queue.send_async(5, 5)).poll(&mut cx).is_ready());
            }
        }
        assert_eq!(count.load(SeqCst), 2 + way);
        queue.drain();
    }
    // A refused message does not trigger it.
    assert!(count_on(&queue, &count));
    assert!(queue.send(1, 40_000).is_err());
    queue.close();
    assert!(queue.send(1, 1).is_err());
    assert_eq!(count.load(SeqCst), 5);
}

#[test]
fn inv12_a_second_notification_comes_back() {
    let queue: Queue<u32> = Queue::new(4).unwrap();
    let count = Arc::new(AtomicUsize::new(0));
    assert!(count_on(&queue, &count));
    let mine = Arc::new(AtomicUsize::new(0));
    let other = Arc::clone(&mine);
    let refused = queue.notify(move || {
        other.fetch_add(1, SeqCst);
    });
    let error = refused.unwrap_err();
    assert_eq!(error.errno(), libc::EBUSY);
    assert_eq!(Arc::strong_count(&mine), 2, "it is not dropped");
    error.into_inner()(); // can still be called
    assert_eq!((mine.load(SeqCst), Arc::strong_count(&mine)), (1, 1));
    queue.send(1, 1).unwrap();
    assert_eq!(count.load(SeqCst), 1, "the first is the one");
    // A cancelled notification is dropped and not called.
    assert!(count_on(&queue, &count));
    assert_eq!(Arc::strong_count(&count), 2);
    assert!(queue.cancel_notify());
    assert_eq!(Arc::strong_count(&count), 1);
    assert!(!queue.cancel_notify());
    // A closed queue would never call it.
    let closed: Queue<u32> = Queue::new(1).unwrap();
    closed.send(1, 1).unwrap();
    closed.close();
    assert_eq!(closed.notify(|| ()).unwrap_err().errno(), libc::ESHUTDOWN);
    // Dropping the queue drops the notification uncalled.
    assert!(count_on(&queue, &count));
    drop(queue);
    assert_eq!((count.load(SeqCst), Arc::strong_count(&count)), (1, 1));
}

#[test]
fn inv12_no_notification_while_a_receiver_waits() {
    let queue: Queue<u32> = Queue::builder(4).spin(false).build().unwrap();
    let count = Arc::new(AtomicUsize::new(0));
    assert!(count_on(&queue, &count));
    thread::scope(|scope| {
        let blocked = scope.spawn(|| queue.receive());
        wait_until(|| queue.stats().waiting == (0, 1));
        queue.send(1, 1).unwrap();
        assert_eq!(blocked.join().unwrap(), Ok((1, 1)));
    });
    let flag = WakeCount::new();
    let waker = flag.waker();
    let mut cx = Context::from_waker(&waker);
    {
        let mut task = pin!(queue.receive_async());
        assert!(task.as_mut().poll(&mut cx).is_pending());
        queue.send(2, 2).unwrap();
        assert_eq!((count.load(SeqCst), flag.count()), (0, 1), "the task is woken instead");
        assert!(task.as_mut().poll(&mut cx).is_ready());
    }
    queue.send(3, 3).unwrap();
    assert_eq!(count.load(SeqCst), 1);
}

/// It runs on the thread of the sender, after the message is in the queue.
#[test]
fn inv12_a_notification_runs_on_the_senders_thread() {
    let queue: Arc<Queue<u32>> = Arc::new(Queue::new(4).unwrap());
    let (to, from) = std::sync::mpsc::channel::<(ThreadId, usize)>();
    let inner = Arc::downgrade(&queue);
    let notification = move || {
        to.send((thread::current().id(), inner.upgrade().unwrap().len())).unwrap();
    };
    queue.notify(notification).unwrap();
    let sender = Arc::clone(&queue);
    let thread = thread::spawn(move || {
        sender.send(1, 1).unwrap();
        thread::current().id()
    });
    assert_eq!(from.recv().unwrap(), (thread.join().unwrap(), 1));
}

/// Many threads register and send: no notification is called twice, and each is called or returned.
#[test]
fn inv12_each_notification_is_called_once_or_taken_back() {
    let queue: Queue<u32> = Queue::new(8).unwrap();
    let count = Arc::new(AtomicUsize::new(0));
    let (registered, back) = (AtomicUsize::new(0), AtomicUsize::new(0));
    thread::scope(|scope| {
        for n in 0..2 {
            let (queue, count, registered, back) = (&queue, &count, &registered, &back);
            scope.spawn(move || {
                for step in 0..2_000 {
                    registered.fetch_add(usize::from(count_on(queue, count)), SeqCst);
                    if step % 16 == n {
                        back.fetch_add(usize::from(queue.cancel_notify()), SeqCst);
                    }
                    let _ = queue.try_send(step, step);
                    let _ = queue.try_receive();
                }
            });
        }
    });
    back.fetch_add(usize::from(queue.cancel_notify()), SeqCst);
    assert_eq!(count.load(SeqCst) + back.load(SeqCst), registered.load(SeqCst));
    assert!(count.load(SeqCst) > 0);
    queue.validate();
}

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
fn inv14_epoll_sees_room() {
    let queue: Queue<u32> = Queue::new(2).unwrap();
    let ready = Readiness::new(&queue, Interest::Writable).unwrap();
    let epoll = Epoll::on(&ready, libc::EPOLLIN);
    assert!(epoll.wait(0), "an empty queue has room");
    (0..2).for_each(|n| queue.send(n, 1).unwrap());
    ready.clear();
    assert!(!epoll.wait(0), "no place");
    assert_eq!(queue.try_send(0, 1).unwrap_err().reason, SendRefused::Full);
    assert_eq!(queue.receive(), Ok((0, 1)));
    assert!(epoll.wait(0));
    queue.drain();
    // A wait ended by a deadline or a drop makes no room; neither does a message taken from a
    // sender.
    queue.send(1, 1).unwrap();
    queue.send(1, 1).unwrap();
    let mut cx = Context::from_waker(Waker::noop());
    {
        let mut send = pin!(queue.send_async(1, 1));
        assert!(send.as_mut().poll(&mut cx).is_pending());
    }
    ready.clear();
    assert!(!epoll.wait(0));
    thread::scope(|scope| {
        let blocked = scope.spawn(|| queue.send(3, 1));
        wait_until(|| queue.stats().waiting == (1, 0));
        queue.receive().unwrap();
        assert!(blocked.join().unwrap().is_ok());
        assert!(!epoll.wait(0));
    });
    queue.close();
    assert!(epoll.wait(0));
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

/// An event loop and a thread use both directions of a queue of two. All messages arrive, and the
/// test ends.
#[test]
fn inv14_event_loops_on_both_sides_lose_no_wake_up() {
    const MESSAGES: u32 = 20_000;
    let queue: Arc<Queue<u32>> = Arc::new(Queue::new(2).unwrap());
    let sender = Arc::clone(&queue);
    let thread = thread::spawn(move || {
        let ready = Readiness::new(&*sender, Interest::Writable).unwrap();
        let epoll = Epoll::on(&ready, libc::EPOLLIN | libc::EPOLLET);
        let mut n = 0;
        while n < MESSAGES {
            assert!(epoll.wait(20_000), "a lost wake-up");
            ready.clear();
            while n < MESSAGES && sender.try_send(n, 1).is_ok() {
                n += 1;
            }
        }
    });
    let ready = Readiness::new(Arc::clone(&queue), Interest::Readable).unwrap();
    let epoll = Epoll::on(&ready, libc::EPOLLIN | libc::EPOLLET);
    let mut n = 0;
    while n < MESSAGES {
        assert!(epoll.wait(20_000), "a lost wake-up");
        ready.clear();
        while let Ok((message, _)) = queue.try_receive() {
            assert_eq!(message, n);
            n += 1;
        }
    }
    thread.join().unwrap();
    queue.validate();
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
            assert!(epoll.wait(20_000), "a lost wake-up");
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
            let short = Wait::at_most(Duration::from_micros(n % 50));
            let received = match n % 3 {
                0 => self.queue.try_receive(),
                1 => self.queue.receive_with(short),
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
