//! Counted references, and waits.

use std::future::Future;
use std::task::{Context, Wake, Waker};

use offlock_percpu::CpuId;
use offlock_percpu::rcu;
use offlock_sync::atomic::{AtomicBool, Ordering};
use offlock_sync::virtual_cpu::{set_current, take_id};
use offlock_sync::virtual_fence::{both_strategies, with_membarrier};
use offlock_sync::{Arc, model, thread};
use radix_ctx::{CtxRef, GetRefError, Id, LookupError};

use super::support::{both_modes, spawn, thoroughly, yield_often};
use super::table::{Contexts, Payload};

/// The planted bugs, each with the model that must fail for it.
pub(super) const MUTANTS: &[(&str, &str)] = &[
    ("fold: no section still counts", "table_refs::inv13_the_last_put_meets_the_fold"),
    ("fold: no reference is left", "table_refs::inv13_the_last_put_meets_the_fold"),
    ("remove: no task waits", "table_refs::inv18_a_removal_wakes_a_task"),
    (
        "remove: the slot is dead before the look for tasks",
        "table_refs::inv18_a_removal_wakes_a_task",
    ),
    (
        "remove: the slot is dead before the look at the references",
        "table_refs::inv18_a_removal_wakes_a_task_with_the_first_reference",
    ),
    (
        "removed: the mark comes before the look at the context",
        "table_refs::inv18_a_removal_wakes_a_task",
    ),
    (
        "retire: the link carries what came before the removal",
        "table_refs::inv18_a_removal_carries_what_was_done_before",
    ),
    (
        "retire all: the link carries what came before",
        "table_refs::inv18_a_removal_carries_what_was_done_before",
    ),
    (
        "fold: the mark carries what came before the removal",
        "table_refs::inv18_the_fold_of_a_removal_carries_what_was_done_before",
    ),
    (
        "end: the state carries what came before the drop",
        "table_refs::inv18_a_removal_carries_what_was_done_before",
    ),
    (
        "kill: what came before the removal",
        "table_refs::inv18_a_removal_carries_what_was_done_before",
    ),
    (
        "is_removed: what came before the removal",
        "table_refs::inv18_a_removal_carries_what_was_done_before",
    ),
    ("refs: the counts are made", "table_refs::inv13_two_threads_take_the_first_references"),
    ("is_done: the drop has ended", "table_refs::inv14_a_removal_that_is_done_carries_the_drop"),
    ("finish: the drop has ended", "table_refs::inv14_a_removal_that_is_done_carries_the_drop"),
    (
        "remove all: the drops have ended",
        "table_refs::inv14_a_removal_that_is_done_carries_the_drop",
    ),
];

/// The planted bugs that only loom can catch: shuttle returns no stale values, and a random schedule never
/// stops a section for a whole grace period.
pub(super) const LOOM_ONLY: &[&str] = &[
    "fold: no section still counts",
    "remove: the slot is dead before the look for tasks",
    "remove: the slot is dead before the look at the references",
    "removed: the mark comes before the look at the context",
    "retire: the link carries what came before the removal",
    "retire all: the link carries what came before",
    "fold: the mark carries what came before the removal",
    "end: the state carries what came before the drop",
    "kill: what came before the removal",
    "is_removed: what came before the removal",
    "refs: the counts are made",
    "is_done: the drop has ended",
    "finish: the drop has ended",
    "remove all: the drops have ended",
];

/// The removals of the only context of a table.
const REMOVALS: [fn(Arc<Contexts>, Id); 3] = [
    |contexts, id| _ = contexts.table.remove(id).unwrap(),
    |contexts, _| assert_eq!(contexts.table.begin_remove_all().count(), 1),
    |contexts, _| drop(contexts), // the last `Arc`, and with it the table
];

/// Takes a reference, reads the context late, and drops the reference.
fn hold(contexts: &Contexts, id: Id) {
    match contexts.table.get_ref(id) {
        Ok(context) => {
            let found = context.late();
            thread::yield_now();
            yield_often();
            assert_eq!(Payload::read(found), 7);
            drop(context);
        }
        Err(error) => assert_eq!(error, GetRefError::Lookup(LookupError::Stale)),
    }
}

