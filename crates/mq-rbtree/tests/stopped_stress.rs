//! A sending thread that is stopped at random moments, also between its claim of a slot and its
//! publication: the deadlines of receives and `close` work beside it, and no message is lost.
//!
//! A thread cannot be stopped alone by a signal, and its own process cannot trace it. So a forked
//! child traces it. The child does nothing but system calls and accesses of one shared page. It
//! holds the sender until some receives have ended: without their deadlines that would be never.
#![cfg(not(offlock_model))]

use std::hint::spin_loop;
use std::io;
use std::pin::pin;
use std::ptr::{self, null_mut};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering::SeqCst};
use std::sync::{Mutex, mpsc};
use std::task::{Context, Poll, Waker};
use std::thread;
use std::time::{Duration, Instant};

use mq_rbtree::{Queue, ReceiveError, SendRefused};

use testkit::watchdog::watched;

/// Long, so that a good part of the stops comes between a claim and its publication.
type Message = [u64; 32];

/// Messages of each sender that are not received yet: below the room and the slots of the ring,
/// because a sender without room takes the lock.
const AHEAD: [u64; 2] = [64, 8];
/// Receives that end while the sender is stopped.
const RECEIVES: u64 = 3;
/// Stops of a round.
const STOPS: u32 = 40;
/// The sender may also be stopped while it has the lock. Then it goes on after this time.
const STOPPED: Duration = Duration::from_millis(1_500);

/// What the processes share.
#[derive(Default)]
struct Page {
    /// Receives that have ended.
    receives: AtomicU64,
    /// Whether the sender is stopped for the last time: until `release`.
    last: AtomicBool,
    release: AtomicBool,
    /// Stops in which receives ended, and others.
    passed: AtomicU32,
    blocked: AtomicU32,
}

impl Page {
    fn stops(&self) -> u32 {
        self.blocked.load(SeqCst) + self.passed.load(SeqCst)
    }
}

/// The page of the round that runs.
static PAGE: Mutex<Option<&Page>> = Mutex::new(None);

/// Returns a zeroed page that a forked child shares.
fn shared() -> &'static Page {
    let (access, flags) =
        (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_SHARED | libc::MAP_ANONYMOUS);
    // SAFETY: a new mapping replaces nothing.
    let page = unsafe { libc::mmap(null_mut(), size_of::<Page>(), access, flags, -1, 0) };
    assert_ne!(page, libc::MAP_FAILED, "{}", io::Error::last_os_error());
    // SAFETY: the mapping is large enough, aligned and never unmapped, and zeroes are a `Page`.
    unsafe { &*page.cast::<Page>() }
}

fn nap() {
    let time = libc::timespec { tv_sec: 0, tv_nsec: 100_000 };
    // SAFETY: `time` is a valid time, and the rest is not asked for.
    unsafe { libc::nanosleep(&time, null_mut()) };
}

fn ptrace(request: libc::c_uint, thread: libc::pid_t) -> libc::c_long {
    // SAFETY: the requests used here access no memory of this process.
    unsafe { libc::ptrace(request, thread, ptr::null_mut::<u8>(), ptr::null_mut::<u8>()) }
}

/// Stops a thread again and again. Runs in the forked child, so it must not allocate or panic.
fn stop_again_and_again(thread: libc::pid_t, page: &Page) -> libc::c_int {
    if ptrace(libc::PTRACE_SEIZE, thread) != 0 {
        return 1;
    }
    for n in 0..=STOPS {
        (0..(n * 7919) % 3000).for_each(|_| spin_loop());
        let mut status = 0;
        let stopped = ptrace(libc::PTRACE_INTERRUPT, thread) == 0
            // SAFETY: `status` is valid for a write.
            && unsafe { libc::waitpid(thread, &mut status, libc::__WALL) } == thread
            && libc::WIFSTOPPED(status);
        if !stopped {
            return 2;
        }
        let before = page.receives.load(SeqCst);
        let last = n == STOPS;
        page.last.store(last, SeqCst);
        let is_over = || match last {
            true => page.release.load(SeqCst),
            false => page.receives.load(SeqCst) >= before + RECEIVES,
        };
        // A nap may take long on a busy machine, so the time counts. The clock may be read in the child.
        let (began, mut passed) = (Instant::now(), false);
        while !passed && began.elapsed() < STOPPED {
            nap();
            passed = is_over();
        }
        let count = if passed { &page.passed } else { &page.blocked };
        count.fetch_add(1, SeqCst);
        if ptrace(libc::PTRACE_CONT, thread) != 0 {
            return 3;
        }
    }
    0 // the end of a tracer detaches it
}

/// Forks the child that stops this thread of this process. Returns its process id.
fn stop_from_a_child(thread: libc::pid_t, page: &Page) -> libc::pid_t {
    // SAFETY: has no preconditions; it fails where any process may trace.
    unsafe { libc::prctl(libc::PR_SET_PTRACER, libc::PR_SET_PTRACER_ANY) };
    // SAFETY: the child does only what a child of a process with threads may do.
    match unsafe { libc::fork() } {
        // SAFETY: ends the child without the parent's handlers.
        0 => unsafe { libc::_exit(stop_again_and_again(thread, page)) },
        child => child,
    }
}

/// What a round saw.
#[derive(Default)]
struct Seen {
    /// Receives that ended at their deadline although a send had returned: behind the stopped one.
    held_back: u64,
    /// Whether the queue was closed while the sender was stopped.
    closed: u64,
    passed: u64,
    blocked: u64,
}

