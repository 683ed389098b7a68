//! Short transfers are continued where they stopped, those of `O_DIRECT` files at the start of a
//! block.
//!
//! The tests of direct files use a file in memory that is opened with `O_DIRECT`. It takes any length, so the
//! device can end a transfer at any byte.

use std::fs::OpenOptions;
use std::os::unix::fs::{FileExt, OpenOptionsExt};

use crate::scripted::scripted;
use aio_reap::{AlignedBuf, Engine, File};
use aio_reap_test::sim::Transfer;

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

fn buf(len: usize, byte: impl Fn(usize) -> u8) -> AlignedBuf {
    let mut buf = AlignedBuf::zeroed(len, BLOCK);
    buf.iter_mut().enumerate().for_each(|(at, slot)| *slot = byte(at));
    buf
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
