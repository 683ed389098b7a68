//! Models of the memory that the engine shares: with the kernel, the threads of the pool, and the
//! threads with a remote.
//!
//! `is_planted("...")` or a label in the crate names a planted bug. [`mutants`] checks that a model
//! catches each one.

mod driver;
mod remote;

use std::env;

use crate::backend::aio::{Event, Ring};
use crate::backend::threads::Jobs;
use offlock_sync::atomic::{AtomicBool, AtomicU32, Ordering};
use offlock_sync::cell::UnsafeCell;
use offlock_sync::{Arc, is_planted, model, thread, with_preemptions};

/// Runs a model with at least three preemptions, for models that take less than a second with them.
///
/// Not with a planted bug: two show it, and a run that a bug makes longer is not worth the time.
fn thoroughly(f: impl Fn() + Send + Sync + 'static) {
    let least = if env::var_os("OFFLOCK_MUTANT").is_some() { 0 } else { 3 };
    with_preemptions(least, || model(f));
}

/// The memory that the kernel and the engine share.
struct Shared<const NR: usize> {
    head: AtomicU32,
    tail: AtomicU32,
    events: [UnsafeCell<Event>; NR],
}

// SAFETY: the producer and the consumer use an event only on their sides of head and tail. The
// model checks that: loom fails it if two accesses race.
unsafe impl<const NR: usize> Sync for Shared<NR> {}
// SAFETY: the fields are plain numbers.
unsafe impl<const NR: usize> Send for Shared<NR> {}

/// Acts as the kernel: waits for room, writes an event, and moves the tail over it.
fn produce<const NR: usize>(shared: &Shared<NR>, mut tail: u32, count: u64) {
    let nr = NR as u32;
    for data in 0..count {
        // Ordering: Acquire pairs with the Release store of the head in `Ring::consume`; the
        // consumer's reads of the event happen before it is overwritten.
        while (tail + 1) % nr == shared.head.load(Ordering::Acquire) {
            thread::yield_now();
        }
        let event = Event { data, obj: !data, res: data as i64 * 3, res2: 0 };
        // SAFETY: the load above has shown that the head has passed this event, so only the
        // producer uses it.
        shared.events[tail as usize].with_mut(|slot| unsafe { slot.write(event) });
        tail = (tail + 1) % nr;
        // Ordering: Release pairs with the Acquire load of the tail in `Ring::consume`; it carries
        // the event.
        shared.tail.store(tail, Ordering::Release);
    }
}

/// `count` events go through a ring of `NR` that starts at `at`, in order and whole.
fn events_arrive<const NR: usize>(at: u32, count: u64, most: usize) {
    thoroughly(move || {
        let shared = Arc::new(Shared::<NR> {
            head: AtomicU32::new(at),
            tail: AtomicU32::new(at),
            events: std::array::from_fn(|_| UnsafeCell::new(Event::default())),
        });
        let kernel = thread::spawn({
            let shared = Arc::clone(&shared);
            move || produce(&shared, at, count)
        });
        // SAFETY: `produce` keeps to the protocol, and this is the only consumer.
        let mut ring = unsafe { Ring::new(&shared.head, &shared.tail, &shared.events) };
        let mut next = 0;
        while next < count {
            let before = next;
            ring.consume(most, |event| {
                assert_eq!((event.data, event.obj), (next, !next), "torn, lost or repeated");
                assert_eq!(event.res, next as i64 * 3);
                next += 1;
            });
            assert!(next - before <= most as u64);
            if next == before {
                thread::yield_now();
            }
        }
        kernel.join().unwrap();
        ring.consume(most, |_| panic!("more than was produced"));
    });
}

/// Two of three events are usable, so the third one waits for the consumer and the fourth
/// overwrites the first. Fails if the Acquire of the tail or the Release of the head is weakened,
/// or if the head moves before the event is read.
#[test]
fn inv08_ring_hands_over_whole_events_and_wraps() {
    events_arrive::<3>(1, 4, 3);
}

/// One event is usable, so each event overwrites the last.
#[test]
fn inv08_ring_of_one_event() {
    events_arrive::<2>(0, 3, 1);
}

/// Consumes at most `most` events of a ring of `NR`, of which no other is written. Returns them and the
/// head.
fn consume<const NR: usize>(head: u32, tail: u32, most: usize) -> (Vec<u64>, u32) {
    let (head, tail) = (AtomicU32::new(head), AtomicU32::new(tail));
    let event = |at: usize| UnsafeCell::new(Event { data: at as u64, ..Event::default() });
    let events: [_; NR] = std::array::from_fn(event);
    let mut seen = Vec::new();
    // SAFETY: this is the only `Ring`, and no code writes the events.
    let mut ring = unsafe { Ring::new(&head, &tail, &events) };
    ring.consume(most, |event| seen.push(event.data));
    (seen, head.load(Ordering::Relaxed))
}

#[test]
fn inv08_ring_wraps_stops_in_time_and_clamps_a_hostile_head() {
    model(|| {
        assert_eq!(consume::<4>(2, 1, 10), (vec![2, 3, 0], 1));
        assert_eq!(consume::<4>(2, 1, 2), (vec![2, 3], 0));
        assert_eq!(consume::<4>(3, 3, 10), (vec![], 3));
        assert_eq!(consume::<4>(u32::MAX, 1, 10), (vec![3, 0], 1));
        assert_eq!(consume::<4>(1, 400, 10), (vec![1, 2, 3], 0));
        assert_eq!(consume::<0>(0, 0, 10), (vec![], 0));
    });
}

