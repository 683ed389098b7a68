//! Lookups, removal and reclaim of a table.
//!
//! Readers read a context some time after they found it. So a model fails if the drop comes before the read
//! or is not ordered after it. A second drop finds the memory in quarantine. A missing drop is missed by
//! the count.

use offlock_percpu::CpuId;
use offlock_percpu::rcu;
use offlock_sync::atomic::{AtomicUsize, Ordering};
use offlock_sync::quarantine::{Watched, free};
use offlock_sync::virtual_cpu::set_current;
use offlock_sync::virtual_fence::both_strategies;
use offlock_sync::{Arc, model, thread};
use radix_ctx::{CtxTable, Id, LookupError};

use super::support::{TIMES, spawn, thoroughly, yield_often};

/// The planted bugs, each with the model that must fail for it.
pub(super) const MUTANTS: &[(&str, &str)] = &[
    ("publish: the nodes are built", "table::inv12_a_context_is_seen_finished"),
    ("insert: the value is written", "table::inv12_a_context_is_seen_finished"),
    ("iterate: the context is complete", "table::inv12_an_iteration_sees_finished_contexts"),
    ("reclaim: a grace period is over", "table::inv12_a_removed_context_outlives_its_readers"),
    (
        "flush: the lists still wait for the period that has ended",
        "table::inv12_a_flush_leaves_lists_of_a_later_period",
    ),
    ("insert: the spare slab is the missing one", "table::inv08_two_inserts_need_a_slab"),
    ("vacate: no slot of the slab is used", "table::inv17_an_insert_keeps_its_slab_in_the_tree"),
    (
        "callback: queue it for slots that were added meanwhile",
        "table::a_removal_meets_the_last_callback",
    ),
    (
        "retire: the slot is in its list before the look for the callback",
        "table::a_removal_meets_the_last_callback",
    ),
    (
        "callback: the flag is clear before the look at the lists",
        "table::a_removal_meets_the_last_callback",
    ),
];

/// The planted bugs that only loom can catch: shuttle returns no stale values, and a random schedule never
/// stops a flush for a whole reclaim by another thread.
pub(super) const LOOM_ONLY: &[&str] = &[
    "flush: the lists still wait for the period that has ended",
    "publish: the nodes are built",
    "insert: the value is written",
    "iterate: the context is complete",
    "reclaim: a grace period is over",
    "retire: the slot is in its list before the look for the callback",
    "callback: the flag is clear before the look at the lists",
];

/// A context that counts its drops, and whose memory stays in quarantine after its drop: the checker sees a
/// late read.
pub(super) struct Payload {
    at: *mut Watched<u64>,
    drops: Arc<AtomicUsize>,
}

// SAFETY: every thread may read the value, and only the drop frees it. The models check their order.
unsafe impl Send for Payload {}
// SAFETY: every thread may read the value, and only the drop frees it. The models check their order.
unsafe impl Sync for Payload {}

impl Payload {
    /// Returns a pointer for a read after the reference is used for the last time.
    pub(super) fn late(&self) -> *const Watched<u64> {
        self.at
    }

    /// Reads the value of a pointer from [`late`](Self::late).
    pub(super) fn read(found: *const Watched<u64>) -> u64 {
        // SAFETY: the memory is alive, or in quarantine until the run ends.
        **unsafe { &*found }
    }
}

impl Drop for Payload {
    fn drop(&mut self) {
        // SAFETY: the pointer is from `Box::into_raw`, and is dropped once.
        free(unsafe { Box::from_raw(self.at) });
        // Ordering: Relaxed; the tests read it after joins.
        self.drops.fetch_add(1, Ordering::Relaxed);
    }
}

/// A table, and the number of its contexts that were dropped.
pub(super) struct Contexts {
    pub(super) table: CtxTable<Payload>,
    pub(super) drops: Arc<AtomicUsize>,
}

impl Contexts {
    pub(super) fn new() -> Arc<Self> {
        Arc::new(Self { table: CtxTable::new(), drops: Arc::new(AtomicUsize::new(0)) })
    }

    pub(super) fn payload(&self, value: u64) -> Payload {
        let at = Box::into_raw(Box::new(Watched::new(value)));
        Payload { at, drops: Arc::clone(&self.drops) }
    }

    pub(super) fn insert(&self, value: u64) -> Id {
        self.table.insert(self.payload(value)).unwrap()
    }

