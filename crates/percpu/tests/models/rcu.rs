//! Grace periods, guards and reclamation.

use std::ptr;

use offlock_percpu::rcu::{self, Atomic, Owned};
use offlock_sync::atomic::{AtomicPtr, Ordering};
use offlock_sync::quarantine::{Watched, free};
use offlock_sync::{Arc, beside, thread, yield_often};

/// A value whose reads the checker sees, however late: its memory is in quarantine when it is gone.
///
/// Not the payload of `quarantine`: loom would take its counts for leaked if the value is still retired at
/// the end of a run.
struct Payload(Late);

impl Payload {
    fn new() -> Self {
        Self(Late(Box::into_raw(Box::new(Watched::new(1)))))
    }
}

impl Drop for Payload {
    fn drop(&mut self) {
        self.0.free();
    }
}

/// What a reader found, to be read when its reference is long used.
#[derive(Clone, Copy)]
struct Late(*mut Watched<u64>);

// SAFETY: read by all while a guard holds, and freed by one thread: that is what the models check.
unsafe impl Send for Late {}
// SAFETY: as above.
unsafe impl Sync for Late {}

impl Late {
    fn read(self) -> u64 {
        // SAFETY: alive, or in quarantine until the run is over, where the canary is dead.
        **unsafe { &*self.0 }
    }

    fn free(self) {
        // SAFETY: from `into_raw`, and freed once.
        free(unsafe { Box::from_raw(self.0) });
    }
}

/// Runs a model in which the domain exists before the first thread begins.
///
/// In a checker the first use of a global happens before every later use of it. If a writer made the
/// domain after an unlink, every reader would see the unlink.
fn in_domain(f: impl Fn()) -> impl Fn() {
    move || {
        let _ = rcu::stats();
        f();
    }
}

fn model(f: impl Fn() + Send + Sync + 'static) {
    super::model(in_domain(f));
}

fn shared() -> Arc<Atomic<Payload>> {
    Arc::new(Atomic::new(Payload::new()))
}

/// Retires the value, and leaves another one that reads the same.
fn replace(shared: &Atomic<Payload>) {
    shared.store(Owned::new(Payload::new()));
}

/// Pins, finds, reads late.
fn read(shared: &Atomic<Payload>) {
    let guard = rcu::pin();
    let late = shared.load(&guard).0;
    thread::yield_now();
    yield_often();
    assert_eq!(late.read(), 1);
}

/// A node that its writer frees by hand.
struct Node(AtomicPtr<Watched<u64>>);

impl Node {
    fn new() -> Arc<Self> {
        Arc::new(Self(AtomicPtr::new(Box::into_raw(Box::new(Watched::new(1))))))
    }

    /// Pins, and reads the node, if it is there, after `meanwhile`.
    fn read(&self, meanwhile: fn()) {
        let _guard = rcu::pin();
        // Ordering: Acquire pairs with nothing; the node is older than the thread.
        let node = self.0.load(Ordering::Acquire);
        if !node.is_null() {
            meanwhile();
            assert_eq!(Late(node).read(), 1);
        }
    }

    /// Unlinks the node, and frees it if `grace_period` says that one is over.
    fn unlink_and_free(&self, grace_period: impl FnOnce() -> bool) {
        // Ordering: Relaxed; the grace period orders it.
        let node = self.0.swap(ptr::null_mut(), Ordering::Relaxed);
        if grace_period() {
            Late(node).free();
        }
    }
}

/// Replaces the value while `reader` runs, polls, and joins the reader.
fn replace_under(reader: fn(&Atomic<Payload>)) {
    let shared = shared();
    let reader = beside(&shared, reader);
    yield_often();
    replace(&shared);
    rcu::poll();
    reader.join().unwrap();
}

/// What a reader finds is not dropped while its guard lives, and then it is.
#[test]
fn inv25_a_reader_keeps_what_it_found() {
    model(|| {
        let shared = shared();
        let reader = beside(&shared, read);
        yield_often();
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
        let shared = shared();
        let reader = beside(&shared, read);
        replace(&shared);
        reader.join().unwrap();
    });
}

/// The target of a cookie, which costs no shared write, is far enough: another thread's bump may
/// have been on its way, and a reader with its number may have found the old value.
#[test]
fn a_cookie_needs_no_shared_write() {
    super::long_model(in_domain(|| {
        let node = Node::new();
        let reader = beside(&node, |node| node.read(thread::yield_now));
        let other = thread::spawn(|| _ = rcu::start_grace_period().poll());
        node.unlink_and_free(|| rcu::start_grace_period().poll());
        reader.join().unwrap();
        other.join().unwrap();
    }));
}

/// A thread that finds its grace period completed by another thread frees the node after the reads
/// that the other thread knows of.
#[test]
fn a_grace_period_of_another_thread_carries_the_reads() {
    model(|| {
        let node = Node::new();
        let owner = beside(&node, |node| {
            node.unlink_and_free(|| {
                let period = rcu::start_grace_period();
                yield_often();
                period.poll()
            });
        });
        node.read(|| ()); // a yield would hide a weak `completed`
        let _ = rcu::start_grace_period().poll();
        owner.join().unwrap();
    });
}

/// A writer that takes a value out finds all of it, also what another writer built.
#[test]
fn a_value_taken_out_is_seen_finished() {
    model(|| {
        let shared = shared();
        let other = beside(&shared, replace);
        let old = shared.swap(Owned::new(Payload::new()));
        assert_eq!(old.0.read(), 1);
        drop(old);
        other.join().unwrap();
    });
}

/// `synchronize` returns when the readers that were inside are gone.
#[test]
fn after_synchronize_the_writer_is_alone() {
    model(|| {
        let node = Node::new();
        let reader = beside(&node, |node| node.read(thread::yield_now));
        node.unlink_and_free(|| {
            rcu::synchronize().unwrap();
            true
        });
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
            let late = shared.load(&guard).0;
            rcu::end_thread();
            assert!(rcu::is_pinned());
            drop(rcu::pin()); // counts, and does not end it
            yield_often();
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
    super::long_model(in_domain(|| {
        let shared = shared();
        let readers = [(); 2].map(|()| {
            beside(&shared, |shared| {
                read(shared);
                rcu::end_thread();
            })
        });
        yield_often();
        replace(&shared);
        rcu::poll();
        readers.into_iter().for_each(|reader| reader.join().unwrap());
    }));
}

/// Two threads retire on one CPU, and a third polls: each value is dropped once.
///
/// The third is the last: loom prefers the first of several threads, and would let two that wait for a lock
/// of the last one take turns for ever.
#[test]
fn two_threads_retire_on_one_cpu() {
    model(|| {
        let retire = || {
            let shared = Atomic::new(Payload::new());
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
        let shared = shared();
        drop(Atomic::new(1).swap(Owned::new(2))); // makes the bags; the bag is full with one more
        let full = thread::spawn(|| drop(Atomic::new(1).swap(Owned::new(2))));
        rcu::poll();
        for _ in 0..2 {
            rcu::synchronize().unwrap();
        }
        let guard = rcu::pin();
        let late = shared.load(&guard).0;
        replace(&shared);
        full.join().unwrap();
        assert_eq!(late.read(), 1);
        drop(guard);
    });
}
