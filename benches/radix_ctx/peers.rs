//! The peers that many threads share without a lock of ours around them, at the versions of
//! `benches/Cargo.toml`, and a `Vec` that no thread can change, as the limit.
//!
//! Hash maps are told dense keys from 0, hash them by Fx, the fastest hash for numbers, and know
//! how many entries will come.

use dashmap::DashMap;
use rustc_hash::FxBuildHasher;
use scc::HashIndex;
use sharded_slab::Slab;

use crate::map::{Change, Map, Walk, unguarded};

/// papaya: a lock-free hash map. Blocking resizes are its advice where throughput counts; nothing
/// here resizes in a window.
pub(crate) struct Papaya<V>(papaya::HashMap<u64, V, FxBuildHasher>);

impl<V: Send + Sync + 'static> Map<V> for Papaya<V> {
    const NAME: &'static str = "papaya";
    type Key = u64;
    type Guard<'g>
        = papaya::HashMapRef<'g, u64, V, FxBuildHasher, papaya::LocalGuard<'g>>
    where
        Self: 'g;

    fn filled(n: usize, value: impl Fn(u64) -> V) -> (Self, Vec<Self::Key>) {
        let map = papaya::HashMap::builder()
            .capacity(n)
            .hasher(FxBuildHasher)
            .resize_mode(papaya::ResizeMode::Blocking)
            .build();
        fill(Self(map), n, value)
    }

    #[inline(always)]
    fn enter(&self) -> Self::Guard<'_> {
        self.0.pin()
    }

    #[inline(always)]
    fn read<R>(&self, guard: &Self::Guard<'_>, key: u64, f: impl FnOnce(&V) -> R) -> Option<R> {
        guard.get(&key).map(f)
    }
}

impl<V: Send + Sync + 'static> Change<V> for Papaya<V> {
    fn insert(&self, n: u64, value: V) -> u64 {
        let old = self.0.pin().insert(n, value).is_some();
        assert!(!old, "entry {n} was there");
        n
    }

    fn remove(&self, key: u64) -> bool {
        self.0.pin().remove(&key).is_some()
    }
}

impl<V: Send + Sync + 'static> Walk<V> for Papaya<V> {
    fn each(&self, f: impl FnMut(&V)) {
        self.0.pin().values().for_each(f);
    }
}

/// scc's `HashIndex`: a hash map with lock-free reads.
pub(crate) struct Index<V: 'static>(HashIndex<u64, V, FxBuildHasher>);

impl<V: Send + Sync + 'static> Map<V> for Index<V> {
    const NAME: &'static str = "HashIndex";
    type Key = u64;
    type Guard<'g>
        = scc::Guard
    where
        Self: 'g;

    fn filled(n: usize, value: impl Fn(u64) -> V) -> (Self, Vec<Self::Key>) {
        fill(Self(HashIndex::with_capacity_and_hasher(n, FxBuildHasher)), n, value)
    }

    #[inline(always)]
    fn enter(&self) -> scc::Guard {
        scc::Guard::new()
    }

    #[inline(always)]
    fn read<R>(&self, guard: &scc::Guard, key: u64, f: impl FnOnce(&V) -> R) -> Option<R> {
        self.0.peek(&key, guard).map(f)
    }
}

impl<V: Send + Sync + 'static> Change<V> for Index<V> {
    fn insert(&self, n: u64, value: V) -> u64 {
        assert!(self.0.insert_sync(n, value).is_ok(), "entry {n} was there");
        n
    }

    fn remove(&self, key: u64) -> bool {
        self.0.remove_sync(&key)
    }
}

impl<V: Send + Sync + 'static> Walk<V> for Index<V> {
    fn each(&self, mut f: impl FnMut(&V)) {
        self.0.iter(&scc::Guard::new()).for_each(|(_, value)| f(value));
    }
}

