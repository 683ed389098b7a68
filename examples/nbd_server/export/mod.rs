//! The table of exports: images are opened once each, locked, and described to clients.

#[cfg(test)]
mod tests;
mod upstream;

use std::borrow::Cow;
use std::fs::{File, OpenOptions};
use std::io::{self, Seek, SeekFrom};
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use nbd_protocol::{
    Command, ExportInfo, Exports, ListedExport, MAX_PAYLOAD, MAX_REPLIES, MAX_STRING, Negotiated,
    OPTION_HEADER, Request, TransmissionFlags,
};
use percpu::sync::Mutex;
use thiserror::Error;
use tracing::{info, warn};

use crate::args::Args;
use crate::blocks::{BLOCK, Backing, Blocks, Image};
use crate::folder::{Folder, MOST_NAMES};
use crate::image_spec::ImageSpec;
use crate::lock::{LockError, lock};
use crate::open_files::{FileState, OpenFiles, identity};
use crate::tls::Acceptor;
use crate::upstream::UpstreamError;

/// How long to wait for an image's lock: the kernel keeps the lock of a server that was killed
/// until its writes in flight have ended.
const LOCK_PATIENCE: Duration = Duration::from_secs(1);

/// Most images of a folder that are opened while the server runs. A guess: each takes some
/// descriptors, and a queue in each worker.
const FOLDER: usize = if cfg!(test) { 3 } else { 1024 };

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
    #[error("image '{address}': {error}")]
    Upstream { address: String, error: Box<UpstreamError> },
    #[error("image '{address}' has blocks of {min} bytes; up to {BLOCK} are supported")]
    UpstreamBlocks { address: String, min: usize },
    #[error("TLS: {0}")]
    Tls(String),
    #[error("cannot keep blocks in memory: {0}")]
    Cache(io::Error),
    #[error(
        "image '{path}' has {len} bytes, and the export of {size} bytes at offset {offset} ends behind them"
    )]
    Beyond { path: PathBuf, offset: u64, size: u64, len: u64 },
    #[error(
        "offset {offset} of image '{path}' is not a multiple of {unit}, which its device needs"
    )]
    Misaligned { path: PathBuf, offset: u64, unit: u32 },
    #[error("two images are called '{name}'; give one another name with NAME=PATH")]
    Duplicate { name: String },
    #[error(
        "'{name}' is one image too many: {most} were opened, and keep their places until the server ends"
    )]
    TooMany { name: String, most: usize },
}

impl ExportError {
    fn lock(path: &Path, error: LockError) -> Self {
        let path = path.to_owned();
        match error {
            LockError::Locked => Self::Locked { path },
            LockError::Os(error) => Self::Open { path, error },
        }
    }
}

/// One name under which an image is served.
#[derive(Debug)]
pub(crate) struct Export {
    pub(crate) info: ExportInfo,
    /// Index of the image in [`ExportTable::blocks`].
    pub(crate) file: usize,
    /// Where it begins in the file, in bytes.
    pub(crate) start: u64,
    /// It ends where the file does, also when that has grown.
    grows: bool,
}

/// The part of a file that an export serves: see [`ImageSpec`].
struct Part {
    read_only: bool,
    offset: u64,
    size: Option<u64>,
}

/// An open file that is to be served.
struct Opened {
    file: File,
    /// It was opened for reading only.
    read_only: bool,
    /// How long to wait for its lock.
    patience: Duration,
    /// Make it as large as `--size` says.
    may_grow: bool,
}

/// All exports of the server. An open export keeps its index. Exports of a folder are added when a
/// client asks for them, and released when no client has them open ([`idle`](crate::idle)).
#[derive(Debug)]
pub(crate) struct ExportTable {
    /// An export keeps its index, and is read without a lock: requests carry the index.
    exports: boxcar::Vec<Export>,
    /// Most exports, and most images.
    capacity: usize,
    /// Locked to open a file, or to release it.
    pub(crate) known: Mutex<OpenFiles>,
    folder: Option<Folder>,
    /// Exports of the command line, the first of which is the default.
    fixed: usize,
    /// Their files.
    pub(crate) fixed_files: usize,
    pub(crate) args: Args,
    /// One image per file, whatever its names.
    pub(crate) blocks: Blocks,
    /// The TLS that clients are offered.
    pub(crate) tls: Acceptor,
}

