//! A device on a file or a block device.

use std::fs::File;
use std::io::{self, IoSlice, Seek, SeekFrom};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, FileTypeExt, MetadataExt};

#[cfg(feature = "aio-reap")]
use aio_reap::SharedFile;
use arrayvec::ArrayVec;

#[cfg(feature = "aio-reap")]
use super::engine;
use super::{BlockDevice, read_only, retry_interrupted};
#[cfg(feature = "aio-reap")]
use crate::cache::{DeviceChange, Load};

/// The most parts of one call, as of a window of a write-back. At most `IOV_MAX`.
const PARTS: usize = 256;

/// An open file or block device, accessed by `pread`, `pwrite`, `fdatasync` and `fallocate`.
///
/// If the file was opened with `O_DIRECT`, block sizes must be multiples of the alignment that it
/// needs. A cache attaches a file once, whatever descriptors it has, with `O_DIRECT` or without.
///
/// With the feature `aio-reap`, readahead, and the operations that tasks begin, use the
/// [`Engine`](https://docs.rs/aio-reap/latest/aio_reap/struct.Engine.html) that the thread has lent by
/// `lend_engine`: they block no thread, and many are in flight at once. So a device has a second descriptor,
/// and a call that blocks may be refused with `WouldDeadlock` on a thread that has lent an engine.
#[derive(Debug)]
pub struct FileDevice {
    file: File,
    /// An engine refers to the file only during an operation, so no idle thread keeps a descriptor
    /// of a dropped device open.
    #[cfg(feature = "aio-reap")]
    shared: SharedFile,
    len: u64,
    /// The alignment that `O_DIRECT` needs, or 1 without `O_DIRECT`.
    alignment: usize,
    writable: bool,
    identity: (u64, u64),
}

