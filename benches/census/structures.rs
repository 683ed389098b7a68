//! The structures of the census: the name of each, its operation, and the target that it decides.

use std::hint::black_box;
use std::sync::Arc;

use offlock_percpu::{PerCpuCounter, PercpuRef, rcu};
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
    /// Makes the structure. What the threads share is leaked: the program ends with the count.
    #[cfg_attr(not(offlock_virtual_cpu), expect(dead_code, reason = "used where QEMU runs it"))]
    pub(crate) make: fn() -> Shared,
}

/// By crate: ours, and what a program uses instead.
#[rustfmt::skip]
pub(crate) const STRUCTURES: &[Structure] = &[
    row("counter", "PerCpuCounter::add", Some("P9.counter"), counter),
    row("reference", "PercpuRef get + put", Some("P9.ref"), reference),
    row("arc", "Arc clone + drop", None, arc),
    row("pin", "rcu::pin + unpin", Some("P9.pin"), || each(move || _ = black_box(&rcu::pin()))),
    row("radix-lookup", "CtxTable::get under a guard", Some("R11.lookup"), radix_lookup),
    row("radix-get-ref", "CtxTable::get_ref + drop", Some("R11.get_ref"), radix_get_ref),
    row("list", "PerCpuList insert + drop", Some("L7.add_remove"), list),
    row("mq-bitmap", "Queue send + receive, empty", Some("M11.send_receive"), mq_bitmap),
    row("buf-hot", "Cache hit, one block for all", Some("B10.hot_hit"), buf_hot),
    row("buf-quick-hot", "quick_cache hit, one key for all", None, buf_quick_hot),
];

const fn row(
    name: &'static str,
    operation: &'static str,
    target: Option<&'static str>,
    make: fn() -> Shared,
) -> Structure {
    Structure { name, operation, target, make }
}

/// The structure called `name`.
#[cfg(offlock_virtual_cpu)]
pub(crate) fn find(name: &str) -> Option<&'static Structure> {
    STRUCTURES.iter().find(|structure| structure.name == name)
}

fn leak<T>(value: T) -> &'static T {
    Box::leak(Box::new(value))
}

/// The same operation for each thread.
fn each(operation: impl Fn() + Copy + Sync + 'static) -> Shared {
    Box::new(move |_| Box::new(operation))
}

fn counter() -> Shared {
    let counter = leak(PerCpuCounter::new());
    each(move || counter.add(1))
}

fn reference() -> Shared {
    let refs = leak(PercpuRef::new(|| {}));
    each(move || _ = black_box(&refs.try_get()))
}

fn arc() -> Shared {
    let arc = leak(Arc::new(0_u64));
    each(move || _ = black_box(&Arc::clone(arc)))
}

/// Contexts of the table; every thread looks all of them up.
const CONTEXTS: u64 = 512;

/// Gives each thread all ids of a table in turn, beginning with another one.
fn lookups(one: impl Fn(&'static CtxTable<[u64; 7]>, Id) + Copy + Sync + 'static) -> Shared {
    let table = leak(CtxTable::new());
    let insert = |n| table.insert([n; 7]).expect("memory for a context, and no limit");
    let ids = leak((0..CONTEXTS).map(insert).collect::<Vec<Id>>());
    Box::new(move |thread| {
        let mut at = thread * 37;
        Box::new(move || {
            at += 67; // no neighbour, and all of them before the first again
            one(table, ids[at % ids.len()]);
        })
    })
}

fn radix_lookup() -> Shared {
    lookups(|table, id| _ = black_box(table.get(id, &rcu::pin()).expect("it is there")[0]))
}

fn radix_get_ref() -> Shared {
    lookups(|table, id| _ = black_box(&table.get_ref(id).expect("it is there")[0]))
}

fn list() -> Shared {
    let list = leak(PerCpuList::new());
    each(move || drop(black_box(list.insert(1_u64).expect("memory for an entry"))))
}

/// A queue that each thread sends a message to, and receives one from: its own, or another's. It has room for
/// more messages than there are threads, so that no thread waits.
fn mq_bitmap() -> Shared {
    let queue: &'static mq_rbtree::Queue<u64> =
        leak(mq_rbtree::Queue::new(1024).expect("memory for a queue"));
    each(move || {
        queue.try_send(1, 5).expect("fewer threads than messages that fit, and memory");
        black_box(queue.try_receive().expect("each thread sends before it receives"));
    })
}

/// The bytes of a block, which all threads read.
const BLOCK: usize = 4096;
/// The message of `expect`: every block can be read.
const CACHED: &str = "there is memory, and the device is in memory";

fn buf_hot() -> Shared {
    let cache = bufcache::Cache::new(64 * BLOCK).expect(CACHED);
    let device = bufcache::MemoryDevice::new(vec![1; BLOCK]);
    let disk = leak(cache.attach(device).expect(CACHED));
    // Often enough for the policy, which counts to three.
    (0..4).for_each(|_| drop(disk.get(0).expect(CACHED)));
    each(move || _ = black_box(disk.get(0).expect(CACHED)[0]))
}

fn buf_quick_hot() -> Shared {
    let cache = leak(quick_cache::sync::Cache::<u64, Arc<[u8; BLOCK]>>::new(256));
    cache.insert(0, Arc::new([1; BLOCK]));
    each(move || _ = black_box(cache.get(&0).expect("room for it")[0]))
}
