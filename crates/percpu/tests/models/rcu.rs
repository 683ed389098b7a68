//! Grace periods, guards and reclamation.

use offlock_percpu::rcu::{self, Atomic, Owned};
use offlock_sync::atomic::{AtomicPtr, Ordering};
use offlock_sync::quarantine::{Watched, free};
use offlock_sync::{Arc, thread};

use super::Long;

/// A planted bug, and the model that must fail for it.
pub(super) const MUTANTS: &[(&str, &str)] = &[
    ("reclaim: the target is completed", "rcu::inv25_a_reader_keeps_what_it_found"),
    ("bump: before the scan", "rcu::inv25_a_reader_keeps_what_it_found"),
    ("pin: before the reads", "rcu::inv25_a_reader_keeps_what_it_found"),
    ("scan: the readers have left", "rcu::inv25_a_reader_keeps_what_it_found"),
    ("unpin: the reads are done", "rcu::inv25_a_reader_keeps_what_it_found"),
    ("pin: the reads of earlier guards are done", "rcu::a_reader_that_comes_back_has_left"),
    ("publish: the node is built", "rcu::a_new_value_is_seen_finished"),
    ("publish: the node is built", "rcu::a_value_taken_out_is_seen_finished"),
    ("pin: the unlinks before the grace period", "rcu::inv25_a_reader_keeps_what_it_found"),
    ("bump: the unlinks", "rcu::inv25_a_reader_keeps_what_it_found"),
    ("target: after the unlink", "rcu::a_cookie_needs_no_shared_write"),
    ("target: one more, for a bump under way", "rcu::a_cookie_needs_no_shared_write"),
    ("scan: the reads are done", "rcu::a_grace_period_of_another_thread_carries_the_reads"),
    ("free: the reads are done", "rcu::a_grace_period_of_another_thread_carries_the_reads"),
    (
        "thread exit: no guard is left",
        "rcu::inv15_a_thread_that_ends_inside_a_guard_goes_on_reading",
    ),
    ("thread exit: the slot is reset", "rcu::inv15_a_slot_goes_to_the_next_thread"),
    ("bag: take its lock", "rcu::two_threads_retire_on_one_cpu"),
    ("bag: the lists are consistent", "rcu::two_threads_retire_on_one_cpu"),
];

/// Of these, what only loom can see.
pub(super) const LOOM_ONLY: &[&str] = &[
    "pin: before the reads",
    "bump: before the scan",
    "scan: the readers have left",
    "unpin: the reads are done",
    "pin: the reads of earlier guards are done",
    "publish: the node is built",
    "pin: the unlinks before the grace period",
    "bump: the unlinks",
    "target: after the unlink",
    "target: one more, for a bump under way",
    "scan: the reads are done",
    "free: the reads are done",
    "thread exit: the slot is reset",
    "bag: take its lock",
    "bag: the lists are consistent",
];

/// A value whose reads the checker sees, however late: its memory is in quarantine when it is gone.
struct Payload(*mut Watched<u64>);

// SAFETY: read by all, and freed by the drop, which has it alone: that is what the models check.
unsafe impl Send for Payload {}
// SAFETY: as above.
unsafe impl Sync for Payload {}

impl Payload {
    fn new(value: u64) -> Self {
        Self(Box::into_raw(Box::new(Watched::new(value))))
    }

    fn read(&self) -> u64 {
        Late(self.0).read()
    }

    /// To be read when the reference is long used.
    fn late(&self) -> Late {
        Late(self.0)
    }
}

impl Drop for Payload {
    fn drop(&mut self) {
        // SAFETY: ours from `into_raw`, and dropped once.
        free(unsafe { Box::from_raw(self.0) });
    }
}

#[derive(Clone, Copy)]
struct Late(*const Watched<u64>);

// SAFETY: the pointer is read while a guard holds; the models check that.
unsafe impl Send for Late {}

impl Late {
    fn read(self) -> u64 {
        // SAFETY: alive, or in quarantine until the run is over, where the canary is dead.
        **unsafe { &*self.0 }
    }
}

/// Runs a model in which the domain exists before the first thread begins.
///
/// In a checker the first use of a global happens before every later use of it. If a writer made the
/// domain after an unlink, every reader would see the unlink.
fn model(f: impl Fn() + Send + Sync + 'static) {
    super::model(move || {
        let _ = rcu::stats();
        f();
    });
}

type Shared = Arc<Atomic<Payload>>;

