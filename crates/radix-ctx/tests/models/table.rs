//! Inserts, lookups, removal and reclaim of a table, and its limits.

use std::sync::atomic::{AtomicUsize, Ordering};

use offlock_percpu::rcu;
use offlock_sync::quarantine::Payload;
use offlock_sync::virtual_fence::{both_strategies, with_membarrier};
use offlock_sync::{Arc, beside, model, thoroughly, thread, yield_often};
use radix_ctx::{CtxTable, Id, InsertRefused, LookupError};

use super::contexts::{Contexts, TIMES, carries, on_cpu, race, race_thoroughly};

/// A lookup finds nothing, or a complete context in a complete slab.
#[test]
fn inv12_a_context_is_seen_finished() {
    let first = Id::from_bits(1 << 32).unwrap();
    race_thoroughly(
        move |contexts, []| {
            (0..TIMES).for_each(|_| contexts.look(first, 7, LookupError::NotFound));
        },
        |contexts, []| _ = contexts.insert(7),
    );
}

/// An iteration finds complete contexts only.
#[test]
fn inv12_an_iteration_sees_finished_contexts() {
    let read = |(_, found): (Id, &Payload)| assert_eq!(found.read(), 7);
    race_thoroughly(
        move |contexts, []| contexts.table.iter(&rcu::pin()).for_each(read),
        |contexts, []| _ = contexts.insert(7),
    );
}

#[test]
fn inv12_a_removed_context_outlives_its_readers() {
    both_strategies(|| {
        race_thoroughly(
            |contexts, [id]| contexts.look(id, 1, LookupError::Stale),
            |contexts, [id]| {
                yield_often();
                contexts.remove_and_poll(id);
                assert_eq!(contexts.lookup(id), Err(LookupError::Stale));
            },
        );
    });
}

/// The index is used again, and the old id never leads to the new context.
#[test]
fn inv12_a_stale_id_finds_nothing_after_reuse() {
    race_thoroughly(
        |contexts, [old]| (0..TIMES).for_each(|_| contexts.look(old, 1, LookupError::Stale)),
        |contexts, [old]| {
            contexts.remove(old);
            contexts.flush();
            let new = contexts.insert_and_look(2);
            assert_eq!((new.index(), new.generation()), (0, 2));
            assert_eq!(contexts.lookup(old), Err(LookupError::Stale));
        },
    );
}

#[test]
fn inv14_of_racing_removes_one_succeeds() {
    race_thoroughly(
        |contexts, [id]| {
            on_cpu(1);
            contexts.remove(id);
        },
        |contexts, [id]| contexts.remove(id),
    );
}

/// Two removals, on one CPU or on two. One of the threads reclaims meanwhile.
#[test]
fn two_removals_are_reclaimed_once() {
    for cpu in [0, 1] {
        model(move || {
            race(
                move |contexts, [_, second]| {
                    on_cpu(cpu);
                    contexts.remove(second);
                },
                |contexts, [first, _]| {
                    contexts.remove(first);
                    contexts.flush();
                },
            );
        });
    }
}

/// Two inserts get two ids, and each finds its context.
#[test]
fn two_inserts_get_two_ids() {
    race_thoroughly(
        |contexts, [_]| {
            on_cpu(1);
            contexts.insert_and_look(2);
        },
        |contexts, [_]| _ = contexts.insert_and_look(3),
    );
}

/// Lookups and iterations find the contexts that stay, while slabs and nodes beside and above them come.
#[test]
fn inv17_permanent_ids_are_found_while_the_tree_grows() {
    race_thoroughly(
        |contexts, permanent: [Id; 2]| {
            for _ in 0..TIMES {
                assert_eq!(contexts.lookup(permanent[1]), Ok(2));
                let guard = rcu::pin();
                let seen: Vec<Id> = contexts.table.iter(&guard).map(|(id, _)| id).collect();
                assert!(seen.starts_with(&permanent) && seen.is_sorted(), "{seen:?}");
            }
        },
        |contexts, _| contexts.remove(contexts.insert(9)), // adds a slab and a node
    );
}

/// A reader is in a slab that leaves the tree. The id stays stale when the slab is freed, and when another
/// one replaces it.
#[test]
fn inv17_a_slab_outlives_its_readers() {
    model(|| {
        let (contexts, [first, _, gone]) = Contexts::with();
        contexts.remove(first);
        contexts.flush();
        contexts.remove(gone);
        contexts.flush(); // its slab is empty, and kept
        let reader = beside(&contexts, move |contexts| {
            for _ in 0..TIMES {
                assert_eq!(contexts.lookup(gone), Err(LookupError::Stale));
            }
        });
        contexts.table.remove_all().unwrap(); // the lower slab is empty now, so the other one leaves
        assert_eq!(contexts.table.stats().slabs, 1);
        let again = [1, 2, 3].map(|value| contexts.insert(value))[2];
        assert_eq!((again.index(), again.generation()), (2, 2));
        reader.join().unwrap();
    });
}

