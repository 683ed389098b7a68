//! Lookups, removal and reclaim of a table. Slabs have two slots here, nodes too.
//!
//! What a reader found it reads late, so that a drop under it, or one that is not ordered after it,
//! fails the model; a drop too many finds the canary dead, and one too few is missed by the count.

use percpu::CpuId;
use percpu::rcu;
use percpu::sync::atomic::{AtomicUsize, Ordering};
use percpu::sync::quarantine::{Watched, free};
use percpu::sync::virtual_cpu::set_current;
use percpu::sync::{Arc, model, thread};
use radix_ctx::{CtxTable, Id, LookupError};

/// A planted bug, and the model that must fail for it.
pub(super) const MUTANTS: &[(&str, &str)] = &[
    ("insert: the value is written", "table::inv12_a_context_is_seen_finished"),
    ("reclaim: a grace period is over", "table::inv12_a_removed_context_outlives_its_readers"),
    (
        "callback: queue it for slots that were added meanwhile",
        "table::a_removal_meets_the_last_tick",
    ),
];

/// Of these, what only loom can see.
pub(super) const LOOM_ONLY: &[&str] =
    &["insert: the value is written", "reclaim: a grace period is over"];

/// How often a short thing is done that must hit another short thing: a random schedule needs some.
pub(super) const TIMES: usize = if cfg!(offlock_shuttle) { 10 } else { 1 };

/// Takes a while, so that others come in between as often as not; loom needs no help.
pub(super) fn dawdle() {
    if cfg!(offlock_shuttle) {
        for _ in 0..100 {
            thread::yield_now();
        }
    }
}

/// A context whose reads the checker sees, however late, and whose drops are counted.
pub(super) struct Payload {
    at: *mut Watched<u64>,
    drops: Arc<AtomicUsize>,
}

// SAFETY: read by all, and freed by the drop, which has it alone: that is what the models check.
unsafe impl Send for Payload {}
// SAFETY: as above.
unsafe impl Sync for Payload {}

impl Payload {
    /// To be read when the reference is long used.
    pub(super) fn late(&self) -> *const Watched<u64> {
        self.at
    }

    /// Reads what `found` led to a while ago.
    pub(super) fn read(found: *const Watched<u64>) -> u64 {
        // SAFETY: alive, or in quarantine until the run is over, where the canary is dead.
        **unsafe { &*found }
    }
}

impl Drop for Payload {
    fn drop(&mut self) {
        // SAFETY: ours from `into_raw`, and dropped once.
        free(unsafe { Box::from_raw(self.at) });
        // Ordering: Relaxed; counted at the end, behind the joins.
        self.drops.fetch_add(1, Ordering::Relaxed);
    }
}

/// A table, and how many of its contexts were dropped.
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

    fn insert_at(&self, index: u32) -> Id {
        self.table.insert_in(index..=index, self.payload(index.into())).unwrap()
    }

    /// Finds, takes a while, and reads.
    pub(super) fn look(&self, id: Id) -> Result<u64, LookupError> {
        let guard = rcu::pin();
        let found = self.table.get(id, &guard)?.late();
        thread::yield_now();
        dawdle();
        Ok(Payload::read(found))
    }

    /// When nobody is at it: what was removed is dropped, and nothing else.
    pub(super) fn assert_dropped(&self, drops: usize, live: usize) {
        self.table.flush().unwrap();
        assert_eq!(self.drops.load(Ordering::Relaxed), drops);
        assert_eq!((self.table.len(), self.table.stats().pending), (live, 0));
        self.table.validate();
    }
}

pub(super) fn spawn<T: Send + Sync + 'static>(
    shared: &Arc<T>,
    f: impl FnOnce(&T) + Send + 'static,
) -> thread::JoinHandle<()> {
    let shared = Arc::clone(shared);
    thread::spawn(move || f(&shared))
}

fn on_cpu(cpu: u32) {
    set_current(CpuId::new(cpu));
}

