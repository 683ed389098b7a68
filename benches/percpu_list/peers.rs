//! The peers that many threads share without a lock of ours around them, at the versions of
//! `benches/Cargo.toml`.

use dashmap::DashMap;
use rustc_hash::FxBuildHasher;

use crate::locked::{Address, Plain, plain};
use crate::registry::Registry;

/// sharded-slab: a slab for each thread, whose keys go anywhere.
pub(crate) struct ShardedSlab(sharded_slab::Slab<Address>);

impl Registry for ShardedSlab {
    const NAME: &'static str = "sharded-slab";
    type Object = Box<Plain>;
    type Ticket<'a> = usize;

    fn new() -> Self {
        Self(sharded_slab::Slab::new())
    }

    fn object(&self, number: u64) -> Box<Plain> {
        plain(number)
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
    type Ticket<'a> = ();

    fn new() -> Self {
        Self(DashMap::with_hasher(FxBuildHasher))
    }

    fn object(&self, number: u64) -> u64 {
        number
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
