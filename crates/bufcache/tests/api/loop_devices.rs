//! Block devices of the system, with sectors of 512 and of 4,096 bytes. Loop devices need root and
//! `losetup`; where they cannot be had, the tests say so and test nothing.

use std::fs::OpenOptions;
use std::io::{IoSlice, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::process::Command;

use crate::world::*;

const SIZE: usize = 4096;
const BLOCKS: u8 = 64;

/// A loop device over a file of blocks that are filled with their numbers; detached at the end.
struct Loop {
    path: String,
    _file: tempfile::NamedTempFile,
}

impl Loop {
    fn with_sectors(of: usize) -> Option<Self> {
        Self::new(&["--sector-size", &of.to_string()])
    }

    /// Returns a device that `losetup` makes with these options.
    fn new(options: &[&str]) -> Option<Self> {
        let mut file = tempfile::NamedTempFile::new_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        for block in 0..BLOCKS {
            file.write_all(&[block; SIZE]).unwrap();
        }
        file.as_file().sync_all().unwrap();
        let made = Command::new("losetup")
            .args(["--find", "--show"])
            .args(options)
            .arg(file.path())
            .output();
        match made {
            Ok(made) if made.status.success() => {
                let path = String::from_utf8(made.stdout).unwrap().trim().to_owned();
                Some(Self { path, _file: file })
            }
            Ok(made) => {
                let why = String::from_utf8_lossy(&made.stderr).into_owned();
                println!("no loop device, so nothing was tested: {why}");
                None
            }
            Err(why) => {
                println!("no losetup, so nothing was tested: {why}");
                None
            }
        }
    }

    fn open(&self, direct: bool) -> File {
        let flags = if direct { libc::O_DIRECT } else { 0 };
        let mut options = OpenOptions::new();
        options.read(true).write(true).custom_flags(flags).open(&self.path).unwrap()
    }
}

impl Drop for Loop {
    fn drop(&mut self) {
        let _ = Command::new("losetup").args(["--detach", &self.path]).status();
    }
}

fn reads_all(cache: &Cache, device: impl IntoDevice) {
    let disk = cache.attach(device).unwrap();
    assert_eq!(disk.blocks(), u64::from(BLOCKS));
    for number in 0..BLOCKS {
        let block = disk.get(u64::from(number)).unwrap();
        assert!(block.iter().all(|&byte| byte == number), "block {number}");
    }
}

fn serves(sector: usize) {
    let Some(disk) = Loop::with_sectors(sector) else { return };
    let cache = Cache::builder(16 * SIZE).build().unwrap();
    let small = Cache::builder(16 * SIZE).block_size(512).build().unwrap();
    reads_all(&cache, FileDevice::new(disk.open(true)).unwrap());

    let direct = Arc::new(FileDevice::new(disk.open(true)).unwrap());
    assert_eq!(direct.alignment(), sector);
    reads_all(&cache, Arc::clone(&direct));
    match small.attach(Arc::clone(&direct)) {
        Ok(small) => assert_eq!((sector, small.get(17).unwrap()[3]), (512, 2)),
        Err(BuildError::Misaligned { alignment, .. }) => {
            assert_eq!((sector, alignment), (4096, 4096))
        }
        Err(other) => panic!("{other}"),
    }

    // Written directly, durably, and zeroed; then read by another descriptor, past all caches of ours.
    #[repr(align(4096))]
    struct Block([u8; SIZE]);
    direct.write(0, &Block([101; SIZE]).0).unwrap();
    direct.write_vectored(SIZE as u64, &[IoSlice::new(&Block([102; SIZE]).0)], true).unwrap();
    direct.zero(2 * SIZE as u64, SIZE as u64).unwrap();
    direct.sync().unwrap();
    let again = FileDevice::new(disk.open(true)).unwrap();
    for (block, expected) in [101, 102, 0, 3].into_iter().enumerate() {
        let mut bytes = Block([9; SIZE]);
        assert_eq!(again.read((block * SIZE) as u64, &mut bytes.0).unwrap(), SIZE);
        assert!(bytes.0.iter().all(|&byte| byte == expected), "block {block}");
    }
}

#[test]
fn a_block_device_with_sectors_of_512_bytes() {
    serves(512);
}

#[test]
fn a_block_device_with_sectors_of_4096_bytes() {
    serves(4096);
}

#[test]
fn a_block_device_by_way_of_the_page_cache() {
    let Some(disk) = Loop::with_sectors(512) else { return };
    let cache = Cache::new(16 * SIZE).unwrap();
    let device = FileDevice::new(disk.open(false)).unwrap();
    assert_eq!((device.alignment(), device.len()), (1, u64::from(BLOCKS) * SIZE as u64));
    reads_all(&cache, device);
}

/// The system opens it for writing all the same, and tells of the refusal only when it syncs.
#[test]
fn a_read_only_block_device_refuses_writers() {
    let Some(disk) = Loop::new(&["--read-only"]) else { return };
    let cache = Cache::new(1 << 20).unwrap();
    let device = cache.attach(FileDevice::new(disk.open(false)).unwrap()).unwrap();
    assert_eq!(device.get_mut(1).map(drop), Err(GetError::ReadOnly));
    assert_eq!(device.create(1).map(drop), Err(GetError::ReadOnly));
    assert_eq!(device.discard(1..2), Err(WriteError::ReadOnly));
    assert_eq!(device.get(1).unwrap()[0], 1);
    assert_eq!(device.sync(), Ok(()));
}
