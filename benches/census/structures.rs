//! What the census knows: name, what makes the operation, and the target that it decides.

use std::collections::{BinaryHeap, HashMap, VecDeque};
use std::hint::black_box;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use aio_reap::Engine;
use aio_reap_test::Build;
use aio_reap_test::sim::{Script, SubmitStep};
use crossbeam_utils::CachePadded;
use crossbeam_utils::sync::ShardedLock;
use dashmap::DashMap;
use intrusive_collections::{LinkedList, LinkedListLink, intrusive_adapter};
use mq_rbtree::Levels;
use offlock_percpu::lglock::LgLock;
use offlock_percpu::{PerCpuCounter, PercpuRef, rcu};
use parking_lot::{Mutex, RwLock};
use percpu_list::PerCpuList;
use radix_ctx::{CtxTable, Id};

use crate::served;

/// Runs one operation.
pub(crate) type Operation = Box<dyn FnMut()>;
/// Gives thread `n` its operation; called on that thread.
pub(crate) type Shared = Box<dyn Fn(usize) -> Operation + Sync>;

/// A row of the census.
pub(crate) struct Structure {
    /// One word: an argument of the program.
    pub(crate) name: &'static str,
    /// What one operation is.
    pub(crate) operation: &'static str,
    /// The id in the section `[census]` of `targets.toml`; the worst of those that share one counts.
    pub(crate) target: Option<&'static str>,
    /// Makes the structure for that many threads. What the threads share is leaked: the program
    /// ends with the count.
    pub(crate) make: fn(usize) -> Shared,
}

impl Structure {
    const fn ours(
        name: &'static str,
        operation: &'static str,
        target: Option<&'static str>,
        make: fn(usize) -> Shared,
    ) -> Self {
        Self { name, operation, target, make }
    }

    const fn peer(name: &'static str, operation: &'static str, make: fn(usize) -> Shared) -> Self {
        Self { name, operation, target: None, make }
    }
}

/// By crate: ours, then what a program uses instead.
pub(crate) const STRUCTURES: &[Structure] = &[
    // percpu
    Structure::ours("counter", "PerCpuCounter::add", Some("P9.counter"), counter),
    Structure::peer("shared-counter", "fetch_add on one word", shared_counter),
    Structure::peer("padded-counter", "fetch_add on a padded word per thread", padded_counter),
    Structure::ours("reference", "PercpuRef get + put", Some("P9.ref"), reference),
    Structure::peer("arc", "Arc clone + drop", arc),
    Structure::ours("pin", "rcu::pin + unpin", Some("P9.pin"), pin),
    Structure::peer("crossbeam-epoch", "crossbeam_epoch::pin + unpin", crossbeam_epoch_pin),
    Structure::peer("sharded-lock", "crossbeam ShardedLock read + release", sharded_lock),
    Structure::ours("lglock", "LgLock local lock, add, unlock", None, lglock),
    Structure::peer("parking-lot-mutex", "parking_lot::Mutex lock, add, unlock", parking_lot_mutex),
    // radix-ctx
    Structure::ours(
        "radix-lookup",
        "CtxTable::get under a guard",
        Some("R11.lookup"),
        radix_lookup,
    ),
    Structure::peer("radix-papaya", "papaya get under a guard", radix_papaya),
    Structure::peer("radix-dashmap", "dashmap get", radix_dashmap),
    Structure::peer("radix-rwlock", "parking_lot RwLock of a HashMap, get", radix_rwlock),
    Structure::ours(
        "radix-get-ref",
        "CtxTable::get_ref + drop",
        Some("R11.get_ref"),
        radix_get_ref,
    ),
    Structure::ours("radix-insert", "CtxTable::insert + remove", None, radix_insert),
    // percpu-list
    Structure::ours("list", "PerCpuList insert + drop", Some("L7.add_remove"), list),
    Structure::peer("list-mutex", "one linked list, one lock: add + remove", list_mutex),
    // mq-rbtree
    Structure::ours(
        "mq-bitmap",
        "Queue send + receive, empty",
        Some("M11.send_receive"),
        mq_bitmap,
    ),
    Structure::ours("mq-rbtree", "Queue of keys send + receive, empty", None, mq_rbtree_keys),
    Structure::peer("mq-heap", "parking_lot BinaryHeap push + pop, empty", mq_heap),
    Structure::peer("mq-crossbeam", "crossbeam-channel send + receive, empty", mq_crossbeam),
    // bufcache
    Structure::ours("buf-hot", "Cache hit, one block for all", Some("B10.hot_hit"), buf_hot),
    Structure::ours("buf-hot-sampled", "Cache hit, one sampled block", None, buf_hot_sampled),
    Structure::peer("buf-quick-hot", "quick_cache hit, one key for all", buf_quick_hot),
    Structure::ours("buf-random", "Cache hit, 64 blocks", None, buf_random),
    Structure::peer("buf-quick-random", "quick_cache hit, 64 keys", buf_quick_random),
    // aio-reap
    Structure::ours("aio-engine", "request and reap, an engine per thread", None, aio_engine),
    Structure::peer("aio-queue", "request through one locked queue, as of a pool", aio_queue),
    // all of them
    Structure::ours("served-hit", "offlock-nbd's READ of a cached block", None, served::crates),
    Structure::peer(
        "served-hit-maps",
        "the same by dashmap, quick_cache, atomics",
        served::concurrent_maps,
    ),
    Structure::peer("served-hit-locks", "the same by maps behind locks", served::locks),
];