/// The tree shrinks away from the place of an id whose slab is gone: the id is stale all the same.
/// Fails if the root is read apart from what it covers.
#[test]
fn inv12_a_stale_id_stays_stale_while_the_tree_shrinks() {
    model(|| {
        let contexts = Contexts::new();
        let [_, stale, last] = [0, 2, 4].map(|index| contexts.insert_at(index));
        for id in [stale, last] {
            contexts.table.shrink_to_fit(); // the slab of the one before
            contexts.table.remove(id).unwrap();
            contexts.table.flush().unwrap();
        }
        let height = contexts.table.stats().height;
        let reader = spawn(&contexts, move |contexts| {
            for _ in 0..TIMES {
                assert_eq!(contexts.look(stale), Err(LookupError::Stale));
            }
        });
        contexts.table.shrink_to_fit();
        reader.join().unwrap();
        assert_eq!((height, contexts.table.stats().height), (2, 0));
        contexts.assert_dropped(2, 1);
    });
}

/// A lookup finds nothing, or all of a context and of the slab it is in.
#[test]
fn inv12_a_context_is_seen_finished() {
    model(|| {
        let contexts = Contexts::new();
        let reader = spawn(&contexts, |contexts| {
            let first = Id::from_bits(1 << 32).unwrap();
            for _ in 0..TIMES {
                match contexts.look(first) {
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

#[test]
fn inv12_a_removed_context_outlives_its_readers() {
    model(|| {
        let contexts = Contexts::new();
        let id = contexts.insert(7);
        let reader = spawn(&contexts, move |contexts| match contexts.look(id) {
            Ok(value) => assert_eq!(value, 7),
            Err(error) => assert_eq!(error, LookupError::Stale),
        });
        dawdle();
        contexts.table.remove(id).unwrap();
        contexts.table.poll();
        assert_eq!(contexts.look(id), Err(LookupError::Stale));
        reader.join().unwrap();
        contexts.assert_dropped(1, 0);
    });
}

/// The index is used again; the old id never leads to the new context.
#[test]
fn inv12_a_stale_id_finds_nothing_after_reuse() {
    model(|| {
        let contexts = Contexts::new();
        let old = contexts.insert(1);
        let reader = spawn(&contexts, move |contexts| {
            for _ in 0..TIMES {
                match contexts.look(old) {
                    Ok(value) => assert_eq!(value, 1),
                    Err(error) => assert_eq!(error, LookupError::Stale),
                }
            }
        });
        contexts.table.remove(old).unwrap();
        contexts.table.flush().unwrap();
        let new = contexts.insert(2);
        assert_eq!((new.index(), new.generation()), (0, 2));
        assert_eq!(contexts.look(new), Ok(2));
        assert_eq!(contexts.look(old), Err(LookupError::Stale));
        reader.join().unwrap();
        contexts.assert_dropped(1, 1);
    });
}

#[test]
fn inv14_of_racing_removes_one_succeeds() {
    model(|| {
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

/// Two removals, on one CPU or on two, while the first of them to come to it reclaims.
#[test]
fn what_two_removed_is_reclaimed_once() {
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

/// Two inserts get two ids, and both find what they put there.
#[test]
fn two_inserts_get_two_ids() {
    model(|| {
        let contexts = Contexts::new();
        let first = contexts.insert(1);
        let other = spawn(&contexts, |contexts| {
            on_cpu(1);
            let id = contexts.insert(2);
            assert_eq!(contexts.look(id), Ok(2));
        });
        let id = contexts.insert(3);
        assert_eq!(contexts.look(id), Ok(3));
        other.join().unwrap();
        contexts.table.remove(first).unwrap();
        contexts.assert_dropped(1, 2);
    });
}

/// A cyclic insert begins where the last one ended, also beside it: what that one's thread vacates
/// meanwhile is behind both.
#[test]
fn inv08_cyclic_inserts_take_turns() {
    let late: &[bool] = if cfg!(offlock_shuttle) { &[false, true] } else { &[false] };
    for &late in late {
        model(move || {
            let contexts = Contexts::new();
            contexts.table.try_reserve(2).unwrap();
            let insert =
                |contexts: &Contexts| contexts.table.insert_cyclic(contexts.payload(7)).unwrap();
            let other = thread::spawn({
                let contexts = Arc::clone(&contexts);
                move || {
                    on_cpu(1);
                    if late {
                        (0..2).for_each(|_| dawdle());
                    }
                    insert(&contexts).index()
                }
            });
            let id = insert(&contexts);
            contexts.table.remove(id).unwrap();
            contexts.table.flush().unwrap();
            let mut given = [id.index(), other.join().unwrap()];
            given.sort_unstable();
            assert_eq!(given, [0, 1]);
            contexts.assert_dropped(1, 1);
        });
    }
}

/// A context that stays is found while slabs and nodes beside and above it come and go.
#[test]
fn inv17_a_permanent_id_is_found_while_the_tree_grows_and_shrinks() {
    model(|| {
        let contexts = Contexts::new();
        let permanent = contexts.insert(7);
        let reader = spawn(&contexts, move |contexts| {
            for _ in 0..TIMES {
                assert_eq!(contexts.look(permanent), Ok(7));
            }
        });
        let far = contexts.insert_at(2); // a node above
        contexts.table.remove(far).unwrap();
        contexts.table.flush().unwrap();
        contexts.table.shrink_to_fit();
        assert_eq!(contexts.table.stats().height, 0);
        reader.join().unwrap();
        assert_eq!(contexts.drops.load(Ordering::Relaxed), 1);
    });
}

/// A reader is in a slab that leaves the tree; the id stays stale when the slab is gone, and when
/// another takes its place.
#[test]
fn inv17_a_slab_outlives_its_readers() {
    model(|| {
        let contexts = Contexts::new();
        let gone = contexts.insert(7);
        contexts.table.remove(gone).unwrap();
        contexts.table.flush().unwrap();
        let reader = spawn(&contexts, move |contexts| {
            for _ in 0..TIMES {
                assert_eq!(contexts.look(gone), Err(LookupError::Stale));
            }
        });
        contexts.table.shrink_to_fit();
        assert_eq!(contexts.table.stats().slabs, 0);
        let again = contexts.insert(8);
        assert_eq!((again.index(), again.generation()), (0, 2));
        reader.join().unwrap();
    });
}

/// A removal beside the end of a tick: that goes on, or another is sent, without anybody's help.
#[test]
fn a_removal_meets_the_last_tick() {
    model(|| {
        let contexts = Contexts::new();
        let ids = [1, 2].map(|value| contexts.insert(value));
        contexts.table.remove(ids[0]).unwrap();
        let ticks = thread::spawn(|| _ = rcu::poll());
        dawdle();
        contexts.table.remove(ids[1]).unwrap();
        ticks.join().unwrap();
        for _ in 0..2 {
            rcu::poll();
        }
        assert_eq!(contexts.drops.load(Ordering::Relaxed), 2);
    });
}

/// The tick of a removal is on its way, or running, when the table is dropped: it does not free what
/// the drop still uses, and the last tick frees it.
#[test]
fn an_old_tick_meets_the_drop_of_the_table() {
    let late: &[bool] = if cfg!(offlock_shuttle) { &[false, true] } else { &[false] };
    for &late in late {
        model(move || {
            let contexts = Contexts::new();
            let drops = Arc::clone(&contexts.drops);
            let id = contexts.insert(7);
            contexts.table.remove(id).unwrap();
            let ticks = thread::spawn(move || {
                if !late {
                    dawdle();
                }
                rcu::poll();
                rcu::poll();
            });
            if late {
                dawdle();
            }
            drop(contexts);
            ticks.join().unwrap();
            assert_eq!(drops.load(Ordering::Relaxed), 1);
        });
    }
}
