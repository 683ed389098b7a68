//! The table of exports: images are opened once each, locked, and described to clients.
//!
//! An export of the command line lives as long as the server. One of a folder is made for each connection that
//! opens it; what these have in common is the image ([`open_images`](crate::open_images)).

#[cfg(test)]
mod tests;
mod upstream;

use std::borrow::Cow;
use std::cell::RefCell;
use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use nbd_protocol::{
    Command, ExportInfo, Exports, ListedExport, MAX_PAYLOAD, MAX_REPLIES, MAX_STRING,
    OPTION_HEADER, Request, TransmissionFlags as Flags,
};
use thiserror::Error;
use tracing::{info, warn};

use crate::args::Args;
use crate::blocks::{BLOCK, Backing, Blocks, Image};
use crate::folder::{Folder, MOST_NAMES};
use crate::image_spec::ImageSpec;
use crate::lock::{LockError, lock};
use crate::open_images::{OpenImages, identity, length};
use crate::tls::Acceptor;
use crate::upstream::UpstreamError;

/// How long to wait for an image's lock: the kernel keeps the lock of a server that was killed
/// until its writes in flight have ended.
const LOCK_PATIENCE: Duration = Duration::from_secs(1);

/// Most images of a folder that are open at a time. A guess: each takes some descriptors, and a queue
/// in each worker that serves it.
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
    #[error("'{name}' is one image too many: {most} are open")]
    TooMany { name: String, most: usize },
}

impl ExportError {
    /// Makes errors that say which image could not be opened.
    fn at(path: &Path) -> impl Fn(io::Error) -> Self + Copy {
        move |error| Self::Open { path: path.to_owned(), error }
    }
}

/// What is served under one name.
#[derive(Clone, Debug)]
pub(crate) struct Export {
    pub(crate) info: ExportInfo,
    pub(crate) image: Arc<Image>,
    /// Where it begins in the image, in bytes.
    pub(crate) start: u64,
    /// It ends where the image does, also when that has grown.
    grows: bool,
}

impl Export {
    /// An image is as long as its file was when it was opened, whatever the file is now.
    fn new(mut info: ExportInfo, image: Arc<Image>, spec: &ImageSpec) -> Self {
        info.size = info.size.min(image.len().saturating_sub(spec.offset));
        Self { info, image, start: spec.offset, grows: spec.size.is_none() }.current()
    }

    /// The export with the size that it has now.
    fn current(mut self) -> Self {
        if self.grows {
            let rest = self.image.len().saturating_sub(self.start);
            self.info.size = rest - rest % u64::from(self.info.min_block.max(1));
        }
        self
    }

    /// The size of the buffer of a READ or WRITE.
    pub(crate) fn room(&self, request: &Request, command: Command) -> usize {
        let Request { offset, len, .. } = *request;
        match command {
            Command::Read { .. } => self.image.room(self.start + offset, len as usize),
            _ => len as usize,
        }
    }
}

/// All exports of the server.
#[derive(Debug)]
pub(crate) struct ExportTable {
    /// Exports of the command line, the first of which is the default.
    pub(crate) fixed: Vec<Export>,
    folder: Option<Folder>,
    /// One image per file, whatever its names.
    pub(crate) images: OpenImages,
    args: Args,
    pub(crate) blocks: Blocks,
    /// The TLS that clients are offered.
    pub(crate) tls: Acceptor,
}

impl ExportTable {
    /// Opens every image of the command line, and the folder.
    pub(crate) fn open(args: &Args) -> Result<Self, ExportError> {
        let open = |path: &PathBuf| Folder::open(path).map_err(ExportError::at(path));
        let folder = args.export_dir.as_ref().map(open).transpose()?;
        let mut table = Self {
            fixed: Vec::new(),
            folder,
            images: OpenImages::new(!args.no_lock),
            args: args.clone(),
            blocks: Blocks::new(args.cache).map_err(ExportError::Cache)?,
            tls: Acceptor::new(args).map_err(ExportError::Tls)?,
        };
        for image in &args.images {
            let export = table.add_image(image)?;
            let ExportInfo { name, size, description, .. } = &export.info;
            info!(export = name, size, of = description, "serving");
            table.fixed.push(export);
        }
        table.images.limit(FOLDER); // an export of a server, or a second one of a file, takes no slot
        Ok(table)
    }

