//! Requests that open, close and name files.

use std::ffi::CStr;
use std::fmt;
use std::num::NonZeroI32;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, IntoRawFd, OwnedFd, RawFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use crate::buf::HeldBuf;
use crate::engine::Engine;
use crate::error::RequestError;
use crate::file::{File, SharedFile};
use crate::op::{Kind, Op, STATX_BYTES};
use crate::payload::{Reply, sealed::Sealed};
use crate::request::{Refusal, Request};

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
    /// truncate or the kernel has not cached the path. Otherwise an open for reading returns at once, and
    /// one for writing fails with `ENXIO` if no reader exists. [`IoPath`] has an example.
    pub fn open(&self, path: impl Into<IoPath>, options: OpenOptions) -> Request<'_, IoPath, File> {
        let mut path = path.into();
        let OpenOptions { flags, mode } = options;
        let op = Op::on_path(Kind::Open, path.dir_fd(), path.addresses().0, flags, mode);
        self.named(op, path)
    }

    /// Asks for the metadata of a file (`statx`), and follows a symbolic link. A `&`[`File`] is a
    /// path too: `engine.stat(&file)`.
    ///
    /// [`Statx`] has an example.
    pub fn stat(&self, path: impl Into<IoPath>) -> Request<'_, IoPath, Statx> {
        let mut path = path.into();
        let flags = if path.itself.is_some() { libc::AT_EMPTY_PATH } else { 0 };
        let (name, result) = path.addresses();
        let op = Op::on_path(Kind::Statx, path.dir_fd(), name, flags, 0);
        let offset = result.expose_provenance() as u64;
        self.named(Op { offset, ..op }, path)
    }

    /// Closes a descriptor, and reports the error of the close, which some file systems (NFS) use
    /// for failed writes. To drop a [`File`] also closes it, but blocks for as long as that takes.
    ///
    /// The descriptor is closed in every case, so the outcome returns `None` for it, and the request
    /// cannot be cancelled. If the kernel refuses the request, the engine closes the descriptor and the
    /// result is the error of the refusal. A request that the engine refuses returns the descriptor.
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
    pub fn close(&self, fd: impl Into<OwnedFd>) -> Request<'_, Option<OwnedFd>, ()> {
        let fd = fd.into();
        let op = Op { kind: Kind::Close, fd: fd.as_raw_fd(), ..Op::NOP };
        Request::new(self.core(), None, op, HeldBuf::new(Some(fd)))
    }

    fn named<T: Reply<IoPath>>(&self, op: Op, path: IoPath) -> Request<'_, IoPath, T> {
        let valid = !path.bytes.is_empty();
        let request = Request::new(self.core(), None, op, HeldBuf::new(path));
        request.check(valid, Refusal::InvalidPath)
    }
}

impl Sealed for Statx {}

impl Reply<IoPath> for Statx {
    unsafe fn from_kernel(
        result: Result<usize, RequestError>,
        path: &mut IoPath,
    ) -> Result<Self, RequestError> {
        result.map(|_| Self::parse(&path.bytes))
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
        SharedFile::new(fd).map(Self::shared).map_err(|error| {
            let errno = error.raw_os_error().and_then(NonZeroI32::new);
            RequestError::new(errno.unwrap_or(const { NonZeroI32::new(libc::EIO).unwrap() }), 0)
        })
    }
}

/// The path of a request such as [`Engine::open`](crate::Engine::open).
///
/// It is made by `from` of anything that is a path, and of a `&File`, for requests on the file
/// itself. The outcome of a request returns it: used again, it costs no allocation. A path with a
/// zero byte is refused with [`SubmitError::InvalidPath`](crate::SubmitError::InvalidPath).
///
/// ```
/// use aio_reap::{Engine, IoPath, OpenOptions};
///
/// # fn main() -> std::io::Result<()> {
/// let engine = Engine::new()?;
/// let folder = tempfile::tempdir()?;
/// let name = IoPath::from(folder.path().join("new"));
/// let (file, name) = engine.open(name, OpenOptions::write_only().create(0o600)).submit()?.wait();
/// engine.write(&file?, b"hello", 0).submit()?.wait().0?;
/// assert_eq!(engine.stat(name).submit()?.wait().0?.size, 5);
/// # Ok(())
/// # }
/// ```
pub struct IoPath {
    /// The memory of a `statx` result and behind it the path, ended by a zero byte. Empty if the
    /// path has a zero byte itself. A `Vec`, so that a move of the value leaves pointers valid.
    bytes: Vec<u8>,
    /// The file that an empty path names.
    itself: Option<File>,
}

impl IoPath {
    fn new(itself: Option<File>, path: &Path) -> Self {
        let bytes = path.as_os_str().as_bytes();
        if bytes.contains(&0) {
            return Self { bytes: Vec::new(), itself };
        }
        Self { bytes: [&[0; STATX_BYTES], bytes, &[0]].concat(), itself }
    }

    /// Returns the descriptor that the path is relative to.
    fn dir_fd(&self) -> RawFd {
        self.itself.as_ref().map_or(libc::AT_FDCWD, |file| file.as_fd().as_raw_fd())
    }

