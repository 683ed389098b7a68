//! Blocks of several sizes in one memory: what a large one costs the small ones.
#![cfg(not(any(offlock_loom, offlock_shuttle)))]

use std::collections::VecDeque;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use bufcache::{
    AttachOptions, BlockDevice, Builder, Cache, Device, Eviction, Fault, FaultDevice, GetError,
    MemoryDevice, Operation,
};

const SMALL: usize = 4096;
const LARGE: usize = 65_536;
/// Small blocks that the cache has room for, and those of a chunk.
const ROOM: u64 = 1024;
const CHUNK: u64 = (LARGE / SMALL) as u64;

/// The patience of a call that is to be refused.
const SHORT: Duration = Duration::from_millis(300);

struct World {
    cache: Cache,
    disk: Arc<FaultDevice<MemoryDevice>>,
    small: Device,
    large: Device,
}

/// Each block of a device is full of its number.
fn world(with: impl FnOnce(Builder) -> Builder) -> World {
    let builder = Cache::builder(ROOM as usize * SMALL).block_sizes(SMALL, LARGE);
    let builder = builder.patience(Duration::from_secs(60)).dirty_limits(100, 100);
    let cache = with(builder.write_back_after(Duration::from_secs(3600))).build().unwrap();
    let filled = |size: usize, blocks: usize| {
        let blocks = (0..blocks).flat_map(|block| vec![block as u8; size]);
        MemoryDevice::new(blocks.collect())
    };
    let disk = Arc::new(FaultDevice::new(filled(SMALL, 2 * ROOM as usize)));
    let options = AttachOptions::new(SMALL).on_loss(|_| {});
    let small = cache.attach_with(Arc::clone(&disk), options).unwrap();
    let large = cache.attach(filled(LARGE, 64), LARGE).unwrap();
    World { cache, disk, small, large }
}

impl World {
    fn read(&self, blocks: impl IntoIterator<Item = u64>) {
        for block in blocks {
            assert!(self.small.get(block).unwrap().iter().all(|byte| *byte == block as u8));
        }
    }

    fn read_large(&self, block: u64) {
        // A machine that has others to run may take the time that it waits.
        let mut got = (0..100).map(|_| self.large.get(block));
        let guard = got.find(|got| !matches!(got, Err(GetError::NoFreeBuffers)));
        let guard = guard.expect("a buffer").unwrap();
        assert!(guard.iter().all(|byte| *byte == block as u8));
    }

    /// Fills it, so that the order of the blocks is not that of their memory.
    fn mix(&self) {
        let mut state = 1_u64;
        for _ in 0..8 * ROOM {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            self.read([(state >> 33) % (2 * ROOM)]);
        }
        assert!(self.cached() + 8 >= ROOM); // some are free already
    }

    fn evictions(&self) -> u64 {
        self.cache.stats().evictions
    }

    fn cached(&self) -> u64 {
        (0..2 * ROOM).filter(|&block| self.small.is_cached(block)).count() as u64
    }
}

#[test]
fn a_large_block_evicts_the_small_ones_of_a_chunk() {
    for eviction in [Eviction::Adaptive, Eviction::A2, Eviction::Clock] {
        let world = world(|builder| builder.eviction(eviction));
        world.mix();
        let evicted: Vec<_> = (0..32)
            .map(|block| {
                let before = world.evictions();
                world.read_large(block);
                world.evictions() - before
            })
            .collect();
        println!("{eviction:?}: evicted for each large block: {evicted:?}");
        assert!(evicted.iter().all(|evicted| *evicted <= CHUNK), "{eviction:?}: {evicted:?}");
        assert!(world.cached() >= ROOM - 32 * CHUNK); // a large one may evict a large one
        // And back: a large one makes room for as many.
        world.read(0..2 * ROOM);
        (0..64).for_each(|block| world.read_large(block));
    }
}

#[test]
fn a_smaller_cache_evicts_no_more_than_it_must() {
    let world = world(|builder| builder);
    world.mix();
    world.cache.resize((ROOM - 3 * CHUNK) as usize * SMALL).unwrap();
    assert!(world.cached() + 3 * CHUNK + 8 >= ROOM);
    assert_eq!(world.cache.stats().bytes, (ROOM - 3 * CHUNK) as usize * SMALL);
}