    fn add_image(&self, spec: &ImageSpec) -> Result<Export, ExportError> {
        let ImageSpec { name, path, .. } = spec;
        if name.is_empty() || name.len() > MAX_STRING || name.chars().any(char::is_control) {
            return Err(ExportError::Name { name: name.clone() });
        }
        if self.names().any(|other| other == name) {
            return Err(ExportError::Duplicate { name: name.clone() });
        }
        if let Some(address) = &spec.upstream {
            return self.add_upstream(spec, address);
        }
        // A file that is also served for writing is opened once, for that.
        let writes = |other: &ImageSpec| !other.read_only && is_same_file(&other.path, path);
        let read_only = self.args.read_only || !self.args.images.iter().any(writes);
        let (file, created) = open(path, &self.args, read_only)?;
        let added = self.add(spec, &file, || {
            self.lock(path, &file, read_only, LOCK_PATIENCE)?;
            grow(&file, &self.args, read_only).map_err(ExportError::at(path))
        });
        if let (Some(created), Err(error)) = (created, &added) {
            // A program that holds the lock has begun to use the file in the meantime.
            if !matches!(error, ExportError::Locked { .. }) {
                let _ = std::fs::remove_file(created); // `added` says what failed first
            }
        }
        added
    }

    /// Makes an export of an open file, or of the image that the file has already. Otherwise calls `prepare`, and
    /// makes the image.
    fn add(
        &self,
        spec: &ImageSpec,
        file: &File,
        prepare: impl FnOnce() -> Result<(), ExportError>,
    ) -> Result<Export, ExportError> {
        let (name, fail) = (&spec.name, ExportError::at(&spec.path));
        let image = self.images.get(identity(&file.metadata().map_err(fail)?), || {
            prepare()?;
            let backing = Backing::open(file).map_err(fail)?;
            info!(export = name, path = %spec.path.display(), "opened");
            self.blocks.attach(name.clone(), backing).map_err(ExportError::Cache)
        })?;
        let too_many = || ExportError::TooMany { name: name.clone(), most: FOLDER };
        Ok(Export::new(self.describe(spec, file)?, image.ok_or_else(too_many)?, spec))
    }

    fn lock(
        &self,
        path: &Path,
        file: &File,
        read_only: bool,
        patience: Duration,
    ) -> Result<(), ExportError> {
        if self.args.no_lock {
            return Ok(());
        }
        lock(file, read_only, patience).map_err(|error| match error {
            LockError::Locked => ExportError::Locked { path: path.to_owned() },
            LockError::Os(error) => ExportError::at(path)(error),
        })
    }