/// The structure called `name`.
pub(crate) fn find(name: &str) -> Option<&'static Structure> {
    STRUCTURES.iter().find(|structure| structure.name == name)
}

/// Why no lock here is refused.
const FREE: &str = "no thread panics or locks twice";

pub(crate) fn leak<T>(value: T) -> &'static T {
    Box::leak(Box::new(value))
}

fn counter(_threads: usize) -> Shared {
    let counter = leak(PerCpuCounter::new());
    Box::new(move |_| Box::new(move || counter.add(1)))
}

fn reference(_threads: usize) -> Shared {
    let refs = leak(PercpuRef::new(|| {}));
    Box::new(move |_| {
        Box::new(move || {
            black_box(&refs.try_get());
        })
    })
}

fn pin(_threads: usize) -> Shared {
    Box::new(move |_| {
        Box::new(move || {
            black_box(&rcu::pin());
        })
    })
}

fn lglock(_threads: usize) -> Shared {
    let lock = leak(LgLock::new(|_| 0_u64));
    Box::new(move |_| Box::new(move || *lock.local().expect(FREE) += 1))
}

/// Contexts of the table; every thread looks all of them up.
const CONTEXTS: u64 = 512;

fn table() -> (&'static CtxTable<[u64; 7]>, &'static [Id]) {
    let table = leak(CtxTable::new());
    let insert = |n| table.insert([n; 7]).expect("memory for a context, and no limit");
    (table, leak((0..CONTEXTS).map(insert).collect::<Vec<_>>()))
}

/// All ids in turn, from another one on each thread.
fn ids(ids: &'static [Id], thread: usize) -> impl FnMut() -> Id {
    let mut at = thread * 37;
    move || {
        at += 67; // no neighbour, and all of them before the first again
        ids[at % ids.len()]
    }
}

fn radix_lookup(_threads: usize) -> Shared {
    let (table, all) = table();
    Box::new(move |thread| {
        let mut next = ids(all, thread);
        Box::new(move || {
            let guard = rcu::pin();
            black_box(table.get(next(), &guard).expect("it is there")[0]);
        })
    })
}

fn radix_get_ref(_threads: usize) -> Shared {
    let (table, all) = table();
    Box::new(move |thread| {
        let mut next = ids(all, thread);
        Box::new(move || {
            black_box(&table.get_ref(next()).expect("it is there")[0]);
        })
    })
}

/// The keys of the peers in turn, as [`ids`] gives ours.
fn keys(thread: usize) -> impl FnMut() -> u64 {
    let mut at = thread as u64 * 37;
    move || {
        at += 67;
        at % CONTEXTS
    }
}

fn radix_papaya(_threads: usize) -> Shared {
    let map = leak(papaya::HashMap::<u64, [u64; 7]>::new());
    (0..CONTEXTS).for_each(|key| {
        map.pin().insert(key, [key; 7]);
    });
    Box::new(move |thread| {
        let mut next = keys(thread);
        Box::new(move || {
            black_box(map.pin().get(&next()).expect("it is there")[0]);
        })
    })
}

fn radix_dashmap(_threads: usize) -> Shared {
    let map = leak(DashMap::<u64, [u64; 7]>::new());
    (0..CONTEXTS).for_each(|key| {
        map.insert(key, [key; 7]);
    });
    Box::new(move |thread| {
        let mut next = keys(thread);
        Box::new(move || {
            black_box(map.get(&next()).expect("it is there")[0]);
        })
    })
}

fn radix_rwlock(_threads: usize) -> Shared {
    let map: HashMap<u64, [u64; 7]> = (0..CONTEXTS).map(|key| (key, [key; 7])).collect();
    let map = leak(CachePadded::new(RwLock::new(map)));
    Box::new(move |thread| {
        let mut next = keys(thread);
        Box::new(move || {
            black_box(map.read().get(&next()).expect("it is there")[0]);
        })
    })
}