/// Where each chunk but one has a buffer that is kept, that one goes.
#[test]
fn a_large_block_finds_the_unused_chunk() {
    for how in ["pins", "guards"] {
        let world = world(|builder| builder);
        world.read(0..ROOM); // in the order of the memory
        let free = 17;
        let (mut pins, mut guards) = (Vec::new(), Vec::new());
        for chunk in (0..ROOM / CHUNK).filter(|chunk| *chunk != free) {
            let guard = world.small.get(chunk * CHUNK + chunk % CHUNK).unwrap();
            match how {
                "pins" => pins.push(guard.pin().unwrap()),
                _ => guards.push(guard),
            }
        }
        world.read_large(1);
        assert_eq!((world.evictions(), world.cached()), (CHUNK, ROOM - CHUNK));
        let gone = free * CHUNK..(free + 1) * CHUNK;
        assert!(gone.clone().all(|block| !world.small.is_cached(block)), "{how}");
    }
}

#[test]
fn inv19_a_large_block_waits_no_longer_than_the_patience_and_evicts_nothing_in_vain() {
    let world = world(|builder| builder.patience(SHORT));
    world.read(0..ROOM);
    let pins: Vec<_> = (0..ROOM)
        .step_by(CHUNK as usize)
        .map(|block| world.small.get(block).unwrap().pin().unwrap())
        .collect();
    assert_eq!(world.large.get(1).unwrap_err(), GetError::NoFreeBuffers);
    assert_eq!((world.evictions(), world.cached()), (0, ROOM));
    drop(pins);
    world.read_large(1);
    assert_eq!(world.cached(), ROOM - CHUNK);
}

#[test]
fn what_is_used_stays_where_others_are_not() {
    let world = world(|builder| builder);
    world.read(0..ROOM);
    // Of the first quarter of the chunks all but one, often.
    for _ in 0..3 {
        world.read((0..ROOM / 4).filter(|block| block % CHUNK != 3));
    }
    world.read_large(1);
    let used = (0..ROOM / 4).filter(|&block| world.small.is_cached(block)).count() as u64;
    assert_eq!((used, world.cached()), (ROOM / 4, ROOM - CHUNK));
}

#[test]
fn inv17_dirty_small_blocks_are_written_before_their_chunk_goes() {
    let world = world(|builder| builder.patience(SHORT));
    for block in 0..ROOM {
        world.small.create(block).unwrap().fill(!block as u8);
    }
    world.disk.inject(Operation::Write, .., Fault::Error(libc::EIO));
    assert_eq!(world.large.get(1).unwrap_err(), GetError::NoFreeBuffers);
    assert_eq!(world.cached(), ROOM);
    world.disk.heal();
    (0..8).for_each(|block| world.read_large(block));
    for block in 0..ROOM {
        assert!(world.small.get(block).unwrap().iter().all(|byte| *byte == !block as u8));
    }
    let _ = world.small.sync(); // the errors before
    world.small.sync().unwrap();
    let mut bytes = vec![0; ROOM as usize * SMALL];
    world.disk.inner().read(0, &mut bytes).unwrap();
    let whole = |(block, bytes): (usize, &[u8])| bytes.iter().all(|byte| *byte == !block as u8);
    assert!(bytes.chunks(SMALL).enumerate().all(whole));
}

/// Threads that want large and small ones at once, and pin some.
#[test]
fn several_take_chunks_at_once() {
    let world = world(|builder| builder);
    world.read(0..ROOM);
    thread::scope(|scope| {
        for thread in 0..4_u64 {
            let world = &world;
            scope.spawn(move || {
                for round in 0..200 {
                    let of = (round * 7 + thread * 13) % 64;
                    let guard = world.large.get(of).unwrap();
                    let pin = world.small.get((round * 31 + thread * 401) % (2 * ROOM));
                    let pin = pin.unwrap().pin().unwrap();
                    assert!(guard.iter().all(|byte| *byte == of as u8));
                    drop(guard);
                    world.read([(round * 17 + thread * 211) % (2 * ROOM)]);
                    drop(pin);
                }
            });
        }
    });
    assert!(world.cache.stats().bytes <= ROOM as usize * SMALL);
}

