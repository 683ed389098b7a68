//! Images as exports: opened once each, locked, measured.

use std::collections::HashMap;
use std::fs::{File, OpenOptions};
use std::io::{self, Seek, SeekFrom};
use std::ops::Range;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use aio_reap::AlignedBuf;
use bufcache::Load;
use nbd_protocol::{
    Command, ExportInfo, Exports, MAX_PAYLOAD, MAX_STRING, Request, TransmissionFlags,
};
use thiserror::Error;
use tracing::info;

use crate::args::Args;
use crate::blocks::{Blocks, Fill};

/// How long to wait for an image's lock: the kernel keeps the lock of a server that was killed until
/// its writes in flight have ended.
const LOCK_PATIENCE: Duration = Duration::from_secs(1);

/// Why an image cannot be served.
#[derive(Debug, Error)]
pub(crate) enum ExportError {
    #[error("cannot open image '{path}': {error}")]
    Open { path: PathBuf, error: io::Error },
    #[error("image '{path}' does not exist; --size BYTES creates it")]
    Missing { path: PathBuf },
    #[error("image '{path}' is neither a regular file nor a block device")]
    Kind { path: PathBuf },
    #[error("image '{path}' is in use by another program; --no-lock serves it all the same")]
    Locked { path: PathBuf },
    #[error("'{name}' is not an export name: 1 to {MAX_STRING} bytes, no control characters")]
    Name { name: String },
    #[error("cannot keep blocks in memory: {0}; --cache 0 keeps none")]
    Cache(io::Error),
    #[error("two images are called '{name}'; give one another name with NAME=PATH")]
    Duplicate { name: String },
}

/// One name under which an image is served.
#[derive(Debug)]
pub(crate) struct Export {
    pub(crate) info: ExportInfo,
    /// Index into [`ExportTable::files`].
    pub(crate) file: usize,
}

/// Everything the server serves; immutable once open.
#[derive(Debug)]
pub(crate) struct ExportTable {
    exports: Vec<Export>,
    /// One open file per image, whatever its names.
    pub(crate) files: Vec<File>,
    /// By file: an fdatasync failed once. The kernel reports that to one caller only, and what was
    /// lost is not known; so nothing is called durable any more.
    failed: Vec<AtomicBool>,
    read_only: bool,
    /// What is kept of the files in memory, unless nothing is to be.
    pub(crate) blocks: Option<Blocks>,
}

impl ExportTable {
    /// Opens every image of the command line.
    pub(crate) fn open(args: &Args) -> Result<Self, ExportError> {
        let mut table = Self {
            exports: vec![],
            files: vec![],
            failed: vec![],
            read_only: args.read_only,
            blocks: None,
        };
        let mut known = HashMap::new();
        for image in &args.images {
            table.add(image, args, &mut known)?;
        }
        if args.cache > 0 {
            let blocks =
                Blocks::new(args.cache, &table.files, table.len()).map_err(ExportError::Cache)?;
            table.blocks = Some(blocks);
        }
        Ok(table)
    }

    fn add(
        &mut self,
        image: &str,
        args: &Args,
        known: &mut HashMap<(u64, u64, u64), usize>,
    ) -> Result<(), ExportError> {
        let (name, path) = split_name(image);
        if name.is_empty() || name.len() > MAX_STRING || name.chars().any(char::is_control) {
            return Err(ExportError::Name { name });
        }
        if self.exports.iter().any(|export| export.info.name == name) {
            return Err(ExportError::Duplicate { name });
        }
        let file = open(&path, args)?;
        let fail = |error| ExportError::Open { path: path.clone(), error };
        let meta = file.metadata().map_err(fail)?;
        let index = match known.get(&identity(&meta)) {
            Some(&index) => index, // `file` closes; the lock is the first one's
            None => {
                if !args.no_lock {
                    lock(&file, args.read_only, &path)?;
                }
                grow(&file, args).map_err(fail)?;
                known.insert(identity(&meta), self.files.len());
                self.files.push(file);
                self.failed.push(AtomicBool::new(false));
                self.files.len() - 1
            }
        };
        let info = describe(name, &path, &self.files[index], args).map_err(fail)?;
        info!(export = info.name, size = info.size, path = %path.display(), "serving");
        self.exports.push(Export { info, file: index });
        Ok(())
    }

