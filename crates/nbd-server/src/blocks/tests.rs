//! READs through the cache, made as a worker makes them.

use std::os::unix::fs::FileExt;

use aio_reap_test::Build;
use aio_reap_test::sim::{Script, Transfer};

use super::*;
use crate::memory::ALIGN;

/// Makes an image of `len` bytes that depend on their position, behind a cache of `cache` bytes.
fn make(len: usize, cache: u64) -> (File, Vec<u8>, Arc<Image>) {
    let file = tempfile::tempfile().unwrap();
    let bytes: Vec<u8> = (0..len).map(|at| (at / 8 * 37 + at) as u8).collect();
    file.write_all_at(&bytes, 0).unwrap();
    let backing = Backing::open(&file).unwrap();
    let image = Blocks::new(cache).unwrap().attach("test".into(), backing).unwrap();
    (file, bytes, image)
}

/// Returns the size of the buffer of a READ.
fn room(image: &Image, offset: u64, len: usize) -> usize {
    image.read_range(offset, len as u64).unwrap().len
}

/// Reads as a worker does, from the cache or else from the file. Also returns whether the cache
/// answered.
fn read(image: &Image, file: &File, offset: u64, len: usize) -> (io::Result<Vec<u8>>, bool) {
    let mut buf = AlignedBuf::zeroed(room(image, offset, len), ALIGN);
    buf.set_len(len);
    if image.try_read(offset, &mut buf) {
        return (Ok(buf.to_vec()), true);
    }
    let fill = image.fill(offset, &mut buf);
    let count = read_up_to(file, fill.offset(), &mut buf).unwrap();
    let result = fill.finish((count, Ok(())), &mut buf);
    (result.map(|count| buf[..count].to_vec()), false)
}

fn read_up_to(file: &File, offset: u64, buf: &mut [u8]) -> io::Result<usize> {
    let mut done = 0;
    loop {
        match file.read_at(&mut buf[done..], offset + done as u64)? {
            0 => return Ok(done),
            count => done += count,
        }
    }
}

#[test]
fn any_part_of_an_image_of_any_size_is_read_and_kept() {
    const LEN: usize = 3 * BLOCK + 1000;
    let edges = [0, 1, 511, 4095, 4096, 4097, 8191, 8192, 12_288, 12_300, LEN - 1, LEN];
    for (at, &start) in edges.iter().enumerate() {
        for &end in &edges[at + 1..] {
            let (file, bytes, image) = make(LEN, 1 << 20);
            let (offset, len) = (start as u64, end - start);
            for again in [false, true] {
                let (found, hit) = read(&image, &file, offset, len);
                assert!(found.unwrap() == bytes[start..end], "{start}..{end}");
                assert_eq!(hit, again, "{start}..{end}");
            }
            // Whole blocks are cached, including the bytes around the range.
            let whole = start / BLOCK * BLOCK..end.next_multiple_of(BLOCK).min(LEN);
            let (found, hit) = read(&image, &file, whole.start as u64, whole.len());
            assert!(hit && found.unwrap() == bytes[whole]);
        }
    }
}

#[test]
fn what_cannot_be_kept_is_read_all_the_same() {
    // The cache has two buffers, fewer than the request has blocks.
    let (file, bytes, image) = make(64 * BLOCK, 2 * BLOCK as u64);
    for _ in 0..2 {
        let (found, hit) = read(&image, &file, 0, 16 * BLOCK);
        assert!(!hit && found.unwrap() == bytes[..16 * BLOCK]);
    }
    for round in 0..2 {
        let (found, hit) = read(&image, &file, 100, BLOCK); // in two blocks
        assert!(found.unwrap() == bytes[100..100 + BLOCK]);
        assert_eq!(hit, round > 0);
    }
    // Guards hold both buffers.
    let guards = [0, 1].map(|block| image.device.get(block));
    let (found, hit) = read(&image, &file, 5 * BLOCK as u64, BLOCK);
    assert!(!hit && found.unwrap() == bytes[5 * BLOCK..6 * BLOCK]);
    assert!(!read(&image, &file, 5 * BLOCK as u64, BLOCK).1);
    drop(guards);
    assert!(!read(&image, &file, 5 * BLOCK as u64, BLOCK).1);
    assert!(read(&image, &file, 5 * BLOCK as u64, BLOCK).1);
}

#[test]
fn a_scan_is_not_kept_and_small_reads_are() {
    let (file, bytes, image) = make(64 * BLOCK, 1 << 20);
    for (len, kept) in [(SCAN, 0), (BLOCK, 16)] {
        for at in (0..16 * BLOCK).step_by(len) {
            let (found, _) = read(&image, &file, at as u64, len);
            assert!(found.unwrap() == bytes[at..at + len]);
        }
        // The first READ of a scan is not recognised as part of it, so its blocks are kept.
        let there = |&at: &usize| image.try_read((at * BLOCK) as u64, &mut [0; BLOCK]);
        assert_eq!((0..16).filter(there).count(), kept.max(SCAN / BLOCK), "{len}");
    }
}

#[test]
fn the_blocks_that_a_shrunken_image_has_left_are_kept_and_no_others() {
    let (file, bytes, image) = make(4 * BLOCK, 1 << 20);
    file.set_len(BLOCK as u64 + 100).unwrap();
    let (found, hit) = read(&image, &file, 0, 4 * BLOCK);
    assert!(!hit && found.unwrap().len() == BLOCK + 100);
    assert!(read(&image, &file, 0, BLOCK).1, "the first was read whole");
    file.write_all_at(&bytes, 0).unwrap();
    let (found, hit) = read(&image, &file, BLOCK as u64, BLOCK);
    assert!(!hit && found.unwrap() == bytes[BLOCK..2 * BLOCK], "zeros were kept");
}

