//! Removals in signal handlers, 10,000 times a second on each thread, while threads add, remove and
//! walk in the same slots, on the real kernel, with and without rseq sections.
//!
//! Ignored by default. Each test runs for `OFFLOCK_STRESS_SECONDS` seconds (3).
#![cfg(not(any(offlock_loom, offlock_shuttle)))]

#[path = "common/churn.rs"]
mod churn;

use std::cell::{Cell, UnsafeCell};
use std::hint;
use std::mem::{self, MaybeUninit};
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use percpu_list::{Entry, PerCpuList};

use churn::{any_cpu, storm};
use testkit::canary::{Canary, Census};
use testkit::rng::{self, Rng};
use testkit::signals::{self, ThreadTimer};

use Ordering::Relaxed;

/// The interval of the signals of each thread.
const INTERVAL: Duration = Duration::from_micros(100);

/// The most CPU time that a handler may take: much more than it needs, and much less than the
/// longest time for which another thread holds a slot.
const BOUND: u64 = 20_000_000; // ns

/// For how long a slot is held now and then, so that a handler that waits for it exceeds the bound.
const HELD: Duration = Duration::from_millis(60);

/// Counters of the handlers of one thread.
struct Counters {
    signals: Cell<u64>,
    /// Removals that were done or deferred.
    removed: Cell<u64>,
    /// Calls that found no entry.
    nothing: Cell<u64>,
    /// [`LockError::WouldBlock`].
    busy: Cell<u64>,
    /// [`LockError::Deadlock`].
    own: Cell<u64>,
    /// Any other error.
    wrong: Cell<u64>,
    /// The longest handler, in ns of CPU time.
    longest: Cell<u64>,
    /// How often a handler slept.
    slept: Cell<u64>,
}

thread_local! {
    // The values are `const` and have no drop, so a signal handler may use them at any moment.
    static ACT: Cell<Option<&'static dyn Act>> = const { Cell::new(None) };
    static SEED: Cell<u64> = const { Cell::new(1) };
    static COUNTERS: Counters = const {
        let [signals, removed, nothing, busy, own, wrong, longest, slept] =
            [const { Cell::new(0) }; 8];
        Counters { signals, removed, nothing, busy, own, wrong, longest, slept }
    };
}

/// The action of a handler. It is async-signal-safe.
trait Act: Sync {
    fn act(&self, rng: &mut Rng, counters: &Counters);
}

fn bump(count: &Cell<u64>) {
    count.set(count.get() + 1);
}

/// Returns the CPU time that this thread has used, in ns.
fn used() -> u64 {
    // SAFETY: zero is a valid `timespec`.
    let mut time: libc::timespec = unsafe { mem::zeroed() };
    // SAFETY: `time` is a local that the call may write.
    unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &mut time) };
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}

/// Returns how often this thread gave up the CPU to wait.
fn sleeps() -> u64 {
    // SAFETY: zero is a valid `rusage`.
    let mut usage: libc::rusage = unsafe { mem::zeroed() };
    // SAFETY: `usage` is a local that the call may write.
    unsafe { libc::getrusage(libc::RUSAGE_THREAD, &mut usage) };
    usage.ru_nvcsw as u64
}

extern "C" fn interrupted(_: libc::c_int) {
    let Some(act) = ACT.get() else { return };
    COUNTERS.with(|counters| {
        let mut rng = rng::seeded(SEED.replace(SEED.get() + 1));
        let (used_before, slept_before) = (used(), sleeps());
        act.act(&mut rng, counters);
        counters.slept.set(counters.slept.get() + sleeps() - slept_before);
        counters.longest.set(counters.longest.get().max(used() - used_before));
        bump(&counters.signals);
    });
}

/// The sums of the counters of all threads.
#[derive(Debug, Default)]
struct Sum {
    signals: AtomicU64,
    removed: AtomicU64,
    nothing: AtomicU64,
    busy: AtomicU64,
    own: AtomicU64,
    wrong: AtomicU64,
    longest: AtomicU64,
    slept: AtomicU64,
}

impl Sum {
    /// Adds the counters of this thread, which no handler changes at this time, and resets them.
    fn take(&self) {
        COUNTERS.with(|counters| {
            let counts = [
                (&self.signals, &counters.signals),
                (&self.removed, &counters.removed),
                (&self.nothing, &counters.nothing),
                (&self.busy, &counters.busy),
                (&self.own, &counters.own),
                (&self.wrong, &counters.wrong),
                (&self.slept, &counters.slept),
            ];
            for (sum, count) in counts {
                sum.fetch_add(count.take(), Relaxed);
            }
            self.longest.fetch_max(counters.longest.take(), Relaxed);
        });
    }
}

/// Runs [`storm`] with handlers that interrupt `f`.
fn signal_storm(
    threads: usize,
    act: &'static dyn Act,
    enough: impl Fn(&Sum) -> bool + Sync,
    f: impl Fn(usize, &mut Rng) + Sync,
) -> Sum {
    signals::handle(interrupted);
    let sum = Sum::default();
    let proved = |calls| sum.signals.load(Relaxed) > calls && enough(&sum);
    let calls = storm(threads, proved, |me, rng| {
        let timer = ThreadTimer::start(INTERVAL);
        SEED.set(rng.usize(..1 << 40) as u64);
        ACT.set(Some(act));
        let until = Instant::now() + Duration::from_millis(2);
        while Instant::now() < until {
            f(me, rng);
        }
        ACT.set(None);
        drop(timer);
        sum.take();
    });
    println!("{calls} calls, of 2 ms each and longer; by handlers {sum:?}");
    assert!(sum.signals.load(Relaxed) > calls, "handlers ran");
    assert_eq!(sum.wrong.load(Relaxed), 0);
    assert_eq!(sum.slept.load(Relaxed), 0, "a handler waited");
    assert!(sum.longest.load(Relaxed) < BOUND, "{} ns", sum.longest.load(Relaxed));
    sum
}