    /// Describes an export of a file.
    fn describe(&self, spec: &ImageSpec, file: &File) -> Result<ExportInfo, ExportError> {
        let ImageSpec { ref name, ref path, offset, .. } = *spec;
        let fail = ExportError::at(path);
        let len = length(file).map_err(fail)?;
        let size = spec.size.or_else(|| len.checked_sub(offset));
        let is_there = |size: &u64| offset.checked_add(*size).is_some_and(|end| end <= len);
        let Some(mut size) = size.filter(is_there) else {
            let size = spec.size.unwrap_or(0);
            return Err(ExportError::Beyond { path: path.clone(), offset, size, len });
        };
        let is_device = file.metadata().map_err(fail)?.file_type().is_block_device();
        let mut min_block = 1;
        if is_device {
            min_block = rustix::fs::ioctl_blksszget(file).map_err(|e| fail(e.into()))?;
        }
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
            return Err(ExportError::Misaligned { path: path.clone(), offset, unit: min_block });
        }
        // A block device may write zeros one by one where a file system changes its map.
        let zeroes = if is_device { Flags::NONE } else { Flags::SEND_FAST_ZERO };
        let description = path.file_name().map(|name| name.to_string_lossy().into_owned());
        Ok(ExportInfo {
            name: name.clone(),
            description: description.unwrap_or_default(),
            size,
            flags: flags(self.args.read_only || spec.read_only, zeroes),
            min_block,
            preferred_block: min_block.max(4096),
            max_block: MAX_PAYLOAD,
        })
    }

    /// Finds an export of the command line. Without a name, the first.
    fn find_fixed(&self, name: &str) -> Option<Export> {
        let found = self.fixed.iter().find(|export| name.is_empty() || export.info.name == name);
        found.cloned().map(Export::current)
    }

    /// Opens a file of the folder.
    fn in_folder(&self, name: &str) -> Option<(ImageSpec, File)> {
        let folder = self.folder.as_ref()?;
        match folder.file(name, self.args.read_only, self.args.direct) {
            Ok(file) => {
                let (name, path) = (name.to_owned(), folder.path(name));
                Some((ImageSpec { name, path, ..ImageSpec::default() }, file))
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => None,
            Err(error) => {
                warn!(name, %error, "cannot open a file of the folder");
                None
            }
        }
    }

    /// The names of the exports of the command line.
    pub(crate) fn names(&self) -> impl Iterator<Item = &str> {
        self.fixed.iter().map(|export| export.info.name.as_str())
    }

    /// All images, each once. Those of files are in `images`, also those of the command line.
    fn images(&self) -> Vec<Arc<Image>> {
        let fixed = self.fixed.iter().map(|export| Arc::clone(&export.image));
        let mut images: Vec<_> = fixed.chain(self.images.all()).collect();
        images.sort_by_key(Arc::as_ptr);
        images.dedup_by(|one, other| Arc::ptr_eq(one, other));
        images
    }

    /// Has images grow with their files, by whole blocks. Clients that connect from now on see the
    /// new sizes.
    pub(crate) fn grow(&self) {
        self.images.grow();
    }

    /// Has images of the folder released that were idle for as long as `--idle` says.
    pub(crate) fn release_idle(&self, now: Instant) {
        if self.args.idle > 0 {
            self.images.release_idle(now, Duration::from_secs(self.args.idle));
        }
    }

    /// Returns how many bytes the replies to so many bytes of options may take while their buffer
    /// grows.
    pub(crate) fn handshake_room(&self, input: usize) -> usize {
        let fixed = self.fixed.iter().map(|export| &export.info);
        let fixed: usize = fixed.map(|info| info.name.len() + info.description.len() + 64).sum();
        let list = fixed + if self.folder.is_some() { MOST_NAMES * 512 } else { 0 };
        let replies = (input / OPTION_HEADER + 1).saturating_mul(list).min(MAX_REPLIES) + list;
        3 * replies // a buffer that grows has twice its bytes, beside the old one
    }

    /// Makes everything written so far durable; an error if that ever failed.
    pub(crate) fn sync(&self) -> io::Result<()> {
        // A release that runs meanwhile has synced its image before it takes the image away.
        let all = self.images().into_iter().map(|image| image.sync_now());
        all.fold(Ok(()), io::Result::and) // of all, whatever becomes of one
    }

    /// Whether there is a folder, whose images may be released.
    pub(crate) fn has_folder(&self) -> bool {
        self.folder.is_some()
    }

    /// Describes the export of that name. Opens nothing for good: a client that only looks leaves a
    /// file of the folder to others.
    pub(crate) fn find_export(&self, name: &str) -> Option<ExportInfo> {
        if let Some(export) = self.find_fixed(name) {
            return Some(export.info);
        }
        let (spec, file) = self.in_folder(name)?;
        let open = self.images.find(&identity(&file.metadata().ok()?));
        let info = self.describe(&spec, &file);
        let info = info
            .inspect_err(|error| warn!(name, %error, "cannot look at a file of the folder"))
            .ok()?;
        Some(match open {
            Some(image) => Export::new(info, image, &spec).info,
            None => info,
        })
    }

    /// Opens the export of that name.
    pub(crate) fn open_export(&self, name: &str) -> Option<Export> {
        if let Some(export) = self.find_fixed(name) {
            return Some(export);
        }
        let (spec, file) = self.in_folder(name)?;
        // A worker asks, which has others to serve: no patience.
        let prepare = || self.lock(&spec.path, &file, self.args.read_only, Duration::ZERO);
        let export = self.add(&spec, &file, prepare);
        export.inspect_err(|error| warn!(%error, "an export is not served")).ok()
    }
}

/// The exports as a handshake sees them. Keeps the one that the client opened last.
pub(crate) struct Opening<'t> {
    table: &'t ExportTable,
    pub(crate) opened: RefCell<Option<Export>>,
}

impl<'t> Opening<'t> {
    pub(crate) fn new(table: &'t ExportTable) -> Self {
        Self { table, opened: RefCell::default() }
    }
}

impl Exports for Opening<'_> {
    fn find(&self, name: &str) -> Option<Cow<'_, ExportInfo>> {
        self.table.find_export(name).map(Cow::Owned)
    }

    fn open(&self, name: &str) -> Option<Cow<'_, ExportInfo>> {
        let export = self.table.open_export(name)?;
        let info = export.info.clone();
        self.opened.replace(Some(export));
        Some(Cow::Owned(info))
    }

    fn list(&self) -> Vec<ListedExport> {
        let table = self.table;
        let mut listed: Vec<_> = table.fixed.iter().map(|export| export.info.listed()).collect();
        for name in table.folder.iter().flat_map(Folder::names) {
            if !table.names().any(|fixed| fixed == name) {
                listed.push(ListedExport { name, description: String::new() });
            }
        }
        listed
    }
}

/// What an export offers, and `more` if it can be changed.
fn flags(read_only: bool, more: Flags) -> Flags {
    let common = Flags::HAS_FLAGS | Flags::SEND_FLUSH | Flags::SEND_FUA | Flags::SEND_CACHE;
    let common = common | Flags::SEND_DF | Flags::CAN_MULTI_CONN;
    match read_only {
        true => common | Flags::READ_ONLY,
        false => common | Flags::SEND_TRIM | Flags::SEND_WRITE_ZEROES | more,
    }
}

/// Opens an image. If this call creates its file, returns that file's path too.
fn open(path: &Path, args: &Args, read_only: bool) -> Result<(File, Option<PathBuf>), ExportError> {
    let fail = ExportError::at(path);
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
