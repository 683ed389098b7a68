//! A trace of block numbers through a cache, for its hits alone. The bench of hits has this file, too.

use std::error::Error;
use std::io;

use bufcache::{BlockDevice, Cache, Device, Eviction};

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

/// A cache of so many bytes, and a device for each size of blocks, which ascend.
pub(crate) fn cache<const N: usize>(
    bytes: usize,
    sizes: [usize; N],
    eviction: Eviction,
) -> Result<(Cache, Vec<Device>), Box<dyn Error + Send + Sync>> {
    let builder = Cache::builder(bytes).block_sizes(sizes[0], sizes[N - 1]);
    let cache = builder.eviction(eviction).build()?;
    let devices: Result<_, _> = sizes.iter().map(|&size| cache.attach(Nothing, size)).collect();
    Ok((cache, devices?))
}

/// The hits with room for so many blocks.
pub(crate) fn hits(
    keys: &[u32],
    room: usize,
    eviction: Eviction,
) -> Result<u64, Box<dyn Error + Send + Sync>> {
    const SIZE: usize = 512; // the smallest: only the number of blocks matters
    let (cache, devices) = cache(room * SIZE, [SIZE], eviction)?;
    for &key in keys {
        drop(devices[0].get(u64::from(key))?);
    }
    let stats = cache.stats();
    Ok(stats.get - stats.misses)
}