impl FileDevice {
    /// Returns a device with the current size of the file. The position of the file, which its
    /// duplicates share, stays. A block device that the system has marked as read-only takes no
    /// writes, also if the file is open for writing.
    ///
    /// # Errors
    ///
    /// The error of a system call that asks for the size, the flags or the mark of the file, or that
    /// duplicates the descriptor. `EINVAL` for a file that is open for writing with `O_APPEND`, by which
    /// the system would write each block at the end of the file.
    pub fn new(mut file: File) -> io::Result<Self> {
        // SAFETY: `F_GETFL` takes no pointer.
        let flags = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_GETFL) };
        let flags = check(flags)?;
        let mut writable = flags & libc::O_ACCMODE != libc::O_RDONLY;
        if writable && flags & libc::O_APPEND != 0 {
            return Err(io::Error::from_raw_os_error(libc::EINVAL));
        }
        let alignment = if flags & libc::O_DIRECT == 0 { 1 } else { direct_alignment(&file) };
        let meta = file.metadata()?;
        // The metadata of a block device has no size.
        let len = if meta.is_file() { meta.len() } else { end_of(&mut file)? };
        let is_block_device = meta.file_type().is_block_device();
        writable &= !Self::is_read_only_device(&file)?;
        let identity = match is_block_device {
            true => (meta.rdev(), u64::MAX),
            false => (meta.dev(), meta.ino()),
        };
        #[cfg(feature = "aio-reap")]
        let shared = SharedFile::new(file.try_clone()?)?;
        Ok(Self {
            file,
            #[cfg(feature = "aio-reap")]
            shared,
            len,
            alignment,
            writable,
            identity,
        })
    }

    /// Returns whether the file is a block device that the system has marked as read-only. It can be
    /// opened for writing all the same: then its writes succeed in the page cache, and the next sync
    /// fails.
    pub fn is_read_only_device(file: &File) -> io::Result<bool> {
        if !file.metadata()?.file_type().is_block_device() {
            return Ok(false);
        }
        let mut mark: libc::c_int = 0;
        // The type of the request differs between the C libraries.
        // SAFETY: `BLKROGET` stores one int to `mark`.
        let result = unsafe { libc::ioctl(file.as_raw_fd(), BLKROGET as _, &raw mut mark) };
        check(result).map(|_| mark != 0)
    }

    /// Limits the device to the first `len` bytes.
    ///
    /// With `O_DIRECT`, a part after the last whole unit of the alignment can be read, but not
    /// written.
    pub fn up_to(mut self, len: u64) -> Self {
        self.len = self.len.min(len);
        self
    }

    /// Returns how many bytes of a short transfer of `done` bytes count: a direct transfer
    /// continues at a multiple of its alignment.
    fn whole_units(&self, done: usize) -> usize {
        done & !(self.alignment - 1)
    }

    fn read_by(
        &self,
        offset: u64,
        buf: &mut [u8],
        mut read: impl FnMut(u64, &mut [u8]) -> io::Result<usize>,
    ) -> io::Result<usize> {
        let mut done = 0;
        while done < buf.len() {
            let count = retry_interrupted(|| read(offset + done as u64, &mut buf[done..]))?;
            done += count;
            // A direct read ends inside a sector only at the end of the file.
            if count == 0 || self.whole_units(done) != done {
                break;
            }
        }
        Ok(done)
    }

    /// Writes the parts, and goes on where a call of `write` ends.
    fn write_by(
        &self,
        mut offset: u64,
        parts: &[IoSlice<'_>],
        mut write: impl FnMut(u64, &[IoSlice<'_>]) -> io::Result<usize>,
    ) -> io::Result<()> {
        if !self.writable {
            return Err(read_only());
        }
        for parts in parts.chunks(PARTS) {
            let mut parts: ArrayVec<_, PARTS> = parts.iter().copied().collect();
            let mut left = &mut parts[..];
            IoSlice::advance_slices(&mut left, 0); // the first is not empty then
            while !left.is_empty() {
                let all: usize = left.iter().map(|part| part.len()).sum();
                let count = retry_interrupted(|| write(offset, left))?;
                let done = if count == all { all } else { self.whole_units(count) };
                if done == 0 {
                    return Err(io::Error::from_raw_os_error(libc::ENOSPC));
                }
                offset += done as u64;
                IoSlice::advance_slices(&mut left, done);
            }
        }
        Ok(())
    }

    fn allocate(&self, mode: i32, offset: u64, len: u64) -> io::Result<()> {
        if !self.writable {
            return Err(read_only());
        }
        let signed = |value: u64| {
            libc::off_t::try_from(value).map_err(|_| io::Error::from_raw_os_error(libc::EFBIG))
        };
        let (offset, len) = (signed(offset)?, signed(len)?);
        let fd = self.file.as_raw_fd();
        retry_interrupted(|| {
            // SAFETY: `fallocate` takes no pointer.
            let result = unsafe { libc::fallocate(fd, mode, offset, len) };
            check(result).map(drop)
        })
    }

    /// Calls `pwritev2`. Returns the number of written bytes.
    fn pwritev(&self, offset: u64, parts: &[IoSlice<'_>], flags: i32) -> io::Result<usize> {
        let offset =
            libc::off_t::try_from(offset).map_err(|_| io::Error::from_raw_os_error(libc::EFBIG))?;
        let (fd, first, count) = (self.file.as_raw_fd(), parts.as_ptr(), parts.len());
        // By its number, because older versions of musl have no `pwritev2`. The zero is the high
        // half of the offset, which 64-bit kernels ignore.
        // SAFETY: `std` guarantees that an `IoSlice` has the layout of an `iovec`. `first` points
        // to `count` of them, and the call only reads their bytes.
        let count =
            unsafe { libc::syscall(libc::SYS_pwritev2, fd, first, count, offset, 0_usize, flags) };
        usize::try_from(count).map_err(|_| io::Error::last_os_error())
    }
}

impl BlockDevice for FileDevice {
    fn len(&self) -> u64 {
        self.len
    }

    fn identity(&self) -> Option<(u64, u64)> {
        Some(self.identity)
    }

    fn is_read_only(&self) -> bool {
        !self.writable
    }

    fn alignment(&self) -> usize {
        self.alignment
    }

    fn read(&self, offset: u64, buf: &mut [u8]) -> io::Result<usize> {
        self.read_by(offset, buf, |offset, buf| self.file.read_at(buf, offset))
    }

    fn write(&self, offset: u64, buf: &[u8]) -> io::Result<()> {
        self.write_vectored(offset, &[IoSlice::new(buf)], false)
    }

    fn write_vectored(&self, offset: u64, parts: &[IoSlice<'_>], durable: bool) -> io::Result<()> {
        let write = |flags| {
            self.write_by(offset, parts, |offset, parts| self.pwritev(offset, parts, flags))
        };
        match durable {
            true => or_synced(write(libc::RWF_DSYNC), || write(0), || self.sync()),
            false => write(0),
        }
    }

    #[cfg(feature = "aio-reap")]
    fn begin_read(&self, load: Load) {
        engine::read(&self.shared, load);
    }

    #[cfg(feature = "aio-reap")]
    fn begin(&self, change: DeviceChange) {
        engine::begin(&self.shared, change);
    }

    /// The kernel makes an engine's writes of a file on the page cache one after the other, and its
    /// discards and zeroes at the same time, in threads that wait for the lock of the file. So a
    /// write-back waits once for those before it if it begins all writes at a time, and no write of the
    /// disk is among them that could delay a read. An engine takes as many as leave half of it free.
    #[cfg(feature = "aio-reap")]
    fn write_depth(&self) -> usize {
        let is_on_page_cache = self.alignment == 1 && self.identity.1 != u64::MAX; // no block device
        if is_on_page_cache { 256 } else { 32 }
    }

    fn zero(&self, offset: u64, len: u64) -> io::Result<()> {
        self.allocate(libc::FALLOC_FL_ZERO_RANGE, offset, len)
    }

    fn discard(&self, offset: u64, len: u64) -> io::Result<()> {
        self.allocate(libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE, offset, len)
    }

    fn sync(&self) -> io::Result<()> {
        retry_interrupted(|| self.file.sync_data())
    }
}

/// `BLKROGET`, `_IO(0x12, 94)`, which `libc` has not. Some machines have another code for a request
/// without a size.
const BLKROGET: libc::c_ulong = {
    let has_code = cfg!(any(
        target_arch = "mips",
        target_arch = "mips64",
        target_arch = "powerpc",
        target_arch = "powerpc64",
        target_arch = "sparc64"
    ));
    0x125e | if has_code { 1 << 29 } else { 0 }
};

/// Returns the position of the end, and leaves the file at its position.
fn end_of(file: &mut File) -> io::Result<u64> {
    let before = file.stream_position()?;
    let end = file.seek(SeekFrom::End(0))?;
    file.seek(SeekFrom::Start(before))?;
    Ok(end)
}

/// Returns the result of a durable write. If the system does not know `RWF_DSYNC`, makes a plain
/// write and a sync instead.
fn or_synced(
    durable: io::Result<()>,
    write: impl FnOnce() -> io::Result<()>,
    sync: impl FnOnce() -> io::Result<()>,
) -> io::Result<()> {
    match durable {
        Err(error) if is_unknown(&error) => write().and_then(|()| sync()),
        result => result,
    }
}

/// Returns whether the error may mean that the system does not know a flag of the call.
fn is_unknown(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::EOPNOTSUPP | libc::ENOSYS | libc::EINVAL))
}

fn check(result: i32) -> io::Result<i32> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result) }
}

