//! The files of images: how one is opened, the folder of them (`--export-dir`), and the locks that keep other
//! programs from writing to one.
//!
//! A client names a file of the folder only: no path, no symbolic link, and no name that begins with
//! a dot. Each is an export with its name, even if it is created later.
//!
//! # Locks
//!
//! All locks are open-file-description locks. The kernel releases them with the last descriptor,
//! even if the server is killed.
//!
//! QEMU's programs tell each other by shared locks of single bytes how they use an image. A program
//! that has the permission number N holds byte 100 + N; one that lets no other program have it
//! holds byte 200 + N. Each program takes its locks first and then looks for those of others, so
//! that of two programs that exclude each other at least one is refused.

use std::ffi::CStr;
use std::fs::{File, Metadata, OpenOptions};
use std::io::{self, Seek, SeekFrom};
use std::ops::Range;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use bufcache::FileDevice;
use nbd_protocol::MAX_STRING;
use rustix::fs::{AtFlags, CWD, Dir, FileType, Mode, OFlags};
use rustix::io::Errno;
use thiserror::Error;
use tracing::warn;

use crate::blocks::NUMBERED;

/// Most names in a list of exports. A file that is not listed is still served.
pub(crate) const MOST_NAMES: usize = 10_000;

/// Most bad names that are logged.
const MOST_WARNINGS: usize = 8;

/// Why an image cannot be served, as the end of a sentence that begins with the image.
#[derive(Debug, Error)]
pub(crate) enum Problem {
    #[error("cannot be opened: {0}")]
    Os(#[from] io::Error),
    #[error("does not exist; --size BYTES creates it")]
    Missing,
    #[error("does not exist, and a server that only reads cannot create it")]
    MissingToRead,
    #[error("is on a file system without O_DIRECT, which --direct needs")]
    Direct,
    #[error("is neither a regular file nor a block device")]
    Kind,
    #[error("is a read-only block device; --read-only, or ',readonly' behind its path, serves it")]
    ReadOnlyDevice,
    #[error("is in use by another program; --no-lock serves it all the same")]
    Locked,
    #[error("has {0} bytes, and the cache can number {NUMBERED}")]
    TooLarge(u64),
    #[error("is one too many: {0} are open")]
    TooMany(usize),
    #[error(
        "has the name '{0}', which no export can have: 1 to {MAX_STRING} bytes, no control characters"
    )]
    Name(String),
    #[error("has the name '{0}' of another; give it another name with NAME=PATH")]
    Duplicate(String),
    #[error("cannot be kept in memory: {0}")]
    Cache(io::Error),
}

impl From<Errno> for Problem {
    fn from(error: Errno) -> Self {
        Self::Os(error.into())
    }
}

/// Device and inode of a file, or the number of a block device.
pub(crate) type Identity = (u64, u64, u64);

/// Returns what two paths of one image have in common: the inode, or for block devices the device.
pub(crate) fn identity(meta: &Metadata) -> Identity {
    if meta.file_type().is_block_device() {
        (0, 0, meta.rdev())
    } else {
        (meta.dev(), meta.ino(), u64::MAX)
    }
}

/// Returns the length of a file or block device in bytes.
pub(crate) fn length(mut file: &File) -> io::Result<u64> {
    file.seek(SeekFrom::End(0)) // block devices have no length in stat
}

/// An open file of an image.
#[derive(Debug)]
pub(crate) struct ImageFile {
    pub(crate) file: File,
    pub(crate) identity: Identity,
    pub(crate) is_device: bool,
    /// It is open for reading only.
    pub(crate) read_only: bool,
}

impl ImageFile {
    /// Opens a file. A block device that takes no writes is opened for reading.
    pub(crate) fn open(path: &Path, read_only: bool, direct: bool) -> Result<Self, Problem> {
        Self::open_at(CWD, path, OFlags::empty(), read_only, direct)
    }

    /// Opens a file of a folder. `more` may refuse symbolic links.
    fn open_at(
        dir: impl AsFd,
        path: &Path,
        more: OFlags,
        read_only: bool,
        direct: bool,
    ) -> Result<Self, Problem> {
        let links = match more.contains(OFlags::NOFOLLOW) {
            true => AtFlags::SYMLINK_NOFOLLOW,
            false => AtFlags::empty(),
        };
        // Opening a FIFO or a device of another kind could block or have side effects, so check the
        // kind first.
        let kind = FileType::from_raw_mode(rustix::fs::statat(&dir, path, links)?.st_mode);
        if !is_image(kind) {
            return Err(Problem::Kind);
        }
        let open = |read_only| {
            let mut flags = if read_only { OFlags::RDONLY } else { OFlags::RDWR };
            flags.set(OFlags::DIRECT, direct);
            // The file may have been replaced since, and the open must not block.
            let careful = flags | more | OFlags::NONBLOCK | OFlags::CLOEXEC;
            let fd = rustix::fs::openat(&dir, path, careful, Mode::empty());
            let fd = fd.map_err(|error| match error {
                Errno::INVAL if direct => Problem::Direct,
                error => error.into(),
            })?;
            rustix::fs::fcntl_setfl(&fd, flags)?; // NONBLOCK would also apply to the engine's I/O
            let file = File::from(fd);
            let meta = file.metadata()?;
            let is_device = meta.file_type().is_block_device();
            match is_device || meta.is_file() {
                true => Ok(Self { file, identity: identity(&meta), is_device, read_only }),
                false => Err(Problem::Kind),
            }
        };
        if read_only || kind != FileType::BlockDevice {
            return open(read_only);
        }
        let device = open(true)?;
        let takes_writes = !FileDevice::is_read_only_device(&device.file)?;
        if takes_writes { open(false) } else { Ok(device) }
    }

