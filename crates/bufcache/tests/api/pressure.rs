//! A get that needs a buffer finds one, unless every buffer is pinned, or dirty and cannot be written.

use bufcache::Pin;

use crate::world::*;

const SIZE: usize = 512;
const POLICIES: [Eviction; 3] = [Eviction::Adaptive, Eviction::A2, Eviction::Clock];

/// A full cache of `buffers` buffers that does not wait for one, and its device.
fn full(eviction: Eviction, buffers: u64) -> (Cache, Device) {
    let builder = Cache::builder(buffers as usize * SIZE).block_size(SIZE);
    let cache = builder.eviction(eviction).patience(Duration::ZERO).build().unwrap();
    let disk = cache.attach(MemoryDevice::new(vec![7; 4 * buffers as usize * SIZE])).unwrap();
    (0..buffers).for_each(|block| drop(disk.get(block).unwrap()));
    (cache, disk)
}

fn pin(disk: &Device, block: u64) -> Pin {
    disk.get(block).unwrap().pin().unwrap()
}

/// The table of a later cache may have the address of a dropped one.
#[test]
fn inv26_a_guard_that_was_forgotten_with_its_cache_keeps_no_buffer_of_another() {
    for round in 0..20 {
        let (cache, disk) = full(Eviction::Adaptive, 640);
        (0..640).for_each(|block| assert_eq!(disk.get_mut(block).err().map(drop), None, "{round}"));
        let got = thread::scope(|scope| {
            let other = scope.spawn(|| disk.get_mut(3).map(drop));
            other.join().unwrap()
        });
        assert_eq!(got, Ok(()), "{round}");
        disk.sync().unwrap();
        (640..1280).for_each(|block| assert_eq!(disk.get(block).err(), None, "{round}"));
        (1280..1920).for_each(|block| std::mem::forget(disk.get(block).unwrap()));
        drop((disk, cache));
    }
}

/// What keeps a buffer in use.
#[derive(Clone, Copy, Debug)]
enum Use {
    Guards,
    Pins,
    /// Pins of blocks that are invalidated.
    Stale,
}

/// Fails unless a get that may not wait finds the only buffer that is not in use.
fn find(eviction: Eviction, buffers: u64, by: Use, idle: usize, has_history: bool) {
    let what = format!("{eviction:?}: buffer {idle} of {buffers} is not in use, others by {by:?}");
    let (_cache, disk) = full(eviction, buffers);
    if has_history {
        // Some blocks that come back soon after they went, which A2 has no probation for, and some of a scan.
        let back = (buffers..buffers + 3).chain(buffers.saturating_sub(4)..buffers);
        let scan = buffers * 3 / 2..buffers * 9 / 4;
        back.chain(scan).for_each(|block| drop(disk.get(block).unwrap()));
    }
    let cached: Vec<_> = (0..3 * buffers).filter(|&block| disk.is_cached(block)).collect();
    assert_eq!(cached.len() as u64, buffers);
    let (mut guards, mut pins) = (Vec::new(), Vec::new());
    match by {
        Use::Guards => guards.extend(cached.iter().map(|&block| disk.get(block).unwrap())),
        Use::Pins | Use::Stale => pins.extend(cached.iter().map(|&block| pin(&disk, block))),
    }
    if let Use::Stale = by {
        cached.iter().for_each(|&block| assert_eq!(disk.invalidate(block), Ok(true)));
    }
    assert!(disk.claim(3 * buffers).unwrap().is_none(), "{what}, yet");
    assert_eq!(disk.get(3 * buffers).err(), Some(GetError::NoFreeBuffers), "{what}, yet");
    match by {
        Use::Guards => drop(guards.remove(idle)),
        Use::Pins | Use::Stale => drop(pins.remove(idle)),
    }
    // A claim looks at few buffers, at very few of stale ones, and may be refused for its policy.
    if buffers <= if let Use::Stale = by { 3 } else { 100 } {
        assert!(disk.claim(3 * buffers).unwrap().is_some(), "{what}: no claim");
    }
    assert_eq!(disk.get(3 * buffers + 1).map(|guard| guard[0]), Ok(7), "{what}: no get");
}

