//! The way a file is opened.

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

    /// Fails with `ELOOP` if the last part of the path is a symbolic link (`O_NOFOLLOW`).
    pub const fn no_follow(self) -> Self {
        self.flags(libc::O_NOFOLLOW)
    }

    /// Adds flags of `open(2)`, such as `O_APPEND`, `O_TRUNC` and `O_DIRECT`. Requests on a direct file
    /// must have its [`Alignment`](crate::Alignment).
    pub const fn flags(self, flags: i32) -> Self {
        Self { flags: self.flags | flags, mode: self.mode }
    }

    pub(crate) fn get(self) -> (libc::c_int, u32) {
        (self.flags, self.mode)
    }
}
