//! The result of a `statx`.

use std::time::{Duration, SystemTime};

/// The size of `struct statx`, in words of 64 bits (ABI).
pub(crate) const STATX_WORDS: usize = 32;
/// What every request asks for: the fields of `stat`, and the time of creation.
pub(crate) const STATX_MASK: u32 = libc::STATX_BASIC_STATS | libc::STATX_BTIME;

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
/// assert_eq!(missing.kind(), std::io::ErrorKind::NotFound);
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
    /// The preferred size of transfers, in bytes.
    pub block_size: u32,
    /// The type and the permissions (`st_mode`).
    pub mode: u32,
    /// The number of hard links.
    pub links: u32,
    /// The user id of the owner.
    pub uid: u32,
    /// The group id.
    pub gid: u32,
    /// The number of the inode.
    pub inode: u64,
    /// The device of the file system: major and minor number.
    pub device: (u32, u32),
    /// The device that a device file stands for: major and minor number.
    pub special: (u32, u32),
    /// The time of the last access.
    pub accessed: SystemTime,
    /// The time of the last write.
    pub modified: SystemTime,
    /// The time of the last change of the metadata.
    pub changed: SystemTime,
    /// The time of the creation, if the file system has it.
    pub created: Option<SystemTime>,
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

    /// Reads a `struct statx` (ABI). Its fields are named with their offsets in bytes.
    pub(crate) fn parse(words: &[u64; STATX_WORDS]) -> Self {
        let half = |at: usize| {
            let bytes = words[at / 8].to_ne_bytes();
            let half: [u8; 4] = if at.is_multiple_of(8) {
                [bytes[0], bytes[1], bytes[2], bytes[3]]
            } else {
                [bytes[4], bytes[5], bytes[6], bytes[7]]
            };
            u32::from_ne_bytes(half)
        };
        let word = |at: usize| words[at / 8];
        let time = |at: usize| {
            let (seconds, nanos) = (word(at) as i64, Duration::from_nanos(half(at + 8).into()));
            let whole = Duration::from_secs(seconds.unsigned_abs());
            let epoch = SystemTime::UNIX_EPOCH;
            let start =
                if seconds < 0 { epoch.checked_sub(whole) } else { epoch.checked_add(whole) };
            start.and_then(|start| start.checked_add(nanos)).unwrap_or(epoch)
        };
        let (mask, mode) = (half(0), half(28)); // `mode` has 16 bits, and 16 spare ones behind it
        let mode = u32::from(u16::from_ne_bytes([mode.to_ne_bytes()[0], mode.to_ne_bytes()[1]]));
        Self {
            size: word(40),
            blocks: word(48),
            block_size: half(4),
            mode,
            links: half(16),
            uid: half(20),
            gid: half(24),
            inode: word(32),
            device: (half(136), half(140)),
            special: (half(128), half(132)),
            accessed: time(64),
            modified: time(112),
            changed: time(96),
            created: (mask & libc::STATX_BTIME != 0).then(|| time(80)),
        }
    }
}