impl ExportTable {
    /// Opens every image of the command line, and the folder.
    pub(crate) fn open(args: &Args) -> Result<Self, ExportError> {
        let open = |path: &PathBuf| {
            let fail = |error| ExportError::Open { path: path.clone(), error };
            Folder::open(path).map_err(fail)
        };
        let folder = args.export_dir.as_ref().map(open).transpose()?;
        let capacity = args.images.len() + if folder.is_some() { FOLDER } else { 0 };
        let mut table = Self {
            exports: boxcar::Vec::with_capacity(capacity),
            capacity,
            known: Mutex::default(),
            folder,
            fixed: args.images.len(),
            fixed_files: 0,
            args: args.clone(),
            blocks: Blocks::new(args.cache, capacity).map_err(ExportError::Cache)?,
            tls: Acceptor::new(args).map_err(ExportError::Tls)?,
        };
        for image in &args.images {
            table.add_image(image)?;
        }
        table.fixed_files = table.blocks.count();
        Ok(table)
    }

    fn add_image(&self, image: &ImageSpec) -> Result<(), ExportError> {
        let ImageSpec { name, path, .. } = image.clone();
        if name.is_empty() || name.len() > MAX_STRING || name.chars().any(char::is_control) {
            return Err(ExportError::Name { name });
        }
        if self.exports.iter().any(|(_, export)| export.info.name == name) {
            return Err(ExportError::Duplicate { name });
        }
        if let Some(address) = &image.upstream {
            return self.add_upstream(name, address, image.read_only);
        }
        // A file that is also served for writing is opened once, for that.
        let writes = |other: &ImageSpec| !other.read_only && is_same_file(&other.path, &path);
        let read_only = self.args.read_only || !self.args.images.iter().any(writes);
        let (file, created) = open(&path, &self.args, read_only)?;
        let part = Part {
            read_only: self.args.read_only || image.read_only,
            offset: image.offset,
            size: image.size,
        };
        let opened = Opened { file, read_only, patience: LOCK_PATIENCE, may_grow: true };
        let added = self.add(name, &path, opened, &part);
        if let (Some(created), Err(error)) = (created, &added) {
            // A program that holds the lock has begun to use the file in the meantime.
            if !matches!(error, ExportError::Locked { .. }) {
                let _ = std::fs::remove_file(created); // `added` says what failed first
            }
        }
        added.map(drop)
    }

    /// Adds an export, unless it is there; returns its index.
    fn add(
        &self,
        name: String,
        path: &Path,
        Opened { file: opened, read_only, patience, may_grow }: Opened,
        part: &Part,
    ) -> Result<usize, ExportError> {
        let fail = |error| ExportError::Open { path: path.to_owned(), error };
        let identity = identity(&opened.metadata().map_err(fail)?);
        let len = length(&opened).map_err(fail)?;
        let mut known = self.known.lock();
        let file = match known.find(&identity, len) {
            // Ours closes; the lock is the first one's.
            Some(file) => {
                let state = &mut known.states[file];
                state.touch();
                let kept = self.image(file).file();
                if let Some(kept) = kept.filter(|_| state.released && !self.args.no_lock) {
                    lock(kept, self.args.read_only, patience)
                        .map_err(|error| ExportError::lock(path, error))?;
                }
                state.released = false;
                file
            }
            None => {
                if self.blocks.count() == self.capacity {
                    return Err(ExportError::TooMany { name, most: self.capacity });
                }
                if !self.args.no_lock {
                    lock(&opened, read_only, patience)
                        .map_err(|error| ExportError::lock(path, error))?;
                }
                if may_grow {
                    grow(&opened, &self.args, read_only).map_err(fail)?;
                }
                let len = length(&opened).map_err(fail)?; // it may have grown
                if let Some(&before) = known.files.get(&identity) {
                    self.blocks.detach(before).map_err(ExportError::Cache)?;
                }
                known.files.remove(&identity); // whatever comes of the next, that one has ended
                let backing = Backing::open(&opened).map_err(fail)?;
                let index = self.blocks.attach(backing).map_err(ExportError::Cache)?;
                known.files.insert(identity, index);
                known.states.push(FileState::new(len));
                index
            }
        };
        let is_there =
            |(_, export): (usize, &Export)| export.info.name == name && export.file == file;
        if let Some(index) = self.exports.iter().position(is_there) {
            known.names.insert(name, index);
            return Ok(index);
        }
        let mut info = self.describe(name, path, &opened, part)?;
        self.bound(&mut info, file, part.offset);
        info!(export = info.name, size = info.size, path = %path.display(), "serving");
        if self.exports.count() == self.capacity {
            return Err(ExportError::TooMany { name: info.name, most: self.capacity });
        }
        let name = info.name.clone();
        let index = self.exports.push(Export {
            info,
            file,
            start: part.offset,
            grows: part.size.is_none(),
        });
        known.names.insert(name, index);
        Ok(index)
    }