/// A model of an eventfd that a thread polls. A poll orders nothing: it finds the count without the
/// lock that a read and a write take.
#[derive(Default)]
struct Notifier(AtomicBool);

impl Notifier {
    fn notify(&self) {
        // Ordering: AcqRel pairs with itself and with `clear`: a write to an eventfd and a read
        // take its lock.
        self.0.swap(true, Ordering::AcqRel);
    }

    /// Sleeps until it is signalled. Does not clear it. If no signal comes, it never ends, which
    /// the checker reports.
    fn wait(&self) {
        // Ordering: Relaxed; see the type.
        while !self.0.load(Ordering::Relaxed) {
            thread::yield_now();
        }
    }

    fn clear(&self) {
        // Ordering: AcqRel pairs with `notify`.
        self.0.swap(false, Ordering::AcqRel);
    }
}

/// Sends `pushed` jobs through `workers` threads: none is lost or repeated, the engine never sleeps
/// while a completion is visible, and every worker ends after the close.
fn jobs_complete(workers: u32, pushed: u32, reap_on_submit: bool) {
    thoroughly(move || {
        let shared = Arc::new((Jobs::new(4), Notifier::default()));
        let threads: Vec<_> = (0..workers)
            .map(|_| {
                let shared = Arc::clone(&shared);
                thread::spawn(move || {
                    let (jobs, notifier) = &*shared;
                    while let Some(job) = jobs.take() {
                        if jobs.finish(job) {
                            notifier.notify();
                        }
                    }
                })
            })
            .collect();
        let (jobs, notifier) = &*shared;
        let mut seen = vec![0; pushed as usize];
        let mut reap = || {
            jobs.drain(|job: u32| seen[job as usize] += 1);
            seen.iter().sum::<u32>()
        };
        let mut reaped = 0;
        for job in 0..pushed {
            jobs.push(job);
            if reap_on_submit {
                reaped = reap(); // without clearing the notifier
            }
        }
        while reaped < pushed {
            notifier.wait();
            if is_planted("notifier-cleared-after-the-reap") {
                reaped = reap();
                notifier.clear();
            } else {
                notifier.clear();
                reaped = reap();
            }
        }
        assert!(seen.iter().all(|&times| times == 1), "{seen:?}");
        jobs.close();
        threads.into_iter().for_each(|thread| thread.join().unwrap());
    });
}

/// Fails if a wake-up is lost on either side.
#[test]
fn pool_loses_no_job_and_no_wake_up() {
    jobs_complete(1, 2, true);
}

/// Fails if the notifier is cleared too late.
#[test]
fn pool_announces_what_a_reap_has_missed() {
    jobs_complete(1, 2, false);
}

/// Fails if a worker sleeps after the close.
#[test]
fn pool_closes_with_every_worker() {
    jobs_complete(2, 1, false);
}

/// Each job is withdrawn or performed, once. Fails if `withdraw` takes another job than it found.
#[test]
fn pool_withdraws_a_job_or_performs_it() {
    thoroughly(|| {
        let jobs = Arc::new(Jobs::new(4));
        let worker = thread::spawn({
            let jobs = Arc::clone(&jobs);
            move || {
                while let Some(job) = jobs.take() {
                    _ = jobs.finish(job);
                }
            }
        });
        (0..2).for_each(|job| _ = jobs.push(job));
        let withdrawn = jobs.withdraw(|&job: &u32| job == 0);
        jobs.close();
        worker.join().unwrap();
        let mut seen: Vec<u32> = withdrawn.into_iter().collect();
        assert!(seen.iter().all(|&job| job == 0), "withdrew another");
        jobs.drain(|job| seen.push(job));
        seen.sort_unstable();
        assert_eq!(seen, [0, 1], "lost or repeated");
    });
}

/// Jobs that are queued when the pool closes are performed.
#[test]
fn pool_performs_what_is_queued_when_it_closes() {
    thoroughly(|| {
        let jobs = Arc::new(Jobs::new(4));
        let worker = thread::spawn({
            let jobs = Arc::clone(&jobs);
            move || {
                let mut count = 0;
                while let Some(job) = jobs.take() {
                    count += u32::from(jobs.finish(job));
                }
                count
            }
        });
        (0..2).for_each(|job| _ = jobs.push(job));
        jobs.close();
        assert_eq!(worker.join().unwrap(), 1, "without a drain only the first one signals");
        let mut seen = Vec::new();
        jobs.drain(|job: u32| seen.push(job));
        assert_eq!(seen, [0, 1]);
    });
}

/// Every planted bug must fail its model.
mod mutants {
    use testkit::planted::Planted;

    use super::{driver, remote};

    const MUTANTS: &[(&str, &str)] = &[
        ("notifier-cleared-after-the-reap", "pool_announces_what_a_reap_has_missed"),
        ("close: wake every worker", "pool_closes_with_every_worker"),
        ("push: wake a worker", "pool_loses_no_job_and_no_wake_up"),
        ("consume: the events are read", "inv08_ring_hands_over_whole_events_and_wraps"),
        ("consume: the events are written", "inv08_ring_hands_over_whole_events_and_wraps"),
    ];

    const LOOM_ONLY: &[&str] = &["consume: the events are read", "consume: the events are written"];

    const PLANTED: Planted = Planted {
        mutants: &[driver::MUTANTS, remote::MUTANTS, MUTANTS],
        loom_only: &[driver::LOOM_ONLY, LOOM_ONLY],
        root: env!("CARGO_MANIFEST_DIR"),
        dirs: &["src"],
    };

    testkit::planted_tests!(PLANTED);
}