/// Returns the alignment that `O_DIRECT` needs: from `statx` (Linux 6.1), else the sector size of a
/// block device, else 512 bytes. 512 is the least of any file system, and the kernel refuses a
/// transfer with too small an alignment.
fn direct_alignment(file: &File) -> usize {
    let fd = file.as_raw_fd();
    // `struct statx` as 32-bit words, of which two are read. The call is made by its number,
    // because older versions of musl have no `statx`.
    let mut stat = [0_u32; 64];
    let (flags, mask) = (libc::AT_EMPTY_PATH, libc::STATX_DIOALIGN);
    let (path, result) = (c"".as_ptr(), stat.as_mut_ptr());
    // SAFETY: `path` is a C string; the kernel stores 256 bytes, the size of `stat`.
    let result = unsafe { libc::syscall(libc::SYS_statx, fd, path, flags, mask, result) };
    // stx_dio_mem_align, byte 152, and stx_dio_offset_align.
    let asked = stat[38].max(stat[39]);
    if result == 0 && asked.is_power_of_two() {
        return asked as usize;
    }
    let mut sector: libc::c_int = 0;
    // SAFETY: `BLKSSZGET` stores one int to `sector`. On other files it fails and stores nothing.
    let result = unsafe { libc::ioctl(fd, libc::BLKSSZGET, &raw mut sector) };
    match usize::try_from(sector) {
        Ok(sector) if result == 0 && sector.is_power_of_two() => sector,
        _ => 512,
    }
}

#[cfg(all(test, not(offlock_model)))]
mod tests {
    use super::*;

    /// Returns the result of a call that transfers at most `most` bytes; 0 is an interruption by a
    /// signal.
    fn at_most(most: Option<usize>, len: usize) -> io::Result<usize> {
        match most {
            Some(0) => Err(io::ErrorKind::Interrupted.into()),
            most => Ok(len.min(most.unwrap_or(len))),
        }
    }

    fn device(bytes: &[u8]) -> FileDevice {
        let file = tempfile::tempfile().unwrap();
        file.write_all_at(bytes, 0).unwrap();
        FileDevice::new(file).unwrap()
    }

