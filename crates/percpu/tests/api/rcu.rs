//! RCU on real threads: retiring, statistics, the ends of threads, and stress.
//!
//! A process has one domain, so the tests take turns ([`alone`]).

use std::cell::RefCell;
use std::panic::resume_unwind;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed};
use std::sync::{Mutex, MutexGuard, PoisonError, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use offlock_percpu::rcu::{self, Atomic, Batch, Guard, Owned, RetireHead};
use offlock_percpu::rcu::{SynchronizeError, Unlinked};

use testkit::canary::{Canary, Census};
use testkit::child::in_own_process;
use testkit::stress::stress_time;

/// Waits for the other tests of this process that use RCU. No retired object of theirs is left then.
pub(crate) fn alone() -> MutexGuard<'static, ()> {
    static TURN: Mutex<()> = Mutex::new(());
    let turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    drain();
    turn
}

/// Drops every retired object. No thread holds a guard, and no other thread polls.
fn drain() {
    while rcu::stats().pending != 0 {
        rcu::poll();
        thread::yield_now();
    }
}

/// Retires a value that `alive` counts.
fn retire(alive: &Census) {
    unlinked(Canary::new(1, alive)).retire();
}

/// Panics without a message.
fn planted() -> ! {
    resume_unwind(Box::new("planted"))
}

/// A value that no reader can find.
fn unlinked<T: Send + Sync + 'static>(value: T) -> Unlinked<Option<T>> {
    Atomic::new(Some(value)).swap(Owned::new(None))
}

/// Runs `f` on a thread that holds a guard and has loaded nothing.
fn with_reader(f: impl FnOnce()) {
    let (tell, pinned) = mpsc::channel();
    let (leave, left) = mpsc::channel::<()>();
    thread::scope(|s| {
        s.spawn(move || {
            let _guard = rcu::pin();
            tell.send(()).unwrap();
            let _ = left.recv();
        });
        pinned.recv().unwrap();
        f();
        drop(leave);
    });
}

#[test]
fn a_retired_value_is_dropped_once_and_not_under_a_reader() {
    let (_alone, alive) = (alone(), Census::new());
    with_reader(|| {
        retire(&alive);
        assert_eq!((rcu::poll(), alive.alive()), (0, 1));
    });
    assert_eq!((rcu::poll(), alive.alive()), (1, 0));
}

#[test]
fn a_wait_that_would_last_for_ever_is_refused() {
    let _alone = alone();
    let guard = rcu::pin();
    assert!(rcu::is_pinned());
    let error = rcu::synchronize().unwrap_err();
    assert_eq!((error, error.errno()), (SynchronizeError::WouldDeadlock, libc::EDEADLK));
    assert!(error.to_string().contains("wait for itself"));
    drop(guard);
    assert_eq!(rcu::synchronize(), Ok(()));
}

#[test]
fn values_print_themselves() {
    let _alone = alone();
    let (owned, shared) = (Owned::new(7), Atomic::new(8));
    assert_eq!(format!("{owned:?} {shared:?}"), "Owned(7) Atomic { .. }");
    assert_eq!(format!("{:?}", shared.swap(owned)), "Unlinked(8)");
}

/// A drop of a retired object may pin, retire and poll; a chain of such drops does not recurse, and
/// one that panics does not stop the others.
#[test]
fn inv11_drops_may_reenter_and_panic() {
    static DROPS: AtomicUsize = AtomicUsize::new(0);
    static INSIDE: AtomicUsize = AtomicUsize::new(0);
    struct Chain(usize);
    impl Drop for Chain {
        fn drop(&mut self) {
            DROPS.fetch_add(1, Relaxed);
            let guard = rcu::pin();
            if self.0 > 0 {
                unlinked(Chain(self.0 - 1)).retire();
            }
            drop(guard);
            INSIDE.fetch_add(rcu::poll(), Relaxed);
            if self.0 % 10 == 5 {
                planted();
            }
        }
    }
    let _alone = alone();
    unlinked(Chain(99)).retire();
    for _ in 0..100 {
        rcu::poll();
    }
    assert_eq!((DROPS.load(Relaxed), INSIDE.load(Relaxed)), (100, 0));
    assert_eq!(rcu::stats().pending, 0);
}

