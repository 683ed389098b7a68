//! Paths in memory that the engine owns while the kernel reads them.

use std::ffi::CStr;
use std::fmt;
use std::os::fd::{AsFd, AsRawFd, RawFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use crate::file::File;
use crate::statx::STATX_WORDS;

/// The path of a request such as [`Engine::open`](crate::Engine::open), relative to the current
/// directory or to an [open one](Self::at).
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
/// let dir = engine.attach(std::fs::File::open(folder.path())?)?;
/// let name = IoPath::at(&dir, "new");
/// let (file, name) = engine.open(name, OpenOptions::write_only().create(0o600)).submit()?.wait();
/// engine.write(&file?, b"hello", 0).submit()?.wait().0?;
/// let (stat, name) = engine.stat(name).submit()?.wait();
/// assert_eq!(stat?.size, 5);
/// assert_eq!(name.to_path(), Some(std::path::Path::new("new")));
/// # Ok(())
/// # }
/// ```
pub struct IoPath {
    /// The memory of a `statx` result and behind it the path, ended by a zero byte. Empty if the
    /// path has a zero byte itself. A `Vec`, so that a move of the value leaves pointers valid.
    words: Vec<u64>,
    dir: Option<File>,
}

impl IoPath {
    /// Makes a path that is relative to the open directory `dir`, unless it is absolute.
    pub fn at(dir: &File, path: impl AsRef<Path>) -> Self {
        Self::new(Some(dir.clone()), path.as_ref())
    }

    fn new(dir: Option<File>, path: &Path) -> Self {
        let bytes = path.as_os_str().as_bytes();
        if bytes.contains(&0) {
            return Self { words: Vec::new(), dir };
        }
        let mut words = vec![0; STATX_WORDS + bytes.len() / 8 + 1];
        for (word, chunk) in words[STATX_WORDS..].iter_mut().zip(bytes.chunks(8)) {
            let mut eight = [0; 8];
            eight[..chunk.len()].copy_from_slice(chunk);
            *word = u64::from_ne_bytes(eight);
        }
        Self { words, dir }
    }

    /// Returns the path, or `None` if it has a zero byte and is refused.
    pub fn to_path(&self) -> Option<&Path> {
        if !self.is_valid() {
            return None;
        }
        // SAFETY: `new` stored the path behind the result, followed by at least one zero byte.
        let path = unsafe { CStr::from_ptr(self.words[STATX_WORDS..].as_ptr().cast()) };
        Some(Path::new(std::ffi::OsStr::from_bytes(path.to_bytes())))
    }

    pub(crate) fn is_valid(&self) -> bool {
        !self.words.is_empty()
    }

    /// Returns whether the path is empty, so that it names the directory (or file) itself.
    pub(crate) fn names_itself(&self) -> bool {
        self.dir.is_some() && self.words.get(STATX_WORDS) == Some(&0)
    }

    /// Returns the descriptor of the directory.
    pub(crate) fn dir_fd(&self) -> RawFd {
        self.dir.as_ref().map_or(libc::AT_FDCWD, |dir| dir.as_fd().as_raw_fd())
    }

    /// Returns the address of the path, for the kernel, and that of the memory for the result of
    /// a `statx`. Both are valid until the value is dropped, if the path is valid.
    pub(crate) fn addresses(&mut self) -> (*mut u8, *mut u8) {
        let result = self.words.as_mut_ptr().cast::<u8>();
        (result.wrapping_add(STATX_WORDS * 8), result)
    }

    /// Returns the result of the last `statx`.
    pub(crate) fn stat_words(&self) -> &[u64; STATX_WORDS] {
        self.words.first_chunk().expect("only valid paths are submitted")
    }
}

impl<P: AsRef<Path> + ?Sized> From<&P> for IoPath {
    fn from(path: &P) -> Self {
        Self::new(None, path.as_ref())
    }
}

impl From<PathBuf> for IoPath {
    fn from(path: PathBuf) -> Self {
        Self::new(None, &path)
    }
}

impl From<String> for IoPath {
    fn from(path: String) -> Self {
        Self::new(None, path.as_ref())
    }
}

/// Names the open file itself: for [`Engine::stat`](crate::Engine::stat).
impl From<&File> for IoPath {
    fn from(file: &File) -> Self {
        Self::at(file, "")
    }
}

impl fmt::Debug for IoPath {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("IoPath").field("path", &self.to_path()).field("dir", &self.dir).finish()
    }
}
