//! The table of exports. Each image is opened once, locked, and described to clients.
//!
//! An export of the command line lives as long as the server. An export of a folder is made for
//! each connection that opens it; exports of one file share its image
//! ([`open_images`](crate::open_images)).

#[cfg(test)]
mod tests;

use std::borrow::Cow;
use std::cell::RefCell;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use nbd_protocol::{
    Command, ExportInfo, Exports, ListedExport, MAX_PAYLOAD, MAX_REPLIES, MAX_STRING,
    OPTION_HEADER, Request, TransmissionFlags as Flags,
};
use thiserror::Error;
use tracing::{info, warn};

use crate::args::Args;
use crate::blocks::{Backing, Blocks, Image};
#[cfg(feature = "objects")]
use crate::blocks::{NUMBERED, Source};
use crate::files::{self, Folder, ImageFile, MOST_NAMES, Problem};
use crate::image_spec::ImageSpec;
use crate::memory::LARGEST;
use crate::open_images::OpenImages;
use crate::tls::Acceptor;
#[cfg(feature = "objects")]
use crate::volume::{self, Volume, VolumeError, VolumeUrl};
use crate::waits;

/// Most open images of a folder. Each needs some descriptors, and a queue in each worker
/// that serves it.
const FOLDER: usize = if cfg!(test) { 3 } else { 1024 };

/// Why the exports cannot be served.
#[derive(Debug, Error)]
pub(crate) enum ExportError {
    #[error("image '{path}' {problem}")]
    Image { path: PathBuf, problem: Problem },
    #[error("cannot open the folder '{path}' of --export-dir: {error}")]
    Folder { path: PathBuf, error: io::Error },
    #[error("TLS: {0}")]
    Tls(String),
    #[error("cannot keep blocks in memory: {0}")]
    Cache(io::Error),
    #[cfg(feature = "objects")]
    #[error(transparent)]
    Volume(#[from] VolumeError),
}

impl ExportError {
    /// Returns a function that makes the error for this image.
    fn of(path: &Path) -> impl Fn(Problem) -> Self {
        move |problem| Self::Image { path: path.to_owned(), problem }
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
        let fail = ExportError::of(path);
        if name.is_empty() || name.len() > MAX_STRING || name.chars().any(char::is_control) {
            return Err(fail(Problem::Name(name.clone())));
        }
        if self.names().any(|other| other == name) {
            return Err(fail(Problem::Duplicate(name.clone())));
        }
        #[cfg(feature = "objects")]
        if let Some(url) = &spec.volume {
            return self.add_volume(spec, url);
        }
        // A file that another export may write is opened once, for writing.
        let writes = |other: &ImageSpec| !other.read_only && is_same_file(&other.path, path);
        let read_only = self.args.read_only || !self.args.images.iter().any(writes);
        let created = self.create(path, read_only).map_err(&fail)?;
        let added = self.add_file(spec, read_only);
        if let (Some(created), Err(problem)) = (created, &added) {
            // `Locked` means that another program has begun to use the new file.
            if !matches!(problem, Problem::Locked) {
                let _ = std::fs::remove_file(created); // `added` says what failed first
            }
        }
        added.map_err(fail)
    }

    /// Creates a missing image. Returns the path of the file if this call has created it.
    fn create(&self, path: &Path, read_only: bool) -> Result<Option<PathBuf>, Problem> {
        let is_missing =
            path.metadata().is_err_and(|error| error.kind() == io::ErrorKind::NotFound);
        match (is_missing, self.args.size) {
            (false, _) => Ok(None),
            (true, _) if read_only => Err(Problem::MissingToRead),
            (true, None) => Err(Problem::Missing),
            (true, Some(_)) => Ok(files::create(path)?),
        }
    }