/// A READ of whole blocks fails after the requested bytes. These bytes are the answer, and the
/// blocks before the failure are kept.
#[test]
fn what_was_read_before_an_error_is_used() {
    for (read, answered, kept) in
        [(2 * BLOCK + 60, true, 2), (2 * BLOCK + 40, false, 2), (10, false, 0)]
    {
        let (file, bytes, image) = make(3 * BLOCK, 1 << 20);
        let script = Script::new();
        let engine = Engine::builder().build_sim(&script).unwrap();
        let attached = engine.attach(file.try_clone().unwrap()).unwrap();
        script.on_transfer(Transfer::Short(read));
        script.on_transfer(Transfer::Fail(libc::EIO));
        let (offset, len) = (100, 2 * BLOCK - 50); // ends 50 bytes into the third block
        let mut buf = AlignedBuf::zeroed(room(&image, offset, len), ALIGN);
        buf.set_len(len);
        let fill = image.fill(offset, &mut buf);
        assert!(!fill.loads.is_empty());
        let reading = engine.read(&attached, buf, fill.offset()).submit();
        let (result, mut buf) = reading.unwrap().wait();
        let error = result.unwrap_err();
        assert_eq!(error.transferred(), read);
        let result = fill.finish((read, Err(error.into())), &mut buf);
        assert_eq!(result.is_ok(), answered, "{read}");
        if answered {
            assert!(buf[..result.unwrap()] == bytes[100..][..len]);
        }
        let there = |&at: &usize| image.try_read((at * BLOCK) as u64, &mut [0; BLOCK]);
        assert_eq!((0..3).filter(there).count(), kept, "{read}");
    }
}

#[test]
fn a_cache_needs_a_block_at_least() {
    assert!(Blocks::new(BLOCK as u64 - 1).is_err());
    let (_, _, image) = make(0, BLOCK as u64);
    assert_eq!((room(&image, 0, 5000), image.try_read(0, &mut [])), (5000, false));
}

#[test]
fn without_a_cache_nothing_is_kept() {
    let (file, bytes, image) = make(4 * BLOCK, 0);
    for _ in 0..2 {
        let (found, hit) = read(&image, &file, 0, BLOCK);
        assert!(!hit && found.unwrap() == bytes[..BLOCK]);
    }
    assert!(image.bypasses_cache(1, true) && image.bypasses_cache(1, false) && image.is_bypassed());
}

/// Every read of the image, kept or not, starts and ends at a multiple of the image's unit.
#[test]
fn an_image_is_read_by_its_own_unit() {
    const LEN: usize = 64 * BLOCK;
    let (file, bytes, mut image) = make(LEN, 1 << 20);
    Arc::get_mut(&mut image).unwrap().alignment = 512;
    let longest = image.longest as usize;
    let claimed = image.device.claim(0).unwrap().expect("it is not cached");
    let parts = [(10, 100), (0, 100), (700, 512), (10, longest + 1), (512, longest + 512)];
    // The second time the READ starts where the last one ended.
    for (offset, len) in parts.into_iter().flat_map(|part| [part, part]) {
        image.next.store(offset, Ordering::Relaxed);
        let mut buf = AlignedBuf::zeroed(room(&image, offset, len), ALIGN);
        buf.set_len(len);
        let start = image.fill(offset, &mut buf).offset();
        let asked = buf.len();
        assert!((start | asked as u64).is_multiple_of(512), "{offset} {len}: {start} {asked}");
        assert!(read(&image, &file, offset, len).0.unwrap() == bytes[offset as usize..][..len]);
    }
    drop(claimed);
}

/// A READ's transfer is the range of whole units around it, unless that is too long or a file cannot have it: for every
/// unit, and offsets and lengths around each multiple of it, each limit, and the ends of what the numbers hold.
#[test]
fn a_widened_range_is_whole_covers_what_was_asked_for_and_keeps_the_limit() {
    const MOST: u64 = 32 << 20;
    let around = |at: u64| (0..5).filter_map(move |step| at.checked_add(step)?.checked_sub(2));
    let mut refused = 0;
    for unit in (0..=16).map(|shift| 1_u64 << shift) {
        let starts =
            [0, unit, 7 * unit, (1 << 32) + unit, 1 << 57, u64::MAX - 3 * unit, u64::MAX - 2];
        let lens = [0, 2, unit, 3 * unit, MOST - 2 * unit, MOST - unit, MOST, u64::MAX - 2];
        for offset in starts.into_iter().flat_map(around) {
            for wanted in lens.into_iter().flat_map(around) {
                let start = if wanted == 0 { offset } else { offset / unit * unit };
                let end = u128::from(offset) + u128::from(wanted);
                let end = if wanted == 0 { end } else { end.next_multiple_of(unit.into()) };
                let len = end - u128::from(start);
                let fits = end <= u64::MAX.into() && len <= MOST.into();
                let (head, len) = ((offset - start) as usize, len as usize);
                let range = ReadRange { start, len, head, wanted: wanted as usize };
                let found = ReadRange::new(offset, wanted, unit, MOST as usize);
                assert_eq!(found, fits.then_some(range), "{offset} {wanted} {unit}");
                refused += u32::from(!fits);
            }
        }
    }
    assert!(refused > 1_000, "limits were not met");
}
