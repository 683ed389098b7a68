//! Short transfers are continued where they stopped, those of `O_DIRECT` files at the start of a
//! block.
//!
//! The tests of direct files use a file in memory that is opened with `O_DIRECT`. It takes any length, so the
//! device can end a transfer at any byte.

use std::fs::OpenOptions;
use std::os::unix::fs::{FileExt, OpenOptionsExt};

use crate::scripted::scripted;
use aio_reap::{AlignedBuf, BufList, Engine, File, Request, RequestError};
use aio_reap_test::sim::Transfer;
use proptest::collection::vec;
use proptest::prelude::*;

const BLOCK: usize = 512;

/// Makes a file with these bytes. Returns `None` if files in memory have no `O_DIRECT` (before
/// Linux 6.6).
fn direct(engine: &Engine, bytes: &[u8]) -> Option<(std::fs::File, File)> {
    let temp = tempfile::NamedTempFile::new_in("/dev/shm").ok()?;
    let mut options = OpenOptions::new();
    let opened = options.write(true).read(true).custom_flags(libc::O_DIRECT).open(temp.path());
    let file = engine.attach(opened.ok()?).unwrap();
    temp.as_file().write_all_at(bytes, 0).unwrap();
    (file.alignment()?.offset as usize == BLOCK).then(|| (temp.into_file(), file))
}

fn buffered(engine: &Engine, bytes: &[u8]) -> Option<(std::fs::File, File)> {
    let raw = tempfile::tempfile().unwrap();
    raw.write_all_at(bytes, 0).unwrap();
    let file = engine.attach(raw.try_clone().unwrap()).unwrap();
    Some((raw, file))
}

fn buf(len: usize, byte: impl Fn(usize) -> u8) -> AlignedBuf {
    let mut buf = AlignedBuf::zeroed(len, BLOCK);
    buf.iter_mut().enumerate().for_each(|(at, slot)| *slot = byte(at));
    buf
}

/// Chooses whether the read fills its buffer with zeros.
fn with_end<B: 'static>(request: Request<'_, B>, zero_fill: bool) -> Request<'_, B> {
    if zero_fill { request.zero_fill() } else { request }
}

/// Checks the result of such a read of `bytes`, whose buffer was full of 0xee, if the file has
/// `there`.
fn check(zero_fill: bool, read: Result<usize, RequestError>, bytes: &[u8], there: &[u8]) {
    assert_eq!(read.unwrap(), if zero_fill { bytes.len() } else { there.len() });
    assert_eq!(&bytes[..there.len()], there);
    let rest = if zero_fill { 0 } else { 0xee };
    assert!(bytes[there.len()..].iter().all(|&byte| byte == rest));
}