fn shared(value: u64) -> Shared {
    Arc::new(Atomic::new(Payload::new(value)))
}

/// Retires the value, and leaves another one that reads the same.
fn replace(shared: &Atomic<Payload>) {
    shared.store(Owned::new(Payload::new(1)));
}

/// Pins, finds, reads late.
fn read(shared: &Atomic<Payload>) {
    let guard = rcu::pin();
    let late = shared.load(&guard).late();
    thread::yield_now();
    dawdle();
    assert_eq!(late.read(), 1);
}

/// Pins, and reads the node late, if it is there.
fn read_node(shared: &AtomicPtr<Watched<u64>>) {
    let guard = rcu::pin();
    // Ordering: Acquire pairs with nothing; the node is older than the thread.
    let node = shared.load(Ordering::Acquire);
    if !node.is_null() {
        thread::yield_now();
        assert_eq!(Late(node).read(), 1);
    }
    drop(guard);
}

fn spawn(
    shared: &Shared,
    f: impl FnOnce(&Atomic<Payload>) + Send + 'static,
) -> thread::JoinHandle<()> {
    let shared = Arc::clone(shared);
    thread::spawn(move || f(&shared))
}

/// Replaces the value while `reader` runs, polls, and joins the reader.
fn replace_under(reader: impl FnOnce(&Atomic<Payload>) + Send + 'static) {
    let shared = shared(1);
    let reader = spawn(&shared, reader);
    dawdle();
    replace(&shared);
    rcu::poll();
    reader.join().unwrap();
}

/// Takes a while, so that others come first, or in between, as often as not. A random schedule gives
/// every thread as many steps, and a pin or a poll takes dozens; loom needs no help.
fn dawdle() {
    if cfg!(offlock_shuttle) {
        for _ in 0..100 {
            thread::yield_now();
        }
    }
}

/// What a reader finds is not dropped while its guard lives, and then it is.
#[test]
fn inv25_a_reader_keeps_what_it_found() {
    model(|| {
        let shared = shared(1);
        let reader = spawn(&shared, read);
        dawdle();
        replace(&shared);
        let early = rcu::poll();
        reader.join().unwrap();
        assert_eq!(early + rcu::poll(), 1, "dropped once, at the latest when no reader is left");
    });
}

/// A reader that has left and come back does not hold up what it read before, and its reads are
/// over before the drop. Fails if the word of the second pin does not carry them.
#[test]
fn a_reader_that_comes_back_has_left() {
    model(|| {
        replace_under(|shared| {
            read(shared);
            drop(rcu::pin());
        });
    });
}

/// A reader that finds the new value finds all of it.
#[test]
fn a_new_value_is_seen_finished() {
    model(|| {
        let shared = shared(1);
        let reader = spawn(&shared, read);
        replace(&shared);
        reader.join().unwrap();
    });
}

/// The target of a cookie, which costs no shared write, is far enough: another thread's bump may
/// have been on its way, and a reader with its number may have found the old value.
#[test]
fn a_cookie_needs_no_shared_write() {
    let _long = Long::mark();
    model(|| {
        let node = Box::into_raw(Box::new(Watched::new(1_u64)));
        let shared = Arc::new(AtomicPtr::new(node));
        let reader = thread::spawn({
            let shared = Arc::clone(&shared);
            move || read_node(&shared)
        });
        let other = thread::spawn(|| {
            let _ = rcu::start_grace_period().poll();
        });
        // Ordering: Relaxed; the cookie orders it.
        shared.store(std::ptr::null_mut(), Ordering::Relaxed);
        let period = rcu::start_grace_period();
        if period.poll() {
            // SAFETY: ours from `into_raw`, unlinked a grace period ago.
            free(unsafe { Box::from_raw(node) });
        }
        reader.join().unwrap();
        other.join().unwrap();
    });
}

/// A thread that finds its grace period completed by another thread frees the node after the reads
/// that the other thread knows of.
#[test]
fn a_grace_period_of_another_thread_carries_the_reads() {
    model(|| {
        let node = Box::into_raw(Box::new(Watched::new(1_u64)));
        let shared = Arc::new(AtomicPtr::new(node));
        let owner = thread::spawn({
            let (shared, node) = (Arc::clone(&shared), Late(node));
            move || {
                let Late(node) = { node };
                // Ordering: Relaxed; the cookie orders it.
                shared.store(std::ptr::null_mut(), Ordering::Relaxed);
                let period = rcu::start_grace_period();
                dawdle();
                if period.poll() {
                    // SAFETY: from `into_raw`, unlinked a grace period ago.
                    free(unsafe { Box::from_raw(node.cast_mut()) });
                }
            }
        });
        let guard = rcu::pin(); // not `read_node`, whose yield hides a weak `completed`
        // Ordering: Acquire pairs with nothing; the node is older than the thread.
        let found = shared.load(Ordering::Acquire);
        if !found.is_null() {
            assert_eq!(Late(found).read(), 1);
        }
        drop(guard);
        let _ = rcu::start_grace_period().poll();
        owner.join().unwrap();
    });
}

