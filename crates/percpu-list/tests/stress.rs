//! A list and many threads on the real kernel, with and without rseq sections: migrations, signals,
//! additions, removals by owners and by others, walks, snapshots, drains and trims at once.
//!
//! Ignored by default. Each test runs for `OFFLOCK_STRESS_SECONDS` seconds (3).
#![cfg(not(offlock_model))]

#[path = "api/no_id.rs"]
mod no_id;

use std::collections::HashSet;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering::*};
use std::sync::{LazyLock, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use no_id::take_id;
use percpu_list::{Entry, PerCpuList, Ref};
use testkit::pin::{allowed_cpus, on, pin_to};
use testkit::rng::{self, Rng};
use testkit::signals::{ThreadTimer, handle};
use testkit::stress::stress_time;

const IDS: usize = 1 << 22;
const MAGIC: u64 = 0x5ca1_ab1e_0ddb_a115;

/// What became of each value.
struct Tables {
    dropped: Vec<AtomicU32>,
    bumps: Vec<AtomicU32>,
}

static TABLES: LazyLock<Tables> = LazyLock::new(|| {
    let table = || (0..IDS).map(|_| AtomicU32::new(0)).collect();
    Tables { dropped: table(), bumps: table() }
});

/// Which threads may remove an entry, and when.
#[derive(Clone, Copy, PartialEq)]
enum Kind {
    /// Only its owner.
    Owned,
    /// Only its owner. The value with this id was added before, and is removed after it.
    After(u64),
    /// Any thread that finds it.
    Free,
}

struct Value {
    magic: u64,
    id: u64,
    kind: Kind,
    bumps: AtomicU32,
    /// How many removals returned true.
    removed: AtomicU32,
    /// Set if the owner removed the entry without a result.
    ended: AtomicBool,
}

impl Value {
    fn check(&self) {
        assert_eq!(self.magic, MAGIC ^ self.id, "torn or overwritten");
        let dropped = TABLES.dropped[self.id as usize].load(Acquire);
        assert_eq!(dropped, 0, "used after its drop: {}", self.id);
    }

    /// Counts the result of a removal.
    fn count(&self, removed: bool) {
        self.removed.fetch_add(removed.into(), Relaxed);
    }
}

impl Drop for Value {
    fn drop(&mut self) {
        self.check();
        let dropped = TABLES.dropped[self.id as usize].fetch_add(1, AcqRel);
        assert_eq!(dropped, 0, "dropped twice: {}", self.id);
        let bumps = TABLES.bumps[self.id as usize].load(Acquire);
        assert_eq!(bumps, *self.bumps.get_mut(), "a stale copy was dropped");
        let (removed, ended) = (*self.removed.get_mut(), *self.ended.get_mut());
        assert!(removed == 1 || removed == 0 && ended, "{removed} removals; ended: {ended}");
    }
}

/// The threads of a test, beside two of which each has no rseq id.
#[derive(Clone, Copy)]
struct Mix<'a> {
    cpus: &'a [usize],
    walkers: u64,
    /// Walks yield between steps, and may end early.
    slow: bool,
    /// The number of entries that stay. The list is drained if it is zero.
    stay: u64,
}

struct World<'a> {
    mix: Mix<'a>,
    list: PerCpuList<Value>,
    next: AtomicU64,
    stop: AtomicBool,
    exchange: Mutex<Vec<Entry<Value>>>,
    found: Mutex<Vec<Ref<Value>>>,
    walks: AtomicU64,
    snapshots: AtomicU64,
}

extern "C" fn nothing(_: libc::c_int) {}

