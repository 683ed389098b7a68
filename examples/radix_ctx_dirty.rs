//! Keep the set of dirty blocks as marks: writers set them, a flusher finds and clears them.
//!
//! Run:     cargo run -p examples --example radix_ctx_dirty
//! Prints:  200000 writes to 1000 blocks, 8025 written back

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::thread;

use percpu::rcu::{self, Owned};
use radix_ctx::{XArray, xarray::Mark};

const DIRTY: Mark = Mark::Zero;
const BLOCKS: u64 = 1_000;
const WRITES: u64 = 50_000; // per writer

/// A block in memory, and what is on the disk.
type Block = (AtomicU64, AtomicU64);

/// Writes back what is marked, in ascending order; returns how many blocks that was.
fn flush(blocks: &XArray<Owned<Block>>) -> Result<u64, percpu::Forked> {
    let guard = rcu::pin(); // the blocks found stay until this goes
    blocks.marked(DIRTY, .., &guard).try_fold(0, |count, (nr, (memory, disk))| {
        blocks.clear_mark(nr, DIRTY)?; // first: who writes after this marks it again
        disk.store(memory.load(Relaxed), Relaxed);
        Ok(count + 1)
    })
}

fn main() -> std::io::Result<()> {
    let blocks = XArray::new();
    (0..BLOCKS).try_for_each(|nr| blocks.insert(nr, Owned::new(Block::default())))?;
    let write = |nr| {
        blocks.with(nr % BLOCKS, |(memory, _)| memory.fetch_add(1, Relaxed));
        blocks.set_mark(nr % BLOCKS, DIRTY).expect("no fork took the lock");
    };
    let flushed = thread::scope(|s| {
        let writers = [0, 1, 2, 3].map(|n| s.spawn(move || (n..n + WRITES).for_each(write)));
        let mut flushed = 0;
        while !writers.iter().all(|writer| writer.is_finished()) {
            flushed += flush(&blocks)?;
        }
        Ok::<_, percpu::Forked>(flushed + flush(&blocks)?) // and what was marked last
    })?;
    println!("{} writes to {BLOCKS} blocks, {flushed} written back", 4 * WRITES);
    let guard = rcu::pin();
    let is_same = |(_, block): (u64, &Block)| block.0.load(Relaxed) == block.1.load(Relaxed);
    assert!(blocks.iter(&guard).all(is_same) && !blocks.any_marked(DIRTY));
    Ok(())
}
