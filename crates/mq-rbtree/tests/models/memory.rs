//! Memory made before the lock by threads that need the same.

use std::ops::Range;

use mq_rbtree::{Bitmap, Queue, QueueStats, RbTree};
use percpu::sync::{Arc, thread};

use super::payload::{Payload, TestLevels, finish, run, with};

/// A planted bug, and the model that must fail for it.
pub(super) const MUTANTS: &[(&str, &str)] = &[
    ("insert: the page is still missing", "memory::inv05_one_of_two_preloaded_pages_is_stored"),
    ("keep: the pool has room", "memory::inv05_one_of_two_unused_nodes_is_kept"),
    ("grow: the chunk is still missing", "memory::inv05_an_outdated_chunk_is_not_stored"),
    ("insert: a slot is free", "memory::inv05_an_outdated_chunk_is_not_stored"),
];

/// Two threads send messages of these priorities; what the queue then says, and `more` are in it.
fn speculate<L: TestLevels>(
    queue: Arc<Queue<Payload, L>>,
    here: Range<u32>,
    there: Range<u32>,
    more: u64,
) -> QueueStats {
    fn send<L: TestLevels>(queue: &Queue<Payload, L>, priorities: Range<u32>) {
        for priority in priorities {
            queue.try_send(Payload::new(9), priority).unwrap();
        }
    }
    let messages = (here.len() + there.len()) as u64 + more;
    let sender = thread::spawn({
        let queue = Arc::clone(&queue);
        move || send(&queue, there)
    });
    send(&queue, here);
    sender.join().unwrap();
    let stats = queue.stats();
    assert_eq!(finish(&queue), messages);
    stats
}

/// Both find no page, and no chunk, and make them; or one finds the other's. Each message has its
/// place, and none is made under the lock.
#[test]
fn inv05_one_of_two_preloaded_pages_is_stored() {
    run(|| {
        let stats = speculate(with::<Bitmap>(8, 0), 7..8, 8..9, 0);
        let levels = stats.levels;
        assert_eq!((levels.live, levels.kept, levels.from_preload), (2, 1, 1));
        assert_eq!((levels.fallback, stats.slab_fallback), (0, 0));
    });
}

/// There is a level for both, but no node is kept, as far as they know before the lock.
#[test]
fn inv05_one_of_two_unused_nodes_is_kept() {
    run(|| {
        let queue =
            Queue::<Payload, RbTree<u32>>::builder_with_keys(8).spare_nodes(1).build().unwrap();
        queue.try_send(Payload::new(9), 7).unwrap();
        let levels = speculate(Arc::new(queue), 7..8, 7..8, 1).levels;
        assert_eq!((levels.live, levels.kept, levels.from_preload), (1, 1, 1));
        assert_eq!(levels.fallback, 0);
    });
}

/// The other finds none any more, though it saw one before it had the lock.
#[test]
fn inv05_two_sends_race_for_one_kept_node() {
    run(|| {
        let queue = with::<RbTree<u32>>(8, 1);
        assert_eq!(finish(&queue), 1);
        let levels = speculate(queue, 7..8, 8..9, 0).levels;
        assert_eq!((levels.live, levels.from_cache), (2, 1));
        assert_eq!(levels.from_preload + levels.fallback, 2);
    });
}

/// A third message needs the second chunk, whatever its sender made before.
#[test]
fn inv05_an_outdated_chunk_is_not_stored() {
    run(|| {
        let stats = speculate(with::<Bitmap>(8, 0), 1..2, 2..4, 0);
        assert!(stats.slab_fallback <= 1 && stats.levels.fallback == 0);
    });
}
