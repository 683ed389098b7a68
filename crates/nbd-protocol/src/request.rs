//! The header that starts every request, and what can be judged from it alone.

use crate::bytes::Bytes;
use crate::error::NbdError;
use crate::export::ExportInfo;
use crate::style::HeaderStyle;
use crate::wire::{CommandFlags, EXTENDED_REQUEST_MAGIC, REQUEST_MAGIC, TransmissionFlags, cmd};

/// A request header as it stands on the wire, nothing checked but the magic.
///
/// # Examples
///
/// ```
/// use nbd_protocol::{Agreed, Command, CommandFlags, ExportInfo, HeaderStyle, Request, wire::cmd};
///
/// let style = HeaderStyle::Structured;
/// let flags = CommandFlags::NONE;
/// let read = Request { flags, command: cmd::READ, cookie: 7, offset: 4096, len: 512 };
/// let header = read.encode(style)?; // a client sends this
///
/// let (received, used) = Request::parse(header.as_slice(), style)?.expect("complete");
/// assert_eq!((received, used), (read, 28));
/// let export = ExportInfo::new("disk", 1 << 20);
/// let agreed = Agreed { style, allocation: false };
/// assert_eq!(received.check(&export, agreed), Ok(Command::Read { df: false }));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Request {
    /// Flags, known and unknown.
    pub flags: CommandFlags,
    /// One of [`cmd`], or unknown.
    pub command: u16,
    /// The client's name for the request; the reply carries it back.
    pub cookie: u64,
    /// Start, in bytes.
    pub offset: u64,
    /// Length, in bytes.
    pub len: u64,
}

/// An encoded request header, 28 or 32 bytes, stored inline.
///
/// # Examples
///
/// ```
/// use nbd_protocol::{CommandFlags, HeaderStyle, Request, wire::cmd};
///
/// let flags = CommandFlags::NONE;
/// let disc = Request { flags, command: cmd::DISC, cookie: 0, offset: 0, len: 0 };
/// assert_eq!(disc.encode(HeaderStyle::Extended)?.as_slice().len(), 32);
/// # Ok::<(), nbd_protocol::LengthTooLong>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RequestHeader {
    bytes: [u8; 32],
    len: u8,
}

impl RequestHeader {
    /// The bytes to send.
    #[must_use]
    pub fn as_slice(&self) -> &[u8] {
        &self.bytes[..usize::from(self.len)]
    }
}

impl AsRef<[u8]> for RequestHeader {
    fn as_ref(&self) -> &[u8] {
        self.as_slice()
    }
}

/// The part of the negotiation that decides which requests are valid.
///
/// # Examples
///
/// ```
/// use nbd_protocol::{Agreed, HeaderStyle};
///
/// let agreed = Agreed::default(); // a client that negotiated nothing
/// assert_eq!(agreed, Agreed { style: HeaderStyle::Simple, allocation: false });
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Agreed {
    /// The headers in use.
    pub style: HeaderStyle,
    /// The context [`BASE_ALLOCATION`](crate::wire::BASE_ALLOCATION) was chosen for the export.
    pub allocation: bool,
}

/// A request that may be carried out.
///
/// # Examples
///
/// ```
/// use nbd_protocol::Command;
///
/// fn is_durable_at_reply(command: Command) -> bool {
///     match command {
///         Command::Write { fua } | Command::Trim { fua } => fua,
///         Command::WriteZeroes { fua, .. } => fua,
///         Command::Flush => true,
///         _ => false,
///     }
/// }
/// assert!(is_durable_at_reply(Command::Write { fua: true }));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Command {
    /// Read.
    Read {
        /// Answer with one chunk.
        df: bool,
    },
    /// Write the payload.
    Write {
        /// Reply only once durable.
        fua: bool,
    },
    /// Make the writes replied to so far durable.
    Flush,
    /// The range is no longer needed.
    Trim {
        /// Reply only once durable.
        fua: bool,
    },
    /// Write zeroes.
    WriteZeroes {
        /// Reply only once durable.
        fua: bool,
        /// Leave the range allocated.
        no_hole: bool,
        /// Fail with [`NbdError::NotSup`], changing nothing, unless faster than writing.
        fast: bool,
    },
    /// The range will be read soon.
    Cache,
    /// Report which parts of the range are holes.
    BlockStatus {
        /// Answer with one extent.
        one: bool,
    },
    /// Finish what is in flight and close; no reply.
    Disconnect,
}

