//! The table of exports. Each image is opened once, locked, and described to clients.
//!
//! An export of the command line lives as long as the server. An export of a folder is made for
//! each connection that opens it; exports of one file share its image
//! ([`open_images`](crate::open_images)).

#[cfg(test)]
mod tests;

use std::borrow::Cow;
use std::cell::RefCell;
use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use bufcache::FileDevice;
use nbd_protocol::{
    Command, ExportInfo, Exports, ListedExport, MAX_PAYLOAD, MAX_REPLIES, MAX_STRING,
    OPTION_HEADER, Request, TransmissionFlags as Flags,
};
use thiserror::Error;
use tracing::{info, warn};

use crate::args::Args;
#[cfg(feature = "objects")]
use crate::blocks::Source;
use crate::blocks::{Backing, Blocks, Image, NUMBERED};
use crate::files::{Folder, LockError, MOST_NAMES, lock};
use crate::image_spec::ImageSpec;
#[cfg(feature = "objects")]
use crate::image_spec::VolumeUrl;
use crate::memory::LARGEST;
use crate::open_images::{OpenImages, identity, length};
use crate::tls::Acceptor;
#[cfg(feature = "objects")]
use crate::volume::{self, Volume, VolumeError};
use crate::waits;

/// Most open images of a folder. Each needs some descriptors, and a queue in each worker
/// that serves it.
const FOLDER: usize = if cfg!(test) { 3 } else { 1024 };

/// Why an image cannot be served.
#[derive(Debug, Error)]
pub(crate) enum ExportError {
    #[error("cannot open image '{path}': {error}")]
    Open { path: PathBuf, error: io::Error },
    #[error("cannot open the folder '{path}' of --export-dir: {error}")]
    Folder { path: PathBuf, error: io::Error },
    #[error("image '{path}' does not exist; --size BYTES creates it")]
    Missing { path: PathBuf },
    #[error("image '{path}' does not exist, and a server that only reads cannot create it")]
    MissingToRead { path: PathBuf },
    #[error("image '{path}' is on a file system without O_DIRECT, which --direct needs")]
    Direct { path: PathBuf },
    #[error("image '{path}' is neither a regular file nor a block device")]
    Kind { path: PathBuf },
    #[error(
        "block device '{path}' is read-only; --read-only, or ',readonly' behind its path, serves it"
    )]
    ReadOnlyDevice { path: PathBuf },
    #[error("image '{path}' is in use by another program; --no-lock serves it all the same")]
    Locked { path: PathBuf },
    #[error("'{name}' is not an export name: 1 to {MAX_STRING} bytes, no control characters")]
    Name { name: String },
    #[error("TLS: {0}")]
    Tls(String),
    #[error("cannot keep blocks in memory: {0}")]
    Cache(io::Error),
    #[error("image '{path}' has {len} bytes, and the cache can number {NUMBERED}")]
    TooLarge { path: PathBuf, len: u64 },
    #[error("two images are called '{name}'; give one another name with NAME=PATH")]
    Duplicate { name: String },
    #[error("'{name}' is one image too many: {most} are open")]
    TooMany { name: String, most: usize },
    #[cfg(feature = "objects")]
    #[error(transparent)]
    Volume(#[from] VolumeError),
}

impl ExportError {
    /// Returns a function that makes the error for this image of a failed system call.
    fn at(path: &Path) -> impl Fn(io::Error) -> Self + Copy {
        move |error| Self::Open { path: path.to_owned(), error }
    }
}

/// An export, whose name is in `info`.
#[derive(Clone, Debug)]
pub(crate) struct Export {
    pub(crate) info: ExportInfo,
    pub(crate) image: Arc<Image>,
}

impl Export {
    /// Makes an export. Its size is that of the image, which is the length that the file had when the
    /// image was opened, or has grown to.
    fn new(mut info: ExportInfo, image: Arc<Image>) -> Self {
        if image.is_read_only {
            info.flags = flags(true, Flags::NONE); // another export of the file has opened it
        }
        Self { info, image }.current()
    }

    /// Returns the export with its present size.
    fn current(mut self) -> Self {
        let len = self.image.len();
        self.info.size = len - len % u64::from(self.info.min_block.max(1));
        self
    }

    /// Returns the size of the buffer that a READ or WRITE needs. `None` if no buffer is that large.
    pub(crate) fn room(&self, request: &Request, command: Command) -> Option<usize> {
        let Request { offset, len, .. } = *request;
        match command {
            Command::Read { .. } => Some(self.image.read_range(offset, len)?.len),
            _ => usize::try_from(len).ok().filter(|&len| len <= LARGEST),
        }
    }
}

