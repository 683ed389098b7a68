//! The list of `percpu-list`, and its peers: a doubly linked list, a slab, and linked lists in shards, each
//! under a mutex; and sharded-slab and dashmap, at the versions of `benches/Cargo.toml`.
//!
//! Mutexes are parking_lot's, each on a line of its own.

use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::thread;

use crossbeam_utils::CachePadded;
use dashmap::DashMap;
use intrusive_collections::{LinkedList, LinkedListLink, UnsafeRef, intrusive_adapter};
use parking_lot::Mutex;
use percpu_list::{Entry, PerCpuList};
use rustc_hash::FxBuildHasher;
use slab::Slab;

use crate::registry::{Registry, Walk};

/// The message of `expect`: no call is refused.
const FREE: &str = "there is memory, and no thread walks";

/// The list that owns what is on it: an object is a number here, and made anew by each addition.
pub(crate) struct Owning(pub(crate) PerCpuList<u64>);

impl Registry for Owning {
    const NAME: &'static str = "PerCpuList";
    type Object = u64;
    type Ticket = Entry<u64>;

    fn new() -> Self {
        Self(PerCpuList::new())
    }

    #[inline(always)]
    fn add(&self, number: &u64) -> Entry<u64> {
        self.0.insert(*number).expect(FREE)
    }

    #[inline(always)]
    fn remove(&self, _: &u64, ticket: Entry<u64>) -> bool {
        ticket.remove().expect(FREE)
    }
}

impl Walk for Owning {
    fn each(&self, mut f: impl FnMut(u64)) {
        self.0.lock_all().expect(FREE).for_each(|number| f(*number));
    }
}

/// The node of a linked list.
#[repr(align(64))]
pub(crate) struct Node {
    number: u64,
    link: LinkedListLink,
}

// SAFETY: the link is used under its list's mutex only; the number does not change.
unsafe impl Sync for Node {}

intrusive_adapter!(NodeAdapter = UnsafeRef<Node>: Node { link => LinkedListLink });

type Nodes = LinkedList<NodeAdapter>;

impl From<u64> for Box<Node> {
    fn from(number: u64) -> Self {
        Self::new(Node { number, link: LinkedListLink::new() })
    }
}

#[inline(always)]
fn push(nodes: &mut Nodes, node: &Node) {
    // SAFETY: the thread that adds a node removes it before it frees it; the node does not move until
    // then.
    nodes.push_back(unsafe { UnsafeRef::from_raw(node) });
}

#[inline(always)]
fn unlink(nodes: &mut Nodes, node: &Node) -> bool {
    if !node.link.is_linked() {
        return false;
    }
    // SAFETY: linked, and nodes are on one list only: that of their registry, or their shard of it.
    unsafe { nodes.cursor_mut_from_ptr(node) }.remove().is_some()
}

/// A doubly linked list under one mutex.
pub(crate) struct MutexList(CachePadded<Mutex<Nodes>>);

// SAFETY: the list is reached under the mutex only; its nodes are `Sync`.
unsafe impl Sync for MutexList {}

impl Registry for MutexList {
    const NAME: &'static str = "Mutex<linked list>";
    type Object = Box<Node>;
    type Ticket = ();

    fn new() -> Self {
        Self(CachePadded::new(Mutex::new(LinkedList::new(NodeAdapter::new()))))
    }

    #[inline(always)]
    fn add(&self, object: &Box<Node>) {
        push(&mut self.0.lock(), object);
    }

    #[inline(always)]
    fn remove(&self, object: &Box<Node>, (): ()) -> bool {
        unlink(&mut self.0.lock(), object)
    }
}

/// Linked lists in shards, as tokio keeps its tasks: a power of two of them, four times the CPUs;
/// the object's number says which; two counters for all.
pub(crate) struct ShardedList {
    shards: Box<[CachePadded<Mutex<Nodes>>]>,
    added: AtomicU64,
    count: AtomicUsize,
}

// SAFETY: as for `MutexList`, by the shards' mutexes.
unsafe impl Sync for ShardedList {}

impl ShardedList {
    #[inline(always)]
    fn shard(&self, node: &Node) -> &Mutex<Nodes> {
        &self.shards[node.number as usize & (self.shards.len() - 1)]
    }
}

