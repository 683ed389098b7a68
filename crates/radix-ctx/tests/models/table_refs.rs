//! References, and who waits for what.

use std::future::{Future, IntoFuture};
use std::task::{Context, Wake, Waker};

use percpu::CpuId;
use percpu::rcu;
use percpu::sync::atomic::{AtomicBool, Ordering};
use percpu::sync::virtual_cpu::{both_modes, set_current, take_id, with_sections};
use percpu::sync::{Arc, model, thread};
use radix_ctx::{CtxRef, GetRefError, Id, LookupError, WaitError};

use super::table::{Contexts, Payload, dawdle, spawn};

/// A planted bug, and the model that must fail for it.
pub(super) const MUTANTS: &[(&str, &str)] = &[
    ("fold: no section still counts", "table_refs::inv13_the_last_put_meets_the_fold"),
    ("fold: no reference is left", "table_refs::inv13_the_last_put_meets_the_fold"),
    (
        "wake: the table has no waiter",
        "table_refs::inv18_who_waits_on_a_context_wakes_when_it_is_killed",
    ),
    (
        "wait: no change since the condition was false",
        "table_refs::inv18_who_waits_on_a_context_wakes_when_it_is_killed",
    ),
    (
        "wake: no slot has a waiter",
        "table_refs::inv18_a_removals_future_is_woken_by_the_last_reference",
    ),
];

/// Of these, what only loom can see.
///
/// A section that is stopped for a whole grace period is none of a random schedule's.
pub(super) const LOOM_ONLY: &[&str] = &["fold: no section still counts"];

/// Takes a reference, uses it late, puts it.
fn hold(contexts: &Contexts, id: Id) {
    match contexts.table.get_ref(id) {
        Ok(context) => {
            let found = context.late();
            thread::yield_now();
            dawdle();
            assert_eq!(Payload::read(found), 7);
            drop(context);
        }
        Err(error) => assert_eq!(error, GetRefError::Lookup(LookupError::Stale)),
    }
}

/// A `get_ref` meets the removal, the grace period, the fold, and the next use of the slot.
#[test]
fn inv13_a_reference_is_taken_of_what_lives_or_not_at_all() {
    both_modes(|| {
        let contexts = Contexts::new();
        let id = contexts.insert(7);
        drop(contexts.table.get_ref(id)); // the counts are there
        let user = spawn(&contexts, move |contexts| {
            set_current(CpuId::new(1));
            hold(contexts, id);
        });
        contexts.table.remove(id).unwrap();
        contexts.table.flush().unwrap();
        assert!(contexts.table.get_ref(id).is_err());
        user.join().unwrap();
        contexts.assert_dropped(1, 0);
    });
}

/// The first reference of a slab, while its context is removed and reclaimed.
#[test]
fn inv13_the_first_reference_meets_the_removal() {
    both_modes(|| {
        let contexts = Contexts::new();
        let id = contexts.insert(7);
        let user = spawn(&contexts, move |contexts| {
            set_current(CpuId::new(1));
            hold(contexts, id);
        });
        contexts.table.remove(id).unwrap();
        contexts.table.poll();
        user.join().unwrap();
        contexts.assert_dropped(1, 0);
    });
}

/// A thread without an rseq id counts elsewhere.
#[test]
fn inv13_a_thread_without_an_id_takes_a_reference() {
    with_sections(true, || {
        let contexts = Contexts::new();
        let id = contexts.insert(7);
        drop(contexts.table.get_ref(id));
        let user = spawn(&contexts, move |contexts| {
            take_id();
            hold(contexts, id);
        });
        contexts.table.remove(id).unwrap();
        contexts.table.flush().unwrap();
        user.join().unwrap();
        contexts.assert_dropped(1, 0);
    });
}

/// The last of two references is put around the fold, by one thread or another.
#[test]
fn inv13_the_last_put_meets_the_fold() {
    both_modes(|| {
        let contexts = Contexts::new();
        let id = contexts.insert(7);
        let context = contexts.table.get_ref(id).unwrap();
        let user = thread::spawn(move || {
            set_current(CpuId::new(1));
            let other = context.clone();
            let found = context.late();
            dawdle();
            drop(context);
            dawdle();
            assert_eq!(Payload::read(found), 7);
            drop(other);
        });
        contexts.table.remove(id).unwrap();
        contexts.table.flush().unwrap();
        user.join().unwrap();
        contexts.assert_dropped(1, 0);
    });
}

/// The next context of the slot has a count of its own.
#[test]
fn inv13_nothing_of_a_count_is_left_for_the_next() {
    both_modes(|| {
        let contexts = Contexts::new();
        let id = contexts.insert(7);
        let context = contexts.table.get_ref(id).unwrap();
        contexts.table.remove(id).unwrap();
        contexts.table.flush().unwrap();
        let user = thread::spawn(move || drop(context));
        user.join().unwrap();
        let next = contexts.insert(7);
        assert_eq!((next.index(), next.generation()), (0, 2));
        let user = spawn(&contexts, move |contexts| hold(contexts, next));
        contexts.table.remove(next).unwrap();
        user.join().unwrap();
        contexts.assert_dropped(2, 0);
    });
}