#[test]
fn inv07_the_only_buffer_that_is_not_in_use_is_found() {
    for (eviction, by) in
        POLICIES.into_iter().flat_map(|eviction| [Use::Guards, Use::Pins].map(|by| (eviction, by)))
    {
        (0..40).for_each(|idle| find(eviction, 40, by, idle, true));
        [0, 50, 99].into_iter().for_each(|idle| find(eviction, 100, by, idle, false));
    }
}

#[test]
fn inv26_one_buffer_is_found_behind_thousands_that_are_pinned() {
    for eviction in POLICIES {
        [0, 2000, 4999].into_iter().for_each(|idle| find(eviction, 5000, Use::Pins, idle, false));
    }
}

#[test]
fn inv10_a_stale_buffer_is_found_behind_others_that_are_pinned() {
    for eviction in POLICIES {
        [0, 1, 2].into_iter().for_each(|idle| find(eviction, 3, Use::Stale, idle, false));
        [0, 50, 99].into_iter().for_each(|idle| find(eviction, 100, Use::Stale, idle, true));
    }
}

const BUFFERS: u64 = 128;

/// A cache of 128 buffers, whose cleaner does nothing by itself, with as many dirty blocks. The device refuses the
/// older half of them.
fn half_refused(most_dirty: u32, fault: Fault) -> (Cache, Device, Disk) {
    let builder = Cache::builder(BUFFERS as usize * SIZE).block_size(SIZE);
    let builder = builder.write_back_after(Duration::from_secs(3600));
    let builder = builder.dirty_limits(100, most_dirty).patience(Duration::from_millis(100));
    let cache = builder.build().unwrap();
    let disk = MemoryDevice::new(vec![7; 2 * BUFFERS as usize * SIZE]);
    let disk = Arc::new(FaultDevice::new(disk));
    let refused = 0..BUFFERS / 2 * SIZE as u64;
    disk.inject_at(Operation::Write, refused, fault);
    let options = AttachOptions::new().on_loss(|_| {});
    let device = cache.attach_with(Arc::clone(&disk), options).unwrap();
    (0..BUFFERS).for_each(|block| device.get_mut(block).unwrap().fill(2));
    (cache, device, disk)
}

#[test]
fn inv26_dirty_buffers_are_written_behind_older_ones_that_cannot_be() {
    let (_cache, disk, _) = half_refused(100, Fault::Error(libc::EIO));
    for block in BUFFERS..BUFFERS + 8 {
        assert_eq!(disk.get(block).map(|guard| guard[0]), Ok(7));
    }
}

/// A writer writes 64 blocks: not again those that were just refused.
#[test]
fn inv26_a_writer_above_the_limit_writes_behind_older_ones_that_cannot_be() {
    for fault in [Fault::Error(libc::EIO), Fault::Panic] {
        let (cache, _device, disk) = half_refused(75, fault);
        let (dirty, limit) = (cache.stats().dirty / SIZE, BUFFERS as usize * 3 / 4);
        assert!(dirty <= limit, "{dirty} are dirty");
        // The device refuses the older half at the first of them, then each alone once, and takes the others.
        let taken = BUFFERS - dirty as u64;
        assert_eq!(disk.count(Operation::Write), 1 + BUFFERS / 2 + taken, "{fault:?}");
    }
}

/// A task does not write dirty buffers itself. A cleaner with nothing to do for an hour does.
#[test]
fn inv26_a_task_that_is_refused_wakes_the_cleaner_for_the_next() {
    let (_cache, disk, _) = crate::world::new();
    (0..16).for_each(|block| crate::world::fill(&disk, block, 2));
    assert_eq!(block_on(disk.get_async(20)).err(), Some(GetError::NoFreeBuffers));
    wait_for("a buffer", || block_on(disk.get_async(20)).is_ok());
}
