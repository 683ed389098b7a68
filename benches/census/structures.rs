//! The structures of the census: the name of each, its operation, and the target that it decides.

use std::collections::BinaryHeap;
use std::hint::black_box;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crossbeam_utils::CachePadded;
use offlock_percpu::{PerCpuCounter, PercpuRef, rcu};
use parking_lot::Mutex;
use percpu_list::PerCpuList;
use radix_ctx::{CtxTable, Id};

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
    ours("counter", "PerCpuCounter::add", "P9.counter", counter),
    peer("shared-counter", "fetch_add on one word", shared_counter),
    ours("reference", "PercpuRef get + put", "P9.ref", reference),
    peer("arc", "Arc clone + drop", arc),
    ours("pin", "rcu::pin + unpin", "P9.pin", pin),
    peer("crossbeam-epoch", "crossbeam_epoch::pin + unpin", crossbeam_epoch_pin),
    ours("radix-lookup", "CtxTable::get under a guard", "R11.lookup", radix_lookup),
    peer("radix-papaya", "papaya get under a guard", radix_papaya),
    ours("radix-get-ref", "CtxTable::get_ref + drop", "R11.get_ref", radix_get_ref),
    ours("list", "PerCpuList insert + drop", "L7.add_remove", list),
    ours("mq-bitmap", "Queue send + receive, empty", "M11.send_receive", mq_bitmap),
    peer("mq-heap", "parking_lot BinaryHeap push + pop, empty", mq_heap),
    peer("mq-crossbeam", "crossbeam-channel send + receive, empty", mq_crossbeam),
    ours("buf-hot", "Cache hit, one block for all", "B10.hot_hit", buf_hot),
    peer("buf-quick-hot", "quick_cache hit, one key for all", buf_quick_hot),
];

type Make = fn(usize) -> Shared;

const fn ours(
    name: &'static str,
    operation: &'static str,
    target: &'static str,
    make: Make,
) -> Structure {
    Structure { name, operation, target: Some(target), make }
}

const fn peer(name: &'static str, operation: &'static str, make: Make) -> Structure {
    Structure { name, operation, target: None, make }
}

/// The structure called `name`.
pub(crate) fn find(name: &str) -> Option<&'static Structure> {
    STRUCTURES.iter().find(|structure| structure.name == name)
}

fn leak<T>(value: T) -> &'static T {
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

fn list(_threads: usize) -> Shared {
    let list = leak(PerCpuList::new());
    Box::new(move |_| {
        Box::new(move || drop(black_box(list.insert(1_u64).expect("memory for an entry"))))
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

/// The bytes of a block, which all threads read.
const BLOCK: usize = 4096;
/// The message of `expect`: every block can be read.
const CACHED: &str = "there is memory, and the device is in memory";

fn buf_hot(_threads: usize) -> Shared {
    let cache = bufcache::Cache::new(64 * BLOCK).expect(CACHED);
    let device = bufcache::MemoryDevice::new(vec![1; BLOCK]);
    let disk = leak(cache.attach(device).expect(CACHED));
    // Often enough for the policy, which counts to three.
    (0..4).for_each(|_| drop(disk.get(0).expect(CACHED)));
    Box::new(move |_| {
        Box::new(move || {
            black_box(disk.get(0).expect(CACHED)[0]);
        })
    })
}

fn buf_quick_hot(_threads: usize) -> Shared {
    let cache = leak(quick_cache::sync::Cache::<u64, Arc<[u8; BLOCK]>>::new(256));
    cache.insert(0, Arc::new([1; BLOCK]));
    Box::new(move |_| {
        Box::new(move || {
            black_box(cache.get(&0).expect("room for it")[0]);
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