/// A writer that takes a value out finds all of it, also what another writer built.
#[test]
fn a_value_taken_out_is_seen_finished() {
    model(|| {
        let shared = shared(1);
        let other = spawn(&shared, replace);
        let old = shared.swap(Owned::new(Payload::new(1)));
        assert_eq!(old.read(), 1);
        drop(old);
        other.join().unwrap();
    });
}

/// `synchronize` returns when the readers that were inside are gone.
#[test]
fn after_synchronize_the_writer_is_alone() {
    model(|| {
        let node = Box::into_raw(Box::new(Watched::new(1_u64)));
        let shared = Arc::new(AtomicPtr::new(node));
        let reader = thread::spawn({
            let shared = Arc::clone(&shared);
            move || read_node(&shared)
        });
        // Ordering: Relaxed; `synchronize` orders it.
        shared.store(std::ptr::null_mut(), Ordering::Relaxed);
        rcu::synchronize().unwrap();
        // SAFETY: ours from `into_raw`, unlinked a grace period ago.
        free(unsafe { Box::from_raw(node) });
        reader.join().unwrap();
    });
}

/// A thread that ends while a guard of its lives (in another thread-local variable) goes on
/// reading until that is dropped.
#[test]
fn inv15_a_thread_that_ends_inside_a_guard_goes_on_reading() {
    model(|| {
        replace_under(|shared| {
            let guard = rcu::pin();
            let late = shared.load(&guard).late();
            rcu::end_thread();
            assert!(rcu::is_pinned());
            drop(rcu::pin()); // counts, and does not end it
            dawdle();
            assert_eq!(late.read(), 1);
            drop(guard);
            assert!(!rcu::is_pinned());
            read(shared); // with a slot taken anew
        });
        rcu::poll();
        assert_eq!(rcu::stats().pending, 0);
    });
}

/// The slot of a thread that has ended serves the next one, with nothing left in it.
#[test]
fn inv15_a_slot_goes_to_the_next_thread() {
    let _long = Long::mark();
    model(|| {
        let shared = shared(1);
        let first = spawn(&shared, |shared| {
            read(shared);
            rcu::end_thread();
        });
        let second = spawn(&shared, |shared| {
            read(shared);
            rcu::end_thread();
        });
        dawdle();
        replace(&shared);
        rcu::poll();
        first.join().unwrap();
        second.join().unwrap();
    });
}

/// Two threads retire on one CPU, and a third polls: each value is dropped once.
///
/// The third is the last: loom prefers the first of several threads, and would let two that wait for a lock
/// of the last one take turns for ever.
#[test]
fn two_threads_retire_on_one_cpu() {
    model(|| {
        let retire = || {
            let shared = Atomic::new(Payload::new(1));
            replace(&shared);
        };
        let first = thread::spawn(retire);
        let third = thread::spawn(rcu::poll);
        retire();
        first.join().unwrap();
        let early = third.join().unwrap();
        rcu::poll();
        let stats = rcu::stats();
        assert_eq!((stats.pending, stats.reclaimed), (0, 2), "{early} early; {stats}");
    });
}

/// A thread whose bag is full while another one moves grace periods on closes that bag late: what was
/// retired on its CPU meanwhile gets a target of its own, and is not freed under its reader.
#[test]
fn inv15_a_target_is_not_older_than_what_it_is_for() {
    model(|| {
        let shared = shared(1);
        drop(Atomic::new(1).swap(Owned::new(2))); // makes the bags; the bag is full with one more
        let full = thread::spawn(|| drop(Atomic::new(1).swap(Owned::new(2))));
        rcu::poll();
        for _ in 0..2 {
            rcu::synchronize().unwrap();
        }
        let guard = rcu::pin();
        let late = shared.load(&guard).late();
        replace(&shared);
        full.join().unwrap();
        assert_eq!(late.read(), 1);
        drop(guard);
    });
}