    /// Describes a part of a file as an export.
    fn describe(
        &self,
        name: String,
        path: &Path,
        file: &File,
        part: &Part,
    ) -> Result<ExportInfo, ExportError> {
        let fail = |error| ExportError::Open { path: path.to_owned(), error };
        let len = length(file).map_err(fail)?;
        let Part { read_only, offset, size } = *part;
        let rest = len.checked_sub(offset).filter(|&rest| size.is_none_or(|size| size <= rest));
        let Some(rest) = rest else {
            let (path, size) = (path.to_owned(), size.unwrap_or(0));
            return Err(ExportError::Beyond { path, offset, size, len });
        };
        let mut size = size.unwrap_or(rest);
        let block_device = file.metadata().map_err(fail)?.file_type().is_block_device();
        let mut min_block = if block_device {
            rustix::fs::ioctl_blksszget(file).map_err(|e| fail(e.into()))?
        } else {
            1
        };
        if self.args.direct {
            let needed = aio_reap::Alignment::of(file).map_err(fail)?;
            min_block = needed.map_or(1, |align| align.offset.max(align.memory));
            let rounded = size - size % u64::from(min_block);
            if rounded != size {
                info!(export = name, from = size, to = rounded, "size rounded down for --direct");
                size = rounded;
            }
        }
        if offset % u64::from(min_block) != 0 {
            return Err(ExportError::Misaligned { path: path.to_owned(), offset, unit: min_block });
        }
        let common = TransmissionFlags::HAS_FLAGS
            | TransmissionFlags::SEND_FLUSH
            | TransmissionFlags::SEND_FUA
            | TransmissionFlags::SEND_CACHE
            | TransmissionFlags::SEND_DF
            | TransmissionFlags::CAN_MULTI_CONN;
        let flags = if read_only {
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
            description: path
                .file_name()
                .map_or(String::new(), |n| n.to_string_lossy().into_owned()),
            size,
            flags,
            min_block,
            preferred_block: min_block.max(4096),
            max_block: MAX_PAYLOAD,
        })
    }

    /// A whole file, read-only with `--read-only`.
    fn whole(&self) -> Part {
        Part { read_only: self.args.read_only, offset: 0, size: None }
    }

    /// An image is as long as its file was when it was opened: under a name that it got later it is
    /// no longer.
    fn bound(&self, info: &mut ExportInfo, file: usize, start: u64) {
        info.size = info.size.min(self.image(file).len().saturating_sub(start));
    }

    /// The image of a file.
    pub(crate) fn image(&self, file: usize) -> &Arc<Image> {
        self.blocks.image(file)
    }

    /// Returns the export that a client negotiated, if it is still as the client was told.
    pub(crate) fn index_of(&self, known: &OpenFiles, negotiated: &Negotiated) -> Option<usize> {
        let name = &negotiated.export;
        // In the folder another file may have taken the name.
        let index = self.find_fixed(name).or_else(|| known.names.get(name).copied())?;
        let info = self.info(index);
        // An image of the command line may have grown since; the session keeps the size that the client was told.
        let may_grow = index < self.fixed && self.exports[index].grows;
        let grown = may_grow && info.size > negotiated.size;
        let same = (info.size == negotiated.size || grown)
            && info.advertised(negotiated.style) == negotiated.flags;
        same.then_some(index)
    }

    /// Finds an export of the command line. Without a name, the first.
    fn find_fixed(&self, name: &str) -> Option<usize> {
        let mut fixed = self.exports.iter().take(self.fixed);
        fixed.position(|(_, export)| name.is_empty() || export.info.name == name)
    }

    /// Opens a file of the folder.
    fn in_folder(&self, name: &str) -> Option<(&Folder, File)> {
        let folder = self.folder.as_ref()?;
        match folder.file(name, self.args.read_only, self.args.direct) {
            Ok(file) => Some((folder, file)),
            Err(error) if error.kind() == io::ErrorKind::NotFound => None,
            Err(error) => {
                warn!(name, %error, "cannot open a file of the folder");
                None
            }
        }
    }

    /// The number of exports in the table.
    #[cfg(test)]
    pub(crate) fn len(&self) -> usize {
        self.exports.count()
    }

    /// The largest number of exports. All indexes are below.
    pub(crate) fn capacity(&self) -> usize {
        self.capacity
    }

    /// The names of all exports in the table, by index.
    pub(crate) fn names(&self) -> impl Iterator<Item = &str> {
        self.exports.iter().map(|(_, export)| export.info.name.as_str())
    }

    pub(crate) fn get(&self, index: usize) -> &Export {
        &self.exports[index]
    }

    /// An export as a client is told of it, with the size that it has now.
    pub(crate) fn info(&self, index: usize) -> ExportInfo {
        let Export { ref info, file, start, grows } = self.exports[index];
        let mut info = info.clone();
        if grows {
            let rest = self.image(file).len().saturating_sub(start);
            info.size = rest - rest % u64::from(info.min_block);
        }
        info
    }

    /// Has images grow with their files, by whole blocks. Clients that connect from now on see the
    /// new sizes.
    pub(crate) fn grow(&self) {
        let mut known = self.known.lock();
        for file in 0..self.blocks.count() {
            let (image, name) = (self.image(file), self.names_of(file).next().unwrap_or_default());
            let Some(opened) = image.file() else { continue };
            let (before, state) = (image.len(), &mut known.states[file]);
            match length(opened) {
                // A released file is opened anew if it has grown.
                Ok(len) if len < before + BLOCK as u64 || state.released => {}
                Ok(len) if image.grow(len) => {
                    state.resize(len);
                    info!(export = name, from = before, to = image.len(), "the image has grown");
                }
                Ok(_) => {
                    warn!(export = name, before, "only a size in whole blocks of {BLOCK} can grow")
                }
                Err(error) => {
                    warn!(export = name, %error, "cannot tell whether the image has grown")
                }
            }
        }
    }

    /// The size of the buffer of a READ or WRITE.
    pub(crate) fn room(&self, export: usize, request: &Request, command: Command) -> usize {
        let Request { offset, len, .. } = *request;
        match command {
            Command::Read { .. } => {
                let Export { file, start, .. } = self.exports[export];
                self.image(file).room(start + offset, len as usize)
            }
            _ => len as usize,
        }
    }

    /// Returns how many bytes the replies to so many bytes of options may take while their buffer
    /// grows.
    pub(crate) fn handshake_room(&self, input: usize) -> usize {
        let fixed = self.exports.iter().take(self.fixed).map(|(_, export)| &export.info);
        let fixed: usize = fixed.map(|info| info.name.len() + info.description.len() + 64).sum();
        let list = fixed + if self.folder.is_some() { MOST_NAMES * 512 } else { 0 };
        let replies = (input / OPTION_HEADER + 1).saturating_mul(list).min(MAX_REPLIES) + list;
        3 * replies // a buffer that grows has twice its bytes, beside the old one
    }

    /// Makes everything written so far durable; an error if that ever failed.
    pub(crate) fn sync(&self) -> io::Result<()> {
        // Those that were opened anew since had been synced before that.
        let known: Vec<_> = self.known.lock().files.values().copied().collect();
        let all = known.into_iter().map(|file| self.sync_file(file));
        all.fold(Ok(()), io::Result::and) // of all, whatever becomes of one
    }

    /// Makes what was written to one file durable.
    pub(crate) fn sync_file(&self, file: usize) -> io::Result<()> {
        self.image(file).sync_now()
    }

    /// Whether there is a folder, whose files may be released.
    pub(crate) fn has_folder(&self) -> bool {
        self.folder.is_some()
    }

    /// The names under which a file was opened.
    pub(crate) fn names_of(&self, file: usize) -> impl Iterator<Item = &str> {
        let its = self.exports.iter().filter(move |(_, export)| export.file == file);
        its.map(|(_, export)| export.info.name.as_str())
    }
}

