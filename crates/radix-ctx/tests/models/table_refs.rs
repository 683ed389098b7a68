//! Counted references, and waits by a thread and by a task.

use std::future::Future;
use std::pin::pin;
use std::task::{Context, Waker};

use offlock_percpu::rcu;
use offlock_sync::quarantine::Payload;
use offlock_sync::virtual_cpu::take_id;
use offlock_sync::virtual_fence::{both_strategies, with_membarrier};
use offlock_sync::{Arc, beside, model, thoroughly, thread, yield_often};
use radix_ctx::{CtxRef, Id};
use testkit::WakeCount;

use super::contexts::{Contexts, both_modes, carries, on_cpu, race, race_thoroughly};

/// The removals of the only context of a table.
const REMOVALS: [fn(Arc<Contexts>, Id); 3] = [
    |contexts, id| contexts.remove(id),
    |contexts, _| assert_eq!(contexts.table.begin_remove_all().count(), 1),
    |contexts, _| drop(contexts), // the last `Arc`, and with it the table
];

/// Creates a table with a context, and a reference to it.
fn referenced() -> (Arc<Contexts>, Id, CtxRef<Payload>) {
    let (contexts, [id]) = Contexts::with();
    let context = contexts.table.get_ref(id).unwrap();
    (contexts, id, context)
}

fn remove_and_flush(contexts: &Contexts, id: Id) {
    contexts.remove(id);
    contexts.flush();
}

/// A `get_ref` meets the removal, the grace period, the fold, and the next context of the slot. The counts of its
/// slab exist already, or it is the first reference of the slab.
#[test]
fn inv13_only_a_live_context_gives_a_reference() {
    both_modes(|| {
        let (contexts, id, context) = referenced(); // makes the counts
        drop(context);
        let user = beside(&contexts, move |contexts| {
            on_cpu(1);
            contexts.hold(id, 1);
        });
        remove_and_flush(&contexts, id);
        assert!(contexts.table.get_ref(id).is_err());
        user.join().unwrap();
        contexts.end();
    });
}

/// The first reference of a slab is taken while its context is removed and reclaimed.
#[test]
fn inv13_the_first_reference_meets_the_removal() {
    both_modes(|| {
        race(
            |contexts, [id]| {
                on_cpu(1);
                contexts.hold(id, 1);
            },
            |contexts, [id]| contexts.remove_and_poll(id),
        );
    });
}

/// Two threads take the first references of a slab. One makes the counts, and the other finds none or
/// complete ones.
#[test]
fn inv13_two_threads_take_the_first_references() {
    race_thoroughly(
        |contexts, [id]| {
            on_cpu(1);
            contexts.hold(id, 1);
        },
        |contexts, [id]| contexts.hold(id, 1),
    );
}

/// A thread without an rseq id counts in another word.
#[test]
fn inv13_a_thread_without_an_id_takes_a_reference() {
    model(|| {
        let (contexts, id, context) = referenced();
        drop(context);
        let user = beside(&contexts, move |contexts| {
            take_id();
            contexts.hold(id, 1);
        });
        remove_and_flush(&contexts, id);
        user.join().unwrap();
        contexts.end();
    });
}

/// The drops of two references meet the fold: the last drop or the fold finds the count at zero.
#[test]
fn inv13_the_last_put_meets_the_fold() {
    both_strategies(|| {
        both_modes(|| {
            let (contexts, id, context) = referenced();
            let user = thread::spawn(move || {
                on_cpu(1);
                let other = context.clone();
                let found = context.late();
                yield_often();
                drop(context);
                yield_often();
                assert_eq!(found.read(), 1);
                drop(other);
            });
            remove_and_flush(&contexts, id);
            user.join().unwrap();
            contexts.end();
        });
    });
}

/// Each context of a slot has a count of its own.
#[test]
fn inv13_each_context_of_a_slot_has_its_own_count() {
    both_modes(|| {
        let (contexts, id, context) = referenced();
        remove_and_flush(&contexts, id);
        let user = thread::spawn(move || drop(context));
        user.join().unwrap();
        let next = contexts.insert(7);
        assert_eq!((next.index(), next.generation()), (0, 2));
        let user = beside(&contexts, move |contexts| contexts.hold(next, 7));
        contexts.remove(next);
        user.join().unwrap();
        contexts.end();
    });
}

/// The last reference is dropped while the table is dropped and a callback is queued. Either may be the last
/// user of the core.
#[test]
fn the_last_reference_outlives_the_table() {
    model(|| {
        let (contexts, id, context) = referenced();
        let drops = contexts.drops.clone();
        contexts.remove(id);
        drop(contexts);
        let user = thread::spawn(move || {
            assert_eq!(context.read(), 1);
            drop(context);
        });
        for _ in 0..3 {
            yield_often();
            rcu::poll();
        }
        user.join().unwrap();
        assert_eq!(drops.dropped(), 1);
    });
}