/// Sends until the queue is closed. Returns how many messages it has sent.
fn send(queue: &Queue<Message>, priority: u32, sent: &AtomicU64, received: &AtomicU64) -> u64 {
    let (mut n, ahead) = (0, AHEAD[priority as usize]);
    loop {
        if n - received.load(SeqCst) >= ahead {
            if queue.is_closed() {
                return n;
            }
            thread::yield_now();
            continue;
        }
        match queue.try_send([n; 32], priority) {
            Ok(()) => {
                n += 1;
                sent.store(n, SeqCst);
            }
            Err(refused) => {
                assert_eq!(refused.reason, SendRefused::Closed);
                return n;
            }
        }
    }
}

/// Receives until the queue is closed and empty. Returns the receives that were held back.
fn receive(
    queue: &Queue<Message>,
    page: &Page,
    sent: &[AtomicU64; 2],
    received: &[AtomicU64; 2],
) -> u64 {
    let (mut held_back, mut calls, mut out) = (0, 0, Vec::new());
    loop {
        let waiting = (0..2).any(|of| sent[of].load(SeqCst) > received[of].load(SeqCst));
        let wait = Instant::now() + Duration::from_micros(200);
        calls += 1;
        // Batches, so that the senders rarely wait.
        let got = match calls % 8 {
            0 => queue.receive_deadline(wait).map(|message| out.push(message)),
            1 => queue.receive_guard_deadline(wait).map(|guard| out.push(guard.accept())),
            2 => {
                let mut task = pin!(queue.receive_async());
                match task.as_mut().poll(&mut Context::from_waker(Waker::noop())) {
                    Poll::Ready(got) => got.map(|message| out.push(message)),
                    Poll::Pending => Err(ReceiveError::Timeout),
                }
            }
            _ => match queue.receive_deadline(wait) {
                Ok(message) => {
                    out.push(message);
                    let _empty = queue.try_receive_batch(&mut out, 63);
                    Ok(())
                }
                Err(error) => Err(error),
            },
        };
        page.receives.fetch_add(1, SeqCst);
        match got {
            Ok(()) => {}
            Err(ReceiveError::Timeout) => held_back += u64::from(waiting),
            Err(error) => {
                assert_eq!(error, ReceiveError::Closed);
                return held_back;
            }
        }
        for (message, priority) in out.drain(..) {
            let next = received[priority as usize].fetch_add(1, SeqCst);
            assert_eq!(message, [next; 32], "whole, and in order");
        }
    }
}

fn round() -> Seen {
    let queue: Queue<Message> = Queue::new(1024).unwrap();
    let (page, [sent, received]) =
        (shared(), [(); 2].map(|()| [(); 2].map(|()| AtomicU64::new(0))));
    *PAGE.lock().unwrap() = Some(page);
    let mut seen = Seen::default();
    thread::scope(|scope| {
        let (queue, sent, received) = (&queue, &sent, &received);
        let (tell, told) = mpsc::channel();
        let stopped = scope.spawn(move || {
            // SAFETY: has no preconditions.
            tell.send(unsafe { libc::gettid() }).unwrap();
            send(queue, 0, &sent[0], &received[0])
        });
        let other = scope.spawn(|| send(queue, 1, &sent[1], &received[1]));
        let receiver = scope.spawn(|| receive(queue, page, sent, received));
        let child = stop_from_a_child(told.recv().unwrap(), page);
        let mut status = 0;
        // SAFETY: `status` is valid for a write.
        let mut ended =
            |flags| child > 0 && unsafe { libc::waitpid(child, &mut status, flags) } == child;
        let mut early = false;
        while !page.last.load(SeqCst) && !early {
            early = ended(libc::WNOHANG);
            thread::sleep(Duration::from_micros(100));
        }
        assert!(queue.close());
        seen.closed = u64::from(page.stops() == STOPS);
        page.release.store(true, SeqCst);
        let counts = [stopped, other].map(|sender| sender.join().unwrap());
        seen.held_back = receiver.join().unwrap();
        assert_eq!(received.each_ref().map(|count| count.load(SeqCst)), counts);
        assert!(early || ended(0));
        assert_eq!(status, 0, "the child could trace a thread of its parent");
    });
    queue.validate();
    seen.passed = page.passed.load(SeqCst).into();
    seen.blocked = page.blocked.load(SeqCst).into();
    seen
}

#[test]
#[ignore = "stress: seconds of threads"]
fn stress_inv22_a_sender_is_stopped_at_random_moments() {
    let until = Instant::now() + testkit::stress::stress_time(5);
    let (rounds, mut seen) = (AtomicU64::new(0), Seen::default());
    let rounds = &rounds;
    let seen = watched(
        || PAGE.lock().unwrap().map_or(0, Page::stops).into(),
        || "a round does not end".into(),
        || {
            while Instant::now() < until || seen.closed == 0 || seen.held_back.max(seen.blocked) < 8
            {
                let more = round();
                seen.held_back += more.held_back;
                seen.closed += more.closed;
                seen.passed += more.passed;
                seen.blocked += more.blocked;
                rounds.fetch_add(1, SeqCst);
            }
            seen
        },
    );
    let Seen { held_back, closed, passed, blocked } = seen;
    println!(
        "{} rounds: {passed} stops beside receives, {blocked} with the lock; {held_back} receives \
         held back; {closed} closed beside a stopped sender",
        rounds.load(SeqCst)
    );
    // A busy machine, or a stop with the lock, blocks a few. Without the deadlines a stop within a send
    // is always blocked, and no receive is held back.
    assert!(blocked <= held_back, "receives end beside a stopped sender");
}