    /// The export a client negotiated.
    pub(crate) fn index_of(&self, name: &str) -> Option<usize> {
        if name.is_empty() {
            return (!self.exports.is_empty()).then_some(0);
        }
        self.exports.iter().position(|export| export.info.name == name)
    }

    pub(crate) fn len(&self) -> usize {
        self.exports.len()
    }

    pub(crate) fn get(&self, index: usize) -> &Export {
        &self.exports[index]
    }

    /// How large the buffer of a READ or WRITE has to be.
    pub(crate) fn room(&self, export: usize, request: &Request, command: Command) -> usize {
        let Request { offset, len, .. } = *request;
        match (&self.blocks, command) {
            (Some(blocks), Command::Read { .. }) => {
                blocks.room(self.exports[export].file, offset, len as usize)
            }
            _ => len as usize,
        }
    }

    /// Makes of a READ's buffer one whose blocks are kept; back it comes where they are not to be.
    pub(crate) fn fill(
        &self,
        file: usize,
        offset: u64,
        buf: AlignedBuf,
        room: &mut Vec<Vec<Load>>,
    ) -> Result<Fill, AlignedBuf> {
        match &self.blocks {
            Some(blocks) => blocks.fill(file, offset, buf, room),
            None => Err(buf),
        }
    }

    /// Has everything that was written to these bytes be in the image, so that what the file system tells
    /// of its holes is so. Blocks.
    pub(crate) fn settle(&self, file: usize, bytes: Range<u64>) -> io::Result<()> {
        self.blocks.as_ref().map_or(Ok(()), |blocks| blocks.settle(file, bytes))
    }

    /// Makes everything written so far durable; an error if that ever failed.
    pub(crate) fn sync(&self) -> io::Result<()> {
        let mut result = Ok(());
        for (index, file) in self.files.iter().enumerate() {
            let synced = match self.blocks.as_ref().and_then(|blocks| blocks.image(index)) {
                _ if self.has_sync_failed(index) => Err(io::Error::from_raw_os_error(libc::EIO)),
                _ if self.read_only => Ok(()),
                Some(image) => image.sync(),
                None => file.sync_data(),
            };
            result = result.and(synced); // of all, whatever becomes of one
        }
        result
    }

    /// Remembers that data of a file was lost.
    pub(crate) fn sync_failed(&self, file: usize) {
        // Ordering: Relaxed; a fact of its own, it publishes nothing. A sync on another thread
        // that misses it was concurrent with the failure, and gets the kernel's own answer.
        self.failed[file].store(true, Ordering::Relaxed);
    }

    /// Whether a file's data was ever lost.
    pub(crate) fn has_sync_failed(&self, file: usize) -> bool {
        self.failed[file].load(Ordering::Relaxed) // see `sync_failed`
    }
}

impl Exports for ExportTable {
    fn find(&self, name: &str) -> Option<&ExportInfo> {
        self.index_of(name).map(|index| &self.exports[index].info)
    }

    fn names(&self) -> Vec<&str> {
        self.exports.iter().map(|export| export.info.name.as_str()).collect()
    }
}

/// `name=path`, or a path whose last part is the name. A path with '=' in a directory's name is a
/// path.
fn split_name(image: &str) -> (String, PathBuf) {
    if let Some((name, path)) = image.split_once('=') {
        if !name.contains('/') {
            return (name.to_owned(), path.into());
        }
    }
    let path = PathBuf::from(image);
    let name = path.file_name().map(|name| name.to_string_lossy().into_owned());
    (name.unwrap_or_default(), path)
}

fn open(path: &Path, args: &Args) -> Result<File, ExportError> {
    let fail = |error| ExportError::Open { path: path.to_owned(), error };
    let create = args.size.is_some() && !args.read_only;
    // Opening a FIFO or a device of another kind could block or have effects: look first.
    match path.metadata() {
        Ok(meta) if !meta.is_file() && !meta.file_type().is_block_device() => {
            return Err(ExportError::Kind { path: path.to_owned() });
        }
        Err(error) if error.kind() == io::ErrorKind::NotFound && !create => {
            return Err(ExportError::Missing { path: path.to_owned() });
        }
        _ => {}
    }
    let mut options = OpenOptions::new();
    options.read(true).write(!args.read_only).create(create).mode(0o600);
    if args.direct {
        options.custom_flags(libc::O_DIRECT);
    }
    options.open(path).map_err(fail)
}