/// A reference is put while its table is dropped; a tick is on its way, and both may be the last that
/// have the table.
#[test]
fn the_last_reference_outlives_the_table() {
    model(|| {
        let contexts = Contexts::new();
        let drops = Arc::clone(&contexts.drops);
        let id = contexts.insert(7);
        let context = contexts.table.get_ref(id).unwrap();
        contexts.table.remove(id).unwrap();
        drop(contexts);
        let user = thread::spawn(move || {
            assert_eq!(Payload::read(context.late()), 7);
            drop(context);
        });
        for _ in 0..3 {
            dawdle();
            rcu::poll();
        }
        user.join().unwrap();
        assert_eq!(drops.load(Ordering::Relaxed), 1);
    });
}

/// A waiter that waits for what never comes is woken by the removal, and told.
#[test]
fn inv18_who_waits_on_a_context_wakes_when_it_is_killed() {
    model(|| {
        let contexts = Contexts::new();
        let id = contexts.insert(7);
        let context = contexts.table.get_ref(id).unwrap();
        let waiter = thread::spawn(move || {
            let waited = CtxRef::wait_until(&context, |_| None::<()>);
            assert_eq!(waited, Err(WaitError::Removed));
        });
        contexts.table.remove(id).unwrap();
        waiter.join().unwrap();
        contexts.assert_dropped(1, 0);
    });
}

/// Who removed a context waits until the other thread has put its reference.
#[test]
fn inv18_a_removal_waits_for_the_last_reference() {
    model(|| {
        let contexts = Contexts::new();
        let id = contexts.insert(7);
        let context = contexts.table.get_ref(id).unwrap();
        let user = thread::spawn(move || drop(context));
        contexts.table.remove(id).unwrap().wait().unwrap();
        assert_eq!(contexts.drops.load(Ordering::Relaxed), 1);
        user.join().unwrap();
        contexts.assert_dropped(1, 0);
    });
}

/// A future that sleeps until a context is dropped is woken by the thread that puts its last reference,
/// and one that sleeps until it is removed by who removes it.
#[test]
fn inv18_a_future_is_woken_by_what_it_sleeps_for() {
    model(|| {
        let contexts = Contexts::new();
        let id = contexts.insert(7);
        let context = contexts.table.get_ref(id).unwrap();
        let removed = CtxRef::removed(&context);
        let remover = spawn(&contexts, move |contexts| {
            let _ = contexts.table.remove(id).unwrap();
        });
        is_ready_or_woken(removed, || remover.join().unwrap());

        let removal = contexts.table.begin_remove_all(); // nothing any more
        assert!(removal.is_empty());
        contexts.table.flush().unwrap();
        let user = thread::spawn(move || drop(context));
        is_ready_or_woken(removal.into_future(), || user.join().unwrap());
    });
}

#[test]
fn inv18_a_removals_future_is_woken_by_the_last_reference() {
    model(|| {
        let contexts = Contexts::new();
        let id = contexts.insert(7);
        let context = contexts.table.get_ref(id).unwrap();
        let removal = contexts.table.remove(id).unwrap();
        contexts.table.flush().unwrap();
        let user = thread::spawn(move || drop(context));
        is_ready_or_woken(removal.into_future(), || user.join().unwrap());
        contexts.assert_dropped(1, 0);
    });
}

struct Flag(AtomicBool);

impl Wake for Flag {
    fn wake(self: std::sync::Arc<Self>) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Polls once; what it waits for is over after `end`.
fn is_ready_or_woken(future: impl Future, end: impl FnOnce()) {
    let flag = std::sync::Arc::new(Flag(AtomicBool::new(false)));
    let waker = Waker::from(std::sync::Arc::clone(&flag));
    let mut future = std::pin::pin!(future);
    let polled = future.as_mut().poll(&mut Context::from_waker(&waker));
    end();
    assert!(polled.is_ready() || flag.0.load(Ordering::Relaxed), "asleep for ever");
    let polled = future.as_mut().poll(&mut Context::from_waker(Waker::noop()));
    assert!(polled.is_ready());
}

/// Two threads close the table; each returns when all is dropped.
#[test]
fn inv14_two_threads_close_the_table() {
    model(|| {
        let contexts = Contexts::new();
        contexts.insert(7);
        let other = spawn(&contexts, |contexts| {
            contexts.table.remove_all().unwrap();
            assert_eq!(contexts.drops.load(Ordering::Relaxed), 1);
        });
        contexts.table.remove_all().unwrap();
        assert_eq!(contexts.drops.load(Ordering::Relaxed), 1);
        other.join().unwrap();
    });
}
