//! What needs a lock: an arena with generations under two locks, and the list that everyone writes
//! first.

use std::collections::LinkedList;

use parking_lot::{Mutex, RwLock};
use thunderdome::{Arena, Index};

use crate::map::{Change, Map, Walk};
use crate::peers::fill;

/// An arena under a reader-writer lock.
pub(crate) struct RwArena<V>(RwLock<Arena<V>>);

impl<V: Send + Sync> Map<V> for RwArena<V> {
    const NAME: &'static str = "RwLock<Arena>";
    type Key = Index;
    type Guard<'g>
        = ()
    where
        Self: 'g;

    fn filled(n: usize, value: impl Fn(u64) -> V) -> (Self, Vec<Self::Key>) {
        fill(Self(RwLock::new(Arena::with_capacity(n))), n, value)
    }

    fn enter(&self) {}

    #[inline(always)]
    fn read<R>(&self, _: &(), key: Index, f: impl FnOnce(&V) -> R) -> Option<R> {
        self.0.read().get(key).map(f)
    }
}

impl<V: Send + Sync> Change<V> for RwArena<V> {
    fn insert(&self, _: u64, value: V) -> Index {
        self.0.write().insert(value)
    }

    fn remove(&self, key: Index) -> bool {
        let removed = self.0.write().remove(key);
        removed.is_some()
    }

    fn pack(key: Index) -> u64 {
        key.to_bits()
    }

    fn unpack(bits: u64) -> Index {
        Index::from_bits(bits).expect("a packed key")
    }
}

impl<V: Send + Sync> Walk<V> for RwArena<V> {
    fn each(&self, mut f: impl FnMut(&V)) {
        self.0.read().iter().for_each(|(_, value)| f(value));
    }
}

/// An arena under a mutex.
pub(crate) struct MutexArena<V>(Mutex<Arena<V>>);

impl<V: Send + Sync> Map<V> for MutexArena<V> {
    const NAME: &'static str = "Mutex<Arena>";
    type Key = Index;
    type Guard<'g>
        = ()
    where
        Self: 'g;

    fn filled(n: usize, value: impl Fn(u64) -> V) -> (Self, Vec<Self::Key>) {
        fill(Self(Mutex::new(Arena::with_capacity(n))), n, value)
    }

    fn enter(&self) {}

    #[inline(always)]
    fn read<R>(&self, _: &(), key: Index, f: impl FnOnce(&V) -> R) -> Option<R> {
        self.0.lock().get(key).map(f)
    }
}

impl<V: Send + Sync> Change<V> for MutexArena<V> {
    fn insert(&self, _: u64, value: V) -> Index {
        self.0.lock().insert(value)
    }

    fn remove(&self, key: Index) -> bool {
        let removed = self.0.lock().remove(key);
        removed.is_some()
    }

    fn pack(key: Index) -> u64 {
        key.to_bits()
    }

    fn unpack(bits: u64) -> Index {
        Index::from_bits(bits).expect("a packed key")
    }
}

impl<V: Send + Sync> Walk<V> for MutexArena<V> {
    fn each(&self, mut f: impl FnMut(&V)) {
        self.0.lock().iter().for_each(|(_, value)| f(value));
    }
}

/// A doubly linked list under a mutex: the most obvious registry.
pub(crate) struct MutexList<V>(Mutex<LinkedList<(u64, V)>>);

impl<V: Send + Sync> Map<V> for MutexList<V> {
    const NAME: &'static str = "Mutex<LinkedList>";
    type Key = u64;
    type Guard<'g>
        = ()
    where
        Self: 'g;

    fn filled(n: usize, value: impl Fn(u64) -> V) -> (Self, Vec<Self::Key>) {
        let list = (0..n as u64).map(|n| (n, value(n))).collect();
        (Self(Mutex::new(list)), (0..n as u64).collect())
    }

    fn enter(&self) {}

    #[inline(always)]
    fn read<R>(&self, _: &(), key: u64, f: impl FnOnce(&V) -> R) -> Option<R> {
        let list = self.0.lock();
        list.iter().find(|(found, _)| *found == key).map(|(_, value)| f(value))
    }
}
