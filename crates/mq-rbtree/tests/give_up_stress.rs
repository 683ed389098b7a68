//! Threads and tasks that give up their waits at the moment in which a message or room comes: each message is
//! received once.
#![cfg(not(offlock_model))]

use std::future::Future;
use std::pin::pin;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::task::{Context, Poll};
use std::thread;
use std::time::{Duration, Instant};

use mq_rbtree::{Queue, ReceiveError, SendError, SendRefused};

use testkit::block_on::unparker;
use testkit::canary::{Canary, Census};
use testkit::rng::{self, Rng};
use testkit::wait_until;
use testkit::watchdog::watched;

/// A delay that adapts to the moment of a race: a thread that came too late comes earlier next
/// time.
struct AdaptiveDelay(u64);

impl AdaptiveDelay {
    fn time(&self) -> Duration {
        Duration::from_nanos(self.0)
    }

    fn learn(&mut self, was_early: bool) {
        self.0 = if was_early { (self.0 * 9 / 8 + 50).min(500_000) } else { self.0 * 7 / 8 };
    }
}

/// The results of the sends, or of the receives.
#[derive(Clone, Copy, Default)]
struct Results {
    sum: u64,
    count: u64,
    gave_up: u64,
}

impl Results {
    fn add(&mut self, value: u64) {
        self.sum = self.sum.wrapping_add((value + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15));
        self.count += 1;
    }

    fn and(self, other: Self) -> Self {
        Self {
            sum: self.sum.wrapping_add(other.sum),
            count: self.count + other.count,
            gave_up: self.gave_up + other.gave_up,
        }
    }
}

/// Polls once, waits until a wake-up or the timeout, and then drops the future, sometimes in spite
/// of the wake-up.
fn poll_briefly<F: Future>(future: F, time: Duration, rng: &mut Rng) -> Option<F::Output> {
    let waker = unparker();
    let mut cx = Context::from_waker(&waker);
    let mut future = pin!(future);
    if let Poll::Ready(output) = future.as_mut().poll(&mut cx) {
        return Some(output);
    }
    thread::park_timeout(time);
    if rng.usize(..2) == 0 {
        return None;
    }
    match future.as_mut().poll(&mut cx) {
        Poll::Ready(output) => Some(output),
        Poll::Pending => None,
    }
}

/// Sends with deadlines, or with futures that are dropped, until it is stopped.
fn send_briefly(
    queue: &Queue<Canary>,
    me: u64,
    census: &Census,
    stop: &AtomicBool,
    steps: &AtomicU64,
) -> Results {
    let (mut rng, mut delay, mut results) =
        (rng::seeded(me), AdaptiveDelay(1_000), Results::default());
    for serial in 0.. {
        if stop.load(Relaxed) {
            break;
        }
        let value = me << 32 | serial;
        let message = Canary::new(value, census);
        let said = if me != 1 {
            Some(queue.send_deadline(message, 0, Instant::now() + delay.time()))
        } else {
            poll_briefly(queue.send_async(message, 0), delay.time(), &mut rng)
        };
        let went = match said {
            Some(Ok(())) => true,
            None => false,
            Some(Err(SendError { value: message, reason })) => {
                assert_eq!((message.read(), reason), (value, SendRefused::Timeout));
                false
            }
        };
        if went {
            results.add(value);
        } else {
            results.gave_up += 1;
        }
        delay.learn(!went);
        steps.fetch_add(1, Relaxed);
    }
    results
}

/// Receives in the same ways. Thread 0 waits without a limit, until the queue is closed.
fn receive_briefly(
    queue: &Queue<Canary>,
    me: u64,
    stop: &AtomicBool,
    steps: &AtomicU64,
) -> Results {
    let (mut rng, mut delay, mut results) =
        (rng::seeded(99 + me), AdaptiveDelay(1_000), Results::default());
    while me == 0 || !stop.load(Relaxed) {
        let said = match me {
            0 => Some(queue.receive()),
            1 | 2 => Some(queue.receive_deadline(Instant::now() + delay.time())),
            _ => poll_briefly(queue.receive_async(), delay.time(), &mut rng),
        };
        let got = match said {
            Some(Ok((message, 0))) => {
                results.add(message.read());
                true
            }
            None | Some(Err(ReceiveError::Timeout)) => false,
            Some(Err(ReceiveError::Closed)) if me == 0 => break,
            Some(other) => {
                panic!("{:?}", other.map(|(message, priority)| (message.read(), priority)))
            }
        };
        results.gave_up += u64::from(!got);
        delay.learn(!got);
        steps.fetch_add(1, Relaxed);
    }
    results
}

/// Runs the races for some milliseconds, and checks that every message sent was received. Returns
/// the waits given up on each side, and all waits.
fn races(spin: bool) -> [u64; 3] {
    let queue: Queue<Canary> = Queue::builder(1).spin(spin).build().unwrap();
    let (census, steps) = (Census::default(), AtomicU64::new(0));
    let stops = [AtomicBool::new(false), AtomicBool::new(false)];
    let (sent, got) = watched(
        || steps.load(Relaxed),
        || queue.stats().to_string(),
        || {
            thread::scope(|scope| {
                let (queue, census, stops, steps) = (&queue, &census, &stops, &steps);
                let senders = [0, 1, 2].map(|me| {
                    scope.spawn(move || send_briefly(queue, me, census, &stops[0], steps))
                });
                let receivers = [0, 1, 2, 3]
                    .map(|me| scope.spawn(move || receive_briefly(queue, me, &stops[1], steps)));
                thread::sleep(Duration::from_millis(20));
                stops[0].store(true, Relaxed);
                let sent = senders.map(|sender| sender.join().unwrap());
                stops[1].store(true, Relaxed);
                let [forever, timed @ ..] = receivers;
                let timed = timed.map(|receiver| receiver.join().unwrap());
                // A wait that was given up with a permit has passed it on: the remaining receiver
                // gets the message.
                wait_until(|| {
                    let stats = queue.stats();
                    stats.depth == 0 && stats.waiting == (0, 1)
                });
                queue.validate();
                assert!(queue.close());
                let last = forever.join().unwrap();
                let sum = |results: &[Results]| {
                    results.iter().copied().fold(Results::default(), Results::and)
                };
                (sum(&sent), sum(&timed).and(last))
            })
        },
    );
    assert_eq!((sent.count, sent.sum), (got.count, got.sum), "what was sent, and received");
    assert_eq!(census.alive(), 0);
    queue.validate();
    let stats = queue.stats();
    assert_eq!((stats.sent, stats.received, stats.depth), (sent.count, sent.count, 0));
    [sent.gave_up, got.gave_up, stats.send_waits + stats.receive_waits]
}

#[test]
#[ignore = "stress: seconds of threads"]
fn stress_inv09_who_gives_up_at_the_last_moment_loses_no_message() {
    let until = Instant::now() + testkit::stress::stress_time(5);
    let (mut round, mut seen) = (0, [0; 3]);
    while Instant::now() < until || seen.contains(&0) {
        let more = races(round % 2 == 1);
        seen.iter_mut().zip(more).for_each(|(all, more)| *all += more);
        round += 1;
    }
    let [sends, receives, waits] = seen;
    println!("{round} rounds; given up: {sends} sends, {receives} receives; {waits} waits");
}
