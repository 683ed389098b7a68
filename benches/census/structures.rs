//! What the census knows: name, what makes the operation, and the target that it decides.

use std::collections::{BinaryHeap, HashMap, VecDeque};
use std::hint::black_box;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use aio_reap::Engine;
use aio_reap_test::Build;
use aio_reap_test::scripted::{Script, SubmitStep};
use crossbeam_utils::CachePadded;
use crossbeam_utils::sync::ShardedLock;
use dashmap::DashMap;
use intrusive_collections::{LinkedList, LinkedListLink, intrusive_adapter};
use mq_rbtree::Levels;
use parking_lot::{Mutex, RwLock};
use percpu::lglock::LgLock;
use percpu::{PerCpuCounter, PercpuRef, rcu};
use percpu_list::{IntrusiveList, Link, PerCpuList, linked};
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
    Structure::ours("counter", "PerCpuCounter::add, batch 256", Some("P9.counter"), counter),
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
    Structure::ours(
        "list-intrusive",
        "IntrusiveList insert + remove",
        Some("L7.add_remove"),
        list_intrusive,
    ),
    Structure::ours("list-owning", "PerCpuList insert + drop", Some("L7.add_remove"), list_owning),
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
    let counter = leak(PerCpuCounter::with_batch(256));
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