/// A header that does not start with the request magic: the stream is out of step, close it.
///
/// # Examples
///
/// ```
/// use nbd_protocol::{BadMagic, HeaderStyle, Request};
///
/// let refused = Request::parse(b"GET / HTTP/1.1", HeaderStyle::Simple);
/// assert_eq!(refused, Err(BadMagic(u32::from_be_bytes(*b"GET "))));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("request starts with {0:#010x} instead of the request magic")]
pub struct BadMagic(pub u32);

/// A length that needs extended headers, which were not negotiated.
///
/// # Examples
///
/// ```
/// use nbd_protocol::{CommandFlags, HeaderStyle, LengthTooLong, Request, wire::cmd};
///
/// let flags = CommandFlags::NONE;
/// let trim = Request { flags, command: cmd::TRIM, cookie: 1, offset: 0, len: 1 << 40 };
/// assert_eq!(trim.encode(HeaderStyle::Structured), Err(LengthTooLong(1 << 40)));
/// assert!(trim.encode(HeaderStyle::Extended).is_ok());
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("a length of {0} bytes needs extended headers; without them the longest is 4294967295")]
pub struct LengthTooLong(pub u64);

/// A payload behind which the next request cannot be found: close the connection.
///
/// # Examples
///
/// ```
/// use nbd_protocol::{BadPayload, CommandFlags, HeaderStyle, Request, wire::cmd};
///
/// let flags = CommandFlags::NONE; // an extended WRITE must have PAYLOAD_LEN
/// let write = Request { flags, command: cmd::WRITE, cookie: 1, offset: 0, len: 512 };
/// let refused = write.checked_payload_len(HeaderStyle::Extended, 1 << 20);
/// assert_eq!(refused, Err(BadPayload::NoFlag(512)));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BadPayload {
    /// The payload exceeds the maximum. The client decides how long it would take to skip it.
    #[error("a payload of {len} bytes exceeds the maximum of {max}")]
    TooLong {
        /// Length in bytes.
        len: u64,
        /// The maximum that was given.
        max: u32,
    },
    /// An extended WRITE lacks the flag PAYLOAD_LEN. Its data, if the client sends any, would be read as
    /// requests.
    #[error("a WRITE of {0} bytes without the flag PAYLOAD_LEN")]
    NoFlag(u64),
}

impl Request {
    /// Reads one header from the front of `input`; returns it and its length. `Ok(None)` if it is not
    /// complete. A payload is not part of it: see [`checked_payload_len`](Self::checked_payload_len).
    ///
    /// # Errors
    ///
    /// [`BadMagic`] if the first four bytes are not the request magic of `style`.
    pub fn parse(input: &[u8], style: HeaderStyle) -> Result<Option<(Self, usize)>, BadMagic> {
        let mut bytes = Bytes(input);
        let Some(magic) = bytes.u32() else { return Ok(None) };
        if magic != Self::magic(style) {
            return Err(BadMagic(magic));
        }
        let request = Self::fields(&mut bytes, style);
        Ok(request.map(|request| (request, input.len() - bytes.0.len())))
    }

    fn fields(bytes: &mut Bytes<'_>, style: HeaderStyle) -> Option<Self> {
        Some(Self {
            flags: CommandFlags(bytes.u16()?),
            command: bytes.u16()?,
            cookie: bytes.u64()?,
            offset: bytes.u64()?,
            len: if style.is_extended() { bytes.u64()? } else { bytes.u32()?.into() },
        })
    }

