//! The structures of the census: the name of each, its operation, and the target that it decides.

use std::collections::BinaryHeap;
use std::hint::black_box;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use aio_reap::Engine;
use aio_reap_test::Build;
use aio_reap_test::sim::{Script, SubmitStep};
use crossbeam_utils::CachePadded;
use intrusive_collections::{LinkedList, LinkedListLink, intrusive_adapter};
use offlock_percpu::{PerCpuCounter, PercpuRef, rcu};
use parking_lot::Mutex;
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
    /// The operation that is counted.
    pub(crate) operation: &'static str,
    /// The id in the section `[census]` of `targets.toml`; the worst of those that share one counts.
    pub(crate) target: Option<&'static str>,
    /// Makes the structure for that many threads. What the threads share is leaked: the program
    /// ends with the count.
    pub(crate) make: Make,
}

/// By crate: ours, then what a program uses instead.
#[rustfmt::skip]
pub(crate) const STRUCTURES: &[Structure] = &[
    ours("counter", "PerCpuCounter::add", Some("P9.counter"), counter),
    peer("shared-counter", "fetch_add on one word", shared_counter),
    ours("reference", "PercpuRef get + put", Some("P9.ref"), reference),
    peer("arc", "Arc clone + drop", arc),
    ours("pin", "rcu::pin + unpin", Some("P9.pin"), pin),
    peer("crossbeam-epoch", "crossbeam_epoch::pin + unpin", crossbeam_epoch_pin),
    ours("radix-lookup", "CtxTable::get under a guard", Some("R11.lookup"), radix_lookup),
    peer("radix-papaya", "papaya get under a guard", radix_papaya),
    ours("radix-get-ref", "CtxTable::get_ref + drop", Some("R11.get_ref"), radix_get_ref),
    ours("radix-insert", "CtxTable::insert + remove", None, radix_insert),
    ours("list", "PerCpuList insert + drop", Some("L7.add_remove"), list),
    peer("list-mutex", "one linked list, one lock: add + remove", list_mutex),
    ours("mq-bitmap", "Queue send + receive, empty", Some("M11.send_receive"), mq_bitmap),
    peer("mq-heap", "parking_lot BinaryHeap push + pop, empty", mq_heap),
    peer("mq-crossbeam", "crossbeam-channel send + receive, empty", mq_crossbeam),
    ours("buf-hot", "Cache hit, one block for all", Some("B10.hot_hit"), buf_hot),
    peer("buf-quick-hot", "quick_cache hit, one key for all", buf_quick_hot),
    ours("buf-random", "Cache hit, 64 blocks", None, buf_random),
    ours("aio-engine", "request and reap, an engine per thread", None, aio_engine),
    ours("served-hit", "offlock-nbd's READ of a cached block", None, served::crates),
    peer("served-hit-maps", "the same by dashmap, quick_cache, atomics", served::concurrent_maps),
];

type Make = fn(usize) -> Shared;

const fn ours(
    name: &'static str,
    operation: &'static str,
    target: Option<&'static str>,
    make: Make,
) -> Structure {
    Structure { name, operation, target, make }
}

const fn peer(name: &'static str, operation: &'static str, make: Make) -> Structure {
    Structure { name, operation, target: None, make }
}

/// The structure called `name`.
pub(crate) fn find(name: &str) -> Option<&'static Structure> {
    STRUCTURES.iter().find(|structure| structure.name == name)
}

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

/// The node of the single-lock list.
#[repr(align(128))]
struct Node(LinkedListLink);

intrusive_adapter!(NodeAdapter = Box<Node>: Node { 0 => LinkedListLink });

/// The list under its lock.
type Locked = CachePadded<Mutex<LinkedList<NodeAdapter>>>;

/// Two operations, each under the lock. Every thread takes off the entry that it has just added, or, if
/// another thread has done so meanwhile, the entry of that thread: it moves as many lines.
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

/// The message of `expect`: no call is refused.
const ROOM: &str = "fewer threads than messages that fit, and memory";
const SENT: &str = "each thread sends before it receives";

/// A queue that each thread sends a message to, and receives one from: its own, or another's.
fn mq_bitmap(_threads: usize) -> Shared {
    let queue: &'static mq_rbtree::Queue<u64> =
        leak(mq_rbtree::Queue::new(MESSAGES).expect("memory for a queue"));
    Box::new(move |_| {
        Box::new(move || {
            queue.try_send(1, 5).expect(ROOM);
            black_box(queue.try_receive().expect(SENT));
        })
    })
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

/// Makes a device of this many blocks, all of them cached.
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

/// The message of `expect`: every block can be read.
pub(crate) const CACHED: &str = "there is memory, and the device is in memory";

fn buf_hot(_threads: usize) -> Shared {
    bufcache_hits(1)
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

/// The message of `expect`: no request fails.
const ENGINE: &str = "memory, a descriptor, and a free slot";

fn shared_counter(_threads: usize) -> Shared {
    let counter = leak(CachePadded::new(AtomicU64::new(0)));
    Box::new(move |_| {
        Box::new(move || {
            // Ordering: Relaxed; a counter, it publishes nothing.
            counter.fetch_add(1, Ordering::Relaxed);
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

fn crossbeam_epoch_pin(_threads: usize) -> Shared {
    Box::new(move |_| {
        Box::new(move || {
            black_box(&crossbeam_epoch::pin());
        })
    })
}
