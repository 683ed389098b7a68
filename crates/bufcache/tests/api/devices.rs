//! Devices: those of the system, those that fail, and those that come and go.

use std::fs::OpenOptions;
use std::io::{IoSlice, Seek, SeekFrom};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, OpenOptionsExt};

use bufcache_test::Outcome;

use crate::world::*;

const SIZE: usize = 4096;

fn errno<T>(result: io::Result<T>) -> Option<i32> {
    result.err().and_then(|error| error.raw_os_error())
}

/// 200,000 bytes, each the number of its sector.
pub(crate) fn numbered() -> Vec<u8> {
    (0..200_000).map(|at| (at / 512) as u8).collect()
}

/// Everything a device can do, against what it should then hold.
fn works(device: &impl BlockDevice, frees: bool) {
    #[repr(align(4096))]
    struct Block([u8; SIZE]);
    let mut there = numbered();
    assert_eq!(device.len(), 200_000);
    let mut block = Block([9; SIZE]);
    device.write(8192, &block.0).unwrap();
    there[8192..8192 + SIZE].fill(9);
    block.0.fill(8);
    device.write_vectored(16_384, &[IoSlice::new(&block.0)], true).unwrap();
    there[16_384..16_384 + SIZE].fill(8);
    if frees {
        device.zero(32_768, 8192).unwrap();
        there[32_768..32_768 + 8192].fill(0);
        device.discard(65_536, SIZE as u64).unwrap();
        there[65_536..65_536 + SIZE].fill(0);
    }
    device.sync().unwrap();
    for (at, expected) in (0..).step_by(SIZE).zip(there.chunks(SIZE)) {
        assert_eq!(device.read(at, &mut block.0).unwrap(), expected.len());
        assert!(block.0[..expected.len()] == *expected, "at {at}");
    }
    assert_eq!(device.read(200_704, &mut block.0).unwrap(), 0);
}

/// A file in the directory of the build, which is on a disk.
fn on_disk() -> (tempfile::NamedTempFile, File) {
    let mut file = tempfile::NamedTempFile::new_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    io::Write::write_all(&mut file, &numbered()).unwrap();
    let open = OpenOptions::new().read(true).write(true).open(file.path()).unwrap();
    (file, open)
}

#[test]
fn a_device_in_memory_does_it_all() {
    works(&MemoryDevice::new(numbered()), true);
    works(&FaultDevice::new(MemoryDevice::new(numbered())), true);
    let device = MemoryDevice::new(vec![1; 100]);
    assert_eq!(errno(device.write(90, &[0; 11])), Some(libc::ENOSPC));
    assert_eq!(errno(device.zero(u64::MAX, 2)), Some(libc::ENOSPC));
    let mut bytes = [0; 100];
    assert_eq!((device.read(0, &mut bytes).unwrap(), bytes), (100, [1; 100]));
}

#[test]
fn a_file_does_it_all() {
    let (_path, file) = on_disk();
    let device = FileDevice::new(file).unwrap();
    assert_eq!(device.alignment(), 1);
    let frees = errno(device.zero(32_768, 8192)) != Some(libc::EOPNOTSUPP);
    works(&device, frees);
}

/// Linux writes at the end of such a file, whatever the offset.
#[test]
fn a_file_that_is_open_for_appending_is_refused() {
    let (path, _) = on_disk();
    let open = |write| {
        // SAFETY: `fcntl` with a flag takes no pointer.
        let set =
            |file: &File| unsafe { libc::fcntl(file.as_raw_fd(), libc::F_SETFL, libc::O_APPEND) };
        let file = OpenOptions::new().read(true).write(write).open(path.path()).unwrap();
        assert_eq!(set(&file), 0);
        file
    };
    assert_eq!(errno(FileDevice::new(open(true))), Some(libc::EINVAL));
    assert_eq!(FileDevice::new(open(false)).unwrap().len(), 200_000);
}

/// A file of one block, of which the third was synced and the fifth was not.
fn grown() -> (File, Arc<FaultDevice<FileDevice>>, bufcache::Device) {
    let file = tempfile::tempfile().unwrap();
    file.write_all_at(&[7; SIZE], 0).unwrap();
    let device = FileDevice::new(file.try_clone().unwrap()).unwrap();
    let device = Arc::new(FaultDevice::new(device));
    device.record().unwrap();
    let options = AttachOptions::new().growing().on_loss(|_| {});
    let disk = Cache::new(1 << 20).unwrap().attach_with(Arc::clone(&device), options).unwrap();
    disk.create(2).unwrap().fill(3);
    disk.sync().unwrap();
    disk.create(4).unwrap().fill(5);
    disk.flush().unwrap();
    assert_eq!(file.metadata().unwrap().len(), 5 * SIZE as u64);
    (file, device, disk)
}

