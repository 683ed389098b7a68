//! A cache as its users see it, on devices in memory.

use crate::world::*;

const SIZE: usize = 4096;

/// Each block is filled with its number.
struct Numbered(u64);

impl Numbered {
    fn new(blocks: u64) -> Arc<Self> {
        Arc::new(Self(blocks))
    }
}

impl BlockDevice for Numbered {
    fn len(&self) -> u64 {
        self.0 * SIZE as u64
    }

    fn read(&self, offset: u64, buf: &mut [u8]) -> io::Result<usize> {
        buf.fill((offset / SIZE as u64) as u8);
        Ok(buf.len())
    }
}

#[test]
fn a_scan_passes_by_what_is_used_again_in_a_cache_that_was_full_before() {
    let cache = Cache::new(1_000 * SIZE).unwrap();
    let disk = cache.attach(Numbered::new(100_000)).unwrap();
    let mut read = |block: u64| drop(disk.get(block).unwrap());
    let hot = || (0..200).chain(0..200).chain(0..200);
    (0..1_000).chain(hot()).for_each(&mut read);
    // Those that are used in the older half of probation stay, and others leave the main list for
    // them.
    (10_000..10_060).chain(10_000..10_008).chain(10_060..10_200).for_each(&mut read);
    (20_000..30_000).for_each(&mut read);
    let left = (0..200).filter(|&block| disk.is_cached(block)).count();
    assert_eq!(left, 200, "of those that were used three times");
}

#[test]
fn inv08_a_block_out_of_range_allocates_nothing() {
    let cache = Cache::new(4 * SIZE).unwrap();
    let disk = cache.attach(MemoryDevice::new(vec![1; SIZE + 1])).unwrap();
    assert_eq!(disk.get(2).err(), Some(GetError::OutOfRange { block: 2, blocks: 2 }));
    assert_eq!(disk.get(u64::MAX).map(drop).unwrap_err().errno(), libc::EINVAL);
    assert_eq!(cache.stats().bytes, 0);
    let tail = disk.get(1).unwrap();
    assert_eq!((tail[0], &tail[1..]), (1, &[0; SIZE - 1][..]));
}

/// However long a miss may wait, it waits.
#[test]
fn a_patience_that_never_ends_waits_for_a_guard() {
    let cache = Cache::builder(SIZE).patience(Duration::MAX).build().unwrap();
    let disk = cache.attach(Numbered::new(10)).unwrap();
    let held = disk.get(1).unwrap();
    thread::scope(|scope| {
        let waits = scope.spawn(|| disk.get(2).unwrap()[0]);
        thread::sleep(Duration::from_millis(20)); // long enough for it to wait
        drop(held);
        assert_eq!(waits.join().unwrap(), 2);
    });
}

#[test]
fn a_buffer_has_so_many_pins_and_no_more() {
    let cache = Cache::new(16 * SIZE).unwrap();
    let disk = cache.attach(Numbered::new(100)).unwrap();
    let guard = disk.get(1).unwrap();
    let pins: Vec<_> = (0..65_535).map(|_| guard.pin().unwrap()).collect();
    assert_eq!(guard.pin().unwrap_err(), GetError::TooManyPins);
    assert!(pins.iter().all(|pin| pin[0] == 1));
    drop(pins);
    let pin = guard.pin().unwrap();
    drop(guard);
    assert_eq!(pin[SIZE - 1], 1);
}

#[test]
fn inv06_a_shrink_leaves_blocks_alone_that_are_in_use() {
    let cache = Cache::builder(64 * 512).block_size(512).build().unwrap();
    let disk = MemoryDevice::new([[7; 512 * 64], [9; 512 * 64]].concat());
    let disk = cache.attach(disk).unwrap();
    (0..64).for_each(|block| drop(disk.get(block).unwrap()));
    let held: Vec<_> = (5..64).step_by(8).map(|block| disk.get(block).unwrap()).collect();
    (0..8).for_each(|_| _ = cache.shrink(64));
    assert_eq!(cache.stats().bytes, held.len() * 512);
    (64..128).for_each(|block| assert_eq!(disk.get(block).unwrap()[0], 9));
    assert!(held.iter().all(|block| block.iter().all(|&byte| byte == 7)));
}

