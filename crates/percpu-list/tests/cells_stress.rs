//! Everything at once on the real kernel: migrations, signals, walks, snapshots, trims, with and
//! without rseq sections.
//!
//! Ignored by default. It runs for `OFFLOCK_STRESS_SECONDS` seconds (3).
#![cfg(not(offlock_model))]

use std::collections::HashSet;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering::*};
use std::sync::{LazyLock, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use percpu_list::{Entry, PerCpuList, Ref};
use testkit::pin::{allowed_cpus, on, pin_to};
use testkit::rng;
use testkit::signals::{ThreadTimer, handle};
use testkit::stress::stress_time;

const STAY: u64 = 300;
const IDS: usize = 1 << 22;
const MAGIC: u64 = 0x5ca1_ab1e_0ddb_a115;

/// What became of each value.
struct Tables {
    dropped: Vec<AtomicU32>,
    bumps: Vec<AtomicU32>,
}

struct Value {
    magic: u64,
    id: u64,
    /// The value that was added before this one, and is removed after it.
    after: u64,
    bumps: AtomicU32,
    tables: &'static Tables,
}

impl Value {
    fn check(&self) {
        assert_eq!(self.magic, MAGIC ^ self.id, "torn or overwritten");
        let dropped = self.tables.dropped[self.id as usize].load(Acquire);
        assert_eq!(dropped, 0, "used after its drop: {}", self.id);
    }
}

impl Drop for Value {
    fn drop(&mut self) {
        self.check();
        let dropped = self.tables.dropped[self.id as usize].fetch_add(1, AcqRel);
        assert_eq!(dropped, 0, "dropped twice: {}", self.id);
        let bumps = self.tables.bumps[self.id as usize].load(Acquire);
        assert_eq!(bumps, *self.bumps.get_mut(), "a stale copy was dropped");
    }
}

extern "C" fn nothing(_: libc::c_int) {}

/// Unregisters this thread's rseq area, if rseq is in use.
fn take_id() {
    #[cfg(all(any(target_arch = "x86_64", target_arch = "aarch64"), target_env = "gnu"))]
    if offlock_percpu::capabilities().rseq_ids.is_ok() {
        testkit::rseq::unregister();
    }
}

/// Nothing is lost, seen twice or used after its drop, in rounds of at most 10 seconds.
#[test]
#[ignore = "stress: seconds of everything"]
fn stress_inv07_everything_at_once() {
    static TABLES: LazyLock<Tables> = LazyLock::new(|| {
        let table = || (0..IDS).map(|_| AtomicU32::new(0)).collect();
        Tables { dropped: table(), bumps: table() }
    });
    let (begin, time) = (Instant::now(), stress_time(3));
    let (mut walks, mut snapshots) = (0, 0);
    let limit = time + Duration::from_secs(60);
    while begin.elapsed() < time || (walks.min(snapshots) <= 3 && begin.elapsed() < limit) {
        let left = time.saturating_sub(begin.elapsed()).max(time / 2);
        let done = round(&TABLES, left.min(Duration::from_secs(10)));
        (walks, snapshots) = (walks + done.0, snapshots + done.1);
        TABLES.dropped.iter().chain(&TABLES.bumps).for_each(|count| count.store(0, Relaxed));
    }
    assert!(walks > 3 && snapshots > 3);
}

/// Works on a new list for `time`, or until the ids are used up. Returns the numbers of walks and of snapshots.
fn round(tables: &'static Tables, time: Duration) -> (u64, u64) {
    let list = PerCpuList::<Value>::new();
    let (next, stop) = (AtomicU64::new(0), AtomicBool::new(false));
    let add = |after: u64| {
        let id = next.fetch_add(1, Relaxed);
        let value = Value { magic: MAGIC ^ id, id, after, bumps: AtomicU32::new(0), tables };
        list.insert(value).unwrap()
    };
    let cpus = allowed_cpus();
    let exchange: Mutex<Vec<Entry<Value>>> = Mutex::default();
    let found: Mutex<Vec<Ref<Value>>> = Mutex::default();
    let (walks, snapshots) = (AtomicU64::new(0), AtomicU64::new(0));
    let on_all = || stop.load(Relaxed) || next.load(Relaxed) > IDS as u64 - 10_000;
    handle(nothing);
    let stay: Vec<_> =
        (0..STAY).map(|n| on(cpus[n as usize % cpus.len()], || add(u64::MAX))).collect();
    let end = Instant::now() + time; // on a busy machine the inserts above take seconds
    thread::scope(|scope| {
        for worker in 0..5 {
            let (cpus, exchange, found, add, ended) = (&cpus, &exchange, &found, &add, &on_all);
            scope.spawn(move || {
                if worker < 2 {
                    take_id(); // as in a thread that libc did not create
                }
                let _signals = ThreadTimer::start(Duration::from_micros(100));
                let (mut rng, mut own) = (rng::seeded(worker), Vec::new());
                while !ended() {
                    match rng.usize(..1000) {
                        0 => pin_to(&[cpus[rng.usize(..cpus.len())]]),
                        1 => pin_to(cpus),
                        2..30 => exchange.lock().unwrap().extend(own.pop()),
                        30..60 => own.extend(exchange.lock().unwrap().pop()),
                        60..80 => drop(found.lock().unwrap().pop()),
                        80..200 => {
                            let first = add(u64::MAX); // the second is there only while it is
                            let second = add(first.id);
                            first.check();
                            second.check();
                            drop(second);
                            drop(first);
                        }
                        200..590 if own.len() < 300 => own.push(add(u64::MAX)),
                        _ if !own.is_empty() => {
                            let at = rng.usize(..own.len());
                            own[at].check();
                            drop(own.swap_remove(at));
                        }
                        _ => {}
                    }
                }
            });
        }
        for walker in 0..2 {
            let (list, cpus, found, walks, ended) = (&list, &cpus, &found, &walks, &on_all);
            scope.spawn(move || {
                let mut rng = rng::seeded(100 + walker);
                let mut bag = Vec::new();
                while !ended() {
                    let (mut seen, mut stayed) = (HashSet::new(), 0);
                    for value in list.iter() {
                        value.check();
                        assert!(seen.insert(value.id), "seen twice");
                        stayed += u64::from(value.id < STAY);
                        if rng.usize(..4) == 0 {
                            tables.bumps[value.id as usize].fetch_add(1, AcqRel);
                            value.bumps.fetch_add(1, AcqRel);
                        }
                        match rng.usize(..64) {
                            0..4 => bag.push(value),
                            4 => found.lock().unwrap().push(value),
                            _ => {}
                        }
                        if bag.len() > 60 {
                            let at = rng.usize(..60);
                            bag[at].check();
                            drop(bag.swap_remove(at));
                        }
                    }
                    assert_eq!(stayed, STAY, "a walk missed an entry that stays");
                    walks.fetch_add(1, Relaxed);
                    pin_to(&[cpus[rng.usize(..cpus.len())]]);
                    thread::sleep(Duration::from_micros(rng.usize(..300) as u64));
                }
            });
        }
        let (list, add, ended, snapshots) = (&list, &add, &on_all, &snapshots);
        scope.spawn(move || {
            let mut rng = rng::seeded(99);
            while !ended() {
                let own = [(); 3].map(|()| add(u64::MAX));
                let snapshot = list.lock_all().unwrap();
                let (mut ids, mut afters, mut again) = (Vec::new(), Vec::new(), Vec::new());
                snapshot.for_each(|value| {
                    value.check();
                    ids.push(value.id);
                    afters.push(value.after);
                });
                drop(own); // at the end
                thread::sleep(Duration::from_micros(rng.usize(..60) as u64));
                snapshot.for_each(|value| again.push(value.id));
                assert_eq!((&ids, list.len()), (&again, ids.len()), "a snapshot changed");
                drop(snapshot);
                ids.sort_unstable();
                let alone =
                    afters.iter().find(|id| **id != u64::MAX && ids.binary_search(id).is_err());
                assert_eq!(alone, None, "the later of a pair without the earlier");
                snapshots.fetch_add(1, Relaxed);
                if rng.usize(..4) == 0 {
                    list.trim().unwrap();
                }
                thread::sleep(Duration::from_micros(200 + rng.usize(..800) as u64));
            }
        });
        while Instant::now() < end && !ended() {
            thread::sleep(Duration::from_millis(10));
        }
        stop.store(true, Relaxed);
    });
    exchange.lock().unwrap().clear();
    found.lock().unwrap().drain(..).for_each(|value| value.check());
    assert_eq!(list.len() as u64, STAY);
    let (stats, made) = (list.stats(), next.load(Relaxed));
    assert_eq!((stats.adds, stats.removals), (made, made - STAY));
    println!("{made} values, {walks:?} walks, {snapshots:?} snapshots\n{stats}");
    drop(stay);
    assert_eq!(list.len(), 0);
    let lost =
        tables.dropped[..made as usize].iter().position(|dropped| dropped.load(Relaxed) != 1);
    assert_eq!(lost, None, "lost");
    (walks.into_inner(), snapshots.into_inner())
}

/// Runs the test above in a process without rseq sections.
#[test]
#[ignore = "stress: seconds of everything"]
fn stress_all_of_it_without_rseq() {
    testkit::child::rerun_without_rseq("stress_inv");
}