    /// Adds an image of the command line, and grows it to its size.
    fn add_file(&self, spec: &ImageSpec, read_only: bool) -> Result<Export, Problem> {
        let file = ImageFile::open(&spec.path, read_only, self.args.direct)?;
        if file.read_only && !read_only {
            return Err(Problem::ReadOnlyDevice);
        }
        let grow = || self.args.size.map_or(Ok(()), |size| file.grow(&spec.path, size));
        self.add(spec, &file, waits::LOCK, grow)
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

    /// Makes an export of an open file. Uses the image that the file already has, otherwise locks the file,
    /// calls `prepare` and makes one.
    fn add(
        &self,
        spec: &ImageSpec,
        file: &ImageFile,
        patience: Duration,
        prepare: impl FnOnce() -> io::Result<()>,
    ) -> Result<Export, Problem> {
        let name = &spec.name;
        let image = self.images.get(file.identity, || {
            if !self.args.no_lock {
                file.lock(patience)?;
            }
            prepare()?;
            file.geometry(self.args.direct)?; // a file that is refused does not stay open
            let backing = Backing::open(&file.file)?;
            info!(export = name, path = %spec.path.display(), "opened");
            self.blocks.attach(name.clone(), backing).map_err(Problem::Cache)
        })?;
        let info = self.describe(spec, file)?;
        Ok(Export::new(info, image.ok_or(Problem::TooMany(FOLDER))?))
    }

    /// Describes an export of a file.
    fn describe(&self, spec: &ImageSpec, file: &ImageFile) -> Result<ExportInfo, Problem> {
        let ImageSpec { name, path, .. } = spec;
        let (len, min_block) = file.geometry(self.args.direct)?;
        let size = len - len % u64::from(min_block);
        if self.args.direct && size != len {
            info!(export = name, from = len, to = size, "size rounded down for --direct");
        }
        // A block device may write zeros block by block; a file system only changes its map.
        let zeroes = if file.is_device { Flags::NONE } else { Flags::SEND_FAST_ZERO };
        let description = path.file_name().map(|name| name.to_string_lossy().into_owned());
        Ok(ExportInfo {
            name: name.clone(),
            description: description.unwrap_or_default(),
            size,
            flags: flags(spec.read_only || file.read_only, zeroes),
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
    fn in_folder(&self, name: &str) -> Result<Option<(ImageSpec, ImageFile)>, Problem> {
        let Some(folder) = &self.folder else { return Ok(None) };
        let file = folder.file(name, self.args.read_only, self.args.direct)?;
        let (name, path) = (name.to_owned(), folder.path(name));
        Ok(file.map(|file| (ImageSpec { name, path, ..ImageSpec::default() }, file)))
    }

    /// Returns the names of the exports of the command line.
    pub(crate) fn names(&self) -> impl Iterator<Item = &str> {
        self.fixed.iter().map(|export| export.info.name.as_str())
    }

    /// Returns all images, some of them twice: `images` has those of all files, including files of the
    /// command line.
    fn images(&self) -> Vec<Arc<Image>> {
        let fixed = self.fixed.iter().map(|export| Arc::clone(&export.image));
        fixed.chain(self.images.all()).collect()
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
    pub(crate) fn find_export(&self, name: &str) -> Result<Option<ExportInfo>, Problem> {
        if let Some(export) = self.find_fixed(name) {
            return Ok(Some(export.info));
        }
        let Some((spec, file)) = self.in_folder(name)? else { return Ok(None) };
        let info = self.describe(&spec, &file)?;
        Ok(Some(match self.images.find(&file.identity) {
            Some(image) => Export::new(info, image).info,
            None => info,
        }))
    }

    /// Opens an export. `None` if there is no such export.
    pub(crate) fn open_export(&self, name: &str) -> Result<Option<Export>, Problem> {
        if let Some(export) = self.find_fixed(name) {
            return Ok(Some(export));
        }
        let Some((spec, file)) = self.in_folder(name)? else { return Ok(None) };
        // The caller is a worker with other clients to serve, so this does not wait for a lock.
        self.add(&spec, &file, Duration::ZERO, || Ok(())).map(Some)
    }
}

/// The exports as a handshake uses them. Keeps the export that the client opened last.
pub(crate) struct Opening<'t> {
    table: &'t ExportTable,
    pub(crate) opened: RefCell<Option<Export>>,
}

impl<'t> Opening<'t> {
    pub(crate) fn new(table: &'t ExportTable) -> Self {
        Self { table, opened: RefCell::default() }
    }
}

/// Returns an export that was found, or else the message for the client. If the export cannot be served, the log
/// has the reason. The client is told no path and no error of the system.
fn or_refusal<T>(name: &str, found: Result<Option<T>, Problem>) -> Result<T, &'static str> {
    let found = found.map_err(|problem| {
        warn!(name, %problem, "an export is not served");
        match problem {
            Problem::TooLarge(_) => "the export is too large for the server",
            Problem::Locked => "the export is in use by another program",
            Problem::TooMany(_) => "the server has too many exports open",
            _ => "the export cannot be opened: the log of the server has the reason",
        }
    });
    found?.ok_or("no such export")
}

impl Exports for Opening<'_> {
    fn find(&self, name: &str) -> Result<Cow<'_, ExportInfo>, &'static str> {
        or_refusal(name, self.table.find_export(name)).map(Cow::Owned)
    }

    fn open(&self, name: &str) -> Result<Cow<'_, ExportInfo>, &'static str> {
        let export = or_refusal(name, self.table.open_export(name))?;
        let info = export.info.clone();
        self.opened.replace(Some(export));
        Ok(Cow::Owned(info))
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

/// Returns whether two paths name the same file. Files that do not exist yet are compared by their
/// paths.
fn is_same_file(a: &Path, b: &Path) -> bool {
    match (a.metadata(), b.metadata()) {
        (Ok(a), Ok(b)) => files::identity(&a) == files::identity(&b),
        _ => a == b,
    }
}