/// dashmap: hash maps under a reader-writer lock each. Its guards are references to values.
pub(crate) struct Dash<V>(DashMap<u64, V, FxBuildHasher>);

impl<V: Send + Sync + 'static> Map<V> for Dash<V> {
    const NAME: &'static str = "dashmap";
    type Key = u64;
    unguarded!();

    fn filled(n: usize, value: impl Fn(u64) -> V) -> (Self, Vec<Self::Key>) {
        fill(Self(DashMap::with_capacity_and_hasher(n, FxBuildHasher)), n, value)
    }

    #[inline(always)]
    fn read<R>(&self, _: &(), key: u64, f: impl FnOnce(&V) -> R) -> Option<R> {
        self.0.get(&key).map(|found| f(&found))
    }
}

impl<V: Send + Sync + 'static> Change<V> for Dash<V> {
    fn insert(&self, n: u64, value: V) -> u64 {
        assert!(self.0.insert(n, value).is_none(), "entry {n} was there");
        n
    }

    fn remove(&self, key: u64) -> bool {
        self.0.remove(&key).is_some()
    }
}

impl<V: Send + Sync + 'static> Walk<V> for Dash<V> {
    fn each(&self, mut f: impl FnMut(&V)) {
        self.0.iter().for_each(|entry| f(entry.value()));
    }
}

/// sharded-slab: allocates keys with generations, as a table does; a read is a counted reference.
pub(crate) struct Sharded<V>(Slab<V>);

impl<V: Send + Sync + 'static> Map<V> for Sharded<V> {
    const NAME: &'static str = "sharded-slab";
    type Key = u64;
    unguarded!();

    fn filled(n: usize, value: impl Fn(u64) -> V) -> (Self, Vec<Self::Key>) {
        fill(Self(Slab::new()), n, value)
    }

    #[inline(always)]
    fn read<R>(&self, _: &(), key: u64, f: impl FnOnce(&V) -> R) -> Option<R> {
        self.0.get(key as usize).map(|found| f(&found))
    }
}

impl<V: Send + Sync + 'static> Change<V> for Sharded<V> {
    fn insert(&self, _: u64, value: V) -> u64 {
        self.0.insert(value).expect("far below its limit") as u64
    }

    fn remove(&self, key: u64) -> bool {
        self.0.remove(key as usize)
    }
}

/// One line each where the value has 56 bytes: it cannot be faster.
#[repr(align(64))]
struct Slot<V> {
    generation: u32,
    value: V,
}

/// `Vec<Slot>`: the bounds and the generation are looked at, and nothing can change.
pub(crate) struct Slots<V>(Vec<Slot<V>>);

impl<V: Send + Sync + 'static> Map<V> for Slots<V> {
    const NAME: &'static str = "Vec<Slot>";
    type Key = u64;
    unguarded!();

    fn filled(n: usize, value: impl Fn(u64) -> V) -> (Self, Vec<Self::Key>) {
        let slots = (0..n as u64).map(|n| Slot { generation: 1, value: value(n) });
        (Self(slots.collect()), (0..n as u64).map(|n| 1 << 32 | n).collect())
    }

    #[inline(always)]
    fn read<R>(&self, _: &(), key: u64, f: impl FnOnce(&V) -> R) -> Option<R> {
        let slot = self.0.get(key as u32 as usize)?;
        (slot.generation == (key >> 32) as u32).then(|| f(&slot.value))
    }
}

impl<V: Send + Sync + 'static> Walk<V> for Slots<V> {
    fn each(&self, f: impl FnMut(&V)) {
        self.0.iter().map(|slot| &slot.value).for_each(f);
    }
}

/// Fills an empty map.
pub(crate) fn fill<V, M>(map: M, n: usize, value: impl Fn(u64) -> V) -> (M, Vec<M::Key>)
where
    M: Change<V>,
{
    let keys = (0..n as u64).map(|n| map.insert(n, value(n))).collect();
    (map, keys)
}