    /// Inserts contexts at the indexes from 0 on, and removes those at the others again.
    fn insert_at<const N: usize>(&self, indexes: [u32; N]) -> [Id; N] {
        let last = indexes.iter().max().unwrap();
        let all: Vec<Id> = (0..=*last).map(|index| self.insert(index.into())).collect();
        for id in all.iter().filter(|id| !indexes.contains(&id.index())) {
            self.table.remove(*id).unwrap();
        }
        self.table.flush().unwrap();
        indexes.map(|index| all[index as usize])
    }

    /// Removes a context, and reclaims as far as that needs no wait.
    pub(super) fn remove_and_poll(&self, id: Id) {
        let removal = self.table.remove(id).unwrap();
        // The first look may start a grace period, which may have ended at the second one.
        let _ = removal.is_done() || removal.is_done();
    }

    /// Finds a context and reads it after a pause.
    pub(super) fn lookup(&self, id: Id) -> Result<u64, LookupError> {
        let guard = rcu::pin();
        let found = self.table.get(id, &guard)?.late();
        thread::yield_now();
        yield_often();
        Ok(Payload::read(found))
    }

    /// Checks the numbers of drops and of live contexts. No other thread uses the table.
    pub(super) fn assert_dropped(&self, drops: usize, live: usize) {
        self.table.flush().unwrap();
        assert_eq!(self.drops.load(Ordering::Relaxed), drops);
        assert_eq!((self.table.len(), self.table.stats().pending), (live, 0));
        self.table.validate();
    }
}

fn on_cpu(cpu: u32) {
    set_current(CpuId::new(cpu));
}

/// A lookup finds nothing, or a complete context in a complete slab.
#[test]
fn inv12_a_context_is_seen_finished() {
    thoroughly(|| {
        let contexts = Contexts::new();
        let reader = spawn(&contexts, |contexts| {
            let first = Id::from_bits(1 << 32).unwrap();
            for _ in 0..TIMES {
                match contexts.lookup(first) {
                    Ok(value) => assert_eq!(value, 7),
                    Err(error) => assert_eq!(error, LookupError::NotFound),
                }
            }
        });
        contexts.insert(7);
        reader.join().unwrap();
        contexts.assert_dropped(0, 1);
    });
}

/// An iteration finds complete contexts only.
#[test]
fn inv12_an_iteration_sees_finished_contexts() {
    thoroughly(|| {
        let contexts = Contexts::new();
        let reader = spawn(&contexts, |contexts| {
            let read = |(_, found): (Id, &Payload)| assert_eq!(Payload::read(found.late()), 7);
            contexts.table.iter(&rcu::pin()).for_each(read);
        });
        contexts.insert(7);
        reader.join().unwrap();
        contexts.assert_dropped(0, 1);
    });
}

#[test]
fn inv12_a_removed_context_outlives_its_readers() {
    both_strategies(removed_context_outlives_its_readers);
}

fn removed_context_outlives_its_readers() {
    thoroughly(|| {
        let contexts = Contexts::new();
        let id = contexts.insert(7);
        let reader = spawn(&contexts, move |contexts| match contexts.lookup(id) {
            Ok(value) => assert_eq!(value, 7),
            Err(error) => assert_eq!(error, LookupError::Stale),
        });
        yield_often();
        contexts.remove_and_poll(id);
        assert_eq!(contexts.lookup(id), Err(LookupError::Stale));
        reader.join().unwrap();
        contexts.assert_dropped(1, 0);
    });
}

/// The index is used again, and the old id never leads to the new context.
#[test]
fn inv12_a_stale_id_finds_nothing_after_reuse() {
    thoroughly(|| {
        let contexts = Contexts::new();
        let old = contexts.insert(1);
        let reader = spawn(&contexts, move |contexts| {
            for _ in 0..TIMES {
                match contexts.lookup(old) {
                    Ok(value) => assert_eq!(value, 1),
                    Err(error) => assert_eq!(error, LookupError::Stale),
                }
            }
        });
        contexts.table.remove(old).unwrap();
        contexts.table.flush().unwrap();
        let new = contexts.insert(2);
        assert_eq!((new.index(), new.generation()), (0, 2));
        assert_eq!(contexts.lookup(new), Ok(2));
        assert_eq!(contexts.lookup(old), Err(LookupError::Stale));
        reader.join().unwrap();
        contexts.assert_dropped(1, 1);
    });
}