/// All exports of the server.
#[derive(Debug)]
pub(crate) struct ExportTable {
    /// The exports of the command line. The first is the default export.
    pub(crate) fixed: Vec<Export>,
    folder: Option<Folder>,
    /// One image per file, even if the file has several names.
    pub(crate) images: OpenImages,
    args: Args,
    pub(crate) blocks: Blocks,
    /// TLS for clients.
    pub(crate) tls: Acceptor,
}

impl ExportTable {
    /// Opens all images of the command line, and the folder.
    pub(crate) fn open(args: &Args) -> Result<Self, ExportError> {
        let open = |path: &PathBuf| {
            Folder::open(path)
                .map_err(|error| ExportError::Folder { path: path.clone(), error })
                .inspect(Folder::warn_of_bad_names)
        };
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
        table.images.limit(FOLDER); // further exports of a server or of an open file need no place
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
        #[cfg(feature = "objects")]
        if let Some(url) = &spec.volume {
            return self.add_volume(spec, url);
        }
        // A file that another export may write is opened once, for writing.
        let writes = |other: &ImageSpec| !other.read_only && is_same_file(&other.path, path);
        let read_only = self.args.read_only || !self.args.images.iter().any(writes);
        let (file, created) = open(path, &self.args, read_only)?;
        let added = self.add(spec, &file, || {
            self.lock(path, &file, read_only, waits::LOCK)?;
            grow(&file, path, &self.args, read_only).map_err(ExportError::at(path))
        });
        if let (Some(created), Err(error)) = (created, &added) {
            // `Locked` means that another program has begun to use the new file.
            if !matches!(error, ExportError::Locked { .. }) {
                let _ = std::fs::remove_file(created); // `added` says what failed first
            }
        }
        added
    }

    /// Opens a volume, or creates it with the size of its address.
    #[cfg(feature = "objects")]
    fn add_volume(&self, spec: &ImageSpec, url: &VolumeUrl) -> Result<Export, ExportError> {
        let read_only = self.args.read_only || spec.read_only;
        let options = volume::OpenOptions { read_only, takeover: self.args.takeover };
        let name = &spec.name;
        let backing = Backing::from(Volume::open(url, options)?);
        info!(export = name, volume = url.address, "opened");
        let info = ExportInfo {
            name: name.clone(),
            description: url.address.clone(),
            size: backing.len,
            flags: flags(backing.device.is_read_only(), Flags::SEND_FAST_ZERO),
            min_block: 1,
            preferred_block: volume::BLOCK as u32,
            max_block: MAX_PAYLOAD,
        };
        const { assert!(VolumeUrl::MOST <= NUMBERED) };
        let image = self.blocks.attach(name.clone(), backing).map_err(ExportError::Cache)?;
        Ok(Export::new(info, image))
    }

    /// Returns the volumes of the command line, by export.
    #[cfg(feature = "objects")]
    pub(crate) fn volumes(&self) -> impl Iterator<Item = (&str, &Volume)> {
        self.fixed.iter().filter_map(|export| match &export.image.source {
            Source::Volume(volume) => Some((&*export.info.name, &**volume)),
            _ => None,
        })
    }

