//! What needs a lock: an arena with generations under two locks, and the list that everyone writes
//! first.

use std::collections::LinkedList;

use parking_lot::{Mutex, RwLock};
use thunderdome::{Arena, Index};

use crate::map::{Change, Map, Pack, Walk, unguarded};
use crate::peers::fill;

/// An arena under a lock: what it is called, and how the lock is taken to read and to write.
macro_rules! arena {
    ($(#[$meta:meta])* $arena:ident, $name:literal, $lock:ident, $read:ident, $write:ident) => {
        $(#[$meta])*
        pub(crate) struct $arena<V>($lock<Arena<V>>);

        impl<V: Send + Sync> Map<V> for $arena<V> {
            const NAME: &'static str = $name;
            type Key = Index;
            unguarded!();

            fn filled(n: usize, value: impl Fn(u64) -> V) -> (Self, Vec<Index>) {
                fill(Self($lock::new(Arena::with_capacity(n))), n, value)
            }

            #[inline(always)]
            fn read<R>(&self, _: &(), key: Index, f: impl FnOnce(&V) -> R) -> Option<R> {
                self.0.$read().get(key).map(f)
            }
        }

        impl<V: Send + Sync> Change<V> for $arena<V> {
            fn insert(&self, _: u64, value: V) -> Index {
                self.0.$write().insert(value)
            }

            fn remove(&self, key: Index) -> bool {
                let removed = self.0.$write().remove(key);
                removed.is_some()
            }
        }

        impl<V: Send + Sync> Walk<V> for $arena<V> {
            fn each(&self, mut f: impl FnMut(&V)) {
                self.0.$read().iter().for_each(|(_, value)| f(value));
            }
        }
    };
}

arena! {
    /// An arena under a reader-writer lock.
    RwArena, "RwLock<Arena>", RwLock, read, write
}

arena! {
    /// An arena under a mutex.
    MutexArena, "Mutex<Arena>", Mutex, lock, lock
}

impl Pack for Index {
    #[inline]
    fn pack(self) -> u64 {
        self.to_bits()
    }

    #[inline]
    fn unpack(bits: u64) -> Self {
        Self::from_bits(bits).expect("a packed key")
    }
}

/// A doubly linked list under a mutex: the most obvious registry.
pub(crate) struct MutexList<V>(Mutex<LinkedList<(u64, V)>>);

impl<V: Send + Sync> Map<V> for MutexList<V> {
    const NAME: &'static str = "Mutex<LinkedList>";
    type Key = u64;
    unguarded!();

    fn filled(n: usize, value: impl Fn(u64) -> V) -> (Self, Vec<Self::Key>) {
        let list = (0..n as u64).map(|n| (n, value(n))).collect();
        (Self(Mutex::new(list)), (0..n as u64).collect())
    }

    #[inline(always)]
    fn read<R>(&self, _: &(), key: u64, f: impl FnOnce(&V) -> R) -> Option<R> {
        let list = self.0.lock();
        list.iter().find(|(found, _)| *found == key).map(|(_, value)| f(value))
    }
}
