//! An allocator that counts its calls with a `PerCpuCounter`, even those of the first use.
//!
//! Each case runs in a process of its own. The counting begins at the first allocation of the
//! process, or right before the first use that the case tests. A process that hangs has found a
//! lock that its holder takes again.
#![cfg(not(offlock_model))]

use std::alloc::{GlobalAlloc, Layout, System};
use std::env;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicI64, AtomicU8, Ordering::Relaxed};
use std::thread;
use std::time::{Duration, Instant};

use offlock_percpu::{CpuId, capabilities, node_of, possible_cpus, rcu};
use offlock_percpu::{LgLock, PerCpu, PerCpuCounter, PercpuRef};

static BYTES: PerCpuCounter = PerCpuCounter::new();
/// The same count in an atomic: the expected sum.
static TWIN: AtomicI64 = AtomicI64::new(0);

/// Whether to count; decided by the environment at the first allocation.
static STATE: AtomicU8 = AtomicU8::new(UNDECIDED);
const UNDECIDED: u8 = 0;
const OFF: u8 = 1;
const ON: u8 = 2;

struct Counting;

impl Counting {
    #[inline]
    fn count(size: i64) {
        if STATE.load(Relaxed) == UNDECIDED {
            // SAFETY: reads the environment, which no thread of this program changes.
            let early = !unsafe { libc::getenv(c"OFFLOCK_COUNT_EARLY".as_ptr()) }.is_null();
            STATE.store(if early { ON } else { OFF }, Relaxed);
        }
        if STATE.load(Relaxed) == ON {
            BYTES.add(size);
            TWIN.fetch_add(size, Relaxed);
        }
    }
}

// SAFETY: every call goes to the system's allocator, and the adds do not unwind.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        Self::count(layout.size() as i64);
        // SAFETY: the caller's promises are handed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        Self::count(-(layout.size() as i64));
        // SAFETY: the caller's promises are handed on.
        unsafe { System.dealloc(at, layout) }
    }
}

#[global_allocator]
static COUNTING: Counting = Counting;

/// The functions that may be the first use of the crate in a process, by name.
const FIRST_USES: &[(&str, fn())] = &[
    ("an allocation", || drop(std::hint::black_box(vec![1_u8; 100]))),
    ("capabilities", || println!("{}", capabilities())),
    ("possible_cpus", || assert!(possible_cpus() > 0)),
    ("node_of", || _ = node_of(CpuId::new(0))),
    ("slots", || assert_eq!(*PerCpu::new(|_| 7).local(), 7)),
    ("sum", || _ = BYTES.sum()),
    ("many counters", || {
        // Enough counters for the pool to grow under its lock, and to take their words back.
        let counters: Vec<_> = (0..20_000).map(|_| PerCpuCounter::new()).collect();
        counters.iter().for_each(PerCpuCounter::increment);
    }),
    ("reference", || {
        let object = PercpuRef::new(|| drop(vec![1_u8; 9]));
        drop(object.try_get());
        object.kill().unwrap();
    }),
    ("lock", || {
        let lock = LgLock::new(|_| Vec::new());
        lock.local().unwrap().push(1);
        drop(lock.global().unwrap());
    }),
    ("rcu", || {
        let current = rcu::Atomic::new(vec![1]);
        current.store(rcu::Owned::new(vec![2]));
        rcu::barrier().unwrap();
    }),
    ("threads", || {
        thread::scope(|scope| {
            for n in 1..9 {
                scope.spawn(move || {
                    for size in 0..2_000 {
                        drop(std::hint::black_box(vec![0_u8; size % 512 * n]));
                    }
                });
            }
        });
    }),
];

/// The child of the test below.
#[test]
#[ignore = "a child of inv03_an_allocator_can_count"]
fn child_first_use() {
    let Ok(name) = env::var("OFFLOCK_FIRST_USE") else { return };
    let (_, first_use) = FIRST_USES.iter().find(|(known, _)| *known == name).expect("a case");
    STATE.store(ON, Relaxed);
    first_use();
    for _ in 0..1_000 {
        drop(std::hint::black_box(vec![0_u8; 300]));
    }
    // The test harness sleeps until this test ends, and this thread allocates nothing between the
    // loads.
    let (twin, sum) = (TWIN.load(Relaxed), BYTES.sum());
    assert_eq!(sum, twin, "the counter differs from the atomic");
    println!("counted: {}", BYTES.sum());
}

/// The conditions of a case.
#[derive(Clone, Copy, Debug)]
struct Case {
    /// Counts from the first allocation of the process.
    early: bool,
    /// libc registers no rseq area.
    rseq_off: bool,
}

/// Runs the first use `name` in a process of its own; panics if it fails, or hangs.
fn in_process(name: &str, case: Case) {
    let mut child = Command::new(env::current_exe().unwrap());
    child.args(["--exact", "child_first_use", "--ignored", "--nocapture"]);
    child.env("OFFLOCK_FIRST_USE", name).stdout(Stdio::piped()).stderr(Stdio::piped());
    if case.early {
        child.env("OFFLOCK_COUNT_EARLY", "1");
    }
    if case.rseq_off {
        child.env("GLIBC_TUNABLES", "glibc.pthread.rseq=0");
    }
    let (mut child, began) = (child.spawn().unwrap(), Instant::now());
    let hung = loop {
        if child.try_wait().unwrap().is_some() {
            break false;
        }
        if began.elapsed() > Duration::from_secs(30) {
            child.kill().unwrap();
            break true;
        }
        thread::sleep(Duration::from_millis(1));
    };
    let output = child.wait_with_output().unwrap();
    let said = String::from_utf8_lossy(&output.stdout);
    let good = !hung && output.status.success() && said.contains("counted: ");
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(good, "{name}, {case:?}, hung {hung}, {}:\n{said}{errors}", output.status);
}

/// Counts from the first allocation, or from the first use of the crate, with and without an rseq
/// area of libc.
#[test]
fn inv03_an_allocator_can_count() {
    for &(name, _) in FIRST_USES {
        for (early, rseq_off) in [(true, false), (false, false), (true, true), (false, true)] {
            in_process(name, Case { early, rseq_off });
        }
    }
}
