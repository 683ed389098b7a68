//! A READ of 4 KiB that `offlock-nbd` answers from memory, as far as its worker shares memory with others,
//! and the same of what a program uses instead.
//!
//! ```text
//!  event ─► session? ─► receive ─► session? ─► block: find, copy ─► count ─► session? ─► send
//! ```
//!
//! Left out are the system calls and what they move: an event is fetched, a request received and a reply sent
//! for all that come together. Each thread is a worker with one connection; all of them read the same blocks.

use std::hint::black_box;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use crossbeam_utils::CachePadded;
use dashmap::DashMap;
use radix_ctx::CtxTable;

use crate::structures::{BLOCK, BLOCKS, CACHED, Shared, blocks_of_bufcache, leak};

/// Look-ups of a connection for each event: see the server's `worker`.
const LOOKUPS: usize = 3;

/// The state of one thread: its current block, the reply, and figures.
struct Worker {
    at: u64,
    reply: Box<[u8; BLOCK]>,
    reads: u64,
    bytes: u64,
    hits: u64,
}

impl Worker {
    fn new(thread: usize) -> CachePadded<Self> {
        let reply = Box::new([0; BLOCK]);
        CachePadded::new(Self { at: thread as u64, reply, reads: 0, bytes: 0, hits: 0 })
    }

    fn next(&mut self) -> u64 {
        self.at = (self.at + 1) % BLOCKS;
        self.at
    }
}

/// Makes the operation of the server: a context by its id, a block under a guard, and figures of the worker.
pub(crate) fn crates(_threads: usize) -> Shared {
    let connections = leak(CtxTable::<AtomicUsize>::new());
    let disk = blocks_of_bufcache(BLOCKS);
    Box::new(move |thread| {
        let id = connections.insert(AtomicUsize::new(thread)).expect("memory for a context");
        let mut worker = Worker::new(thread);
        Box::new(move || {
            for _ in 0..LOOKUPS {
                // Ordering: Relaxed; its worker alone stores it.
                let slot = connections.with(id, |slot| slot.load(Ordering::Relaxed));
                black_box(slot.expect("it is there"));
            }
            let block = worker.next();
            worker.reply.copy_from_slice(&disk.try_get(block).expect(CACHED));
            worker.reads += 1;
            worker.bytes += BLOCK as u64;
            worker.hits += 1;
            black_box(&worker.reply);
        })
    })
}

/// Figures that all threads count in.
#[derive(Default)]
struct Figures {
    reads: AtomicU64,
    bytes: AtomicU64,
    hits: AtomicU64,
}

/// Concurrent maps, and atomics that all threads add to.
pub(crate) fn concurrent_maps(_threads: usize) -> Shared {
    let connections = leak(DashMap::<u64, (usize, Arc<CachePadded<AtomicU64>>)>::new());
    let blocks = leak(quick_cache::sync::Cache::new(4 * BLOCKS as usize));
    (0..BLOCKS).for_each(|block| blocks.insert(block, Arc::new([1; BLOCK])));
    let figures = leak(CachePadded::new(Figures::default()));
    Box::new(move |thread| {
        let id = thread as u64;
        connections.insert(id, (thread, Arc::default()));
        let mut worker = Worker::new(thread);
        Box::new(move || {
            for _ in 1..LOOKUPS {
                black_box(connections.get(&id).expect("it is there").0);
            }
            let block = worker.next();
            worker.reply.copy_from_slice(&blocks.get(&block).expect("room for all")[..]);
            // Ordering: Relaxed, all; counters, they publish nothing.
            figures.reads.fetch_add(1, Ordering::Relaxed);
            figures.bytes.fetch_add(BLOCK as u64, Ordering::Relaxed);
            figures.hits.fetch_add(1, Ordering::Relaxed);
            connections.get(&id).expect("it is there").1.fetch_add(1, Ordering::Relaxed);
            black_box(&worker.reply);
        })
    })
}