impl Exports for ExportTable {
    /// Opens nothing for good: a client that only looks leaves a file of the folder to others.
    fn find(&self, name: &str) -> Option<Cow<'_, ExportInfo>> {
        if let Some(index) = self.find_fixed(name) {
            return Some(Cow::Owned(self.info(index)));
        }
        let (folder, file) = self.in_folder(name)?;
        let known = identity(&file.metadata().ok()?);
        let known = self.known.lock().find(&known, length(&file).ok()?);
        let opened =
            |(_, export): &(usize, &Export)| export.info.name == name && Some(export.file) == known;
        if let Some((index, _)) = self.exports.iter().find(opened) {
            return Some(Cow::Owned(self.info(index)));
        }
        let info = self.describe(name.to_owned(), &folder.path(name), &file, &self.whole());
        let mut info = info
            .inspect_err(|error| warn!(name, %error, "cannot look at a file of the folder"))
            .ok()?;
        known.inspect(|&file| self.bound(&mut info, file, 0));
        Some(Cow::Owned(info))
    }

    fn open(&self, name: &str) -> Option<Cow<'_, ExportInfo>> {
        if let Some(index) = self.find_fixed(name) {
            return Some(Cow::Owned(self.info(index)));
        }
        let (folder, file) = self.in_folder(name)?;
        // A worker asks, which has others to serve: no patience.
        let read_only = self.args.read_only;
        let opened = Opened { file, read_only, patience: Duration::ZERO, may_grow: false };
        let added = self.add(name.to_owned(), &folder.path(name), opened, &self.whole());
        let index = added.inspect_err(|error| warn!(%error, "an export is not served")).ok()?;
        Some(Cow::Owned(self.info(index)))
    }

    fn list(&self) -> Vec<ListedExport> {
        let fixed = self.exports.iter().take(self.fixed);
        let mut listed: Vec<_> = fixed.map(|(index, _)| self.info(index).listed()).collect();
        for name in self.folder.iter().flat_map(Folder::names) {
            if self.find_fixed(&name).is_none() {
                listed.push(ListedExport { name, description: String::new() });
            }
        }
        listed
    }
}

