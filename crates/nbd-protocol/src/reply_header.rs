//! The headers a server sends before (or instead of) data.

use std::fmt;

use crate::error::NbdError;
use crate::meta::Extent;
use crate::request::Request;
use crate::style::HeaderStyle;
use crate::wire::{EXTENDED_REPLY_MAGIC, SIMPLE_REPLY_MAGIC, STRUCTURED_REPLY_MAGIC, chunk};

/// The longest: an extended chunk header with the offset of the data.
const MAX_LEN: usize = 32 + 8;

/// The header of one reply, at most 40 bytes, stored inline.
///
/// # Examples
///
/// ```
/// use nbd_protocol::{CommandFlags, HeaderStyle, NbdError, ReplyHeader, Request, wire::cmd};
///
/// let flags = CommandFlags::NONE;
/// let read = Request { flags, command: cmd::READ, cookie: 7, offset: 4096, len: 512 };
/// // Followed by the data:
/// assert_eq!(ReplyHeader::read_data(&read, HeaderStyle::Simple).as_slice().len(), 16);
/// assert_eq!(ReplyHeader::read_data(&read, HeaderStyle::Structured).as_slice().len(), 28);
/// // In place of the data:
/// let failed = ReplyHeader::error(&read, HeaderStyle::Extended, NbdError::Io);
/// assert_eq!(failed.as_slice().len(), 38);
/// ```
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct ReplyHeader {
    bytes: [u8; MAX_LEN],
    len: u8,
}

impl ReplyHeader {
    /// A simple reply: success or failure of a request that is not answered in chunks.
    #[must_use]
    pub fn simple(cookie: u64, result: Result<(), NbdError>) -> Self {
        let error = result.err().map_or(0, NbdError::code);
        let mut header = Self { bytes: [0; MAX_LEN], len: 0 };
        header.put(&SIMPLE_REPLY_MAGIC.to_be_bytes());
        header.put(&error.to_be_bytes());
        header.put(&cookie.to_be_bytes());
        header
    }

    /// Makes the header before all the data of a successful READ: a simple reply, or the header of one chunk of
    /// `request.len` bytes, marked as the last.
    ///
    /// A chunk must describe at least one byte, so with a length of 0 this is [`done`](Self::done).
    #[must_use]
    pub fn read_data(request: &Request, style: HeaderStyle) -> Self {
        Self::data_chunk(request, style, request.offset, request.len, true)
    }

    /// Makes the header before `len` bytes of a READ that belong at `offset`. Other chunks may follow unless
    /// `last`. Without chunks there is only one reply, for all of the data.
    ///
    /// The length field of a compact chunk holds `len + 8` in 32 bits; the maximum block size keeps far
    /// below.
    ///
    /// # Panics
    ///
    /// In debug builds, if `len + 8` exceeds 32 bits in a compact chunk.
    #[must_use]
    pub fn data_chunk(
        request: &Request,
        style: HeaderStyle,
        offset: u64,
        len: u64,
        last: bool,
    ) -> Self {
        if !style.has_chunks() || len == 0 {
            return Self::done(request, style);
        }
        let flags = if last { chunk::FLAG_DONE } else { 0 };
        let payload = len.saturating_add(8);
        let mut header = Self::chunk(request, style, flags, chunk::OFFSET_DATA, payload);
        header.put(&offset.to_be_bytes());
        header
    }

    /// Makes the header before the [`Extent`]s of a BLOCK_STATUS: that of one chunk for all `extents` of them,
    /// marked as the last. Each extent is encoded in the form of `style`. The protocol demands at least one.
    ///
    /// # Panics
    ///
    /// In debug builds, if `extents` is 0 or above 268,435,454.
    #[must_use]
    pub fn block_status(request: &Request, style: HeaderStyle, context: u32, extents: u32) -> Self {
        debug_assert!((1..=u32::MAX / 16 - 1).contains(&extents));
        let len = u64::from(extents) * Extent::size(style) as u64;
        let done = chunk::FLAG_DONE;
        if style.is_extended() {
            let kind = chunk::BLOCK_STATUS_EXT;
            let mut header = Self::chunk(request, style, done, kind, len + 8);
            header.put(&context.to_be_bytes());
            header.put(&extents.to_be_bytes());
            header
        } else {
            let mut header = Self::chunk(request, style, done, chunk::BLOCK_STATUS, len + 4);
            header.put(&context.to_be_bytes());
            header
        }
    }

    /// The failure of a request: an error chunk, marked as the last, where the request
    /// [wants chunks](Request::wants_chunks), else a simple reply.
    #[must_use]
    pub fn error(request: &Request, style: HeaderStyle, error: NbdError) -> Self {
        if !request.wants_chunks(style) {
            return Self::simple(request.cookie, Err(error));
        }
        let mut header = Self::chunk(request, style, chunk::FLAG_DONE, chunk::ERROR, 6);
        header.put(&error.code().to_be_bytes());
        header.put(&0_u16.to_be_bytes()); // length of the message: none
        header
    }

    /// Success without data: a last chunk without content where the request
    /// [wants chunks](Request::wants_chunks), else a simple reply.
    #[must_use]
    pub fn done(request: &Request, style: HeaderStyle) -> Self {
        if !request.wants_chunks(style) {
            return Self::simple(request.cookie, Ok(()));
        }
        Self::chunk(request, style, chunk::FLAG_DONE, chunk::NONE, 0)
    }

    /// The bytes to send.
    #[must_use]
    pub fn as_slice(&self) -> &[u8] {
        &self.bytes[..usize::from(self.len)]
    }

    fn chunk(request: &Request, style: HeaderStyle, flags: u16, kind: u16, len: u64) -> Self {
        let mut header = Self { bytes: [0; MAX_LEN], len: 0 };
        let extended = style.is_extended();
        let magic = if extended { EXTENDED_REPLY_MAGIC } else { STRUCTURED_REPLY_MAGIC };
        header.put(&magic.to_be_bytes());
        header.put(&flags.to_be_bytes());
        header.put(&kind.to_be_bytes());
        header.put(&request.cookie.to_be_bytes());
        if extended {
            header.put(&request.offset.to_be_bytes());
            header.put(&len.to_be_bytes());
        } else {
            debug_assert!(u32::try_from(len).is_ok());
            header.put(&(len as u32).to_be_bytes());
        }
        header
    }

    /// Appends a field. Only the constructors call it, and none writes more than `MAX_LEN`.
    fn put(&mut self, field: &[u8]) {
        let start = usize::from(self.len);
        self.bytes[start..start + field.len()].copy_from_slice(field);
        self.len += field.len() as u8;
    }
}

impl AsRef<[u8]> for ReplyHeader {
    fn as_ref(&self) -> &[u8] {
        self.as_slice()
    }
}

impl fmt::Debug for ReplyHeader {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ReplyHeader({:02x?})", self.as_slice())
    }
}
