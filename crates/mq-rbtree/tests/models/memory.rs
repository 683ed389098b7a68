//! Memory preloaded by two threads that need the same.

use std::ops::Range;

use mq_rbtree::{Bitmap, Queue, QueueStats, RbTree};
use offlock_sync::Arc;

use super::payload::{Payload, TestLevels, finish, spawn, thoroughly, with};

/// Two threads send messages of these priorities. Returns the statistics of the queue, which then
/// has `more` messages besides.
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
    let sender = spawn(&queue, |queue| send(&queue, there));
    send(&queue, here);
    sender.join().unwrap();
    let stats = queue.stats();
    assert_eq!(finish(&queue), messages);
    stats
}

/// Both threads may find no chunk, and allocate it. Each message gets a slot, and nothing is allocated
/// under the lock.
#[test]
fn inv05_one_of_two_preloaded_chunks_is_stored() {
    thoroughly(|| {
        let stats = speculate(with::<Bitmap>(8, 0), 7..8, 8..9, 0);
        let levels = stats.levels;
        assert_eq!((levels.live, levels.from_cache, stats.slab_fallback), (2, 2, 0));
    });
}

/// The level of both messages exists, but the hint shows no kept node, so both allocate one.
#[test]
fn inv05_one_of_two_unused_nodes_is_kept() {
    thoroughly(|| {
        let queue =
            Queue::<Payload, RbTree<u32>>::builder_with_keys(8).spare_nodes(1).build().unwrap();
        queue.try_send(Payload::new(9), 7).unwrap();
        let levels = speculate(Arc::new(queue), 7..8, 7..8, 1).levels;
        assert_eq!((levels.live, levels.kept, levels.from_preload), (1, 1, 1));
        assert_eq!(levels.fallback, 0);
    });
}

/// Both threads see the kept node before they lock, and only one gets it.
#[test]
fn inv05_two_sends_race_for_one_kept_node() {
    thoroughly(|| {
        let queue = with::<RbTree<u32>>(8, 1);
        assert_eq!(finish(&queue), 1);
        let levels = speculate(queue, 7..8, 8..9, 0).levels;
        assert_eq!((levels.live, levels.from_cache), (2, 1));
        assert_eq!(levels.from_preload + levels.fallback, 2);
    });
}

/// The third message needs the second chunk. A preloaded first chunk does not serve.
#[test]
fn inv05_an_outdated_chunk_is_not_stored() {
    thoroughly(|| {
        let stats = speculate(with::<Bitmap>(8, 0), 1..2, 2..4, 0);
        assert!(stats.slab_fallback <= 1 && stats.levels.fallback == 0);
    });
}
