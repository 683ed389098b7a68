//! What is counted, by how many threads whatever.

use crate::world::*;

const SIZE: usize = 4096;

/// Each thread has a record at the same time as all others: more than there are words for hits.
#[test]
fn inv21_each_get_of_many_threads_is_a_hit_or_a_miss_and_counts_once() {
    const THREADS: u64 = 150;
    const BLOCKS: u64 = 50;
    let cache = Cache::new(64 * SIZE).unwrap();
    let disk = cache.attach(MemoryDevice::new(vec![1; BLOCKS as usize * SIZE])).unwrap();
    let all = Barrier::new(THREADS as usize);
    thread::scope(|scope| {
        for _ in 0..THREADS {
            scope.spawn(|| {
                let kept = disk.get(0).unwrap();
                all.wait();
                for count in 0..1_000 {
                    drop(disk.get(count % BLOCKS).unwrap());
                }
                all.wait();
                drop(kept);
            });
        }
    });
    let stats = cache.stats();
    assert_eq!(stats.get, THREADS * 1_001);
    assert_eq!((stats.misses, stats.reads), (BLOCKS, BLOCKS));
}

/// Threads come and go, and with them the records whose words they count in.
#[test]
fn inv21_threads_that_end_take_no_count_with_them() {
    let cache = Cache::new(16 * SIZE).unwrap();
    let other = Cache::new(16 * SIZE).unwrap();
    let device = || MemoryDevice::new(vec![1; 8 * SIZE]);
    let (disk, other_disk) = (cache.attach(device()).unwrap(), other.attach(device()).unwrap());
    for _ in 0..100 {
        thread::scope(|scope| {
            for block in 0..4 {
                let (disk, other_disk) = (&disk, &other_disk);
                scope.spawn(move || {
                    let guards = [(); 20].map(|()| disk.get(block).unwrap());
                    drop(other_disk.get(block).unwrap());
                    assert_eq!(
                        disk.try_get(20).unwrap_err(),
                        GetError::OutOfRange { block: 20, blocks: 8 }
                    );
                    drop(guards);
                });
            }
        });
    }
    assert_eq!(cache.stats().get, 100 * 4 * 20);
    assert_eq!(other.stats().get, 100 * 4);
}

/// Each counter by what it is about, in one thread.
#[test]
fn inv21_gets_are_hits_misses_and_refusals_and_buffers_are_of_misses() {
    let cache = Cache::builder(4 * SIZE).patience(Duration::ZERO).build().unwrap();
    let disk = cache.attach(MemoryDevice::new(vec![1; 8 * SIZE])).unwrap();
    assert_eq!(disk.try_get(0).unwrap_err(), GetError::WouldBlock);
    let guards = [0, 1, 2].map(|block| disk.get(block).unwrap());
    drop(disk.get(1).unwrap());
    let stats = cache.stats();
    assert_eq!((stats.get, stats.hits, stats.misses, stats.busy), (5, 1, 3, 1));
    assert_eq!((stats.created, stats.reads, stats.page_retries), (3, 3, 0));

    drop(disk.get(3).unwrap());
    drop(disk.get(4).unwrap()); // in the place of the one that has no guard
    let stats = cache.stats();
    assert_eq!((stats.get, stats.hits, stats.misses), (7, 1, 5));
    assert_eq!((stats.created, stats.evictions), (5, 1));
    drop(guards);
}

/// A get that has to wait for a buffer says how often it looked again.
#[test]
fn inv21_a_wait_for_a_buffer_is_counted() {
    let cache = Cache::builder(SIZE).patience(Duration::from_millis(5)).build().unwrap();
    let disk = cache.attach(MemoryDevice::new(vec![1; 2 * SIZE])).unwrap();
    let guard = disk.get(0).unwrap();
    assert_eq!(disk.get(1).unwrap_err(), GetError::NoFreeBuffers);
    let stats = cache.stats();
    assert!(stats.page_retries > 0);
    assert_eq!((stats.misses, stats.created), (1, 1));
    drop(guard);
    drop(disk.get(1).unwrap());
}