/// If a drop in a batch panics, the same poll drops the rest of the batch.
#[test]
fn inv11_a_panic_does_not_stop_the_batch() {
    struct Panics(#[expect(dead_code, reason = "counts until its drop")] Canary);
    impl Drop for Panics {
        fn drop(&mut self) {
            planted();
        }
    }
    let (_alone, alive) = (alone(), Census::new());
    for _ in 0..5 {
        retire(&alive);
        unlinked(Panics(Canary::new(1, &alive))).retire();
    }
    assert_eq!((rcu::poll(), alive.alive()), (10, 0));
}

#[test]
fn a_batch_is_retired_as_one() {
    static FREED: AtomicUsize = AtomicUsize::new(0);
    #[repr(C)]
    struct Node(RetireHead, u64);
    unsafe fn free(head: std::ptr::NonNull<RetireHead>) {
        // SAFETY: the head is the first field of a `Node` in a box.
        drop(unsafe { Box::from_raw(head.cast::<Node>().as_ptr()) });
        FREED.fetch_add(1, Relaxed);
    }
    let _alone = alone();
    let mut batch = Batch::new();
    for i in 0..100 {
        // SAFETY: the head is in a box, as `free` requires.
        let node = Box::new(Node(unsafe { RetireHead::new(free) }, i));
        let head = std::ptr::NonNull::from(Box::leak(node)).cast();
        // SAFETY: the head is in a box, as `free` requires, and no reader can find it.
        unsafe { batch.push(head, size_of::<Node>()) };
    }
    rcu::poll();
    assert_eq!(FREED.load(Relaxed), 0, "not retired yet");
    drop(batch);
    assert_eq!(rcu::stats().pending_bytes, 100 * size_of::<Node>() as u64);
    rcu::poll();
    assert_eq!(FREED.load(Relaxed), 100);
}

/// A bag is closed at a number of objects and at a number of bytes, although no thread polls.
#[test]
fn retiring_frees_without_a_poll() {
    let _alone = alone();
    let cpus = offlock_percpu::possible_cpus() as u64;
    for _ in 0..10_000 {
        unlinked(0_u8).retire();
        // One batch fills, one waits, and one is merged with it.
        assert!(rcu::stats().pending <= 3 * cpus * 1024, "{}", rcu::stats());
    }
    drain();
    for _ in 0..10_000 {
        unlinked([0_u8; 64 << 10]).retire();
        assert!(rcu::stats().pending_bytes <= 3 * cpus * (2 << 20), "{}", rcu::stats());
    }
    drain();
}

/// The caller states the sizes of objects, and their sum saturates.
#[test]
fn absurd_sizes_saturate() {
    let _alone = alone();
    with_reader(|| {
        for _ in 0..4 {
            // SAFETY: `free` only leaks the head, which is in a box.
            let head = Box::leak(Box::new(unsafe { RetireHead::new(|_| ()) }));
            // SAFETY: no reader can find the head, and it is retired once.
            unsafe { rcu::retire_raw(head.into(), usize::MAX / 2) };
        }
        let stats = rcu::stats();
        assert_eq!((stats.pending, stats.pending_bytes), (4, u64::MAX), "{stats}");
        let shown =
            format!("4 objects ({} bytes) pending, {} reclaimed; ", u64::MAX, stats.reclaimed);
        assert!(stats.to_string().starts_with(&shown), "{stats}");
    });
}

/// Stalls a reader for `stall` while a writer retires objects.
fn stalled(stall: Duration) {
    const OBJECT: usize = 1 << 10;
    let _alone = alone();
    let mut worst = Duration::ZERO;
    // Enough to fill the bag of one CPU, which begins a grace period, wherever the thread runs.
    let enough = 1024 * offlock_percpu::possible_cpus() as u64 + 1000;
    let (mut retired, mut slow) = (0_u64, 0);
    with_reader(|| {
        let mut until = None;
        while until.is_none_or(|until| Instant::now() < until) || retired < enough {
            let began = Instant::now();
            unlinked([0_u8; OBJECT]).retire();
            let took = began.elapsed();
            worst = worst.max(took);
            slow += u64::from(took > Duration::from_millis(5));
            retired += 1;
            until.get_or_insert_with(|| Instant::now() + stall);
            if retired.is_multiple_of(1000) {
                thread::sleep(Duration::from_millis(1)); // bounds the memory that ten seconds need
            }
        }
        let stats = rcu::stats();
        assert_eq!((stats.pending, stats.stalled_readers), (retired, 1), "{stats}");
        assert!(stats.pending_bytes >= retired * OBJECT as u64, "{stats}");
        // On a busy machine some retirements are slow for other reasons than the reader.
        assert!(slow <= retired / 10, "a writer waited: {slow} of {retired} times, {worst:?}");
    });
    rcu::poll();
    let stats = rcu::stats();
    assert_eq!((stats.pending, stats.pending_bytes), (0, 0), "{stats}");
    println!("{retired} objects held up for {stall:?}, the slowest retire {worst:?}; {stats}");
}

/// A reader is stalled once a grace period has begun after its pin, not before.
#[test]
fn a_reader_of_the_current_grace_period_is_not_stalled() {
    let _alone = alone();
    let guard = rcu::pin();
    assert_eq!(rcu::stats().stalled_readers, 0);
    assert!(!rcu::start_grace_period().poll(), "this thread reads");
    assert_eq!(rcu::stats().stalled_readers, 1);
    drop(guard);
}

#[test]
fn inv20_a_stalled_reader_holds_up_memory_and_nobody() {
    stalled(Duration::from_millis(300));
}

#[test]
#[ignore = "stress: a reader sleeps for ten seconds"]
fn stress_inv20_a_reader_stalled_for_ten_seconds() {
    stalled(Duration::from_secs(10));
}

thread_local! {
    static KEPT: RefCell<Kept> = const { RefCell::new(Kept(None, None)) };
}

/// Dropped when its thread ends: after the thread's RCU slot, because it was created before.
struct Kept(Option<[Guard; 2]>, Option<mpsc::Sender<()>>);

impl Drop for Kept {
    fn drop(&mut self) {
        // Nested guards, and a guard after all others were dropped.
        if let Some([outer, inner]) = self.0.take() {
            assert!(rcu::is_pinned());
            drop((rcu::pin(), outer));
            assert!(rcu::is_pinned());
            let told = self.1.take().map(|tell| tell.send(()));
            thread::sleep(Duration::from_millis(50));
            drop((inner, told));
        }
        assert!(!rcu::is_pinned());
        let borrowed = rcu::pin();
        let inner = rcu::pin();
        drop(borrowed);
        assert!(rcu::is_pinned());
        drop(inner);
        assert!(!rcu::is_pinned());
    }
}

/// A guard in a thread-local variable protects until it is dropped, even after the thread's slot
/// was released. Then no slot of the thread is in use.
#[test]
fn inv15_a_thread_that_ends_inside_a_guard_reads_on() {
    let (_alone, alive) = (alone(), Census::new());
    for _ in 0..3 {
        let (tell, ending) = mpsc::channel();
        let thread = thread::spawn(move || {
            // Registered before the slot's own destructor, so destroyed after it.
            KEPT.with(|kept| kept.borrow_mut().1 = Some(tell));
            KEPT.with(|kept| kept.borrow_mut().0 = Some([rcu::pin(), rcu::pin()]));
        });
        ending.recv().unwrap();
        retire(&alive);
        rcu::poll();
        thread.join().unwrap();
        rcu::poll();
        assert_eq!((alive.alive(), rcu::stats().stalled_readers), (0, 0));
    }
}

/// A forgotten guard delays only reclamation, until the process ends.
#[test]
fn inv15_a_forgotten_guard_holds_up_memory_only() {
    in_own_process("rcu::inv15_a_forgotten_guard_holds_up_memory_only", || {
        let alive = Census::new();
        std::mem::forget(rcu::pin());
        retire(&alive);
        let _ = (rcu::poll(), rcu::poll());
        assert_eq!(alive.alive(), 1);
        assert_eq!(rcu::synchronize(), Err(SynchronizeError::WouldDeadlock));
    });
}

/// With readers, writers and exiting threads, no value is dropped while a reader has
/// it, and every retired value is dropped once.
pub(crate) fn churn(time: Duration) {
    let (_alone, alive) = (alone(), Census::new());
    let new = || Owned::new(Canary::new(1, &alive));
    let shared: [Atomic<Canary>; 4] = std::array::from_fn(|_| Atomic::from(new()));
    let until = Instant::now() + time;
    let go = || Instant::now() < until;
    let reads = AtomicU64::new(0);
    thread::scope(|s| {
        for _ in 0..4 {
            let (shared, reads) = (&shared, &reads);
            s.spawn(move || {
                while go() {
                    // Short-lived threads, so that later threads reuse their slots.
                    thread::scope(|s| {
                        s.spawn(|| {
                            for i in 0..2000 {
                                let guard = rcu::pin();
                                let value = shared[i % 4].load(&guard);
                                std::hint::spin_loop();
                                value.read();
                            }
                            reads.fetch_add(2000, Relaxed);
                        });
                    });
                }
            });
        }
        for writer in 0..2 {
            let (shared, new) = (&shared, &new);
            s.spawn(move || {
                let mut i = writer;
                while go() {
                    i += 1;
                    drop(shared[i % 4].swap(new()));
                    if i % 64 == 0 {
                        rcu::synchronize().unwrap();
                    } else if i % 7 == 0 {
                        rcu::poll();
                    }
                }
            });
        }
    });
    drain();
    drop(shared);
    let stats = rcu::stats();
    assert_eq!((alive.alive(), stats.pending), (0, 0), "{stats}");
    println!("{} reads; {stats}", reads.into_inner());
}

#[test]
fn inv15_ends_of_threads_leave_nothing_behind() {
    churn(Duration::from_millis(300));
}

#[test]
#[ignore = "stress: seconds of readers, writers and ends of threads"]
fn stress_inv15_readers_writers_and_ends_of_threads() {
    churn(stress_time(5));
}