#[test]
fn inv20_a_loss_of_power_leaves_what_was_synced_behind_the_former_end() {
    let (_file, device, _disk) = grown();
    let first_of = |bytes: &[u8]| bytes.chunks(SIZE).map(|block| block[0]).collect::<Vec<_>>();
    let moments = device.moments();
    let least = device.after_power_cut(moments, |_, _| 0).unwrap();
    assert_eq!((least.len(), first_of(&least)), (3 * SIZE, vec![7, 0, 3]));
    let most = device.after_power_cut(moments, |_, versions| versions).unwrap();
    assert_eq!((most.len(), first_of(&most)), (5 * SIZE, vec![7, 0, 3, 0, 5]));
    let torn = device.after_power_cut(moments, |sector, _| usize::from(sector == 34)).unwrap();
    assert_eq!((torn.len(), torn[34 * 512 - 1], torn[34 * 512]), (35 * 512, 0, 5));
    let before = device.after_power_cut(0, |_, versions| versions).unwrap();
    assert_eq!(before, [7; SIZE]);
    // A write that is refused does not extend it, nor do zeros.
    device.inject_next(Operation::Write, Fault::Error(libc::ENOSPC));
    device.write(9 * SIZE as u64, &[9; SIZE]).unwrap_err();
    device.discard(9 * SIZE as u64, SIZE as u64).unwrap();
    let most = device.after_power_cut(device.moments(), |_, versions| versions).unwrap();
    assert_eq!(most.len(), 5 * SIZE);
}

#[test]
fn inv20_writes_behind_the_former_end_are_given_up() {
    let (file, device, disk) = grown();
    device.discard(9 * SIZE as u64, SIZE as u64).unwrap();
    device.give_up_writes().unwrap();
    let first = |block: u64| {
        let mut byte = [0];
        file.read_exact_at(&mut byte, block * SIZE as u64).map(|()| byte[0]).ok()
    };
    let there = [0, 1, 2, 3, 4, 5].map(first);
    assert_eq!(there, [Some(7), Some(0), Some(3), Some(0), Some(0), None]);
    assert!(disk.sync().is_err());
}

#[test]
fn a_file_keeps_its_position() {
    let (_path, mut file) = on_disk();
    file.seek(SeekFrom::Start(700)).unwrap();
    let device = FileDevice::new(file.try_clone().unwrap()).unwrap();
    assert_eq!(device.len(), 200_000);
    assert_eq!(file.stream_position().unwrap(), 700);
}

#[test]
fn a_file_that_is_open_for_reading_is_not_written() {
    let (path, _) = on_disk();
    let device = FileDevice::new(File::open(path.path()).unwrap()).unwrap();
    assert_eq!(errno(device.write(0, &[1; 512])), Some(libc::EROFS));
    assert_eq!(
        errno(device.write_vectored(0, &[IoSlice::new(&[1; 512])], true)),
        Some(libc::EROFS)
    );
    assert_eq!(errno(device.discard(0, 512)), Some(libc::EROFS));
    let mut sector = [7; 512];
    assert_eq!((device.read(0, &mut sector).unwrap(), sector), (512, [0; 512]));
}

#[test]
fn a_direct_file_is_read_to_its_end_and_asks_for_whole_blocks() {
    let (path, file) = on_disk();
    let direct =
        OpenOptions::new().read(true).write(true).custom_flags(libc::O_DIRECT).open(path.path());
    let direct = match direct {
        Ok(direct) => direct,
        Err(error) if error.raw_os_error() == Some(libc::EINVAL) => {
            return println!("no O_DIRECT here: nothing was tested");
        }
        Err(error) => panic!("{error}"),
    };
    let device = FileDevice::new(direct).unwrap();
    let alignment = device.alignment();
    assert!(alignment >= 512 && alignment.is_power_of_two(), "{alignment}");
    let cache = Cache::builder(64 * SIZE).build().unwrap();
    let device = Arc::new(device);
    if alignment > 512 {
        let small = Cache::builder(64 * SIZE).block_size(512).build().unwrap();
        let refused = small.attach(Arc::clone(&device)).map(drop);
        assert!(matches!(refused, Err(BuildError::Misaligned { block_size: 512, .. })));
    }
    let disk = cache.attach(Arc::clone(&device)).unwrap();
    let mut expected = numbered();
    expected.resize(disk.blocks() as usize * SIZE, 0); // the end of the last block is zeros
    for (block, bytes) in (0..).zip(expected.chunks(SIZE)) {
        assert!(*disk.get(block).unwrap() == *bytes, "block {block}");
    }
    drop(file);
    let frees = errno(device.zero(32_768, 8192)) != Some(libc::EOPNOTSUPP);
    works(&*device, frees);
}

