//! The object cache's try-lock, and two threads that make a node for one lock.

use std::sync::atomic::{AtomicUsize as Uncounted, Ordering};

use percpu::CpuId;
use percpu::cache::{NodeCache, ObjectCache, Preload};
use percpu::sync::cell::UnsafeCell;
use percpu::sync::virtual_cpu::set_current;
use percpu::sync::{Arc, Mutex, model, mutant, thread};

/// Two threads of one CPU, and one that drains: each object is in one place.
#[test]
fn an_object_has_one_owner() {
    static MADE: Uncounted = Uncounted::new(0);

    fn make() -> UnsafeCell<u32> {
        MADE.fetch_add(1, Ordering::Relaxed);
        UnsafeCell::new(0)
    }

    model(|| {
        MADE.store(0, Ordering::Relaxed);
        let cache = Arc::new(ObjectCache::new(1));
        cache.put(UnsafeCell::new(0_u32)).unwrap();
        let use_one = |object: &UnsafeCell<u32>| {
            // SAFETY: ours, as we took it out of the cache; loom checks that.
            object.with_mut(|value| unsafe { *value += 1 });
        };
        let other = thread::spawn({
            let cache = Arc::clone(&cache);
            move || {
                let object = cache.get_or_else(make);
                use_one(&object);
                usize::from(cache.put(object).is_err())
            }
        });
        let object = cache.get_or_else(make);
        use_one(&object);
        let mine = usize::from(cache.put(object).is_err());
        set_current(CpuId::new(1));
        let drained = cache.drain().inspect(use_one).count();
        let theirs = other.join().unwrap();
        let left = cache.drain().count();
        // Of every object made, one was handed back or came out of a drain in the end.
        let made = 1 + MADE.load(Ordering::Relaxed);
        assert_eq!(mine + theirs + drained + left, made);
    });
}

/// Two threads find no spare node, each makes one, one look again: one is kept, one is freed, and
/// neither under the lock.
#[test]
fn of_two_nodes_made_for_one_place_one_is_kept() {
    static FREED: Uncounted = Uncounted::new(0);

    struct Node;
    impl Drop for Node {
        fn drop(&mut self) {
            FREED.fetch_add(1, Ordering::Relaxed);
        }
    }

    model(|| {
        FREED.store(0, Ordering::Relaxed);
        let cache = NodeCache::new(1);
        let hint = cache.hint();
        let shared = Arc::new((Mutex::new(cache), hint));
        let send_and_receive = |shared: &(Mutex<NodeCache<Box<Node>>>, _)| {
            let mut preload = Preload::<_>::new();
            preload.fill(&shared.1, || Box::new(Node));
            let mut cache = shared.0.lock();
            let freed = FREED.load(Ordering::Relaxed);
            // With a stale hint there may be none. It is no failure: here a send would make one.
            let node = cache.take(&mut preload).unwrap_or_else(|| Box::new(Node));
            cache.put(node, &mut preload).unwrap_or_else(|_| unreachable!("one surplus at most"));
            cache.keep(&mut preload);
            if mutant("node-cache-frees-under-the-lock") {
                drop(std::mem::take(&mut preload));
            }
            assert_eq!(FREED.load(Ordering::Relaxed), freed, "freed under the lock");
            drop(cache);
        };
        let other = thread::spawn({
            let shared = Arc::clone(&shared);
            move || send_and_receive(&shared)
        });
        send_and_receive(&shared);
        other.join().unwrap();
        let cache = shared.0.lock();
        assert_eq!((cache.len(), shared.1.is_short_of(1)), (1, false));
        assert!(FREED.load(Ordering::Relaxed) <= 1, "the surplus of one of them");
    });
}

/// A planted bug, and the model that must fail for it.
pub(super) const MUTANTS: &[(&str, &str)] = &[
    ("node-cache-frees-under-the-lock", "cache::of_two_nodes_made_for_one_place_one_is_kept"),
    ("object-cache-ignores-the-lock", "cache::an_object_has_one_owner"),
    ("object-cache-locks-relaxed", "cache::an_object_has_one_owner"),
];

/// Of these, what only loom can see.
pub(super) const LOOM_ONLY: &[&str] =
    &["object-cache-ignores-the-lock", "object-cache-locks-relaxed"];