    /// Writes a header. With extended headers a WRITE gets the flag PAYLOAD_LEN.
    ///
    /// # Errors
    ///
    /// [`LengthTooLong`] if the length does not fit the 32 bits of a compact header.
    pub fn encode(&self, style: HeaderStyle) -> Result<RequestHeader, LengthTooLong> {
        let mut flags = self.flags;
        let mut bytes = [0; 32];
        bytes[0..4].copy_from_slice(&Self::magic(style).to_be_bytes());
        bytes[6..8].copy_from_slice(&self.command.to_be_bytes());
        bytes[8..16].copy_from_slice(&self.cookie.to_be_bytes());
        bytes[16..24].copy_from_slice(&self.offset.to_be_bytes());
        if style.is_extended() {
            if self.command == cmd::WRITE {
                flags |= CommandFlags::PAYLOAD_LEN;
            }
            bytes[24..32].copy_from_slice(&self.len.to_be_bytes());
        } else {
            let len = u32::try_from(self.len).map_err(|_| LengthTooLong(self.len))?;
            bytes[24..28].copy_from_slice(&len.to_be_bytes());
        }
        bytes[4..6].copy_from_slice(&flags.0.to_be_bytes());
        Ok(RequestHeader { bytes, len: style.request_len() as u8 })
    }

    const fn magic(style: HeaderStyle) -> u32 {
        if style.is_extended() { EXTENDED_REQUEST_MAGIC } else { REQUEST_MAGIC }
    }

    /// Returns the number of bytes of payload that follow the header, whether or not the request is valid: those
    /// of a WRITE, or with extended headers those of any request with the flag PAYLOAD_LEN. The client chooses the
    /// number, up to [`u64::MAX`]: a server calls [`checked_payload_len`](Self::checked_payload_len).
    #[must_use]
    pub const fn payload_len(&self, style: HeaderStyle) -> u64 {
        let has_payload = if style.is_extended() {
            self.flags.contains(CommandFlags::PAYLOAD_LEN)
        } else {
            self.command == cmd::WRITE
        };
        if has_payload { self.len } else { 0 }
    }

    /// Returns the number of bytes of payload for a server that accepts up to `max` of them, its
    /// [`max_block`](ExportInfo::max_block). The server must read the payload also if [`check`](Self::check) refuses
    /// the request.
    ///
    /// # Errors
    ///
    /// [`BadPayload`], whatever [`check`](Self::check) says: the connection must be closed.
    pub const fn checked_payload_len(
        &self,
        style: HeaderStyle,
        max: u32,
    ) -> Result<u64, BadPayload> {
        let len = self.payload_len(style);
        if len > max as u64 {
            return Err(BadPayload::TooLong { len, max });
        }
        let flag = self.flags.contains(CommandFlags::PAYLOAD_LEN);
        if style.is_extended() && self.command == cmd::WRITE && !flag {
            return Err(BadPayload::NoFlag(self.len));
        }
        Ok(len)
    }

    /// Whether the request must be answered in chunks: every READ and BLOCK_STATUS once structured
    /// replies were negotiated, everything with extended headers.
    #[must_use]
    pub const fn wants_chunks(&self, style: HeaderStyle) -> bool {
        match style {
            HeaderStyle::Simple => false,
            HeaderStyle::Structured => matches!(self.command, cmd::READ | cmd::BLOCK_STATUS),
            HeaderStyle::Extended => true,
        }
    }

