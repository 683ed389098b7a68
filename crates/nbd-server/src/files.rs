//! The files of images: a folder of them (`--export-dir`), and the locks that keep other programs from
//! writing to one.
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

use std::ffi::{CStr, CString};
use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use bufcache::FileDevice;
use nbd_protocol::MAX_STRING;
use rustix::fs::{AtFlags, CWD, Dir, FileType, Mode, OFlags};
use tracing::warn;

/// Most names in a list of exports. A file that is not listed is still served.
pub(crate) const MOST_NAMES: usize = 10_000;

/// Most bad names that are logged.
const MOST_WARNINGS: usize = 8;

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

    /// Opens a file of the folder; a block device that takes no writes is opened for reading. Fails
    /// with [`NotFound`](io::ErrorKind::NotFound) if no image has that name.
    pub(crate) fn file(&self, name: &str, read_only: bool, direct: bool) -> io::Result<File> {
        let absent = || io::Error::from(io::ErrorKind::NotFound);
        if !is_name(name) {
            return Err(absent());
        }
        let name = CString::new(name).map_err(|_| absent())?;
        // Opening a device of another kind could have side effects, so check the kind first.
        let stat = rustix::fs::statat(&self.dir, &name, AtFlags::SYMLINK_NOFOLLOW)?;
        if !is_image(FileType::from_raw_mode(stat.st_mode)) {
            return Err(absent());
        }
        let open = |read_only| {
            let mut flags = if read_only { OFlags::RDONLY } else { OFlags::RDWR };
            flags.set(OFlags::DIRECT, direct);
            // The file may have been replaced since, and the open must neither follow a link nor
            // block.
            let careful = OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
            let fd = rustix::fs::openat(&self.dir, &name, flags | careful, Mode::empty())?;
            rustix::fs::fcntl_setfl(&fd, flags)?; // NONBLOCK would also apply to the engine's I/O
            let file = File::from(fd);
            let kind = file.metadata()?.file_type();
            if kind.is_file() || kind.is_block_device() { Ok(file) } else { Err(absent()) }
        };
        let is_device = FileType::from_raw_mode(stat.st_mode) == FileType::BlockDevice;
        let file = open(read_only || is_device)?;
        match is_device && !read_only && !FileDevice::is_read_only_device(&file)? {
            true => open(false),
            false => Ok(file),
        }
    }

    /// Tells of files that cannot be exports because of their names. Those that begin with a dot are
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

/// Why a file could not be locked.
#[derive(Debug)]
pub(crate) enum LockError {
    /// Another program holds the lock.
    Locked,
    Os(io::Error),
}

/// Locks an image. A writer's lock is exclusive and covers the whole image, so it excludes QEMU's
/// readers and writers as well as other servers. Readers share an image with each other and with
/// QEMU's readers, and exclude writers.
pub(crate) fn lock(file: &File, read_only: bool, patience: Duration) -> Result<(), LockError> {
    let start = Instant::now();
    loop {
        let locked =
            if read_only { lock_to_read(file) } else { set_lock(file, libc::F_WRLCK, WHOLE) };
        let Err(error) = locked else { return Ok(()) };
        match error.raw_os_error() {
            Some(libc::EAGAIN | libc::EACCES) if start.elapsed() < patience => {
                std::thread::sleep(Duration::from_millis(10));
            }
            Some(libc::EAGAIN | libc::EACCES) => return Err(LockError::Locked),
            _ => return Err(LockError::Os(error)),
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

/// Fails if another program may not be beside a reader: it writes, or lets no other program read.
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