impl World<'_> {
    fn add(&self, kind: Kind) -> Entry<Value> {
        let id = self.next.fetch_add(1, Relaxed);
        let (bumps, removed) = (AtomicU32::new(0), AtomicU32::new(0));
        let ended = AtomicBool::new(false);
        let value = Value { magic: MAGIC ^ id, id, kind, bumps, removed, ended };
        self.list.insert(value).unwrap()
    }

    fn has_ended(&self) -> bool {
        self.stop.load(Relaxed) || self.next.load(Relaxed) > IDS as u64 - 20_000
    }

    fn pin_to_any(&self, rng: &mut Rng) {
        pin_to(&[self.mix.cpus[rng.usize(..self.mix.cpus.len())]]);
    }

    /// Removes an entry, in one of several ways.
    fn remove(&self, entry: Entry<Value>, rng: &mut Rng) {
        entry.check();
        let found = (rng.usize(..4) < 2).then(|| entry.share());
        match &found {
            Some(found) if rng.bool() => found.count(entry.remove().unwrap()),
            Some(found) if rng.bool() => found.count(self.list.remove(found).unwrap()),
            _ => {
                entry.ended.store(true, Relaxed);
                drop(entry);
            }
        }
        found.inspect(|found| found.check());
    }

    /// Adds, removes and passes entries around.
    fn work(&self, seed: u64) {
        let _signals = ThreadTimer::start(Duration::from_micros(100));
        let (mut rng, mut own) = (rng::seeded(seed), Vec::new());
        while !self.has_ended() {
            match rng.usize(..1000) {
                0 => self.pin_to_any(&mut rng),
                1 => pin_to(self.mix.cpus),
                2..30 => self.exchange.lock().unwrap().extend(own.pop()),
                30..60 => own.extend(self.exchange.lock().unwrap().pop()),
                60..80 => drop(self.found.lock().unwrap().pop()),
                80..85 => {
                    // This thread is not the owner. The entry stays in its place, unlinked.
                    let exchange = self.exchange.lock().unwrap();
                    let free = exchange.last().filter(|entry| entry.kind == Kind::Free);
                    free.inspect(|entry| entry.count(self.list.remove(&entry.share()).unwrap()));
                }
                85 if self.mix.stay == 0 && rng.usize(..8) == 0 => {
                    // The drain runs to its end, because an entry that it has removed and not returned
                    // would not be counted.
                    self.list.drain().for_each(|found| found.unwrap().count(true));
                }
                86 => {
                    let many = (0..rng.usize(..1_000)).map(|_| self.add(Kind::Owned));
                    many.collect::<Vec<_>>().into_iter().for_each(|it| self.remove(it, &mut rng));
                }
                87..200 if self.mix.stay != 0 => {
                    let first = self.add(Kind::Owned); // the second is there only while it is
                    let second = self.add(Kind::After(first.id));
                    first.check();
                    self.remove(second, &mut rng);
                    self.remove(first, &mut rng);
                }
                200..590 if own.len() < 300 => own.push(self.add(Kind::Free)),
                _ if !own.is_empty() => {
                    let at = rng.usize(..own.len());
                    self.remove(own.swap_remove(at), &mut rng);
                }
                _ => {}
            }
        }
        own.into_iter().for_each(|entry| self.remove(entry, &mut rng));
    }

    /// Walks the list. A walk sees the entries that stay, and those of its own thread, which are at the end of their
    /// slots, from where a removal during the walk could move them.
    fn walk(&self, seed: u64) {
        let (mut rng, mut bag) = (rng::seeded(seed), Vec::new());
        while !self.has_ended() {
            let owned = if self.mix.stay == 0 { 0 } else { 40 };
            let own: Vec<_> = (0..owned).map(|_| self.add(Kind::Owned)).collect();
            let is_short = self.mix.slow && rng.usize(..4) == 0;
            let end = if is_short { rng.usize(..500) } else { usize::MAX };
            let mut seen = HashSet::new();
            for value in self.list.iter().take(end) {
                value.check();
                assert!(seen.insert(value.id), "seen twice");
                if self.mix.slow && rng.usize(..16) == 0 {
                    thread::yield_now();
                }
                if rng.usize(..4) == 0 {
                    TABLES.bumps[value.id as usize].fetch_add(1, AcqRel);
                    value.bumps.fetch_add(1, AcqRel);
                }
                if value.kind == Kind::Free && rng.usize(..64) == 0 {
                    value.count(self.list.remove(&value).unwrap());
                }
                match rng.usize(..64) {
                    0..4 => bag.push(value),
                    4 => self.found.lock().unwrap().push(value),
                    _ => {}
                }
                if bag.len() > 60 {
                    let value = bag.swap_remove(rng.usize(..60));
                    value.check();
                }
            }
            let must = (0..self.mix.stay).chain(own.iter().map(|entry| entry.id));
            let missed: Vec<_> = must.filter(|id| !is_short && !seen.contains(id)).collect();
            assert!(missed.is_empty(), "a walk missed entries that stay: {missed:?}");
            own.into_iter().for_each(|entry| self.remove(entry, &mut rng));
            self.walks.fetch_add(1, Relaxed);
            self.pin_to_any(&mut rng);
            thread::sleep(Duration::from_micros(rng.usize(..300) as u64));
        }
    }

    /// Makes snapshots, which do not change, and in which each entry comes with the one it was added after.
    fn snapshot(&self) {
        let mut rng = rng::seeded(99);
        while !self.has_ended() {
            let own = [(); 3].map(|()| self.add(Kind::Owned));
            let snapshot = self.list.lock_all().unwrap();
            let (mut ids, mut after, mut again) = (HashSet::new(), Vec::new(), 0);
            snapshot.for_each(|value| {
                value.check();
                assert!(ids.insert(value.id), "twice in a snapshot");
                after.extend(if let Kind::After(id) = value.kind { Some(id) } else { None });
            });
            own.iter().for_each(|entry| entry.ended.store(true, Relaxed));
            drop(own); // at the end
            thread::sleep(Duration::from_micros(rng.usize(..60) as u64));
            snapshot.for_each(|value| again += usize::from(ids.contains(&value.id)));
            assert_eq!((again, self.list.len()), (ids.len(), ids.len()), "a snapshot changed");
            drop(snapshot);
            let alone = after.iter().find(|id| !ids.contains(id));
            assert_eq!(alone, None, "the later of a pair without the earlier");
            self.snapshots.fetch_add(1, Relaxed);
            if rng.usize(..4) == 0 {
                self.list.trim().unwrap();
            }
            thread::sleep(Duration::from_micros(200 + rng.usize(..800) as u64));
        }
    }
}