#[test]
fn a_file_that_became_shorter_is_an_error_and_not_cached() {
    let (_path, file) = on_disk();
    let disk = Cache::new(64 * SIZE).unwrap();
    let disk = disk.attach(FileDevice::new(file.try_clone().unwrap()).unwrap()).unwrap();
    file.set_len(10_000).unwrap();
    assert_eq!(disk.get(2).err(), Some(GetError::ShortRead { block: 2 }));
    assert_eq!(disk.get(30).err(), Some(GetError::ShortRead { block: 30 }));
    assert!(!disk.is_cached(2));
    file.write_all_at(&numbered(), 0).unwrap();
    assert_eq!(disk.get(2).unwrap()[0], 16);
}

#[test]
fn a_write_that_fails_changes_what_it_was_told_to() {
    let device = FaultDevice::new(MemoryDevice::new(vec![0; 4096]));
    device.inject_next(Operation::Write, Fault::Error(libc::EIO));
    assert_eq!(errno(device.write(0, &[1; 2048])), Some(libc::EIO));
    device.inject_next(Operation::Write, Fault::Short(512));
    assert_eq!(errno(device.write(0, &[2; 2048])), Some(libc::ENOSPC));
    device.inject_next(Operation::Write, Fault::Torn(0b1010));
    assert_eq!(errno(device.write(2048, &[3; 2048])), Some(libc::EIO));
    device.inject(Operation::Sync, .., Fault::Error(libc::EIO));
    assert_eq!(errno(device.sync()), Some(libc::EIO));
    let mut bytes = [9; 4096];
    device.read(0, &mut bytes).unwrap();
    let sectors: Vec<_> = bytes.chunks(512).map(|sector| (sector[0], sector[511])).collect();
    assert_eq!(sectors, [2, 0, 0, 0, 0, 3, 0, 3].map(|byte| (byte, byte)));
    assert_eq!(device.count(Operation::Write), 3);
}

/// All images that a power cut at that moment may leave, as the first byte of each sector.
fn images(device: &FaultDevice<MemoryDevice>, moments: u64) -> Vec<Vec<u8>> {
    let mut found = Vec::new();
    // Odometer over the choices, which are at most two per sector here, of four sectors.
    for mask in 0..16 {
        let choose = |sector: u64, versions: usize| {
            if mask >> sector & 1 == 1 { versions - 1 } else { 0 }
        };
        let image = device.after_power_cut(moments, choose).unwrap();
        let image: Vec<u8> = image.chunks(512).map(|sector| sector[100]).collect();
        if !found.contains(&image) {
            found.push(image);
        }
    }
    found
}

#[test]
fn a_power_cut_keeps_what_a_sync_made_durable_and_any_of_the_rest() {
    let device = FaultDevice::new(MemoryDevice::new(vec![0; 2048]));
    device.write(0, &[9; 512]).unwrap();
    assert!(device.after_power_cut(0, |_, _| 0).is_none());
    device.record().unwrap();
    device.write(0, &[1; 1024]).unwrap();
    let written = device.moments();
    device.sync().unwrap();
    let synced = device.moments();
    device.write(512, &[2; 1024]).unwrap();
    device.write_vectored(1536, &[IoSlice::new(&[3; 512])], true).unwrap();
    let end = device.moments();

    assert_eq!(images(&device, 0), [[9, 0, 0, 0]]);
    let torn = images(&device, written);
    assert_eq!(torn.len(), 4, "{torn:?}");
    assert!(torn.contains(&vec![9, 1, 0, 0]));
    assert_eq!(images(&device, synced - 1).len(), 4, "the sync had not ended");
    assert_eq!(images(&device, synced), [[1, 1, 0, 0]]);
    let last = images(&device, end);
    assert_eq!(last.len(), 4);
    assert!(last.iter().all(|image| image[0] == 1 && image[3] == 3), "{last:?}");

    let recorded = device.recorded();
    assert_eq!(recorded.len(), 4);
    assert!(recorded.iter().all(|entry| entry.outcome == Outcome::Done));
    assert_eq!(recorded[0].durable, Some(synced));
    assert_eq!((recorded[2].durable, recorded[3].durable), (None, Some(end)));
}

