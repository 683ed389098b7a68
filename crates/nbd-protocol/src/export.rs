//! Exports: the description of an image that a server sends to clients.

use std::borrow::Cow;

use crate::style::HeaderStyle;
use crate::wire::{MAX_PAYLOAD, TransmissionFlags};

/// The description of an export that a server sends to a client.
///
/// # Examples
///
/// ```
/// use nbd_protocol::{ExportInfo, TransmissionFlags};
///
/// let mut export = ExportInfo::new("disk", 1 << 30);
/// export.flags |= TransmissionFlags::SEND_FLUSH | TransmissionFlags::SEND_TRIM;
/// export.min_block = 512;
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ExportInfo {
    /// Canonical name, at most [`MAX_STRING`](crate::MAX_STRING) bytes, no NUL.
    pub name: String,
    /// One line for people; may be empty.
    pub description: String,
    /// Size in bytes.
    pub size: u64,
    /// The optional commands and properties of the export. [`ExportInfo::advertised`] adds `HAS_FLAGS`,
    /// and omits flags whose precondition is missing.
    pub flags: TransmissionFlags,
    /// Smallest unit, in bytes, of offsets and lengths: a power of two up to 65,536. 0 counts as 1.
    pub min_block: u32,
    /// Size, in bytes, of efficient requests.
    pub preferred_block: u32,
    /// Longest READ or WRITE, in bytes.
    pub max_block: u32,
}

impl ExportInfo {
    /// A writable export without any optional command, unit 1 byte, preferred 4096.
    #[must_use]
    pub fn new(name: impl Into<String>, size: u64) -> Self {
        Self {
            name: name.into(),
            description: String::new(),
            size,
            flags: TransmissionFlags::HAS_FLAGS,
            min_block: 1,
            preferred_block: 4096,
            max_block: MAX_PAYLOAD,
        }
    }

    /// Returns the name and the description, as a list of exports shows them.
    #[must_use]
    pub fn listed(&self) -> ListedExport {
        ListedExport { name: self.name.clone(), description: self.description.clone() }
    }

    /// The flags to send to a client that negotiated `style`: `SEND_DF` needs chunks,
    /// `SEND_FAST_ZERO` needs `SEND_WRITE_ZEROES`.
    #[must_use]
    pub fn advertised(&self, style: HeaderStyle) -> TransmissionFlags {
        let mut flags = self.flags | TransmissionFlags::HAS_FLAGS;
        if !style.has_chunks() {
            flags = flags - TransmissionFlags::SEND_DF;
        }
        if !flags.contains(TransmissionFlags::SEND_WRITE_ZEROES) {
            flags = flags - TransmissionFlags::SEND_FAST_ZERO;
        }
        flags
    }
}

/// One entry of a list.
///
/// # Examples
///
/// ```
/// use nbd_protocol::ExportInfo;
///
/// assert_eq!(ExportInfo::new("disk", 512).listed().name, "disk");
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ListedExport {
    /// The name to ask for.
    pub name: String,
    /// A description for people; may be empty.
    pub description: String,
}

/// The exports a handshake offers.
///
/// # Examples
///
/// A slice of [`ExportInfo`] offers each by its name. A server with a table of its own:
///
/// ```
/// use std::borrow::Cow;
/// use std::collections::BTreeMap;
///
/// use nbd_protocol::{ExportInfo, Exports, ListedExport};
///
/// struct Table(BTreeMap<String, u64>); // names and sizes
///
/// impl Exports for Table {
///     fn find(&self, name: &str) -> Result<Cow<'_, ExportInfo>, &'static str> {
///         let (name, size) = self.0.get_key_value(name).ok_or("no such export")?;
///         Ok(Cow::Owned(ExportInfo::new(name, *size)))
///     }
///
///     fn list(&self) -> Vec<ListedExport> {
///         let listed = |name: &String| ListedExport { name: name.clone(), description: String::new() };
///         self.0.keys().map(listed).collect()
///     }
/// }
///
/// let table = Table(BTreeMap::from([("disk".to_string(), 1 << 20)]));
/// assert_eq!(table.find("disk").map(|export| export.size), Ok(1 << 20));
/// assert!(table.find("other").is_err());
/// ```
pub trait Exports {
    /// Returns the export called `name`, for its description. The empty name is that of the default export.
    ///
    /// # Errors
    ///
    /// The message for the client if there is no such export, or it cannot be served.
    fn find(&self, name: &str) -> Result<Cow<'_, ExportInfo>, &'static str>;

    /// Returns the export called `name` for a client that is about to use it.
    ///
    /// # Errors
    ///
    /// As those of [`find`](Self::find). May fail where that does not.
    fn open(&self, name: &str) -> Result<Cow<'_, ExportInfo>, &'static str> {
        self.find(name)
    }

    /// Returns all canonical names and descriptions, in the order in which LIST shows them.
    fn list(&self) -> Vec<ListedExport>;
}

/// Exports in order; the first is also the default.
impl Exports for [ExportInfo] {
    fn find(&self, name: &str) -> Result<Cow<'_, ExportInfo>, &'static str> {
        let found =
            if name.is_empty() { self.first() } else { self.iter().find(|e| e.name == name) };
        found.map(Cow::Borrowed).ok_or("no such export")
    }

    fn list(&self) -> Vec<ListedExport> {
        self.iter().map(ExportInfo::listed).collect()
    }
}