/// Makes a regular file at least as large as `--size` says. Only once it is locked.
fn grow(file: &File, args: &Args) -> io::Result<()> {
    let meta = file.metadata()?;
    match args.size {
        Some(size) if !args.read_only && meta.is_file() && meta.len() < size => file.set_len(size),
        _ => Ok(()),
    }
}

/// What makes two paths the same image: the inode, or for block devices the device.
fn identity(meta: &std::fs::Metadata) -> (u64, u64, u64) {
    if meta.file_type().is_block_device() {
        (0, 0, meta.rdev())
    } else {
        (meta.dev(), meta.ino(), u64::MAX)
    }
}

/// Takes an open-file-description lock: a writer's is exclusive and covers the whole image, a
/// reader's is shared and ends before the bytes from 100 on, by which QEMU's programs tell each
/// other what they do with an image, so that they may read it too. It goes with the last
/// descriptor, also when the server is killed.
fn lock(file: &File, read_only: bool, path: &Path) -> Result<(), ExportError> {
    let (kind, len) = if read_only { (libc::F_RDLCK, 100) } else { (libc::F_WRLCK, 0) };
    let range = libc::flock {
        l_type: kind as libc::c_short,
        l_whence: libc::SEEK_SET as libc::c_short,
        l_start: 0,
        l_len: len, // 0: to the end, wherever that will be
        l_pid: 0,
    };
    let start = Instant::now();
    loop {
        // SAFETY: `range` is a whole `struct flock` that lives through the call.
        let ret = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_OFD_SETLK, &raw const range) };
        if ret == 0 {
            return Ok(());
        }
        let error = io::Error::last_os_error();
        let path = path.to_owned();
        match error.raw_os_error() {
            Some(libc::EAGAIN | libc::EACCES) if start.elapsed() < LOCK_PATIENCE => {
                std::thread::sleep(Duration::from_millis(10));
            }
            Some(libc::EAGAIN | libc::EACCES) => return Err(ExportError::Locked { path }),
            _ => return Err(ExportError::Open { path, error }),
        }
    }
}

fn describe(name: String, path: &Path, file: &File, args: &Args) -> io::Result<ExportInfo> {
    let mut size = (&*file).seek(SeekFrom::End(0))?; // block devices have no length in stat
    let block_device = file.metadata()?.file_type().is_block_device();
    let mut min_block = if block_device { rustix::fs::ioctl_blksszget(file)? } else { 1 };
    if args.direct {
        min_block =
            aio_reap::Alignment::of(file)?.map_or(1, |align| align.offset.max(align.memory));
        let rounded = size - size % u64::from(min_block);
        if rounded != size {
            info!(export = name, from = size, to = rounded, "size rounded down for --direct");
            size = rounded;
        }
    }
    let common = TransmissionFlags::HAS_FLAGS
        | TransmissionFlags::SEND_FLUSH
        | TransmissionFlags::SEND_FUA
        | TransmissionFlags::SEND_CACHE
        | TransmissionFlags::SEND_DF
        | TransmissionFlags::CAN_MULTI_CONN;
    let flags = if args.read_only {
        common | TransmissionFlags::READ_ONLY
    } else {
        common
            | TransmissionFlags::SEND_TRIM
            | TransmissionFlags::SEND_WRITE_ZEROES
            // A block device may write zeros one by one where a file system changes its map.
            | if block_device { TransmissionFlags::NONE } else { TransmissionFlags::SEND_FAST_ZERO }
    };
    Ok(ExportInfo {
        name,
        description: path.file_name().map_or(String::new(), |n| n.to_string_lossy().into_owned()),
        size,
        flags,
        min_block,
        preferred_block: min_block.max(4096),
        max_block: MAX_PAYLOAD,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_come_from_the_argument_or_the_file() {
        let split = |image| {
            let (name, path) = split_name(image);
            (name, path.to_str().unwrap().to_owned())
        };
        assert_eq!(split("/a/disk.img"), ("disk.img".into(), "/a/disk.img".into()));
        assert_eq!(split("root=/a/disk.img"), ("root".into(), "/a/disk.img".into()));
        assert_eq!(split("/a=b/disk"), ("disk".into(), "/a=b/disk".into()));
        assert_eq!(split("/"), (String::new(), "/".into()));
    }
}