    /// Judges everything that the header alone can tell, for a connection to `export` that negotiated
    /// what `agreed` says.
    ///
    /// A length of 0 is in order for all commands but BLOCK_STATUS, whose reply must describe at least
    /// one byte. The maximum block size limits READ and
    /// WRITE only: the others move no data over the connection, and existing clients send up to
    /// 1 GiB. DISC is always accepted, as it has no reply to carry an error.
    ///
    /// # Errors
    ///
    /// In this order:
    /// - [`NbdError::Inval`]: unknown command; flag unknown, not advertised, or not for this
    ///   command (FUA is for all, once advertised); with extended headers a WRITE without PAYLOAD_LEN;
    /// - [`NbdError::Perm`]: WRITE, TRIM or WRITE_ZEROES on a read-only export;
    /// - [`NbdError::Inval`]: command not advertised, or BLOCK_STATUS without a context to tell about;
    ///   FLUSH with an offset or a length; BLOCK_STATUS without a length; READ or WRITE longer than
    ///   `max_block`, or than the data of one compact chunk (`u32::MAX - 8`);
    /// - past the end: [`NbdError::NoSpc`] for WRITE and WRITE_ZEROES, else [`NbdError::Inval`];
    /// - [`NbdError::Inval`]: offset or length not a multiple of `min_block`.
    pub fn check(&self, export: &ExportInfo, agreed: Agreed) -> Result<Command, NbdError> {
        let has = |flag| export.advertised(agreed.style).contains(flag);
        let set = |flag| self.flags.contains(flag);
        let command = match self.command {
            cmd::READ => Command::Read { df: set(CommandFlags::DF) },
            cmd::WRITE => Command::Write { fua: set(CommandFlags::FUA) },
            cmd::DISC => return Ok(Command::Disconnect),
            cmd::FLUSH => Command::Flush,
            cmd::TRIM => Command::Trim { fua: set(CommandFlags::FUA) },
            cmd::CACHE => Command::Cache,
            cmd::BLOCK_STATUS => Command::BlockStatus { one: set(CommandFlags::REQ_ONE) },
            cmd::WRITE_ZEROES => Command::WriteZeroes {
                fua: set(CommandFlags::FUA),
                no_hole: set(CommandFlags::NO_HOLE),
                fast: set(CommandFlags::FAST_ZERO),
            },
            _ => return Err(NbdError::Inval),
        };

        let mut valid = CommandFlags::NONE;
        if has(TransmissionFlags::SEND_FUA) {
            valid |= CommandFlags::FUA;
        }
        match command {
            Command::Read { .. } if has(TransmissionFlags::SEND_DF) => valid |= CommandFlags::DF,
            Command::WriteZeroes { .. } => {
                valid |= CommandFlags::NO_HOLE;
                if has(TransmissionFlags::SEND_FAST_ZERO) {
                    valid |= CommandFlags::FAST_ZERO;
                }
            }
            Command::BlockStatus { .. } => valid |= CommandFlags::REQ_ONE,
            Command::Write { .. } if agreed.style.is_extended() => {
                if !set(CommandFlags::PAYLOAD_LEN) {
                    return Err(NbdError::Inval);
                }
                valid |= CommandFlags::PAYLOAD_LEN;
            }
            _ => {}
        }
        if !(self.flags - valid).is_empty() {
            return Err(NbdError::Inval);
        }

        let (needs, writes, limited) = match command {
            Command::Read { .. } => (TransmissionFlags::NONE, false, true),
            Command::Write { .. } => (TransmissionFlags::NONE, true, true),
            Command::Flush | Command::Disconnect => (TransmissionFlags::SEND_FLUSH, false, false),
            Command::Trim { .. } => (TransmissionFlags::SEND_TRIM, true, false),
            Command::WriteZeroes { .. } => (TransmissionFlags::SEND_WRITE_ZEROES, true, false),
            Command::Cache => (TransmissionFlags::SEND_CACHE, false, false),
            Command::BlockStatus { .. } if agreed.allocation && self.len > 0 => {
                (TransmissionFlags::NONE, false, false)
            }
            Command::BlockStatus { .. } => return Err(NbdError::Inval),
        };
        if writes && has(TransmissionFlags::READ_ONLY) {
            return Err(NbdError::Perm);
        }
        let longest = export.max_block.min(u32::MAX - 8); // beside it the chunk has an offset
        if !has(needs) || (limited && self.len > longest.into()) {
            return Err(NbdError::Inval);
        }
        if command == Command::Flush {
            let reserved = self.offset == 0 && self.len == 0;
            return if reserved { Ok(command) } else { Err(NbdError::Inval) };
        }
        if self.offset.checked_add(self.len).is_none_or(|end| end > export.size) {
            return Err(match command {
                Command::Write { .. } | Command::WriteZeroes { .. } => NbdError::NoSpc,
                _ => NbdError::Inval,
            });
        }
        let unit = u64::from(export.min_block.max(1));
        if !self.offset.is_multiple_of(unit) || !self.len.is_multiple_of(unit) {
            return Err(NbdError::Inval);
        }
        Ok(command)
    }
}