    /// Locks the file. See [`lock`].
    pub(crate) fn lock(&self, patience: Duration) -> Result<(), Problem> {
        lock(&self.file, self.read_only, patience)
    }

    /// Returns the length, and the smallest block that clients may use.
    pub(crate) fn geometry(&self, direct: bool) -> Result<(u64, u32), Problem> {
        let size = length(&self.file)?;
        if size > NUMBERED {
            return Err(Problem::TooLarge(size));
        }
        let mut min_block = 1;
        if self.is_device {
            min_block = rustix::fs::ioctl_blksszget(&self.file)?;
        }
        if direct {
            let needed = aio_reap::Alignment::of(&self.file)?;
            min_block = needed.map_or(1, |align| align.offset.max(align.memory));
        }
        Ok((size, min_block))
    }

    /// Grows a regular file to at least `size`, and makes its length and its name durable: a FLUSH
    /// syncs neither if the image was just created. The file must be locked.
    pub(crate) fn grow(&self, path: &Path, size: u64) -> io::Result<()> {
        if self.read_only || self.is_device {
            return Ok(());
        }
        if length(&self.file)? < size {
            self.file.set_len(size)?;
        }
        self.file.sync_all()?;
        // Even if the file was there: a server that created it may have been killed before this step.
        let path = path.canonicalize()?; // the name is in the folder to which symbolic links lead
        let folder = File::open(path.parent().unwrap_or(Path::new("/")));
        match folder.and_then(|folder| folder.sync_all()) {
            // The folder cannot be read, or its file system does not sync folders: sync all of it.
            Err(error) if matches!(error.raw_os_error(), Some(libc::EACCES | libc::EINVAL)) => {
                Ok(rustix::fs::syncfs(&self.file)?)
            }
            synced => synced,
        }
    }
}

/// Creates an empty file, or the target of `path` if that is a dangling symbolic link. Returns the
/// path of the file; `None` if another program has created it in the meantime.
pub(crate) fn create(path: &Path) -> io::Result<Option<PathBuf>> {
    let mut target = path.to_owned();
    // O_EXCL does not follow links. The kernel follows at most 40.
    for _ in 0..40 {
        let Ok(next) = target.read_link() else { break };
        target = target.parent().unwrap_or(Path::new("")).join(next);
    }
    match OpenOptions::new().write(true).create_new(true).mode(0o600).open(&target) {
        Ok(_) => Ok(Some(target)),
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(None),
        Err(error) => Err(error),
    }
}

/// An open folder.
#[derive(Debug)]
pub(crate) struct Folder {
    dir: OwnedFd,
    path: PathBuf,
}

impl Folder {
    pub(crate) fn open(path: &Path) -> io::Result<Self> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let dir = rustix::fs::openat(CWD, path, flags, Mode::empty())?;
        Ok(Self { dir, path: path.to_owned() })
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.path.join(name)
    }

    /// Opens a file of the folder. `None` if no image has that name.
    pub(crate) fn file(
        &self,
        name: &str,
        read_only: bool,
        direct: bool,
    ) -> Result<Option<ImageFile>, Problem> {
        if !is_name(name) {
            return Ok(None);
        }
        let name = Path::new(name);
        match ImageFile::open_at(&self.dir, name, OFlags::NOFOLLOW, read_only, direct) {
            Err(Problem::Kind) => Ok(None),
            Err(Problem::Os(error)) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            opened => opened.map(Some),
        }
    }

    /// Logs the files that cannot be exports because of their names. Names that begin with a dot are
    /// left out on purpose.
    pub(crate) fn warn_of_bad_names(&self) {
        let Ok(entries) = Dir::read_from(&self.dir) else { return };
        let is_bad =
            |name: &CStr| !name.to_bytes().starts_with(b".") && !name.to_str().is_ok_and(is_name);
        let entries = entries.filter_map(Result::ok);
        let bad = entries.filter(|entry| is_image(entry.file_type()) && is_bad(entry.file_name()));
        for entry in bad.take(MOST_WARNINGS) {
            let name = entry.file_name();
            warn!(
                ?name,
                "a file of the folder is no export: no name of one has control characters, or other bytes than UTF-8"
            );
        }
    }

    /// Returns the sorted names of the files that can be served.
    pub(crate) fn names(&self) -> Vec<String> {
        let mut names = Vec::new();
        if let Err(error) = self.collect(&mut names) {
            warn!(folder = %self.path.display(), %error, "not every name is known");
        }
        names.sort_unstable();
        names
    }

    fn collect(&self, names: &mut Vec<String>) -> io::Result<()> {
        for entry in Dir::read_from(&self.dir)? {
            let entry = entry?;
            let Ok(name) = entry.file_name().to_str() else { continue };
            let mut kind = entry.file_type();
            if kind == FileType::Unknown {
                let stat = rustix::fs::statat(&self.dir, name, AtFlags::SYMLINK_NOFOLLOW)?;
                kind = FileType::from_raw_mode(stat.st_mode);
            }
            if is_name(name) && is_image(kind) {
                if names.len() == MOST_NAMES {
                    return Err(io::Error::other("there are too many files"));
                }
                names.push(name.to_owned());
            }
        }
        Ok(())
    }
}

