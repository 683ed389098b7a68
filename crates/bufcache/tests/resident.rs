//! Memory that is given back, in a process of its own: other tests take some meanwhile.
#![cfg(not(offlock_model))]

use std::io;

use bufcache::{BlockDevice, Cache};

const SIZE: usize = 4096;
const BYTES: usize = 64 << 20;

/// Takes no memory.
struct Zeros;

impl BlockDevice for Zeros {
    fn len(&self) -> u64 {
        BYTES as u64
    }

    fn read(&self, _offset: u64, buf: &mut [u8]) -> io::Result<usize> {
        buf.fill(0);
        Ok(buf.len())
    }
}

/// Also where it had no buffers any more, and was kept for others to come.
#[test]
fn a_smaller_cache_gives_back_what_was_evicted_before() {
    let cache = Cache::new(BYTES).unwrap();
    let disk = cache.attach(Zeros).unwrap();
    (0..(BYTES / SIZE) as u64).for_each(|block| drop(disk.get(block).unwrap()));
    assert_eq!(cache.shrink(usize::MAX), BYTES / SIZE);
    let before = resident();
    cache.resize(1 << 20).unwrap();
    assert!(resident() + BYTES / 2 < before, "{before} bytes, and {} after", resident());
}

fn resident() -> usize {
    let pages = std::fs::read_to_string("/proc/self/statm").unwrap();
    pages.split(' ').nth(1).unwrap().parse::<usize>().unwrap() * 4096
}