/// Reads and then writes `lens` bytes from `start` on, in a file of `old_len` bytes, as one buffer or
/// as a list. The device ends transfers after `pieces`. A `block` of 0 is a file with the page cache.
fn any_split(
    block: usize,
    lens: &[usize],
    (start, old_len): (usize, usize),
    (zero_fill, vectored): (bool, bool),
    pieces: &[usize],
) {
    let (engine, script) = scripted(4);
    let old: Vec<u8> = (0..old_len).map(|at| (at % 251) as u8 | 1).collect();
    let opened = if block == 0 { buffered(&engine, &old) } else { direct(&engine, &old) };
    let Some((raw, file)) = opened else {
        return assert!(std::env::var_os("OFFLOCK_REQUIRE_ALL").is_none());
    };
    let (len, offset) = (lens.iter().sum(), start as u64);
    let list = |byte: fn(usize) -> u8| {
        let mut from = 0;
        let bufs = lens.iter().map(|&len| {
            from += len;
            buf(len, |at| byte(from - len + at))
        });
        BufList::new(bufs.collect()).unwrap()
    };
    let bytes_of = |list: BufList<AlignedBuf>| {
        list.iter().map(|buf| buf.to_vec()).collect::<Vec<_>>().concat()
    };
    let cut = || pieces.iter().for_each(|&piece| script.on_transfer(Transfer::Short(piece)));

    cut();
    let (read, bytes) = if vectored {
        let request = engine.read_vectored(&file, list(|_| 0xee), offset);
        let (read, list) = with_end(request, zero_fill).submit().unwrap().wait();
        (read, bytes_of(list))
    } else {
        let request = engine.read(&file, buf(len, |_| 0xee), offset);
        let (read, buf) = with_end(request, zero_fill).submit().unwrap().wait();
        (read, buf.to_vec())
    };
    let there = len.min(old_len.saturating_sub(start));
    check(zero_fill, read, &bytes, &old[start.min(old_len)..][..there]);

    cut();
    let new = |at| !(at as u8);
    let (written, bytes) = if vectored {
        let (written, back) =
            engine.write_vectored(&file, list(new), offset).submit().unwrap().wait();
        assert!(back.iter().map(|buf| buf.len()).eq(lens.iter().copied()));
        (written, bytes_of(back))
    } else {
        let (written, back) = engine.write(&file, buf(len, new), offset).submit().unwrap().wait();
        (written, back.to_vec())
    };
    assert_eq!(written.unwrap(), len);
    let mut reference = old;
    reference.resize(old_len.max(if len == 0 { 0 } else { start + len }), 0);
    if len > 0 {
        reference[start..start + len].copy_from_slice(&bytes);
    }
    assert!(bytes.iter().enumerate().all(|(at, &byte)| byte == new(at)));
    let mut now = vec![0; reference.len()];
    raw.read_exact_at(&mut now, 0).unwrap();
    assert!(now == reference && raw.metadata().unwrap().len() == reference.len() as u64);
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    /// Wherever the device cuts transfers and wherever the file ends, the bytes are those of the
    /// reference, for one buffer and for lists.
    #[test]
    fn inv11_any_split_gives_the_same_bytes(
        lens in vec(prop_oneof![Just(0usize), 1usize..40, 1usize..300], 1..12),
        place in (0usize..200, 0usize..400),
        how: (bool, bool),
        pieces in vec(1usize..40, 0..80),
    ) {
        any_split(0, &lens, place, how, &pieces);
    }

    #[test]
    fn inv11_direct_transfers_continue_at_a_block(
        blocks in vec(1usize..4, 1..5),
        first in 0usize..6,
        old_len in 0usize..8000,
        how: (bool, bool),
        pieces in vec(BLOCK..4 * BLOCK, 0..20),
    ) {
        let lens: Vec<_> = blocks.iter().map(|count| count * BLOCK).collect();
        any_split(BLOCK, &lens, (first * BLOCK, old_len), how, &pieces);
    }
}

/// A write of less than a block is retried, but only up to the limit.
#[test]
fn inv12_less_than_a_block_is_written_again_up_to_a_limit() {
    for (tries, written) in [(10, true), (40, false)] {
        let (engine, script) = scripted(128);
        let Some((_raw, file)) = direct(&engine, &[]) else {
            assert!(std::env::var_os("OFFLOCK_REQUIRE_ALL").is_none());
            return;
        };
        (0..tries).for_each(|_| script.on_transfer(Transfer::Short(100)));
        let (result, _) = engine.write(&file, buf(2 * BLOCK, |_| 1), 0).submit().unwrap().wait();
        match result {
            Ok(moved) => assert!(written && moved == 2 * BLOCK),
            Err(error) => {
                assert!(!written);
                assert_eq!(error.errno(), libc::ENOSPC);
            }
        }
    }
}

/// The engine reads `statx` by positions, which are those of the fields of the C library's
/// structure.
#[cfg(target_env = "gnu")]
#[test]
fn alignment_is_that_of_the_c_librarys_statx() {
    use std::mem::{MaybeUninit, offset_of, size_of};
    use std::os::fd::AsRawFd;

    assert_eq!(size_of::<libc::statx>(), 256);
    assert_eq!(offset_of!(libc::statx, stx_dio_mem_align), 38 * 4);
    assert_eq!(offset_of!(libc::statx, stx_dio_offset_align), 39 * 4);
    let (engine, _script) = scripted(128);
    let temp = tempfile::NamedTempFile::new_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let mut options = OpenOptions::new();
    let opened = options.read(true).custom_flags(libc::O_DIRECT).open(temp.path());
    let Ok(raw) = opened else { return };
    let mut stat = MaybeUninit::<libc::statx>::zeroed();
    let (fd, mask) = (raw.as_raw_fd(), libc::STATX_DIOALIGN);
    // SAFETY: an empty path with AT_EMPTY_PATH names the descriptor, and `stat` is large enough.
    let ret =
        unsafe { libc::statx(fd, c"".as_ptr(), libc::AT_EMPTY_PATH, mask, stat.as_mut_ptr()) };
    // SAFETY: an all-zero statx is valid, and the kernel stores only numbers.
    let stat = unsafe { stat.assume_init() };
    if ret != 0 || stat.stx_dio_offset_align == 0 {
        return; // before Linux 6.1, or a file system that does not report it
    }
    let align = engine.attach(raw).unwrap().alignment().expect("it is opened with O_DIRECT");
    let named = (stat.stx_dio_mem_align, stat.stx_dio_offset_align);
    assert_eq!((align.memory, align.offset), named);
}