/// Returns whether files of that name are served. `.` and `..` are not.
fn is_name(name: &str) -> bool {
    let bad = |char: char| char == '/' || char.is_control();
    !name.is_empty() && name.len() <= MAX_STRING && !name.starts_with('.') && !name.contains(bad)
}

fn is_image(kind: FileType) -> bool {
    matches!(kind, FileType::RegularFile | FileType::BlockDevice)
}

/// The byte of QEMU's first permission, and that of its first refusal to share one.
const PERMISSION: i64 = 100;
const NOT_SHARED: i64 = 200;

/// The numbers of QEMU's permissions. QEMU has another one, to write bytes that change nothing,
/// which a reader can let others have.
const CONSISTENT_READ: i64 = 0;
const WRITE: i64 = 1;
const RESIZE: i64 = 3;

/// The permissions that a reader has, and those that it lets no other program have.
const READS: [i64; 1] = [CONSISTENT_READ];
const EXCLUDES: [i64; 2] = [WRITE, RESIZE];

/// Every byte of a file, even if it grows.
const WHOLE: Range<i64> = 0..i64::MAX;

/// Locks an image. A writer's lock is exclusive and covers the whole image, so it excludes QEMU's
/// readers and writers as well as other servers. Readers share an image with each other and with
/// QEMU's readers, and exclude writers.
pub(crate) fn lock(file: &File, read_only: bool, patience: Duration) -> Result<(), Problem> {
    let start = Instant::now();
    loop {
        let locked =
            if read_only { lock_to_read(file) } else { set_lock(file, libc::F_WRLCK, WHOLE) };
        let Err(error) = locked else { return Ok(()) };
        match error.raw_os_error() {
            Some(libc::EAGAIN | libc::EACCES) if start.elapsed() < patience => {
                std::thread::sleep(Duration::from_millis(10));
            }
            Some(libc::EAGAIN | libc::EACCES) => return Err(Problem::Locked),
            _ => return Err(error.into()),
        }
    }
}

/// Releases the lock while descriptors of the file are still open.
pub(crate) fn unlock(file: &File) -> io::Result<()> {
    set_lock(file, libc::F_UNLCK, WHOLE)
}

/// Takes the locks of QEMU's readers. Holds none of them if it fails.
fn lock_to_read(file: &File) -> io::Result<()> {
    let reads = READS.into_iter().map(|number| PERMISSION + number);
    let excludes = EXCLUDES.into_iter().map(|number| NOT_SHARED + number);
    let take = |byte| set_lock(file, libc::F_RDLCK, byte..byte + 1);
    let taken = reads.chain(excludes).try_for_each(take).and_then(|()| refuse_conflicts(file));
    taken.inspect_err(|_| drop(unlock(file))) // the error says what failed first
}

/// Fails if a program that excludes this reader uses the file: one that writes, or that lets no other
/// program read.
fn refuse_conflicts(file: &File) -> io::Result<()> {
    let excluded = EXCLUDES.into_iter().map(|number| PERMISSION + number);
    let refused = READS.into_iter().map(|number| NOT_SHARED + number);
    for byte in excluded.chain(refused) {
        let mut range = range(libc::F_WRLCK, byte..byte + 1);
        // SAFETY: `range` is a complete `struct flock` that outlives the call, which writes to it.
        let ret = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_OFD_GETLK, &raw mut range) };
        if ret != 0 {
            return Err(io::Error::last_os_error());
        }
        if i32::from(range.l_type) != libc::F_UNLCK {
            return Err(io::Error::from_raw_os_error(libc::EAGAIN));
        }
    }
    Ok(())
}

fn set_lock(file: &File, kind: i32, bytes: Range<i64>) -> io::Result<()> {
    let range = range(kind, bytes);
    // SAFETY: `range` is a complete `struct flock` that outlives the call.
    let ret = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_OFD_SETLK, &raw const range) };
    if ret == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

fn range(kind: i32, bytes: Range<i64>) -> libc::flock {
    libc::flock {
        l_type: kind as libc::c_short,
        l_whence: libc::SEEK_SET as libc::c_short,
        l_start: bytes.start,
        l_len: if bytes == WHOLE { 0 } else { bytes.end - bytes.start }, // 0: to the end
        l_pid: 0,
    }
}