/// A flush waits for a grace period. Meanwhile another thread reclaims the lists of that period and starts a
/// later one, for a context that it still reads.
#[test]
fn inv12_a_flush_leaves_lists_of_a_later_period() {
    model(|| {
        let (contexts, [read]) = Contexts::with();
        let gone = contexts.insert(2);
        let removal = contexts.table.remove(gone).unwrap();
        let other = beside(&contexts, Contexts::flush);
        yield_often();
        let _ = removal.is_done(); // reclaims the lists, if their period has ended
        let guard = rcu::pin();
        let found = contexts.table.get(read, &guard).unwrap().late();
        contexts.remove_and_poll(read);
        thread::yield_now();
        yield_often();
        assert_eq!(found.read(), 1);
        drop(guard);
        other.join().unwrap();
        contexts.flush();
        assert_eq!((contexts.drops.dropped(), contexts.table.len()), (2, 0));
    });
}

/// Two inserts in a table whose slabs are full. Each may make a slab without the lock, which the other one
/// has added and filled when it takes the lock again.
#[test]
fn inv08_two_inserts_need_a_slab() {
    model(|| {
        race(
            |contexts, [_, _]| {
                let ids = [3, 4].map(|value| contexts.insert(value));
                assert_eq!(ids.map(|id| contexts.lookup(id)), [Ok(3), Ok(4)]);
            },
            |contexts, full| {
                contexts.insert_and_look(5);
                assert_eq!(full.map(|id| contexts.lookup(id)), [Ok(1), Ok(2)]);
            },
        );
    });
}

/// An insert writes to the only slot of a slab that the removals of the other thread would release. It holds no guard.
#[test]
fn inv17_an_insert_keeps_its_slab_in_the_tree() {
    model(|| {
        race(
            |contexts, _| _ = contexts.insert_and_look(4), // index 3, unless others are vacant
            |contexts, ids: [Id; 3]| {
                yield_often();
                ids.into_iter().rev().for_each(|id| contexts.remove(id));
                contexts.flush();
            },
        );
    });
}

/// A removal while the last callback ends. The callback continues or another one is queued, without another
/// call.
#[test]
fn a_removal_meets_the_last_callback() {
    both_strategies(|| {
        thoroughly(|| {
            let (contexts, ids) = Contexts::with::<2>();
            contexts.remove(ids[0]);
            let callbacks = thread::spawn(|| _ = rcu::poll());
            yield_often();
            contexts.remove(ids[1]);
            callbacks.join().unwrap();
            for _ in 0..2 {
                rcu::poll();
            }
            assert_eq!(contexts.drops.dropped(), 2);
        });
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
            let (contexts, ids) = Contexts::with::<2>();
            let drops = contexts.drops.clone();
            contexts.remove(ids[0]);
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
            contexts.remove(ids[1]);
            drop(contexts);
            callbacks.join().unwrap();
            assert_eq!(drops.dropped(), 2);
        });
    }
}

/// Two inserts while one more context fits: exactly one succeeds.
#[test]
fn inv15_two_inserts_share_the_last_room() {
    thoroughly(|| {
        let contexts = Contexts::built(|builder| builder.max_contexts(2));
        contexts.insert(1);
        let inserted = std::sync::Arc::new(AtomicUsize::new(0));
        let insert = move |contexts: &Contexts| {
            inserted.fetch_add(contexts.try_insert(2).is_some().into(), Ordering::Relaxed)
        };
        let other = beside(&contexts, {
            let insert = insert.clone();
            move |contexts| _ = insert(contexts)
        });
        insert(&contexts);
        other.join().unwrap();
        assert_eq!(insert(&contexts), 1, "room for one of the two");
        contexts.end();
        assert_eq!(contexts.table.len(), 2);
    });
}

/// A thread removes its context and inserts another. With the context of the other thread the table never
/// has more than two, so no insert is refused.
#[test]
fn inv15_an_insert_finds_the_room_of_a_removal() {
    model(|| {
        let contexts = Contexts::built(|builder| builder.max_contexts(2));
        let first = contexts.insert(1);
        let other = beside(&contexts, move |contexts| {
            contexts.remove(first);
            contexts.insert(2);
        });
        contexts.insert(3);
        other.join().unwrap();
        contexts.end();
    });
}

/// The insert that takes the place of a removed context sees what the removing thread did before. With
/// membarrier, because the fences of two guards would carry it, too.
#[test]
fn inv15_the_insert_in_its_place_sees_what_came_before_a_removal() {
    with_membarrier(|| {
        model(|| {
            let table = Arc::new(CtxTable::builder().max_contexts(1).build());
            let first = table.insert(0).unwrap();
            let other = Arc::clone(&table);
            carries(
                move || match other.insert(1).map_err(|error| error.reason) {
                    Ok(_) => true,
                    Err(reason) => {
                        assert_eq!(reason, InsertRefused::Quota { limit: 1 });
                        false
                    }
                },
                || _ = table.remove(first).unwrap(),
            );
        });
    });
}