#[test]
fn inv14_of_racing_removes_one_succeeds() {
    thoroughly(|| {
        let contexts = Contexts::new();
        let id = contexts.insert(7);
        let won = Arc::new(AtomicUsize::new(0));
        let remove = move |contexts: &Contexts, won: &AtomicUsize| match contexts.table.remove(id) {
            Ok(_) => _ = won.fetch_add(1, Ordering::Relaxed),
            Err(error) => assert_eq!(error, LookupError::Stale),
        };
        let other = spawn(&contexts, {
            let won = Arc::clone(&won);
            move |contexts| {
                on_cpu(1);
                remove(contexts, &won);
            }
        });
        remove(&contexts, &won);
        other.join().unwrap();
        assert_eq!(won.load(Ordering::Relaxed), 1);
        contexts.assert_dropped(1, 0);
    });
}

/// Two removals, on one CPU or on two. One of the threads reclaims meanwhile.
#[test]
fn two_removals_are_reclaimed_once() {
    for cpu in [0, 1] {
        model(move || {
            let contexts = Contexts::new();
            let ids = [1, 2].map(|value| contexts.insert(value));
            let other = spawn(&contexts, move |contexts| {
                on_cpu(cpu);
                contexts.table.remove(ids[1]).unwrap();
            });
            contexts.table.remove(ids[0]).unwrap();
            contexts.table.flush().unwrap();
            other.join().unwrap();
            contexts.assert_dropped(2, 0);
        });
    }
}

/// Two inserts get two ids, and each finds its context.
#[test]
fn two_inserts_get_two_ids() {
    thoroughly(|| {
        let contexts = Contexts::new();
        let first = contexts.insert(1);
        let other = spawn(&contexts, |contexts| {
            on_cpu(1);
            let id = contexts.insert(2);
            assert_eq!(contexts.lookup(id), Ok(2));
        });
        let id = contexts.insert(3);
        assert_eq!(contexts.lookup(id), Ok(3));
        other.join().unwrap();
        contexts.table.remove(first).unwrap();
        contexts.assert_dropped(1, 2);
    });
}

/// Lookups and iterations find the contexts that stay, while slabs and nodes beside and above them come.
#[test]
fn inv17_permanent_ids_are_found_while_the_tree_grows() {
    thoroughly(|| {
        let contexts = Contexts::new();
        let permanent = [7, 8].map(|value| contexts.insert(value));
        let reader = spawn(&contexts, move |contexts| {
            for _ in 0..TIMES {
                assert_eq!(contexts.lookup(permanent[1]), Ok(8));
                let guard = rcu::pin();
                let seen: Vec<Id> = contexts.table.iter(&guard).map(|(id, _)| id).collect();
                assert!(seen.starts_with(&permanent) && seen.is_sorted(), "{seen:?}");
            }
        });
        let far = contexts.insert(9); // adds a slab and a node
        contexts.table.remove(far).unwrap();
        reader.join().unwrap();
        contexts.assert_dropped(1, 2);
    });
}

/// A reader is in a slab that leaves the tree. The id stays stale when the slab is freed, and when another
/// one replaces it.
#[test]
fn inv17_a_slab_outlives_its_readers() {
    model(|| {
        let contexts = Contexts::new();
        let [_, gone] = contexts.insert_at([1, 2]);
        contexts.table.remove(gone).unwrap();
        contexts.table.flush().unwrap(); // its slab is empty, and kept
        let reader = spawn(&contexts, move |contexts| {
            for _ in 0..TIMES {
                assert_eq!(contexts.lookup(gone), Err(LookupError::Stale));
            }
        });
        contexts.table.remove_all().unwrap(); // the lower slab is empty now, so the other one leaves
        assert_eq!(contexts.table.stats().slabs, 1);
        let [again] = contexts.insert_at([2]);
        assert_eq!((again.index(), again.generation()), (2, 2));
        reader.join().unwrap();
    });
}

