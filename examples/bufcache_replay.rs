//! A trace of block numbers through a cache, for its hits alone. The bench of hits has this file, too.

use std::error::Error;
use std::io;

use bufcache::{BlockDevice, Cache, Eviction};

/// A device whose reads cost nothing and bring nothing.
struct Nothing;

impl BlockDevice for Nothing {
    fn len(&self) -> u64 {
        1 << 42
    }

    fn read(&self, _: u64, buf: &mut [u8]) -> io::Result<usize> {
        Ok(buf.len())
    }
}

/// The hits with room for so many blocks.
pub(crate) fn hits(
    keys: &[u32],
    room: usize,
    eviction: Eviction,
) -> Result<u64, Box<dyn Error + Send + Sync>> {
    const SIZE: usize = 512; // the smallest: only the number of blocks matters
    let cache = Cache::builder(room * SIZE).block_size(SIZE).eviction(eviction).build()?;
    let device = cache.attach(Nothing)?;
    for &key in keys {
        drop(device.get(u64::from(key))?);
    }
    let stats = cache.stats();
    Ok(stats.get - stats.misses)
}
