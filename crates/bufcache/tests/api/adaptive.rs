//! What an adaptive cache learns.

use testkit::rng::seeded;

use crate::world::*;

const SIZE: usize = 512;
const BUFFERS: u64 = 2000;

/// A cache of [`BUFFERS`] blocks, and a device of `times` as many.
fn world(times: u64) -> (Cache, Device) {
    let builder = Cache::builder(BUFFERS as usize * SIZE).block_size(SIZE);
    let cache = builder.build().unwrap();
    let disk = MemoryDevice::new(vec![0; (times * BUFFERS) as usize * SIZE]);
    let disk = cache.attach(disk).unwrap();
    (cache, disk)
}

/// Claims a block, and ends the load. Returns whether the claim was granted.
fn claims(disk: &Device, block: u64) -> bool {
    let load = disk.claim(block).unwrap();
    load.map(|load| load.finish(Ok(SIZE))).is_some()
}

/// The hits, and the claims that were refused, of a reader that claims what it misses.
fn read(disk: &Device, blocks: impl Iterator<Item = u64>) -> (u64, u64) {
    let (mut hits, mut refused) = (0, 0);
    for block in blocks {
        match disk.try_get(block) {
            Ok(_) => hits += 1,
            Err(_) => refused += u64::from(!claims(disk, block)),
        }
    }
    (hits, refused)
}

/// The hits of a reader whose misses all get a buffer.
fn read_all(disk: &Device, blocks: impl Iterator<Item = u64>) -> u64 {
    let mut hits = 0;
    for block in blocks {
        match disk.try_get(block) {
            Ok(_) => hits += 1,
            Err(_) => drop(disk.get(block).unwrap()),
        }
    }
    hits
}

#[test]
fn inv28_the_second_claim_is_granted_where_few_requests_hit_and_each_where_there_is_room() {
    let (cache, disk) = world(16);
    let mut random = seeded(1);
    let (_, refused) = read(&disk, 0..BUFFERS);
    assert_eq!(refused, 0, "there was room");
    read(&disk, (0..100_000).map(|_| random.u64(0..16 * BUFFERS)));
    let before = cache.stats().claims_refused;
    let (hits, refused) = read(&disk, (0..50_000).map(|_| random.u64(0..16 * BUFFERS)));
    assert!((2_500..4_000).contains(&hits), "a sixteenth, as if each block were kept: {hits}");
    assert!(refused > 35_000, "{refused}");
    assert_eq!(cache.stats().claims_refused - before, refused);

    let is_new = |block: &u64| disk.try_get(*block).is_err() && !claims(&disk, *block);
    let block = (0..16 * BUFFERS).find(is_new).unwrap();
    assert!(claims(&disk, block) && disk.try_get(block).is_ok(), "the second one");
    (0..2 * BUFFERS).for_each(|block| _ = disk.invalidate(block).unwrap());
    let (_, refused) = read(&disk, 2 * BUFFERS..2 * BUFFERS + 50);
    assert_eq!(refused, 0, "there is room");

    // Once many hit, each claim is granted.
    let often = |at| if at % 4 == 0 { random.u64(0..15 * BUFFERS) } else { at % (BUFFERS / 2) };
    read(&disk, (0..100_000).map(often));
    let (_, refused) = read(&disk, 15 * BUFFERS..16 * BUFFERS);
    assert_eq!(refused, 0);
}

#[test]
fn inv28_refusals_cost_few_hits_where_each_block_is_used_twice() {
    // One in ten requests asks again for the block before.
    let blocks = || {
        let mut random = seeded(2);
        let mut last = 0;
        (0..600_000).map(move |at| {
            last = if at % 10 == 9 { last } else { random.u64(0..64 * BUFFERS) };
            last
        })
    };
    let ((_cache, each), (_other, refusing)) = (world(64), world(64));
    let most = read_all(&each, blocks());
    let (hits, refused) = read(&refusing, blocks());
    assert!((60_000..72_000).contains(&most) && refused > 20_000, "{most} {refused}");
    assert!(hits + 600_000 / 128 > most, "{hits} of {most}");
}

/// The hits in percent of `blocks`, each read if it is not there.
fn percent(disk: &Device, blocks: impl Iterator<Item = u64> + Clone) -> u64 {
    100 * read_all(disk, blocks.clone()) / blocks.count() as u64
}

fn is_good_at_a_loop(disk: &Device, cache: &Cache, name: &str) {
    let above = BUFFERS * 101 / 100;
    let percent = percent(disk, (0..60 * BUFFERS).map(|at| at % above));
    assert!(percent >= 70, "{name}: {percent} % with {:?}", cache.stats().eviction);
}

#[test]
fn a_loop_just_above_the_room_hits_after_a_scan_of_other_blocks() {
    for place in 1..9 {
        let (cache, disk) = world(40);
        let scan = 4 * place * BUFFERS..(4 * place + 2) * BUFFERS;
        read_all(&disk, scan);
        is_good_at_a_loop(&disk, &cache, &format!("place {place}"));
    }
}