/// A flush waits for a grace period. Meanwhile another thread reclaims the lists of that period and starts a
/// later one, for a context that it still reads.
#[test]
fn inv12_a_flush_leaves_lists_of_a_later_period() {
    model(|| {
        let contexts = Contexts::new();
        let [gone, read] = [1, 2].map(|value| contexts.insert(value));
        let removal = contexts.table.remove(gone).unwrap();
        let other = spawn(&contexts, |contexts| _ = contexts.table.flush().unwrap());
        yield_often();
        let _ = removal.is_done(); // reclaims the lists, if their period has ended
        let guard = rcu::pin();
        let found = contexts.table.get(read, &guard).unwrap().late();
        contexts.remove_and_poll(read);
        thread::yield_now();
        yield_often();
        assert_eq!(Payload::read(found), 2);
        drop(guard);
        other.join().unwrap();
        contexts.assert_dropped(2, 0);
    });
}

/// Two inserts in a table whose slabs are full. Each may make a slab without the lock, which the other one
/// has added and filled when it takes the lock again.
#[test]
fn inv08_two_inserts_need_a_slab() {
    model(|| {
        let contexts = Contexts::new();
        let full = [1, 2].map(|value| contexts.insert(value));
        let other = spawn(&contexts, |contexts| {
            let ids = [3, 4].map(|value| contexts.insert(value));
            assert_eq!(ids.map(|id| contexts.lookup(id)), [Ok(3), Ok(4)]);
        });
        let id = contexts.insert(5);
        assert_eq!(contexts.lookup(id), Ok(5));
        other.join().unwrap();
        assert_eq!(contexts.lookup(id), Ok(5));
        assert_eq!(full.map(|id| contexts.lookup(id)), [Ok(1), Ok(2)]);
        contexts.assert_dropped(0, 5);
    });
}

/// An insert writes to the only slot of a slab that the removals of the other thread would release. It holds no guard.
#[test]
fn inv17_an_insert_keeps_its_slab_in_the_tree() {
    model(|| {
        let contexts = Contexts::new();
        let ids = [1, 2, 3].map(|value| contexts.insert(value));
        let other = spawn(&contexts, |contexts| {
            let id = contexts.insert(4); // index 3, unless the others are vacant already
            assert_eq!(contexts.lookup(id), Ok(4));
        });
        yield_often();
        ids.into_iter().rev().for_each(|id| _ = contexts.table.remove(id).unwrap());
        contexts.table.flush().unwrap();
        other.join().unwrap();
        contexts.assert_dropped(3, 1);
    });
}

/// A removal while the last callback ends. The callback continues or another one is queued, without another
/// call.
#[test]
fn a_removal_meets_the_last_callback() {
    both_strategies(removal_meets_the_last_callback);
}

fn removal_meets_the_last_callback() {
    thoroughly(|| {
        let contexts = Contexts::new();
        let ids = [1, 2].map(|value| contexts.insert(value));
        contexts.table.remove(ids[0]).unwrap();
        let callbacks = thread::spawn(|| _ = rcu::poll());
        yield_often();
        contexts.table.remove(ids[1]).unwrap();
        callbacks.join().unwrap();
        for _ in 0..2 {
            rcu::poll();
        }
        assert_eq!(contexts.drops.load(Ordering::Relaxed), 2);
    });
}

/// A full table reclaims a removed context before it refuses the next one.
#[test]
fn inv08_an_insert_reclaims_before_it_is_refused() {
    model(|| {
        let table = CtxTable::builder().max_index(1).build();
        let ids = [1, 2].map(|value| table.insert(value).unwrap());
        table.remove(ids[0]).unwrap();
        assert_eq!(table.stats().pending, 1);
        let id = table.insert(3).unwrap();
        assert_eq!((id.index(), id.generation()), (0, 2));
    });
}

/// The callback of a removal is queued or runs when the table is dropped. It frees nothing that the drop
/// still uses, and the last callback frees the core.
#[test]
fn an_old_callback_meets_the_drop_of_the_table() {
    let late: &[bool] = if cfg!(offlock_shuttle) { &[false, true] } else { &[false] };
    for &late in late {
        model(move || {
            let contexts = Contexts::new();
            let drops = Arc::clone(&contexts.drops);
            let ids = [1, 2].map(|value| contexts.insert(value));
            contexts.table.remove(ids[0]).unwrap();
            let callbacks = thread::spawn(move || {
                if !late {
                    yield_often();
                }
                rcu::poll();
                rcu::poll();
            });
            if late {
                yield_often();
            }
            contexts.table.remove(ids[1]).unwrap();
            drop(contexts);
            callbacks.join().unwrap();
            assert_eq!(drops.load(Ordering::Relaxed), 2);
        });
    }
}