/// Each thread removes what it has just inserted; the 512 stay.
fn radix_insert(_threads: usize) -> Shared {
    let (table, _) = table();
    Box::new(move |_| {
        Box::new(move || {
            let id = table.insert([1; 7]).expect("memory for a context, and no limit");
            assert!(table.remove(black_box(id)).is_ok());
        })
    })
}

fn list(_threads: usize) -> Shared {
    let list = leak(PerCpuList::new());
    Box::new(move |_| {
        Box::new(move || drop(black_box(list.insert(1_u64).expect("memory for an entry"))))
    })
}

/// What the single-lock list links.
#[repr(align(128))]
struct Node(LinkedListLink);

intrusive_adapter!(NodeAdapter = Box<Node>: Node { 0 => LinkedListLink });

/// The list under its lock.
type Locked = CachePadded<Mutex<LinkedList<NodeAdapter>>>;

/// As two operations, each under the lock. Every thread takes off what it has just added, unless
/// another has done so meanwhile, and then that one's: it moves as many lines.
fn list_mutex(_threads: usize) -> Shared {
    let list: &'static Locked =
        leak(CachePadded::new(Mutex::new(LinkedList::new(NodeAdapter::new()))));
    Box::new(move |_| {
        let mut node = Some(Box::new(Node(LinkedListLink::new())));
        Box::new(move || {
            list.lock().push_back(node.take().expect("taken off below"));
            node = list.lock().pop_back();
        })
    })
}

/// The capacity of a queue in messages: more than there are threads, so that no thread waits.
const MESSAGES: usize = 1024;

/// A queue that each thread sends a message to, and receives one from: its own, or another's. What
/// moves is the queue; a lock makes the two halves of it transfers of their own.
fn queue<L>(queue: mq_rbtree::Queue<u64, L>) -> Shared
where
    L: Levels<Priority = u32, Hint: Send + Sync> + Send + 'static,
{
    let queue = leak(queue);
    Box::new(move |_| {
        Box::new(move || {
            queue.try_send(1, 5).expect(ROOM);
            black_box(queue.try_receive().expect(SENT));
        })
    })
}

/// Why nothing here is refused.
const ROOM: &str = "fewer threads than messages that fit, and memory";
const SENT: &str = "each thread sends before it receives";

fn mq_bitmap(_threads: usize) -> Shared {
    queue(mq_rbtree::Queue::new(MESSAGES).expect("memory for a queue"))
}

fn mq_rbtree_keys(_threads: usize) -> Shared {
    queue(mq_rbtree::Queue::with_keys(MESSAGES).expect("memory for a queue"))
}

fn mq_heap(_threads: usize) -> Shared {
    let heap: &'static CachePadded<Mutex<BinaryHeap<(u32, u64)>>> =
        leak(CachePadded::new(Mutex::new(BinaryHeap::with_capacity(MESSAGES))));
    Box::new(move |_| {
        Box::new(move || {
            heap.lock().push((5, 1));
            black_box(heap.lock().pop().expect(SENT));
        })
    })
}

fn mq_crossbeam(_threads: usize) -> Shared {
    let (sender, receiver) = leak(crossbeam_channel::bounded::<u64>(MESSAGES));
    Box::new(move |_| {
        Box::new(move || {
            sender.try_send(1).expect(ROOM);
            black_box(receiver.recv().expect(SENT));
        })
    })
}

/// Blocks that are there, of which each thread reads one after the other, from its own place on.
pub(crate) const BLOCKS: u64 = 64;
pub(crate) const BLOCK: usize = 4096;

/// So many blocks, all of them there.
pub(crate) fn blocks_of_bufcache(blocks: u64) -> &'static bufcache::Device {
    let cache = bufcache::Cache::new(2 * BLOCKS as usize * BLOCK).expect(CACHED);
    let device = bufcache::MemoryDevice::new(vec![1; blocks as usize * BLOCK]);
    let disk = leak(cache.attach(device).expect(CACHED));
    // Often enough for the policy, which counts to three.
    (0..4 * blocks).for_each(|count| drop(disk.get(count % blocks).expect(CACHED)));
    disk
}

fn bufcache_hits(blocks: u64) -> Shared {
    let disk = blocks_of_bufcache(blocks);
    Box::new(move |thread| {
        let mut next = CachePadded::new(thread as u64);
        Box::new(move || {
            *next = (*next + 1) % blocks;
            black_box(disk.get(*next).expect(CACHED)[0]);
        })
    })
}