#[test]
fn devices_that_are_gone_give_their_numbers_back_and_leave_no_blocks() {
    let cache = Cache::new(64 * SIZE).unwrap();
    let kept = cache.attach(MemoryDevice::new(vec![255; SIZE])).unwrap();
    let guard = kept.get(0).unwrap();
    for number in 0..140_000_u32 {
        let device = MemoryDevice::new(number.to_ne_bytes().repeat(SIZE / 4));
        let disk = cache.attach(device).unwrap();
        // Their blocks are still there when the numbers come round.
        if number % 65_534 < 300 {
            assert_eq!(disk.get(0).unwrap()[..4], number.to_ne_bytes());
        }
    }
    assert_eq!((guard[0], kept.get(0).unwrap()[1]), (255, 255));
}

#[test]
fn more_devices_at_a_time_than_there_are_numbers_are_refused() {
    let cache = Cache::new(2 * SIZE).unwrap();
    let attach = || cache.attach(MemoryDevice::new(vec![1; SIZE]));
    let mut all: Vec<_> = (0..65_535).map(|_| attach().unwrap()).collect();
    assert!(matches!(attach(), Err(BuildError::TooManyDevices)));
    // A pin is a handle, too.
    let pin = all[7].get(0).unwrap().pin().unwrap();
    drop(all.swap_remove(7));
    assert!(matches!(attach(), Err(BuildError::TooManyDevices)));
    drop(pin);
    let again = attach().unwrap();
    assert_eq!(again.get(0).unwrap()[0], 1);
    assert_eq!(cache.stats().reads, 2, "the block of the one that is gone was not found");
}

/// Such a guard keeps its block for ever, and with it the number of its device.
#[test]
fn a_guard_that_was_forgotten_keeps_one_number() {
    for by_another_thread in [false, true] {
        let cache = Cache::new(4 * SIZE).unwrap();
        let attach = || cache.attach(MemoryDevice::new(vec![1; SIZE]));
        let disk = attach().unwrap();
        let forget = || std::mem::forget(disk.get_mut(0).unwrap());
        match by_another_thread {
            true => thread::scope(|scope| scope.spawn(forget).join().unwrap()),
            false => forget(),
        }
        drop(disk);
        for number in 0..140_000 {
            let disk = attach().unwrap_or_else(|error| panic!("after {number}: {error}"));
            if number % 65_534 < 2 {
                assert_eq!(disk.get(0).unwrap()[0], 1);
            }
        }
    }
}

#[test]
fn inv07_a_buffer_is_found_behind_those_that_were_used() {
    const BUFFERS: u64 = 2000;
    for eviction in [Eviction::Adaptive, Eviction::A2, Eviction::Clock] {
        let builder = Cache::builder(BUFFERS as usize * SIZE).eviction(eviction);
        let cache = builder.patience(Duration::from_secs(10)).build().unwrap();
        let disk = cache.attach(Numbered::new(10_000)).unwrap();
        for _ in 0..5 {
            (0..BUFFERS).for_each(|block| drop(disk.get(block).unwrap()));
        }
        assert!(disk.claim(5000).unwrap().is_some(), "{eviction:?}");
        for _ in 0..5 {
            (0..BUFFERS).for_each(|block| drop(disk.get(block).unwrap()));
        }
        drop(disk.get(5001).unwrap());
        assert_eq!(cache.stats().page_retries, 0, "{eviction:?}: it slept");
    }
}

#[test]
fn inv11_shrinks_evict_what_is_not_in_use() {
    for eviction in [Eviction::Adaptive, Eviction::A2, Eviction::Clock] {
        let cache = Cache::builder(100 * SIZE).eviction(eviction).build().unwrap();
        let disk = cache.attach(Numbered::new(100)).unwrap();
        (0..100).chain(0..100).for_each(|block| drop(disk.get(block).unwrap()));
        let held: Vec<_> = (0..100).step_by(2).map(|block| disk.get(block).unwrap()).collect();
        let passes = (1..10).find(|_| {
            cache.shrink(usize::MAX);
            (1..100).step_by(2).all(|block| !disk.is_cached(block))
        });
        assert!(passes.is_some_and(|passes| passes < 6), "{eviction:?}: {passes:?}");
        assert!((0..100).step_by(2).all(|block| disk.is_cached(block)), "{eviction:?}");
        drop(held);
    }
}

#[test]
fn a_device_has_the_block_size_of_its_cache() {
    for size in [512, 4096, 65_536] {
        let cache = Cache::builder(1 << 20).block_size(size).build().unwrap();
        let disk = cache.attach(MemoryDevice::new(vec![9; 1 << 20])).unwrap();
        assert_eq!((disk.block_size(), disk.get(3).unwrap().len()), (size, size));
    }
    for size in [0, 256, 1000, 131_072] {
        let built = Cache::builder(1 << 20).block_size(size).build().map(drop);
        assert!(matches!(built, Err(BuildError::BlockSize(refused)) if refused == size));
    }
}
