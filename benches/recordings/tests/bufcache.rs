//! The recordings of the XFS buffer cache, replayed on `bufcache`, with the recordings' own events as
//! the oracle: each get misses exactly where XFS allocated a buffer.

use std::collections::BTreeSet;
use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use bufcache::{BlockDevice, Cache, CacheStats, Device};
use recordings::{BufferEvent, CREATE8, Recording, UNLINK8};

const SECTOR: usize = 512;
/// Lengths of buffers, in sectors.
const LENGTHS: [u16; 3] = [1, 8, 32];
/// Gets of each recording that found no buffer.
const ALLOCATIONS: u64 = 2_024;

/// Sectors that say their numbers; counts reads.
struct Disk(Arc<AtomicU64>);

impl BlockDevice for Disk {
    fn len(&self) -> u64 {
        (1 << 32) * SECTOR as u64
    }

    fn read(&self, offset: u64, buf: &mut [u8]) -> io::Result<usize> {
        self.0.fetch_add(1, Ordering::Relaxed);
        for (sector, bytes) in (offset / SECTOR as u64..).zip(buf.chunks_exact_mut(SECTOR)) {
            bytes[..8].copy_from_slice(&sector.to_ne_bytes());
        }
        Ok(buf.len())
    }
}

/// A cache with room for all for each length, and the disk attached to it.
struct Replay {
    caches: [Cache; LENGTHS.len()],
    disks: [Device; LENGTHS.len()],
    reads: Arc<AtomicU64>,
}

impl Replay {
    fn new() -> Self {
        let reads = Arc::<AtomicU64>::default();
        let sizes = LENGTHS.map(|length| usize::from(length) * SECTOR);
        let caches = sizes.map(|size| Cache::builder(64 << 20).block_size(size).build().unwrap());
        let disks = caches.each_ref().map(|cache| cache.attach(Disk(Arc::clone(&reads))).unwrap());
        Self { caches, disks, reads }
    }

    /// The sum of a counter of all caches.
    fn sum(&self, of: fn(&CacheStats) -> u64) -> u64 {
        self.caches.iter().map(|cache| of(&cache.stats())).sum()
    }

    fn disk(&self, event: &BufferEvent) -> (&Device, u64) {
        let which = LENGTHS.iter().position(|&length| length == event.length).unwrap();
        (&self.disks[which], u64::from(event.address / u32::from(event.length)))
    }

    /// Looks the buffer up, and whether that is a hit.
    fn get(&self, event: &BufferEvent) -> bool {
        let (disk, block) = self.disk(event);
        let there = disk.is_cached(block);
        let buffer = disk.get(block).unwrap();
        assert_eq!(buffer.len(), usize::from(event.length) * SECTOR);
        assert_eq!(buffer[..8], u64::from(event.address).to_ne_bytes());
        there
    }
}

/// Returns the buffers that were in the cache when the recording began: got, and never allocated.
fn resident(events: &[BufferEvent]) -> Vec<BufferEvent> {
    let allocated: BTreeSet<u32> =
        events.iter().filter(|event| event.is_made).map(|event| event.address).collect();
    let mut seen = BTreeSet::new();
    let is_first = |event: &&BufferEvent| {
        !event.is_made && !allocated.contains(&event.address) && seen.insert(event.address)
    };
    events.iter().filter(is_first).copied().collect()
}

/// `gets` is the number of lookups, of which so many found no buffer.
fn each_get_misses_where_xfs_allocated(recording: Recording, gets: u64) {
    let events = recording.buffers().unwrap();
    let replay = Replay::new();
    let before = resident(&events);
    assert_eq!(before.len(), 16);
    before.iter().for_each(|event| assert!(!replay.get(event)));

    // Allocated in the recording, and not asked for by the cache yet.
    let mut allocated = BTreeSet::new();
    for event in &events {
        if event.is_made {
            assert!(allocated.insert(event.address), "{event:?}");
        } else {
            assert_eq!(replay.get(event), !allocated.remove(&event.address), "{event:?}");
        }
    }
    assert!(allocated.is_empty());
    let misses = ALLOCATIONS + 16;
    assert_eq!(replay.sum(|stats| stats.get), gets + 16);
    assert_eq!(replay.sum(|stats| stats.misses), misses);
    assert_eq!(replay.sum(|stats| stats.hits), gets - ALLOCATIONS);
    assert_eq!(replay.sum(|stats| stats.created), misses);
    assert_eq!(replay.sum(|stats| stats.reads), misses);
    assert_eq!(replay.reads.load(Ordering::Relaxed), misses);
    assert_eq!(replay.sum(|stats| stats.evictions), 0);
}

#[test]
fn inv21_unlink8_misses_where_xfs_allocated() {
    each_get_misses_where_xfs_allocated(UNLINK8, 640_328);
}

#[test]
fn inv21_create8_misses_where_xfs_allocated() {
    each_get_misses_where_xfs_allocated(CREATE8, 475_601);
}

/// The recorded threads run at once, each with its gets in their order. Another thread than in the
/// recording may be the first to get a buffer. The number of misses stays the same.
#[test]
fn inv21_threads_at_once_miss_each_buffer_once() {
    for (recording, gets) in [(UNLINK8, 640_328), (CREATE8, 475_601)] {
        let events = recording.buffers().unwrap();
        let replay = Replay::new();
        resident(&events).iter().for_each(|event| assert!(!replay.get(event)));
        let failed = Mutex::new(Vec::new());
        let mut threads: Vec<u8> = events.iter().map(|event| event.thread).collect();
        threads.sort_unstable();
        threads.dedup();
        std::thread::scope(|scope| {
            for thread in threads {
                let (events, replay, failed) = (&events, &replay, &failed);
                scope.spawn(move || {
                    for event in events.iter().filter(|e| e.thread == thread && !e.is_made) {
                        let (disk, block) = replay.disk(event);
                        if disk.get(block).is_err() {
                            failed.lock().unwrap().push(*event);
                        }
                    }
                });
            }
        });
        assert_eq!(*failed.lock().unwrap(), []);
        assert_eq!(replay.sum(|stats| stats.get), gets + 16);
        assert_eq!(replay.sum(|stats| stats.misses), ALLOCATIONS + 16);
        assert_eq!(replay.sum(|stats| stats.reads), ALLOCATIONS + 16);
    }
}