/// Why a block can be had.
pub(crate) const CACHED: &str = "there is memory, and the device is in memory";

fn buf_hot(_threads: usize) -> Shared {
    bufcache_hits(1)
}

/// The same, of a full cache, where the block is in the sample of its policy.
fn buf_hot_sampled(_threads: usize) -> Shared {
    const ROOM: u64 = 1024;
    let cache = bufcache::Cache::new(ROOM as usize * BLOCK).expect(CACHED);
    let device = bufcache::MemoryDevice::new(vec![1; 4 * ROOM as usize * BLOCK]);
    let disk = leak(cache.attach(device).expect(CACHED));
    (0..4 * ROOM).for_each(|block| drop(disk.get(block).expect(CACHED)));
    let hot = (0..4 * ROOM).rev().find(|&block| disk.is_sampled(block));
    let hot = hot.expect("one block in eight is sampled");
    // Often enough for the policy, and for the samples of this thread.
    (0..ROOM).for_each(|_| drop(disk.get(hot).expect(CACHED)));
    Box::new(move |_| Box::new(move || _ = black_box(disk.get(hot).expect(CACHED)[0])))
}

fn buf_random(_threads: usize) -> Shared {
    bufcache_hits(BLOCKS)
}

fn quick_hits(keys: u64) -> Shared {
    let cache = leak(quick_cache::sync::Cache::<u64, Arc<[u8; BLOCK]>>::new(4 * BLOCKS as usize));
    (0..keys).for_each(|key| cache.insert(key, Arc::new([1; BLOCK])));
    Box::new(move |thread| {
        let mut next = CachePadded::new(thread as u64);
        Box::new(move || {
            *next = (*next + 1) % keys;
            black_box(cache.get(&*next).expect("room for all")[0]);
        })
    })
}

fn buf_quick_hot(_threads: usize) -> Shared {
    quick_hits(1)
}

fn buf_quick_random(_threads: usize) -> Shared {
    quick_hits(BLOCKS)
}

/// An engine cannot be shared: what is left to count is what engines have in common. Its device is a
/// script's, which does every request at once and without a system call.
fn aio_engine(_threads: usize) -> Shared {
    Box::new(|_| {
        let script = Script::new();
        let engine = Engine::builder().build_sim(&script).expect(ENGINE);
        Box::new(move || {
            script.on_submit(SubmitStep::Inline);
            let request = engine.nop().submit().expect(ENGINE);
            black_box(request.wait().0.expect(ENGINE));
        })
    })
}

/// Why nothing fails.
const ENGINE: &str = "memory, a descriptor, and a free slot";

fn aio_queue(_threads: usize) -> Shared {
    let queue: &'static CachePadded<Mutex<VecDeque<u64>>> =
        leak(CachePadded::new(Mutex::new(VecDeque::with_capacity(MESSAGES))));
    Box::new(move |_| {
        Box::new(move || {
            queue.lock().push_back(1);
            black_box(queue.lock().pop_front().expect(SENT));
        })
    })
}

fn shared_counter(_threads: usize) -> Shared {
    let counter = leak(CachePadded::new(AtomicU64::new(0)));
    Box::new(move |_| {
        Box::new(move || {
            // Ordering: Relaxed; a counter, it publishes nothing.
            counter.fetch_add(1, Ordering::Relaxed);
        })
    })
}

fn padded_counter(threads: usize) -> Shared {
    let counters: Vec<CachePadded<AtomicU64>> =
        (0..threads).map(|_| CachePadded::default()).collect();
    let counters = leak(counters);
    Box::new(move |thread| {
        let own = &counters[thread];
        Box::new(move || {
            // Ordering: as above.
            own.fetch_add(1, Ordering::Relaxed);
        })
    })
}

fn arc(_threads: usize) -> Shared {
    let arc = leak(Arc::new(0_u64));
    Box::new(move |_| {
        Box::new(move || {
            black_box(&Arc::clone(arc));
        })
    })
}

fn parking_lot_mutex(_threads: usize) -> Shared {
    let lock = leak(CachePadded::new(Mutex::new(0_u64)));
    Box::new(move |_| Box::new(move || *lock.lock() += 1))
}

fn sharded_lock(_threads: usize) -> Shared {
    let lock = leak(ShardedLock::new(0_u64));
    Box::new(move |_| {
        Box::new(move || {
            black_box(&*lock.read().expect(FREE));
        })
    })
}

fn crossbeam_epoch_pin(_threads: usize) -> Shared {
    Box::new(move |_| {
        Box::new(move || {
            black_box(&crossbeam_epoch::pin());
        })
    })
}