    /// Returns the address of the path, for the kernel, and that of the memory for the result of
    /// a `statx`. Both are valid until the value is dropped, if the path is valid.
    fn addresses(&mut self) -> (*mut u8, *mut u8) {
        let result = self.bytes.as_mut_ptr();
        (result.wrapping_add(STATX_BYTES), result)
    }
}

impl<P: AsRef<Path>> From<P> for IoPath {
    fn from(path: P) -> Self {
        Self::new(None, path.as_ref())
    }
}

/// Names the open file itself: for [`Engine::stat`](crate::Engine::stat).
impl From<&File> for IoPath {
    fn from(file: &File) -> Self {
        Self::new(Some(file.clone()), Path::new(""))
    }
}

impl fmt::Debug for IoPath {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let path =
            self.bytes.get(STATX_BYTES..).and_then(|path| CStr::from_bytes_with_nul(path).ok());
        f.debug_struct("IoPath").field("path", &path).field("itself", &self.itself).finish()
    }
}

/// The way [`Engine::open`](crate::Engine::open) opens a file: an access mode, and flags of
/// `open(2)`. The descriptor is always closed on `exec`.
///
/// ```
/// use aio_reap::OpenOptions;
///
/// let log = OpenOptions::write_only().create(0o640).flags(libc::O_APPEND);
/// let new = OpenOptions::read_write().create_new(0o600);
/// let direct = OpenOptions::read_only().flags(libc::O_DIRECT);
/// assert_ne!(log, new);
/// # let _ = direct;
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use = "the options do nothing until a file is opened"]
pub struct OpenOptions {
    flags: libc::c_int,
    mode: u32,
}

impl OpenOptions {
    /// Opens a file, or a directory, for reading.
    pub const fn read_only() -> Self {
        Self { flags: libc::O_RDONLY | libc::O_CLOEXEC, mode: 0 }
    }

    /// Opens a file for writing.
    pub const fn write_only() -> Self {
        Self { flags: libc::O_WRONLY | libc::O_CLOEXEC, mode: 0 }
    }

    /// Opens a file for reading and writing.
    pub const fn read_write() -> Self {
        Self { flags: libc::O_RDWR | libc::O_CLOEXEC, mode: 0 }
    }

    /// Creates a file that does not exist, with the permissions `mode` without the bits of the
    /// process's umask.
    pub const fn create(self, mode: u32) -> Self {
        Self { flags: self.flags | libc::O_CREAT, mode }
    }

    /// Creates the file like [`create`](Self::create), and fails with `EEXIST` if it exists, also
    /// as a symbolic link.
    pub const fn create_new(self, mode: u32) -> Self {
        Self { flags: self.flags | libc::O_CREAT | libc::O_EXCL, mode }
    }

    /// Adds flags of `open(2)`, such as `O_APPEND`, `O_TRUNC` and `O_DIRECT`. Requests on a direct file
    /// must have its [`Alignment`](crate::Alignment).
    pub const fn flags(self, flags: i32) -> Self {
        Self { flags: self.flags | flags, mode: self.mode }
    }
}

/// The metadata of a file (`statx(2)`), the result of [`Engine::stat`](crate::Engine::stat).
///
/// ```
/// use aio_reap::Engine;
///
/// # fn main() -> std::io::Result<()> {
/// let engine = Engine::new()?;
/// let stat = engine.stat("/etc/passwd").submit()?.wait().0?;
/// assert!(stat.is_file() && stat.size > 0);
/// assert_eq!(stat.mode & 0o7000, 0);
/// let missing = engine.stat("/no such file").submit()?.wait().0.unwrap_err();
/// assert_eq!(missing.errno(), libc::ENOENT);
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Statx {
    /// The size in bytes.
    pub size: u64,
    /// The allocated space, in units of 512 bytes. Less than the size for a file with holes.
    pub blocks: u64,
    /// The type and the permissions (`st_mode`).
    pub mode: u32,
}

impl Statx {
    /// Returns whether it is a regular file.
    pub fn is_file(&self) -> bool {
        self.mode & libc::S_IFMT == libc::S_IFREG
    }

    /// Returns whether it is a directory.
    pub fn is_dir(&self) -> bool {
        self.mode & libc::S_IFMT == libc::S_IFDIR
    }

    /// Reads a `struct statx` (ABI).
    fn parse(bytes: &[u8]) -> Self {
        let word = |at| u64::from_ne_bytes(*bytes[at..].first_chunk().expect("it is longer"));
        let mode = u16::from_ne_bytes([bytes[28], bytes[29]]).into();
        Self { size: word(40), blocks: word(48), mode }
    }
}

impl Reply<Option<OwnedFd>> for () {
    /// The kernel has closed the descriptor, also with an error.
    unsafe fn from_kernel(
        result: Result<usize, RequestError>,
        fd: &mut Option<OwnedFd>,
    ) -> Result<Self, RequestError> {
        let _closed = fd.take().map(OwnedFd::into_raw_fd);
        result.map(drop)
    }
}
