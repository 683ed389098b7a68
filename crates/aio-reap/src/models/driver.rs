//! Models of an edge-triggered driver, like tokio's reactor, and of `block_on`, with the engine that
//! they turn.
//!
//! [`round`] and [`CallQueue`] are the shipped code. The descriptor is a level. The reactor is a flag
//! that each edge sets and that the driver sleeps for.

use std::cell::Cell;
use std::collections::VecDeque;
use std::convert::Infallible;
use std::task::Poll;

use crate::calls::CallQueue;
use crate::drive::{WokenFlag, block_on, round};
use offlock_sync::atomic::{AtomicBool, Ordering};
use offlock_sync::{Arc, thread};

use super::{Notifier, thoroughly};

pub(super) const MUTANTS: &[(&str, &str)] = &[
    ("drive: the turn left nothing", "driver::inv06_work_left_by_a_turn_is_continued"),
    ("take: the waking thread has written", "driver::inv06_a_woken_future_sees_why"),
    ("set: the waking thread has written", "driver::inv06_a_woken_future_sees_why"),
    ("sleep: the future was not woken", "driver::inv06_a_woken_future_sees_why"),
];

pub(super) const LOOM_ONLY: &[&str] =
    &["take: the waking thread has written", "set: the waking thread has written"];

/// The descriptor and the reactor.
#[derive(Default)]
struct Wake {
    /// Whether the engine's descriptor is readable.
    readable: AtomicBool,
    /// An edge that the driver has not cleared.
    edge: Notifier,
}

struct Shared {
    queue: CallQueue<Arc<Notifier>>,
    wake: Arc<Wake>,
}

impl Wake {
    fn notify(&self) {
        // Ordering: AcqRel pairs with itself and with the exchange in `turn`: a write to an eventfd
        // and a read take its lock. It carries the call.
        self.readable.swap(true, Ordering::AcqRel);
        self.edge.notify();
    }
}

impl Shared {
    /// A turn takes all calls and runs the first `most`. The others stand for work that a turn leaves.
    fn turn(&self, calls: &mut VecDeque<Arc<Notifier>>, most: usize) -> usize {
        // Ordering: AcqRel pairs with the exchange in `notify`.
        self.wake.readable.swap(false, Ordering::AcqRel);
        self.queue.take(calls);
        let count = most.min(calls.len());
        calls.drain(..count).for_each(|ran| ran.notify());
        if !calls.is_empty() {
            // It was readable all the time, so there is no edge.
            // Ordering: AcqRel, as in `notify`.
            self.wake.readable.swap(true, Ordering::AcqRel);
        }
        count
    }
}

/// One thread sends two calls. With `one_by_one` it sends the second one after the first has run.
fn calls_run(most: usize, one_by_one: bool) {
    thoroughly(move || {
        let wake = Arc::new(Wake::default());
        let kick = Arc::clone(&wake);
        let queue = CallQueue::new(2, move || kick.notify());
        let shared = Arc::new(Shared { queue, wake });
        let sender = thread::spawn({
            let shared = Arc::clone(&shared);
            move || {
                let send = || {
                    let ran = Arc::new(Notifier::default());
                    let sent = shared.queue.send(Arc::clone(&ran), |ran| ran);
                    sent.unwrap_or_else(|_| panic!("there is a place for each"));
                    ran
                };
                let first = send();
                if one_by_one {
                    first.wait();
                    return send().wait();
                }
                let second = send();
                first.wait();
                second.wait();
            }
        });
        let (mut done, mut calls) = (0, VecDeque::new());
        while done < 2 {
            shared.wake.edge.wait();
            let mut clear_edge = true;
            loop {
                let again = round(
                    || {
                        if std::mem::take(&mut clear_edge) {
                            shared.wake.edge.clear();
                        }
                    },
                    || done += shared.turn(&mut calls, most),
                    // Ordering: Relaxed; a poll takes no lock, so it orders nothing.
                    || shared.wake.readable.load(Ordering::Relaxed),
                );
                if !again {
                    break;
                }
                thread::yield_now();
            }
        }
        sender.join().unwrap();
    });
}

/// Fails if the driver clears an edge that came after its turn took the calls.
#[test]
fn inv06_a_notification_at_any_moment_of_a_turn_wakes_the_driver() {
    calls_run(2, true);
}

/// Fails if the driver sleeps while the descriptor is readable.
#[test]
fn inv06_work_left_by_a_turn_is_continued() {
    calls_run(1, false);
}

/// Another thread wakes the future that `block_on` polls. Fails if a poll does not see what the
/// waking thread wrote before: nothing wakes the future again.
#[test]
fn inv06_a_woken_future_sees_why() {
    thoroughly(|| {
        let shared = Arc::new((WokenFlag::new(), Notifier::default(), AtomicBool::new(false)));
        let waking = thread::spawn({
            let shared = Arc::clone(&shared);
            move || {
                let (woken, kick, event) = &*shared;
                // Ordering: Relaxed; the flag must carry it.
                event.store(true, Ordering::Relaxed);
                if woken.set() {
                    kick.notify();
                }
            }
        });
        let (woken, kick, event) = &*shared;
        let poll = || match event.load(Ordering::Relaxed) {
            true => Poll::Ready(()),
            false => Poll::Pending,
        };
        // A turn of the engine clears the kick only after a sleep.
        let slept = Cell::new(false);
        let wait = || {
            if slept.take() {
                kick.clear();
            }
            slept.set(woken.sleep(|| kick.wait()).is_some());
            Ok::<(), Infallible>(())
        };
        _ = block_on(woken, poll, wait);
        waking.join().unwrap();
    });
}