fn spin(time: Duration) {
    let until = Instant::now() + time;
    while Instant::now() < until {
        hint::spin_loop();
    }
}

type OwningEntry = Entry<&'static PerCpuList<Canary>>;

/// A place for an entry, which threads fill and handlers empty.
struct Place {
    state: AtomicU8,
    entry: UnsafeCell<MaybeUninit<OwningEntry>>,
}

const EMPTY: u8 = 0;
const BUSY: u8 = 1;
const FULL: u8 = 2;

// SAFETY: only the thread that changed the state to `BUSY` uses the entry, and entries are `Send`.
unsafe impl Sync for Place {}

impl Place {
    fn new() -> Self {
        let entry = UnsafeCell::new(MaybeUninit::uninit());
        Self { state: AtomicU8::new(EMPTY), entry }
    }

    /// Changes the state to `BUSY`, if it is `from`.
    fn claim(&self, from: u8) -> bool {
        // Ordering: Acquire pairs with the Release stores below; it carries the entry.
        self.state.compare_exchange(from, BUSY, Ordering::Acquire, Relaxed).is_ok()
    }

    /// Stores an entry, or returns it if the place is not empty.
    fn put(&self, entry: OwningEntry) -> Option<OwningEntry> {
        if !self.claim(EMPTY) {
            return Some(entry);
        }
        // SAFETY: `claim` gave this thread the only access to the entry.
        unsafe { *self.entry.get() = MaybeUninit::new(entry) };
        // Ordering: Release pairs with the Acquire in `claim`; it carries the entry.
        self.state.store(FULL, Ordering::Release);
        None
    }

    fn take(&self) -> Option<OwningEntry> {
        if !self.claim(FULL) {
            return None;
        }
        // SAFETY: `claim` gave this thread the only access to the entry.
        let place = unsafe { &*self.entry.get() };
        // SAFETY: the place was full, and the entry is moved out once, because the place is then
        // empty.
        let entry = unsafe { place.assume_init_read() };
        // Ordering: Release pairs with the Acquire in `claim`; it carries the move out of the
        // place.
        self.state.store(EMPTY, Ordering::Release);
        Some(entry)
    }
}

struct Owning {
    list: PerCpuList<Canary>,
    places: Vec<Place>,
}

impl Act for Owning {
    fn act(&self, rng: &mut Rng, counters: &Counters) {
        for _ in 0..3 {
            if let Some(entry) = self.places[rng.usize(..self.places.len())].take() {
                entry.defer_remove();
                return bump(&counters.removed);
            }
        }
        bump(&counters.nothing);
    }
}

#[test]
#[ignore = "stress: seconds of signals"]
fn stress_inv14_handlers_defer_removals() {
    let census = Census::new();
    let places = (0..64).map(|_| Place::new()).collect();
    // It is never freed, because a handler may run until its thread ends.
    let stage: &'static Owning = Box::leak(Box::new(Owning { list: PerCpuList::new(), places }));
    let list = &stage.list;
    let (added, removed) = (AtomicU64::new(0), AtomicU64::new(0));
    let ended = |entry: Option<OwningEntry>| {
        if let Some(entry) = entry {
            removed.fetch_add(entry.remove().unwrap().into(), Relaxed);
        }
    };
    let enough = |sum: &Sum| sum.removed.load(Relaxed) > 1_000 && removed.load(Relaxed) > 1_000;
    let sum = signal_storm(4, stage, enough, |me, rng| {
        let place = &stage.places[rng.usize(..stage.places.len())];
        match rng.usize(..64) {
            0..40 => {
                let cpu = any_cpu(rng);
                ended(place.put(list.insert_on(cpu, Canary::new(7, &census)).unwrap()));
                added.fetch_add(1, Relaxed);
            }
            40..60 => ended(place.take()),
            60 => list.iter().for_each(|found| assert_eq!(found.unwrap().read(), 7)),
            61 => list.flush().unwrap(),
            62 => list
                .for_each(|value| {
                    assert_eq!(value.read(), 7);
                    (0..20).for_each(|_| hint::spin_loop()); // the slot is held, for a signal to interrupt
                })
                .unwrap(),
            _ => {
                let snapshot = list.lock_all().unwrap();
                assert!(snapshot.iter().all(|value| value.read() == 7));
                if me == 0 && rng.usize(..1_000) == 0 {
                    spin(HELD);
                }
            }
        }
    });
    stage.places.iter().for_each(|place| ended(place.take()));
    list.flush().unwrap();
    list.validate();
    println!("{}", list.stats());
    let (added, removed) = (added.into_inner(), removed.into_inner());
    let deferred = sum.removed.into_inner();
    assert_eq!((list.stats().adds, list.stats().removals), (added, added));
    assert_eq!((added, list.len(), census.alive()), (removed + deferred, 0, 0));
    assert!(deferred > 1_000 && removed > 1_000);
}

/// Runs all tests above in a process without rseq sections.
#[test]
#[ignore = "stress: seconds of everything"]
fn stress_all_of_it_without_rseq() {
    testkit::child::rerun_without_rseq("stress_inv");
}