/// Opens an image. If this call creates its file, returns that file's path too.
fn open(path: &Path, args: &Args, read_only: bool) -> Result<(File, Option<PathBuf>), ExportError> {
    let fail = |error| ExportError::Open { path: path.to_owned(), error };
    // Opening a FIFO or a device of another kind could block or have effects: look first.
    let missing = match path.metadata() {
        Ok(meta) if !meta.is_file() && !meta.file_type().is_block_device() => {
            return Err(ExportError::Kind { path: path.to_owned() });
        }
        Err(error) => error.kind() == io::ErrorKind::NotFound,
        Ok(_) => false,
    };
    let created = match (missing, args.size.is_some() && !read_only) {
        (true, false) => return Err(ExportError::Missing { path: path.to_owned() }),
        (true, true) => create(path).map_err(fail)?,
        (false, _) => None,
    };
    let mut options = OpenOptions::new();
    options.read(true).write(!read_only);
    if args.direct {
        options.custom_flags(libc::O_DIRECT);
    }
    match options.open(path) {
        Ok(file) => Ok((file, created)),
        Err(error) => {
            if let Some(created) = created {
                let _ = std::fs::remove_file(created); // `error` says what failed first
            }
            Err(fail(error))
        }
    }
}

/// Creates an empty file, where a symbolic link leads if `path` is one. Returns the file's path;
/// `None` if another program has created it since.
fn create(path: &Path) -> io::Result<Option<PathBuf>> {
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

/// Makes a regular file at least as large as `--size` says. Only once it is locked.
fn grow(file: &File, args: &Args, read_only: bool) -> io::Result<()> {
    let meta = file.metadata()?;
    match args.size {
        Some(size) if !read_only && meta.is_file() && meta.len() < size => file.set_len(size),
        _ => Ok(()),
    }
}

/// Whether two paths are the same image. Files that do not exist yet are compared by their paths.
fn is_same_file(a: &Path, b: &Path) -> bool {
    match (a.metadata(), b.metadata()) {
        (Ok(a), Ok(b)) => identity(&a) == identity(&b),
        _ => a == b,
    }
}

fn length(mut file: &File) -> io::Result<u64> {
    file.seek(SeekFrom::End(0)) // block devices have no length in stat
}
