//! Requests that open, close and name files.

use std::num::NonZeroI32;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

use crate::closing::ClosingFd;
use crate::engine::Engine;
use crate::error::RequestError;
use crate::file::File;
use crate::held_buf::HeldBuf;
use crate::io_path::IoPath;
use crate::op::{Kind, Op};
use crate::open_options::OpenOptions;
use crate::reply::{Reply, sealed::Sealed};
use crate::request::Request;
use crate::statx::Statx;

/// # Files
///
/// These requests take a path (see [`IoPath`]) or a descriptor. On io_uring the kernel performs
/// them, other backends use their threads.
impl Engine {
    /// Opens a file. The result is attached to the engine.
    ///
    /// A file whose operation was dropped before its result arrived is closed.
    ///
    /// The open of a FIFO waits for its other end, and occupies a thread of the engine. On io_uring
    /// it waits on a thread of the kernel, and only if the options [create](OpenOptions::create) or
    /// truncate or the kernel has not cached the path. Otherwise an open
    /// for reading returns at once, and one for writing fails with `ENXIO` if no reader exists.
    ///
    /// ```
    /// use aio_reap::{Engine, OpenOptions};
    ///
    /// # fn main() -> std::io::Result<()> {
    /// let engine = Engine::new()?;
    /// let file = engine.open("/etc/passwd", OpenOptions::read_only()).submit()?.wait().0?;
    /// let (read, buf) = engine.read(&file, vec![0; 4], 0).submit()?.wait();
    /// assert_eq!((read?, &buf[..]), (4, &b"root"[..]));
    /// # Ok(())
    /// # }
    /// ```
    pub fn open(&self, path: impl Into<IoPath>, options: OpenOptions) -> Request<'_, IoPath, File> {
        let mut path = path.into();
        let (flags, mode) = options.get();
        let op = Op::open(path.dir_fd(), path.addresses().0, flags, mode);
        self.named(op, path)
    }

    /// Asks for the metadata of a file (`statx`), and follows a symbolic link. A `&`[`File`] is a
    /// path too: `engine.stat(&file)`.
    ///
    /// [`Statx`] has an example.
    pub fn stat(&self, path: impl Into<IoPath>) -> Request<'_, IoPath, Statx> {
        let mut path = path.into();
        let flags = if path.names_itself() { libc::AT_EMPTY_PATH } else { 0 };
        let (name, result) = path.addresses();
        let op = Op::on_path(Kind::Statx, path.dir_fd(), name, flags);
        let offset = result.expose_provenance() as u64;
        self.named(Op { offset, ..op }, path)
    }

    /// Closes a descriptor, and reports the error of the close, which some file systems (NFS) use
    /// for failed writes. To drop a [`File`] also closes it, but blocks for as long as that takes.
    ///
    /// The descriptor is closed in every case, and the request cannot be cancelled. If the kernel
    /// refuses the request, the engine closes the descriptor and the result is the error of the
    /// refusal.
    /// [`File::into_fd`] returns the descriptor of a file.
    ///
    /// ```
    /// use aio_reap::{Engine, OpenOptions};
    ///
    /// # fn main() -> std::io::Result<()> {
    /// let engine = Engine::new()?;
    /// let file = engine.open("/etc/passwd", OpenOptions::read_only()).submit()?.wait().0?;
    /// let fd = file.into_fd().expect("this is its only clone, and no request uses it");
    /// engine.close(fd).submit()?.wait().0?;
    /// # Ok(())
    /// # }
    /// ```
    pub fn close(&self, fd: impl Into<OwnedFd>) -> Request<'_, ClosingFd, ()> {
        let fd = fd.into();
        let op = Op { kind: Kind::Close, fd: fd.as_raw_fd(), ..Op::NOP };
        Request::new(self.core(), None, op, HeldBuf::new(ClosingFd::new(fd)))
    }

    fn named<T: Reply<IoPath>>(&self, op: Op, path: IoPath) -> Request<'_, IoPath, T> {
        let valid = path.is_valid();
        Request::new(self.core(), None, op, HeldBuf::new(path)).invalid_path(!valid)
    }
}

impl Sealed for Statx {}

impl Reply<IoPath> for Statx {
    unsafe fn from_kernel(
        result: Result<usize, RequestError>,
        path: &mut IoPath,
    ) -> Result<Self, RequestError> {
        result.map(|_| Self::parse(path.stat_words()))
    }
}

impl Sealed for File {}

impl Reply<IoPath> for File {
    unsafe fn from_kernel(
        result: Result<usize, RequestError>,
        _path: &mut IoPath,
    ) -> Result<Self, RequestError> {
        let fd = result? as i32;
        // SAFETY: by the contract of this function the kernel has just opened the descriptor for
        // this request, and no other value owns it.
        let fd = unsafe { OwnedFd::from_raw_fd(fd) };
        Self::new(fd).map_err(|error| {
            let errno = error.raw_os_error().and_then(NonZeroI32::new);
            RequestError::new(errno.unwrap_or(const { NonZeroI32::new(libc::EIO).unwrap() }), 0)
        })
    }
}