    /// Makes an export of an open file. Uses the image that the file already has, otherwise calls
    /// `prepare` and makes one.
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
        Ok(Export::new(self.describe(spec, file)?, image.ok_or_else(too_many)?))
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
        let ImageSpec { name, path, .. } = spec;
        let fail = ExportError::at(path);
        let mut size = length(file).map_err(fail)?;
        if size > NUMBERED {
            return Err(ExportError::TooLarge { path: path.clone(), len: size });
        }
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
        let read_only = self.args.read_only || spec.read_only;
        let read_only = read_only || FileDevice::is_read_only_device(file).map_err(fail)?;
        // A block device may write zeros block by block; a file system only changes its map.
        let zeroes = if is_device { Flags::NONE } else { Flags::SEND_FAST_ZERO };
        let description = path.file_name().map(|name| name.to_string_lossy().into_owned());
        Ok(ExportInfo {
            name: name.clone(),
            description: description.unwrap_or_default(),
            size,
            flags: flags(read_only, zeroes),
            min_block,
            preferred_block: min_block.max(4096),
            max_block: MAX_PAYLOAD,
        })
    }

    /// Finds an export of the command line. An empty name stands for the first export.
    fn find_fixed(&self, name: &str) -> Option<Export> {
        let found = self.fixed.iter().find(|export| name.is_empty() || export.info.name == name);
        found.cloned().map(Export::current)
    }

    /// Opens a file of the folder. `None` if there is no such file.
    fn in_folder(&self, name: &str) -> Result<Option<(ImageSpec, File)>, ExportError> {
        let Some(folder) = &self.folder else { return Ok(None) };
        let path = folder.path(name);
        match folder.file(name, self.args.read_only, self.args.direct) {
            Ok(file) => {
                let name = name.to_owned();
                Ok(Some((ImageSpec { name, path, ..ImageSpec::default() }, file)))
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) if self.args.direct && error.raw_os_error() == Some(libc::EINVAL) => {
                Err(ExportError::Direct { path })
            }
            Err(error) => Err(ExportError::at(&path)(error)),
        }
    }

    /// Returns the names of the exports of the command line.
    pub(crate) fn names(&self) -> impl Iterator<Item = &str> {
        self.fixed.iter().map(|export| export.info.name.as_str())
    }

    /// Returns each image once. `images` has those of all files, including files of the command
    /// line.
    fn images(&self) -> Vec<Arc<Image>> {
        let fixed = self.fixed.iter().map(|export| Arc::clone(&export.image));
        let mut images: Vec<_> = fixed.chain(self.images.all()).collect();
        images.sort_by_key(Arc::as_ptr);
        images.dedup_by(|one, other| Arc::ptr_eq(one, other));
        images
    }

    /// Grows images with their files, by whole blocks. Clients that connect later see the new
    /// sizes.
    pub(crate) fn grow(&self) {
        self.images.grow();
    }

    /// Releases images of the folder that were idle for [`waits::IDLE`].
    pub(crate) fn release_idle(&self, now: Instant) {
        self.images.release_idle(now, waits::IDLE);
    }

    /// Returns an upper bound of the memory for the replies to `input` bytes of options.
    pub(crate) fn handshake_room(&self, input: usize) -> usize {
        let fixed = self.fixed.iter().map(|export| &export.info);
        let fixed: usize = fixed.map(|info| info.name.len() + info.description.len() + 64).sum();
        let list = fixed + if self.folder.is_some() { MOST_NAMES * 512 } else { 0 };
        let replies = (input / OPTION_HEADER + 1).saturating_mul(list).min(MAX_REPLIES) + list;
        3 * replies // a growing buffer is copied into one of twice its size
    }

    /// Makes everything written so far durable. Fails if a sync of an image has ever failed.
    pub(crate) fn sync(&self) -> io::Result<()> {
        // A concurrent release has synced its image before it removes the image from the table.
        let all = self.images().into_iter().map(|image| image.sync_now());
        all.fold(Ok(()), io::Result::and) // every image, even after an error
    }

    /// Returns whether there is a folder, whose images may be released.
    pub(crate) fn has_folder(&self) -> bool {
        self.folder.is_some()
    }

    /// Describes an export. Keeps nothing open, so that a client that only asks uses no place for
    /// an open image. `None` if there is no such export.
    pub(crate) fn find_export(&self, name: &str) -> Result<Option<ExportInfo>, ExportError> {
        if let Some(export) = self.find_fixed(name) {
            return Ok(Some(export.info));
        }
        let Some((spec, file)) = self.in_folder(name)? else { return Ok(None) };
        let meta = file.metadata().map_err(ExportError::at(&spec.path))?;
        let open = self.images.find(&identity(&meta));
        let info = self.describe(&spec, &file)?;
        Ok(Some(match open {
            Some(image) => Export::new(info, image).info,
            None => info,
        }))
    }

    /// Opens an export. `None` if there is no such export.
    pub(crate) fn open_export(&self, name: &str) -> Result<Option<Export>, ExportError> {
        if let Some(export) = self.find_fixed(name) {
            return Ok(Some(export));
        }
        let Some((spec, file)) = self.in_folder(name)? else { return Ok(None) };
        let prepare = || {
            let fail = ExportError::at(&spec.path);
            let reads =
                self.args.read_only || FileDevice::is_read_only_device(&file).map_err(fail)?;
            // The caller is a worker with other clients to serve, so this does not wait for a lock.
            self.lock(&spec.path, &file, reads, Duration::ZERO)
        };
        self.add(&spec, &file, prepare).map(Some)
    }
}

/// The exports as a handshake uses them. Keeps the export that the client opened last.
pub(crate) struct Opening<'t> {
    table: &'t ExportTable,
    pub(crate) opened: RefCell<Option<Export>>,
    /// Why the last export was not found, if it is there and cannot be served.
    refusal: RefCell<Option<String>>,
}

impl<'t> Opening<'t> {
    pub(crate) fn new(table: &'t ExportTable) -> Self {
        Self { table, opened: RefCell::default(), refusal: RefCell::default() }
    }
}