/// A `get_ref` meets the removal, the grace period, the fold, and the next context of the slot.
#[test]
fn inv13_only_a_live_context_gives_a_reference() {
    both_modes(|| {
        let contexts = Contexts::new();
        let id = contexts.insert(7);
        drop(contexts.table.get_ref(id)); // makes the counts
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

/// The first reference of a slab is taken while its context is removed and reclaimed.
#[test]
fn inv13_the_first_reference_meets_the_removal() {
    both_modes(|| {
        let contexts = Contexts::new();
        let id = contexts.insert(7);
        let user = spawn(&contexts, move |contexts| {
            set_current(CpuId::new(1));
            hold(contexts, id);
        });
        contexts.remove_and_poll(id);
        user.join().unwrap();
        contexts.assert_dropped(1, 0);
    });
}

/// Two threads take the first references of a slab. One makes the counts, and the other finds none or
/// complete ones.
#[test]
fn inv13_two_threads_take_the_first_references() {
    thoroughly(|| {
        let contexts = Contexts::new();
        let id = contexts.insert(7);
        let user = spawn(&contexts, move |contexts| {
            set_current(CpuId::new(1));
            hold(contexts, id);
        });
        hold(&contexts, id);
        user.join().unwrap();
    });
}

/// A thread without an rseq id counts in another word.
#[test]
fn inv13_a_thread_without_an_id_takes_a_reference() {
    model(|| {
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

/// The drops of two references meet the fold: the last drop or the fold finds the count at zero.
#[test]
fn inv13_the_last_put_meets_the_fold() {
    both_strategies(last_put_meets_the_fold);
}

fn last_put_meets_the_fold() {
    both_modes(|| {
        let contexts = Contexts::new();
        let id = contexts.insert(7);
        let context = contexts.table.get_ref(id).unwrap();
        let user = thread::spawn(move || {
            set_current(CpuId::new(1));
            let other = context.clone();
            let found = context.late();
            yield_often();
            drop(context);
            yield_often();
            assert_eq!(Payload::read(found), 7);
            drop(other);
        });
        contexts.table.remove(id).unwrap();
        contexts.table.flush().unwrap();
        user.join().unwrap();
        contexts.assert_dropped(1, 0);
    });
}

/// Each context of a slot has a count of its own.
#[test]
fn inv13_each_context_of_a_slot_has_its_own_count() {
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

/// The last reference is dropped while the table is dropped and a callback is queued. Either may be the last
/// user of the core.
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
            yield_often();
            rcu::poll();
        }
        user.join().unwrap();
        assert_eq!(drops.load(Ordering::Relaxed), 1);
    });
}

/// The thread that removed a context waits until the other thread has dropped its reference.
#[test]
fn inv18_a_removal_waits_for_the_last_reference() {
    both_strategies(removal_waits_for_the_last_reference);
}

fn removal_waits_for_the_last_reference() {
    thoroughly(|| {
        let contexts = Contexts::new();
        let id = contexts.insert(7);
        let context = contexts.table.get_ref(id).unwrap();
        let removal = contexts.table.remove(id).unwrap();
        contexts.table.flush().unwrap();
        let user = thread::spawn(move || drop(context));
        removal.wait().unwrap();
        assert_eq!(contexts.drops.load(Ordering::Relaxed), 1);
        user.join().unwrap();
        contexts.assert_dropped(1, 0);
    });
}

/// A removal wakes a task that waits for it.
#[test]
fn inv18_a_removal_wakes_a_task() {
    both_strategies(removal_wakes_a_task);
}

fn removal_wakes_a_task() {
    for remove in REMOVALS {
        model(move || {
            let contexts = Contexts::new();
            let id = contexts.insert(7);
            let context = contexts.table.get_ref(id).unwrap();
            let remover = thread::spawn(move || remove(contexts, id));
            is_ready_or_woken(CtxRef::removed(&context), || remover.join().unwrap());
        });
    }
}

/// Also if the task takes the first reference of its slab while another task waits in another slab.
#[test]
fn inv18_a_removal_wakes_a_task_with_the_first_reference() {
    with_membarrier(removal_wakes_a_task_with_the_first_reference);
}

fn removal_wakes_a_task_with_the_first_reference() {
    thoroughly(|| {
        let contexts = Contexts::new();
        let [first, _, id] = [7, 8, 9].map(|value| contexts.insert(value));
        let first = contexts.table.get_ref(first).unwrap();
        let mut waits = std::pin::pin!(CtxRef::removed(&first));
        assert!(waits.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_pending());
        let remover = spawn(&contexts, move |contexts| _ = contexts.table.remove(id).unwrap());
        match contexts.table.get_ref(id) {
            Ok(context) => {
                is_ready_or_woken(CtxRef::removed(&context), || remover.join().unwrap());
            }
            Err(_) => remover.join().unwrap(),
        }
    });
}

struct Flag(AtomicBool);

impl Wake for Flag {
    fn wake(self: std::sync::Arc<Self>) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Polls a future once. It is ready after `end`.
fn is_ready_or_woken(future: impl Future, end: impl FnOnce()) {
    let flag = std::sync::Arc::new(Flag(AtomicBool::new(false)));
    let waker = Waker::from(std::sync::Arc::clone(&flag));
    let mut future = std::pin::pin!(future);
    let polled = future.as_mut().poll(&mut Context::from_waker(&waker));
    end();
    assert!(
        polled.is_ready() || flag.0.load(Ordering::Relaxed),
        "the future is ready, but its task was not woken"
    );
    if polled.is_pending() {
        assert!(future.poll(&mut Context::from_waker(Waker::noop())).is_ready());
    }
}

/// A thread that sees the removal of a context sees what the removing thread did before.
#[test]
fn inv18_a_removal_carries_what_was_done_before() {
    with_membarrier(|| REMOVALS.into_iter().for_each(removal_carries_what_was_done_before));
}

/// Also if the reader sees the mark that the fold makes on a context with references.
#[test]
fn inv18_the_fold_of_a_removal_carries_what_was_done_before() {
    with_membarrier(fold_of_a_removal_carries_what_was_done_before);
}

fn fold_of_a_removal_carries_what_was_done_before() {
    model(|| {
        let contexts = Contexts::new();
        let id = contexts.insert(7);
        let context = contexts.table.get_ref(id).unwrap();
        let done = Arc::new(AtomicBool::new(false));
        let reader = thread::spawn({
            let done = Arc::clone(&done);
            move || {
                if CtxRef::is_removed(&context) {
                    assert!(done.load(Ordering::Relaxed));
                }
            }
        });
        done.store(true, Ordering::Relaxed);
        contexts.table.remove(id).unwrap();
        contexts.table.flush().unwrap();
        reader.join().unwrap();
    });
}

fn removal_carries_what_was_done_before(remove: fn(Arc<Contexts>, Id)) {
    thoroughly(move || {
        let contexts = Contexts::new();
        let id = contexts.insert(7);
        let context = contexts.table.get_ref(id).unwrap();
        let done = Arc::new(AtomicBool::new(false));
        let reader = thread::spawn({
            let done = Arc::clone(&done);
            move || {
                if CtxRef::is_removed(&context) {
                    assert!(done.load(Ordering::Relaxed));
                }
            }
        });
        done.store(true, Ordering::Relaxed);
        remove(contexts, id);
        reader.join().unwrap();
    });
}

/// A removal that is done, of one context or of all, carries the drop by another thread. With membarrier,
/// because the fences of two guards would carry it, too.
#[test]
fn inv14_a_removal_that_is_done_carries_the_drop() {
    with_membarrier(|| [false, true].into_iter().for_each(removal_that_is_done_carries_the_drop));
}

fn removal_that_is_done_carries_the_drop(of_all: bool) {
    thoroughly(move || {
        let contexts = Contexts::new();
        let id = contexts.insert(7);
        let context = contexts.table.get_ref(id).unwrap();
        let one = (!of_all).then(|| contexts.table.remove(id).unwrap());
        let all = of_all.then(|| contexts.table.begin_remove_all());
        contexts.table.flush().unwrap();
        let user = thread::spawn(move || drop(context));
        if one.is_some_and(|it| it.is_done()) || all.is_some_and(|mut it| it.is_done()) {
            assert_eq!(contexts.drops.load(Ordering::Relaxed), 1);
        }
        user.join().unwrap();
    });
}

/// Two threads close the table. Each returns when all contexts are dropped.
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
