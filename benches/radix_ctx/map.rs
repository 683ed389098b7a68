//! The interface of every implementation, and the loops that all of them run.
//!
//! A map is filled with entries 0 to `n` and says under which key each can be found: a hash map is
//! told its keys (dense, from 0), a table hands out its own. Loops run over keys, so that they are
//! the same for all.

use std::hint::black_box;
use std::sync::Arc;

use harness::{Case, Random};

/// The context of most rows: 56 bytes.
pub(crate) type Value = [u64; 7];

/// The context of entry `n`.
pub(crate) fn value(n: u64) -> Value {
    [n; 7]
}

/// An implementation with values `V`. Static dispatch throughout.
pub(crate) trait Map<V>: Send + Sync + Sized + 'static {
    /// The name in the tables.
    const NAME: &'static str;
    /// The key by which a program finds a value again.
    type Key: Copy + Send + Sync + 'static;
    /// The guard that a read needs.
    type Guard<'g>
    where
        Self: 'g;

    /// A map with the values of 0 to `n`, and their keys in that order. Peers are told `n` where
    /// they like to know it before.
    fn filled(n: usize, value: impl Fn(u64) -> V) -> (Self, Vec<Self::Key>);

    /// Makes a guard.
    fn enter(&self) -> Self::Guard<'_>;

    /// Returns the result of `f` on the value under `key`.
    fn read<R>(
        &self,
        guard: &Self::Guard<'_>,
        key: Self::Key,
        f: impl FnOnce(&V) -> R,
    ) -> Option<R>;
}

/// A map that changes while others read it.
pub(crate) trait Change<V>: Map<V, Key: Pack> {
    /// Inserts the value of entry `n`, which is not in the map; the key it has now.
    fn insert(&self, n: u64, value: V) -> Self::Key;

    /// Removes the value under `key`; whether there was one.
    fn remove(&self, key: Self::Key) -> bool;
}

/// A key that can be a number, to be handed to another thread.
pub(crate) trait Pack {
    fn pack(self) -> u64;

    /// The key that was packed.
    fn unpack(bits: u64) -> Self;
}

impl Pack for u64 {
    #[inline]
    fn pack(self) -> u64 {
        self
    }

    #[inline]
    fn unpack(bits: u64) -> Self {
        bits
    }
}

/// The items of a `Map` whose reads need no guard.
macro_rules! unguarded {
    () => {
        type Guard<'g>
            = ()
        where
            Self: 'g;

        fn enter(&self) {}
    };
}
pub(crate) use unguarded;

/// A map that can be walked while others read it.
pub(crate) trait Walk<V>: Map<V> {
    /// Calls `f` with every value.
    fn each(&self, f: impl FnMut(&V));
}

/// The least number of lookups before the order repeats, for a small map. No branch predictor learns so many.
const LEAST: usize = 1 << 14;

/// The order of lookups among `n` entries, a power of two long: each once in random order where
/// there are many, and otherwise picks.
pub(crate) fn order(n: usize) -> Vec<u32> {
    let mut random = Random::new(n as u64);
    if n >= LEAST {
        assert!(n.is_power_of_two());
        random.permutation(n)
    } else {
        (0..LEAST).map(|_| random.below(n) as u32).collect()
    }
}

/// A map, and its keys in the order of the lookups.
pub(crate) struct Filled<M: Map<V>, V = Value> {
    pub(crate) map: M,
    pub(crate) keys: Vec<M::Key>,
    /// The keys in the order of the entries.
    pub(crate) ascending: Vec<M::Key>,
}

impl<V, M: Map<V>> Filled<M, V> {
    pub(crate) fn with(n: usize, order: &[u32], value: impl Fn(u64) -> V) -> Self {
        let (map, ascending) = M::filled(n, value);
        let keys = order.iter().map(|at| ascending[*at as usize]).collect();
        Self { map, keys, ascending }
    }
}

impl<M: Map<Value>> Filled<M> {
    pub(crate) fn new(n: usize, order: &[u32]) -> Self {
        Self::with(n, order, value)
    }

    /// Looks `ops` keys up, from the `at`-th on, each under a guard of its own.
    #[inline]
    pub(crate) fn lookups(&self, keys: &[M::Key], at: usize, ops: u64) {
        let mut sum = 0_u64;
        for i in 0..ops as usize {
            let key = keys[(at + i) & (keys.len() - 1)];
            let found = self.map.read(&self.map.enter(), key, |value| value[0]);
            sum = sum.wrapping_add(found.expect("it is there"));
        }
        black_box(sum);
    }

    /// Lookups with a guard each: the row `NAME/threads`.
    pub(crate) fn case(self: &Arc<Self>, threads: usize) -> Case<'static> {
        let this = Arc::clone(self);
        Case::batched(M::NAME, threads, move |thread| {
            let this = Arc::clone(&this);
            let mut at = thread * this.keys.len() / threads.max(2);
            move |ops| {
                this.lookups(&this.keys, at, ops);
                at += ops as usize;
            }
        })
    }
}