#[test]
fn what_a_failed_sync_covered_is_not_durable_by_the_next() {
    let device = FaultDevice::new(MemoryDevice::new(vec![0; 2048]));
    device.record().unwrap();
    device.write(0, &[1; 512]).unwrap();
    device.inject_next(Operation::Sync, Fault::Error(libc::EIO));
    assert_eq!(errno(device.sync()), Some(libc::EIO));
    device.sync().unwrap();
    let now = device.moments();
    assert_eq!(images(&device, now).len(), 2);
    // Written again, it is; and a write that failed before that is superseded.
    device.inject_next(Operation::Write, Fault::Error(libc::EIO));
    assert_eq!(errno(device.write(0, &[3; 512])), Some(libc::EIO));
    assert_eq!(device.recorded().last().unwrap().outcome, Outcome::Failed);
    device.write(0, &[2; 512]).unwrap();
    device.sync().unwrap();
    assert_eq!(images(&device, device.moments()), [[2, 0, 0, 0]]);
    assert_eq!(images(&device, now).len(), 2);
}

#[test]
fn a_write_that_did_not_end_before_the_sync_began_may_be_lost() {
    let device = FaultDevice::new(MemoryDevice::new(vec![0; 512]));
    device.record().unwrap();
    device.inject_next(Operation::Sync, Fault::Delay(Duration::from_millis(200)));
    thread::scope(|scope| {
        let sync = scope.spawn(|| device.sync());
        while device.moments() == 0 {
            thread::yield_now();
        }
        device.write(0, &[1; 512]).unwrap(); // while the sync runs
        sync.join().unwrap().unwrap();
    });
    assert_eq!(images(&device, device.moments()).len(), 2);
    device.sync().unwrap();
    assert_eq!(images(&device, device.moments()), [[1]]);
}

/// The file of a device that is limited to a part of it has bytes behind the end of the device.
#[test]
fn the_last_block_reads_as_zeros_beyond_the_end_of_the_device() {
    let (_kept, file) = on_disk();
    let device = FileDevice::new(file.try_clone().unwrap()).unwrap().up_to(5000);
    let disk = Cache::new(1 << 20).unwrap().attach(device).unwrap();
    let block = disk.get(1).unwrap();
    assert_eq!(block[..5000 - SIZE], numbered()[SIZE..5000]);
    assert!(block[5000 - SIZE..].iter().all(|&byte| byte == 0), "bytes that are not the device's");
}

type Attach<'a> = dyn Fn(&Cache) -> bufcache::Device + 'a;

#[test]
fn a_read_only_file_refuses_writers_at_once() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a");
    std::fs::write(&path, [7; 4 * SIZE]).unwrap();
    let file = || FileDevice::new(File::open(&path).unwrap()).unwrap();
    let kinds: [Box<Attach<'_>>; 4] = [
        Box::new(|cache| cache.attach(Constant).unwrap()),
        Box::new(|cache| cache.attach(file()).unwrap()),
        Box::new(|cache| cache.attach(Arc::new(file())).unwrap()),
        Box::new(|cache| cache.attach(FaultDevice::new(file())).unwrap()),
    ];
    for attach in kinds {
        let cache = Cache::new(1 << 20).unwrap();
        let device = attach(&cache);
        assert_eq!(device.get(1).unwrap()[0], 7);
        assert_eq!(device.get_mut(1).err(), Some(GetError::ReadOnly));
        assert_eq!(device.try_get_mut(1).err(), Some(GetError::ReadOnly));
        assert_eq!(device.create(2).err(), Some(GetError::ReadOnly));
        assert_eq!(device.try_create(2).err(), Some(GetError::ReadOnly));
        assert_eq!(device.discard(0..1), Err(WriteError::ReadOnly));
        assert_eq!(device.zero(0..1), Err(WriteError::ReadOnly));
        assert_eq!(device.write_around(0, &[1; SIZE]), Err(WriteError::ReadOnly));
        assert_eq!(WriteError::ReadOnly.errno(), libc::EROFS);
        device.sync().unwrap();
        device.close().unwrap();
    }
}

/// A device that has only what a read-only one needs.
struct Constant;

impl BlockDevice for Constant {
    fn len(&self) -> u64 {
        4 * SIZE as u64
    }

    fn read(&self, _: u64, buf: &mut [u8]) -> io::Result<usize> {
        buf.fill(7);
        Ok(buf.len())
    }

    fn is_read_only(&self) -> bool {
        true
    }
}
