//! Policies: ours and those of other caches, and of the literature where none is at hand.

use bufcache::Eviction;
use rustc_hash::FxBuildHasher;
use testkit::replacement::{arc, lru, opt, s3_fifo};

use super::bufcache_replay;
use crate::ours::OPEN;

/// Hits among the keys, with room for so many.
pub(crate) type Hits = fn(&[u32], usize) -> u64;

/// The name of the policy that the targets are about, and the names of its peers. OPT knows the future.
pub(crate) const OURS: &str = "bufcache";
pub(crate) const OPT: &str = "OPT";
pub(crate) const QUICK_CACHE: &str = "quick_cache";
pub(crate) const LRU: &str = "LRU";

pub(crate) const POLICIES: &[(&str, Hits)] = &[
    (OURS, |keys, room| bufcache(keys, room, Eviction::default())),
    ("A2", |keys, room| bufcache(keys, room, Eviction::A2)),
    ("clock", |keys, room| bufcache(keys, room, Eviction::Clock)),
    (LRU, lru),
    (QUICK_CACHE, quick_cache),
    ("moka", moka),
    ("S3-FIFO", s3_fifo),
    #[cfg(feature = "foyer")]
    ("foyer", foyer),
    ("ARC", arc),
    (OPT, opt),
];

/// The cache itself, with its smallest blocks.
fn bufcache(keys: &[u32], room: usize, eviction: Eviction) -> u64 {
    bufcache_replay::hits(keys, room, eviction).expect(OPEN)
}

/// Counts the keys that are there. What is not there is inserted.
fn replay(keys: &[u32], mut has: impl FnMut(u32) -> bool) -> u64 {
    keys.iter().filter(|key| has(**key)).count() as u64
}

/// A cache of one part, which is best for its hits.
fn quick_cache(keys: &[u32], room: usize) -> u64 {
    let mut cache = quick_cache::unsync::Cache::<u32, ()>::new(room);
    replay(keys, |key| {
        let hit = cache.get(&key).is_some();
        if !hit {
            cache.insert(key, ());
        }
        hit
    })
}

/// W-TinyLFU. It evicts after each insert here, not when it finds the time.
fn moka(keys: &[u32], room: usize) -> u64 {
    let builder = moka::sync::Cache::<u32, ()>::builder().max_capacity(room as u64);
    let cache = builder.build_with_hasher(FxBuildHasher);
    replay(keys, |key| {
        let hit = cache.get(&key).is_some();
        if !hit {
            cache.insert(key, ());
            cache.run_pending_tasks();
        }
        hit
    })
}

/// foyer's S3-FIFO, in one part.
#[cfg(feature = "foyer")]
fn foyer(keys: &[u32], room: usize) -> u64 {
    let builder = foyer_memory::CacheBuilder::new(room).with_shards(1);
    let builder = builder.with_hash_builder(FxBuildHasher);
    let config = foyer_memory::S3FifoConfig::default();
    let cache = builder.with_eviction_config(config).build::<foyer_memory::CacheProperties>();
    replay(keys, |key| {
        let hit = cache.get(&key).is_some();
        if !hit {
            cache.insert(key, ());
        }
        hit
    })
}
