//! Two threads that make a node for one lock.

use std::sync::atomic::{AtomicUsize as Uncounted, Ordering};

use percpu::cache::{NodeCache, Preload};
use percpu::sync::{Arc, Mutex, model, mutant, thread};

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
pub(super) const MUTANTS: &[(&str, &str)] =
    &[("node-cache-frees-under-the-lock", "cache::of_two_nodes_made_for_one_place_one_is_kept")];