/// The only unused chunk is the one that the policy would visit last.
#[test]
fn a_large_block_finds_a_chunk_on_probation() {
    for eviction in [Eviction::Adaptive, Eviction::A2, Eviction::Clock] {
        for idle in 48..64 {
            let builder = Cache::builder(64 * LARGE).block_sizes(SMALL, LARGE).eviction(eviction);
            let cache = builder.build().unwrap();
            let large = cache.attach(MemoryDevice::new(vec![1; 128 * LARGE]), LARGE).unwrap();
            let small = cache.attach(MemoryDevice::new(vec![2; 64 * LARGE]), SMALL).unwrap();
            // Each fourth chunk has small blocks.
            for block in 0..64 {
                if block % 4 == 3 {
                    (block * CHUNK..(block + 1) * CHUNK)
                        .for_each(|at| drop(small.get(at).unwrap()));
                } else {
                    drop(large.get(block).unwrap());
                }
            }
            let held: Vec<_> =
                (0..64)
                    .filter(|block| *block != idle)
                    .map(|block| {
                        if block % 4 == 3 { small.get(block * CHUNK + 5) } else { large.get(block) }
                    })
                    .map(|guard| guard.unwrap().pin().unwrap())
                    .collect();
            assert!(large.claim(100).unwrap().is_some(), "{eviction:?}: {idle}");
            drop(held);
        }
    }
}

/// Nine of ten requests are for blocks of 512 bytes, and the large ones have most of the memory.
#[test]
fn two_sizes_have_the_hits_of_least_recently_used_by_bytes() {
    const SIZES: [usize; 2] = [512, LARGE];
    const BYTES: usize = 16 << 20;
    const REQUESTS: u64 = 50_000;
    for room in [8 * LARGE, 32 * LARGE] {
        let mut state = 7_u64;
        let mut random = || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            (state >> 11) as f64 / (1_u64 << 53) as f64
        };
        let requests: Vec<(usize, u64)> = (0..REQUESTS)
            .map(|_| {
                let of = usize::from(random() < 0.1);
                // By Zipf with the exponent 1, about; 0 to below the number of blocks.
                (of, ((BYTES / SIZES[of]) as f64).powf(random()) as u64 - 1)
            })
            .collect();
        let mut oldest_first = VecDeque::new();
        let (mut bytes, mut least) = (0, 0_u64);
        for block in &requests {
            if let Some(at) = oldest_first.iter().position(|there| there == block) {
                oldest_first.remove(at);
                least += 1;
            } else {
                bytes += SIZES[block.0];
            }
            oldest_first.push_back(*block);
            while bytes > room {
                bytes -= SIZES[oldest_first.pop_front().unwrap().0];
            }
        }
        for eviction in [Eviction::Adaptive, Eviction::A2, Eviction::A2Small, Eviction::Clock] {
            let builder = Cache::builder(room).block_sizes(SIZES[0], SIZES[1]);
            let cache = builder.eviction(eviction).build().unwrap();
            let devices =
                SIZES.map(|size| cache.attach(MemoryDevice::new(vec![0; BYTES]), size).unwrap());
            requests.iter().for_each(|&(of, block)| drop(devices[of].get(block).unwrap()));
            let hits = REQUESTS - cache.stats().misses;
            assert!(hits * 100 >= least * 98, "{eviction:?}, {room}: {hits}, not {least}");
        }
    }
}

/// A search that meets a large block in use goes on to the chunks of small ones.
#[test]
fn a_large_block_finds_a_chunk_of_small_ones_beside_large_ones_in_use() {
    for eviction in [Eviction::Adaptive, Eviction::A2, Eviction::A2Small, Eviction::Clock] {
        for larges in 1..4 {
            let builder = Cache::builder((larges + 1) * LARGE).block_sizes(SMALL, LARGE);
            let builder = builder.eviction(eviction).patience(Duration::ZERO);
            let cache = builder.build().unwrap();
            let large = cache.attach(MemoryDevice::new(vec![1; 8 * LARGE]), LARGE).unwrap();
            let small = cache.attach(MemoryDevice::new(vec![2; LARGE]), SMALL).unwrap();
            let guards: Vec<_> =
                (0..larges).map(|block| large.get(block as u64).unwrap()).collect();
            (0..CHUNK).for_each(|block| drop(small.get(block).unwrap()));
            assert_eq!(large.get(7).map(|guard| guard[0]), Ok(1), "{eviction:?}: {larges}");
            assert!(guards.iter().all(|guard| guard[0] == 1));
        }
    }
}

/// A batch of victims is a small part of the cache, also in bytes.
#[test]
fn a_large_block_evicts_one_large_block_of_a_few() {
    for eviction in [Eviction::Adaptive, Eviction::A2, Eviction::A2Small, Eviction::Clock] {
        let builder = Cache::builder(8 * LARGE).block_sizes(512, LARGE).eviction(eviction);
        let cache = builder.build().unwrap();
        let large = cache.attach(MemoryDevice::new(vec![1; 16 * LARGE]), LARGE).unwrap();
        (0..12).for_each(|block| drop(large.get(block).unwrap()));
        assert_eq!(cache.stats().evictions, 4, "{eviction:?}");
    }
}
