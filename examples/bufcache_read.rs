//! Read a file through a cache of buffers, by two threads, and say what that took.
//!
//! Run:     cargo run -p examples --example bufcache_read
//! Prints:  2 MiB summed up twice: 1024 gets, 512 reads of 4096 bytes
//!          and everything that the cache counts

use std::error::Error;
use std::io::Write;
use std::thread;

use bufcache::{Cache, Device, FileDevice, GetError};

const BLOCK: usize = 4096;
const BLOCKS: usize = 512;

/// The sum of a file's bytes, block by block, and those that come next read ahead.
fn sum(disk: &Device) -> Result<u64, GetError> {
    let mut sum = 0;
    for block in 0..disk.blocks() {
        if block % 16 == 0 {
            disk.readahead(block..block + 32);
        }
        let bytes = disk.get(block)?; // keeps the buffer where it is until the end of this round
        sum += bytes.iter().map(|&byte| u64::from(byte)).sum::<u64>();
    }
    Ok(sum)
}

fn main() -> Result<(), Box<dyn Error>> {
    let mut file = tempfile::tempfile()?;
    for block in 0..BLOCKS {
        file.write_all(&[block as u8; BLOCK])?;
    }

    let cache = Cache::new(4 << 20)?; // more than the file has
    let disk = cache.attach(FileDevice::new(file)?, BLOCK)?;
    let sums = thread::scope(|s| [(); 2].map(|()| s.spawn(|| sum(&disk))).map(|t| t.join()));
    for sum in sums {
        let expected: u64 = (0..BLOCKS).map(|block| block as u64 % 256 * BLOCK as u64).sum();
        assert_eq!(sum.expect("it does not panic")?, expected);
    }

    let stats = cache.stats();
    assert_eq!(stats.reads, BLOCKS as u64); // once for both
    println!("2 MiB summed up twice: {} gets, {} reads of {BLOCK} bytes", stats.get, stats.reads);
    println!("{stats}");
    Ok(())
}