/// The thread that removed a context waits until the other thread has dropped its reference.
#[test]
fn inv18_a_removal_waits_for_the_last_reference() {
    both_strategies(|| {
        thoroughly(|| {
            let (contexts, id, context) = referenced();
            let removal = contexts.table.remove(id).unwrap();
            contexts.flush();
            let user = thread::spawn(move || drop(context));
            removal.wait().unwrap();
            assert_eq!(contexts.drops.dropped(), 1);
            user.join().unwrap();
            assert_eq!((contexts.table.len(), contexts.table.stats().pending), (0, 0));
        });
    });
}

/// A removal wakes a task that waits for it.
#[test]
fn inv18_a_removal_wakes_a_task() {
    both_strategies(|| {
        for remove in REMOVALS {
            model(move || {
                let (contexts, id, context) = referenced();
                let remover = thread::spawn(move || remove(contexts, id));
                is_ready_or_woken(CtxRef::removed(&context), || remover.join().unwrap());
            });
        }
    });
}

/// Also if the task takes the first reference of its slab while another task waits in another slab.
#[test]
fn inv18_a_removal_wakes_a_task_with_the_first_reference() {
    with_membarrier(|| {
        thoroughly(|| {
            let (contexts, [first, _, id]) = Contexts::with();
            let first = contexts.table.get_ref(first).unwrap();
            let mut waits = pin!(CtxRef::removed(&first));
            assert!(waits.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_pending());
            let remover = beside(&contexts, move |contexts| contexts.remove(id));
            match contexts.table.get_ref(id) {
                Ok(context) => {
                    is_ready_or_woken(CtxRef::removed(&context), || remover.join().unwrap());
                }
                Err(_) => remover.join().unwrap(),
            }
        });
    });
}

/// Polls a future once. It is ready after `end`.
fn is_ready_or_woken(future: impl Future, end: impl FnOnce()) {
    let count = WakeCount::new();
    let waker = count.waker();
    let mut future = pin!(future);
    let polled = future.as_mut().poll(&mut Context::from_waker(&waker));
    end();
    let woken = count.count() > 0;
    assert!(polled.is_ready() || woken, "the future is ready, but its task was not woken");
    if polled.is_pending() {
        assert!(future.poll(&mut Context::from_waker(Waker::noop())).is_ready());
    }
}

/// A thread that sees the removal of a context sees what the removing thread did before.
#[test]
fn inv18_a_removal_carries_what_was_done_before() {
    with_membarrier(|| {
        for remove in REMOVALS {
            thoroughly(move || {
                let (contexts, id, context) = referenced();
                carries(move || CtxRef::is_removed(&context), || remove(contexts, id));
            });
        }
    });
}

/// Also if the reader sees the mark that the fold makes on a context with references.
#[test]
fn inv18_the_fold_of_a_removal_carries_what_was_done_before() {
    with_membarrier(|| {
        model(|| {
            let (contexts, id, context) = referenced();
            let flush = || remove_and_flush(&contexts, id);
            carries(move || CtxRef::is_removed(&context), flush);
        });
    });
}

/// A removal that is done, of one context or of all, carries the drop by another thread. With membarrier,
/// because the fences of two guards would carry it, too.
#[test]
fn inv14_a_removal_that_is_done_carries_the_drop() {
    fn removal_that_is_done_carries_the_drop(of_all: bool) {
        thoroughly(move || {
            let (contexts, id, context) = referenced();
            let one = (!of_all).then(|| contexts.table.remove(id).unwrap());
            let all = of_all.then(|| contexts.table.begin_remove_all());
            contexts.flush();
            let user = thread::spawn(move || drop(context));
            if one.is_some_and(|it| it.is_done()) || all.is_some_and(|mut it| it.is_done()) {
                assert_eq!(contexts.drops.dropped(), 1);
            }
            user.join().unwrap();
        });
    }
    with_membarrier(|| [false, true].into_iter().for_each(removal_that_is_done_carries_the_drop));
}

/// Two threads close the table. Each returns when all contexts are dropped.
#[test]
fn inv14_two_threads_close_the_table() {
    model(|| {
        let close = |contexts: &Contexts| {
            contexts.table.remove_all().unwrap();
            assert_eq!(contexts.drops.dropped(), 1);
        };
        let (contexts, [_]) = Contexts::with();
        let other = beside(&contexts, close);
        close(&contexts);
        other.join().unwrap();
    });
}