/// Nothing is lost, seen twice, removed twice or used after its drop, in rounds of at most 10 seconds.
fn storm(mix: Mix<'_>) {
    let (begin, time) = (Instant::now(), stress_time(3));
    let (mut walks, mut snapshots) = (0, 0);
    let limit = time + Duration::from_secs(60);
    while begin.elapsed() < time || (walks.min(snapshots) <= 3 && begin.elapsed() < limit) {
        let left = time.saturating_sub(begin.elapsed()).max(time / 2);
        let done = round(mix, left.min(Duration::from_secs(10)));
        (walks, snapshots) = (walks + done.0, snapshots + done.1);
        TABLES.dropped.iter().chain(&TABLES.bumps).for_each(|count| count.store(0, Relaxed));
    }
    assert!(walks > 3 && snapshots > 3);
}

/// Works on a new list for `time`, or until the ids are used up. Returns the numbers of walks and of snapshots.
fn round(mix: Mix<'_>, time: Duration) -> (u64, u64) {
    let world = World {
        mix,
        list: PerCpuList::new(),
        next: AtomicU64::new(0),
        stop: AtomicBool::new(false),
        exchange: Mutex::default(),
        found: Mutex::default(),
        walks: AtomicU64::new(0),
        snapshots: AtomicU64::new(0),
    };
    handle(nothing);
    let all = allowed_cpus(); // entries stay also in slots of CPUs on which no thread runs
    let on_each = |n: u64| on(all[n as usize % all.len()], || world.add(Kind::Owned));
    let stay: Vec<_> = (0..mix.stay).map(on_each).collect();
    let end = Instant::now() + time; // on a busy machine the inserts above take seconds
    thread::scope(|scope| {
        for worker in 0..5 {
            let world = &world;
            scope.spawn(move || {
                pin_to(world.mix.cpus);
                if worker < 2 {
                    take_id(); // as in a thread that libc did not create
                }
                world.work(worker);
            });
        }
        for walker in 0..mix.walkers {
            let world = &world;
            scope.spawn(move || world.walk(100 + walker));
        }
        scope.spawn(|| world.snapshot());
        while Instant::now() < end && !world.has_ended() {
            thread::sleep(Duration::from_millis(10));
        }
        world.stop.store(true, Relaxed);
    });
    let mut rng = rng::seeded(0);
    world.exchange.lock().unwrap().drain(..).for_each(|entry| world.remove(entry, &mut rng));
    world.found.lock().unwrap().drain(..).for_each(|value| value.check());
    world.list.validate();
    let (stats, made) = (world.list.stats(), world.next.load(Relaxed));
    assert_eq!((world.list.len() as u64, world.list.iter().count() as u64), (mix.stay, mix.stay));
    assert_eq!((stats.adds, stats.removals), (made, made - mix.stay));
    println!("{made} values, {:?} walks, {:?} snapshots\n{stats}", world.walks, world.snapshots);
    stay.into_iter().for_each(|entry| world.remove(entry, &mut rng));
    let stats = world.list.stats();
    assert!(stats.cpu_hits < made || all.len() == 1 || mix.stay == 0, "{stats}");
    assert_eq!((world.list.len(), stats.removals), (0, made));
    let lost = TABLES.dropped[..made as usize].iter().position(|count| count.load(Relaxed) != 1);
    assert_eq!(lost, None, "lost");
    (world.walks.into_inner(), world.snapshots.into_inner())
}

#[test]
#[ignore = "stress: seconds of removals and drains"]
fn stress_inv03_every_entry_is_removed_once() {
    storm(Mix { cpus: &allowed_cpus(), walkers: 1, slow: false, stay: 0 });
}

#[test]
#[ignore = "stress: seconds of snapshots"]
fn stress_inv06_snapshots_see_one_instant() {
    storm(Mix { cpus: &allowed_cpus(), walkers: 1, slow: false, stay: 8 });
}

#[test]
#[ignore = "stress: seconds of walks"]
fn stress_inv07_walks() {
    storm(Mix { cpus: &allowed_cpus(), walkers: 2, slow: false, stay: 300 });
}

#[test]
#[ignore = "stress: seconds of walks"]
fn stress_inv11_slow_walks() {
    storm(Mix { cpus: &allowed_cpus(), walkers: 2, slow: true, stay: 300 });
}

/// The threads run on one CPU, and entries stay in the slots of all.
#[test]
#[ignore = "stress: seconds of everything"]
fn stress_inv16_slots_without_threads() {
    storm(Mix { cpus: &allowed_cpus()[..1], walkers: 1, slow: false, stay: 300 });
}

/// Runs all tests above in a process without rseq sections.
#[test]
#[ignore = "stress: seconds of everything"]
fn stress_all_of_it_without_rseq() {
    testkit::child::rerun_without_rseq("stress_inv");
}