impl Opening<'_> {
    /// Keeps why an export cannot be served, for the client and for the log. The client is told no
    /// path and no error of the system.
    fn note<T>(&self, name: &str, found: Result<Option<T>, ExportError>) -> Option<T> {
        found.unwrap_or_else(|error| {
            warn!(name, %error, "an export is not served");
            let refusal = match error {
                ExportError::TooLarge { .. } => "the export is too large for the server",
                ExportError::Locked { .. } => "the export is in use by another program",
                ExportError::TooMany { .. } => "the server has too many exports open",
                _ => "the export cannot be opened: the log of the server has the reason",
            };
            self.refusal.replace(Some(refusal.into()));
            None
        })
    }
}

impl Exports for Opening<'_> {
    fn find(&self, name: &str) -> Option<Cow<'_, ExportInfo>> {
        self.refusal.replace(None);
        self.note(name, self.table.find_export(name)).map(Cow::Owned)
    }

    fn open(&self, name: &str) -> Option<Cow<'_, ExportInfo>> {
        self.refusal.replace(None);
        let export = self.note(name, self.table.open_export(name))?;
        let info = export.info.clone();
        self.opened.replace(Some(export));
        Some(Cow::Owned(info))
    }

    fn refusal(&self) -> Cow<'static, str> {
        self.refusal.take().map_or("no such export".into(), Cow::Owned)
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

/// Returns the flags of an export, with `more` if it is writable.
fn flags(read_only: bool, more: Flags) -> Flags {
    let common = Flags::HAS_FLAGS | Flags::SEND_FLUSH | Flags::SEND_FUA;
    let common = common | Flags::SEND_DF | Flags::CAN_MULTI_CONN;
    match read_only {
        true => common | Flags::READ_ONLY,
        false => common | Flags::SEND_TRIM | Flags::SEND_WRITE_ZEROES | more,
    }
}

/// Opens the file of an image. Also returns its path if this call has created it.
fn open(path: &Path, args: &Args, read_only: bool) -> Result<(File, Option<PathBuf>), ExportError> {
    let fail = ExportError::at(path);
    // Opening a FIFO or a device of another kind could block or have side effects, so check the
    // kind first.
    let missing = match path.metadata() {
        Ok(meta) if !meta.is_file() && !meta.file_type().is_block_device() => {
            return Err(ExportError::Kind { path: path.to_owned() });
        }
        Err(error) => error.kind() == io::ErrorKind::NotFound,
        Ok(_) => false,
    };
    let created = match (missing, args.size.is_some() && !read_only) {
        (true, false) if read_only => {
            return Err(ExportError::MissingToRead { path: path.to_owned() });
        }
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
        Ok(file) if !read_only && FileDevice::is_read_only_device(&file).map_err(fail)? => {
            Err(ExportError::ReadOnlyDevice { path: path.to_owned() })
        }
        Ok(file) => Ok((file, created)),
        Err(error) => {
            if let Some(created) = created {
                let _ = std::fs::remove_file(created); // `error` says what failed first
            }
            match error.raw_os_error() {
                Some(libc::EINVAL) if args.direct => {
                    Err(ExportError::Direct { path: path.to_owned() })
                }
                _ => Err(fail(error)),
            }
        }
    }
}

/// Creates an empty file, or the target of `path` if that is a dangling symbolic link. Returns the
/// path of the file; `None` if another program has created it in the meantime.
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

/// Grows a regular file to the size of `--size`, and makes its length and its name durable: a FLUSH
/// syncs neither if the image was just created. The file must be locked.
fn grow(file: &File, path: &Path, args: &Args, read_only: bool) -> io::Result<()> {
    let meta = file.metadata()?;
    let Some(size) = args.size.filter(|_| !read_only && meta.is_file()) else { return Ok(()) };
    if meta.len() < size {
        file.set_len(size)?;
    }
    file.sync_all()?;
    // Even if the file was there: a server that created it may have been killed before this step.
    sync_folder_of(file, path)
}

/// Makes the name of a file durable.
fn sync_folder_of(file: &File, path: &Path) -> io::Result<()> {
    let path = path.canonicalize()?; // the name is in the folder to which symbolic links lead
    match File::open(path.parent().unwrap_or(Path::new("/"))).and_then(|folder| folder.sync_all()) {
        // The folder cannot be read, or its file system does not sync folders: sync all of it.
        Err(error) if matches!(error.raw_os_error(), Some(libc::EACCES | libc::EINVAL)) => {
            Ok(rustix::fs::syncfs(file)?)
        }
        synced => synced,
    }
}

/// Returns whether two paths name the same file. Files that do not exist yet are compared by their
/// paths.
fn is_same_file(a: &Path, b: &Path) -> bool {
    match (a.metadata(), b.metadata()) {
        (Ok(a), Ok(b)) => identity(&a) == identity(&b),
        _ => a == b,
    }
}