    #[test]
    fn a_short_read_is_continued_at_its_byte() {
        let bytes: Vec<u8> = (1..=23).collect();
        let device = device(&bytes);
        for (first, second) in (0..256).map(|both| (both / 16 + 1, both % 16 + 1)) {
            let mut most = [0, first, 0, second, 0].into_iter();
            let mut buf = [0xff; 20];
            let read = device.read_by(7, &mut buf, |offset, buf| {
                let len = at_most(most.next(), buf.len())?;
                device.file.read_at(&mut buf[..len], offset)
            });
            assert_eq!(read.unwrap(), 16, "after {first} and {second}");
            assert_eq!(buf[..], [&bytes[7..], &[0xff; 4]].concat(), "{first}, {second}");
        }
    }

    #[test]
    fn a_direct_transfer_is_continued_at_a_multiple_of_its_unit() {
        let bytes: Vec<u8> = (1..=16).collect();
        let mut device = device(&[0; 16]);
        device.alignment = 4;
        for first in 1..16 {
            device.file.write_all_at(&[0; 16], 0).unwrap();
            let mut most = [0, first, 0].into_iter();
            let mut offsets = Vec::new();
            let write = |offset: u64, parts: &[IoSlice<'_>]| {
                let len = at_most(most.next(), parts[0].len())?;
                offsets.push(offset);
                device.file.write_at(&parts[0][..len], offset)
            };
            let parts = [IoSlice::new(&bytes)];
            let written = device.write_by(0, &parts, write).map_err(|error| error.raw_os_error());
            if first < 4 {
                assert_eq!(written, Err(Some(libc::ENOSPC)), "{first}");
                continue;
            }
            assert_eq!((written, &offsets[..]), (Ok(()), &[0, first as u64 / 4 * 4][..]));
            let mut there = [0; 16];
            device.file.read_exact_at(&mut there, 0).unwrap();
            assert_eq!(there[..], bytes, "after {first}");
        }
        // Only the end of the file is inside a unit: no further call is made.
        let mut calls = 0;
        let read = device.read_by(0, &mut [0; 16], |_, buf| {
            calls += 1;
            Ok(buf.len().min(6))
        });
        assert_eq!((read.unwrap(), calls), (6, 1));
    }

    #[test]
    fn a_durable_write_that_the_system_does_not_know_is_synced() {
        let error = |errno| Err(io::Error::from_raw_os_error(errno));
        let calls = |durable: io::Result<()>, write: io::Result<()>, sync: io::Result<()>| {
            let calls = std::cell::RefCell::new(Vec::new());
            let call = |name, result| {
                calls.borrow_mut().push(name);
                result
            };
            let result = or_synced(durable, || call("write", write), || call("sync", sync));
            (result.map_err(|error| error.raw_os_error().unwrap()), calls.take())
        };
        let both = vec!["write", "sync"];
        for unknown in [libc::EOPNOTSUPP, libc::ENOSYS, libc::EINVAL] {
            assert_eq!(calls(error(unknown), Ok(()), Ok(())), (Ok(()), both.clone()));
        }
        assert_eq!(calls(error(libc::EINVAL), Ok(()), error(libc::EIO)), (Err(libc::EIO), both));
        let failed = (Err(libc::ENOSPC), vec!["write"]);
        assert_eq!(calls(error(libc::EINVAL), error(libc::ENOSPC), Ok(())), failed);
        assert_eq!(calls(error(libc::EIO), Ok(()), Ok(())), (Err(libc::EIO), vec![]));
        assert_eq!(calls(Ok(()), Ok(()), Ok(())), (Ok(()), vec![]));
    }

    /// Wherever a call ends, inside a part or between two.
    #[test]
    fn a_short_write_of_parts_is_continued_at_its_byte() {
        let bytes: Vec<u8> = (1..=16).collect();
        let parts = [&bytes[..3], &[], &bytes[3..8], &bytes[8..9], &bytes[9..]];
        let parts = parts.map(IoSlice::new);
        for (first, second) in (0..256).map(|both| (both / 16 + 1, both % 16 + 1)) {
            let device = device(&[0; 30]);
            let mut most = [0, first, 0, second, 0].into_iter();
            let write = |offset: u64, parts: &[IoSlice<'_>]| {
                let all = parts.iter().flat_map(|part| part.to_vec()).collect::<Vec<u8>>();
                device.file.write_at(&all[..at_most(most.next(), all.len())?], offset)
            };
            device.write_by(7, &parts, write).unwrap();
            let mut there = [0; 30];
            device.file.read_exact_at(&mut there, 0).unwrap();
            assert_eq!(there[7..23], bytes, "after {first} and {second}");
            assert!(there[..7].iter().chain(&there[23..]).all(|&byte| byte == 0));
        }
        let full = device(&[]).write_by(0, &parts, |_, _| Ok(0));
        assert_eq!(full.unwrap_err().raw_os_error(), Some(libc::ENOSPC));
    }
}
