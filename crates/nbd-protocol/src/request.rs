//! The 28-byte header that starts every request, and what can be judged from it alone.

use crate::bytes::Bytes;
use crate::error::NbdError;
use crate::export::ExportInfo;
use crate::wire::{CommandFlags, REQUEST_MAGIC, TransmissionFlags, cmd};

/// Length of a request header, in bytes.
pub const REQUEST_LEN: usize = 28;

/// A request header as it stands on the wire, nothing checked but the magic.
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
    pub len: u32,
}

/// What a client negotiated that decides which of its requests are in order.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Agreed {
    /// READ and BLOCK_STATUS are answered in chunks.
    pub structured: bool,
    /// The context [`BASE_ALLOCATION`](crate::wire::BASE_ALLOCATION) was chosen for the export.
    pub allocation: bool,
}

/// A request that may be carried out.
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
    /// Which parts of the range are holes.
    BlockStatus {
        /// Answer with one extent.
        one: bool,
    },
    /// Finish what is in flight and close; no reply.
    Disconnect,
}

/// A header that does not start with the request magic: the stream is out of step, close it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("request starts with {0:#010x} instead of the request magic")]
pub struct BadMagic(pub u32);

impl Request {
    /// Reads a header.
    ///
    /// # Errors
    ///
    /// [`BadMagic`] if the first four bytes are not the request magic.
    pub fn parse(header: &[u8; REQUEST_LEN]) -> Result<Self, BadMagic> {
        let mut bytes = Bytes(header);
        // The header has exactly the length of the six fields, so no default is ever used.
        let magic = bytes.u32().unwrap_or_default();
        if magic != REQUEST_MAGIC {
            return Err(BadMagic(magic));
        }
        Ok(Self {
            flags: CommandFlags(bytes.u16().unwrap_or_default()),
            command: bytes.u16().unwrap_or_default(),
            cookie: bytes.u64().unwrap_or_default(),
            offset: bytes.u64().unwrap_or_default(),
            len: bytes.u32().unwrap_or_default(),
        })
    }

    /// Writes a header.
    #[must_use]
    pub fn encode(&self) -> [u8; REQUEST_LEN] {
        let mut header = [0; REQUEST_LEN];
        header[0..4].copy_from_slice(&REQUEST_MAGIC.to_be_bytes());
        header[4..6].copy_from_slice(&self.flags.0.to_be_bytes());
        header[6..8].copy_from_slice(&self.command.to_be_bytes());
        header[8..16].copy_from_slice(&self.cookie.to_be_bytes());
        header[16..24].copy_from_slice(&self.offset.to_be_bytes());
        header[24..28].copy_from_slice(&self.len.to_be_bytes());
        header
    }

    /// How many bytes of payload follow the header, whether or not the request is valid: only
    /// WRITE has any. A refused WRITE must still have them drained (or the connection closed).
    #[must_use]
    pub const fn payload_len(&self) -> u32 {
        if self.command == cmd::WRITE { self.len } else { 0 }
    }

    /// Whether the request must be answered in chunks: every READ and BLOCK_STATUS once structured
    /// replies were negotiated. Pass it to [`ReplyHeader::error`](crate::ReplyHeader::error).
    #[must_use]
    pub const fn wants_chunks(&self, structured: bool) -> bool {
        structured && matches!(self.command, cmd::READ | cmd::BLOCK_STATUS)
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
    ///   command (FUA is for all, once advertised);
    /// - [`NbdError::Perm`]: WRITE, TRIM or WRITE_ZEROES on a read-only export;
    /// - [`NbdError::Inval`]: command not advertised, or BLOCK_STATUS without a context to tell about;
    ///   FLUSH with an offset or a length; BLOCK_STATUS without a length; READ or WRITE longer than
    ///   `max_block`;
    /// - past the end: [`NbdError::NoSpc`] for WRITE and WRITE_ZEROES, else [`NbdError::Inval`];
    /// - [`NbdError::Inval`]: offset or length not a multiple of `min_block`.
    pub fn check(&self, export: &ExportInfo, agreed: Agreed) -> Result<Command, NbdError> {
        let has = |flag| export.advertised(agreed.structured).contains(flag);
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
        if !has(needs) || (limited && self.len > export.max_block) {
            return Err(NbdError::Inval);
        }
        if command == Command::Flush {
            let reserved = self.offset == 0 && self.len == 0;
            return if reserved { Ok(command) } else { Err(NbdError::Inval) };
        }
        if self.offset.checked_add(self.len.into()).is_none_or(|end| end > export.size) {
            return Err(match command {
                Command::Write { .. } | Command::WriteZeroes { .. } => NbdError::NoSpc,
                _ => NbdError::Inval,
            });
        }
        let unit = u64::from(export.min_block.max(1));
        if !self.offset.is_multiple_of(unit) || !u64::from(self.len).is_multiple_of(unit) {
            return Err(NbdError::Inval);
        }
        Ok(command)
    }
}
