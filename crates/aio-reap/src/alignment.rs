//! The alignment that a file opened with `O_DIRECT` requires of requests.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};

use crate::sys;

/// The alignment that a file opened with `O_DIRECT` requires of requests, in bytes. Both numbers
/// are powers of two.
///
/// ```
/// use aio_reap::{AlignedBuf, Alignment, Engine};
/// use std::fs::File;
///
/// # fn main() -> std::io::Result<()> {
/// let file = File::open("/etc/os-release")?;
/// assert_eq!(Alignment::of(&file)?, None); // not opened with O_DIRECT
/// # use std::os::unix::fs::OpenOptionsExt;
/// # let open = File::options().read(true).custom_flags(0o40000).open("/etc/os-release");
/// # let Ok(file) = open else { return Ok(()) };
/// if let Some(align) = Alignment::of(&file)? {
///     let len = 4096_u32.next_multiple_of(align.offset) as usize;
///     let buf = AlignedBuf::zeroed(len, align.memory as usize);
///     let engine = Engine::new()?;
///     engine.read(&engine.attach(file)?, buf, 0).submit()?;
/// }
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Alignment {
    /// The alignment of the buffer's address.
    pub memory: u32,
    /// The alignment of the offset and the length.
    pub offset: u32,
}

impl Alignment {
    /// Returns the alignment that the open file `fd` requires, or `None` if it was not opened with
    /// `O_DIRECT`.
    ///
    /// # Errors
    ///
    /// Returns the error of `fcntl` if the flags cannot be read.
    pub fn of(fd: impl AsFd) -> io::Result<Option<Self>> {
        let fd = fd.as_fd();
        // SAFETY: `F_GETFL` takes no pointer, and `fd` is open while it is borrowed.
        let flags = unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_GETFL) };
        let flags = sys::check(flags.into())? as i32;
        Ok((flags & libc::O_DIRECT != 0).then(|| Self::ask(fd)))
    }

    /// Returns whether a multiple of `address` is aligned for a buffer, and one of `bytes` for
    /// offsets and lengths.
    ///
    /// Several addresses, or an offset and several lengths, may be passed ored together.
    #[inline]
    pub(crate) fn accepts(self, address: usize, bytes: u64) -> bool {
        address.is_multiple_of(self.memory as usize) && bytes.is_multiple_of(self.offset.into())
    }

    /// Asks `statx` (Linux 6.1), then the sector size of a block device. If neither answers, the
    /// result is 512 bytes, the smallest block of any Linux file system; the kernel refuses a
    /// request that needs more.
    fn ask(fd: BorrowedFd<'_>) -> Self {
        let (memory, offset) = sys::direct_alignment(fd).unwrap_or_default();
        if memory.is_power_of_two() && offset.is_power_of_two() {
            return Self { memory, offset };
        }
        let mut sector: libc::c_int = 0;
        // SAFETY: BLKSSZGET stores one int in `sector`. On other files it fails and stores nothing.
        let ret = unsafe { libc::ioctl(fd.as_raw_fd(), libc::BLKSSZGET, &raw mut sector) };
        let sector = if ret == 0 && sector > 0 { sector as u32 } else { 512 };
        Self { memory: sector, offset: sector }
    }
}