impl Registry for ShardedList {
    const NAME: &'static str = "sharded list";
    type Object = Box<Node>;
    type Ticket = ();

    fn new() -> Self {
        let cpus = thread::available_parallelism().map_or(1, usize::from);
        let shards = (0..4 * cpus.next_power_of_two())
            .map(|_| CachePadded::new(Mutex::new(LinkedList::new(NodeAdapter::new()))));
        Self { shards: shards.collect(), added: AtomicU64::new(0), count: AtomicUsize::new(0) }
    }

    #[inline(always)]
    fn add(&self, object: &Box<Node>) {
        let mut shard = self.shard(object).lock();
        push(&mut shard, object);
        // Ordering: Relaxed, both; statistics counters, they publish nothing.
        self.added.fetch_add(1, Ordering::Relaxed);
        self.count.fetch_add(1, Ordering::Relaxed);
    }

    #[inline(always)]
    fn remove(&self, object: &Box<Node>, (): ()) -> bool {
        let mut shard = self.shard(object).lock();
        let removed = unlink(&mut shard, object);
        if removed {
            // Ordering: as above.
            self.count.fetch_sub(1, Ordering::Relaxed);
        }
        removed
    }
}

/// The object whose address a slab stores.
#[repr(align(64))]
pub(crate) struct Plain {
    number: u64,
}

/// The address of an object that is in a registry, so it is alive.
#[derive(Clone, Copy)]
struct Address(NonNull<Plain>);

// SAFETY: objects do not change while they are in a registry.
unsafe impl Send for Address {}
// SAFETY: as above.
unsafe impl Sync for Address {}

impl Address {
    fn of(object: &Plain) -> Self {
        Self(NonNull::from(object))
    }

    fn number(self) -> u64 {
        // SAFETY: the thread that adds an object removes it before it frees it.
        unsafe { self.0.as_ref() }.number
    }
}

impl From<u64> for Box<Plain> {
    fn from(number: u64) -> Self {
        Self::new(Plain { number })
    }
}

/// A slab of addresses under one mutex.
pub(crate) struct MutexSlab(CachePadded<Mutex<Slab<Address>>>);

impl Registry for MutexSlab {
    const NAME: &'static str = "Mutex<Slab>";
    type Object = Box<Plain>;
    type Ticket = usize;

    fn new() -> Self {
        Self(CachePadded::new(Mutex::new(Slab::new())))
    }

    #[inline(always)]
    fn add(&self, object: &Box<Plain>) -> usize {
        self.0.lock().insert(Address::of(object))
    }

    #[inline(always)]
    fn remove(&self, _: &Box<Plain>, key: usize) -> bool {
        self.0.lock().try_remove(key).is_some()
    }
}

impl Walk for MutexSlab {
    fn each(&self, mut f: impl FnMut(u64)) {
        self.0.lock().iter().for_each(|(_, address)| f(address.number()));
    }
}

/// sharded-slab: a slab for each thread, whose keys go anywhere.
pub(crate) struct ShardedSlab(sharded_slab::Slab<Address>);

impl Registry for ShardedSlab {
    const NAME: &'static str = "sharded-slab";
    type Object = Box<Plain>;
    type Ticket = usize;

    fn new() -> Self {
        Self(sharded_slab::Slab::new())
    }

    #[inline(always)]
    fn add(&self, object: &Box<Plain>) -> usize {
        self.0.insert(Address::of(object)).expect("far below its limit")
    }

    #[inline(always)]
    fn remove(&self, _: &Box<Plain>, key: usize) -> bool {
        self.0.remove(key)
    }
}

/// dashmap: hash maps under a lock each, by the object's number; hashed by Fx, the fastest for
/// numbers. An object comes back under the number that it had, as open files do.
pub(crate) struct Dash(DashMap<u64, u64, FxBuildHasher>);

impl Registry for Dash {
    const NAME: &'static str = "dashmap";
    type Object = u64;
    type Ticket = ();

    fn new() -> Self {
        Self(DashMap::with_hasher(FxBuildHasher))
    }

    #[inline(always)]
    fn add(&self, number: &u64) {
        self.0.insert(*number, *number);
    }

    #[inline(always)]
    fn remove(&self, number: &u64, (): ()) -> bool {
        self.0.remove(number).is_some()
    }
}
