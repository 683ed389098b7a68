//! Keep the set of dirty blocks as marks: writers set them, a flusher finds and clears them.
//!
//! Run:     cargo run -p examples --example radix_ctx_dirty
//! Prints:  200000 writes to 1000 blocks, 8025 written back

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::thread;

use radix_ctx::rcu::{self, Owned};
use radix_ctx::{XArray, xarray::Mark};

const DIRTY: Mark = Mark::Zero;
const BLOCKS: u64 = 1_000;
const WRITES: u64 = 50_000; // per writer

/// A block in memory, and what is on the disk.
type Block = (AtomicU64, AtomicU64);

/// Writes the marked blocks back, in ascending order. Returns how many there were.
fn flush(blocks: &XArray<Owned<Block>>) -> u64 {
    let guard = rcu::pin(); // the blocks found stay until this goes
    let mut count = 0;
    for (nr, (memory, disk)) in blocks.marked(DIRTY, .., &guard) {
        blocks.clear_mark(nr, DIRTY); // first: a write after this marks the block again
        disk.store(memory.load(Relaxed), Relaxed);
        count += 1;
    }
    count
}

fn main() -> std::io::Result<()> {
    let blocks = XArray::new();
    (0..BLOCKS).try_for_each(|nr| blocks.insert(nr, Owned::new(Block::default())))?;
    let write = |nr| {
        blocks.with(nr % BLOCKS, |(memory, _)| memory.fetch_add(1, Relaxed));
        blocks.set_mark(nr % BLOCKS, DIRTY);
    };
    let flushed = thread::scope(|s| {
        let writers = [0, 1, 2, 3].map(|n| s.spawn(move || (n..n + WRITES).for_each(write)));
        let mut flushed = 0;
        while !writers.iter().all(|writer| writer.is_finished()) {
            flushed += flush(&blocks);
        }
        flushed + flush(&blocks) // and the blocks that were marked last
    });
    println!("{} writes to {BLOCKS} blocks, {flushed} written back", 4 * WRITES);
    let guard = rcu::pin();
    let is_same = |(_, block): (u64, &Block)| block.0.load(Relaxed) == block.1.load(Relaxed);
    assert!(blocks.iter(&guard).all(is_same) && !blocks.any_marked(DIRTY));
    Ok(())
}
