//! The replies of a server, as a client reads them.

use crate::bytes::Bytes;
use crate::client::ClientError;
use crate::error::NbdError;
use crate::style::HeaderStyle;
use crate::wire::{
    EXTENDED_REPLY_MAGIC, MAX_STRING, SIMPLE_REPLY_MAGIC, STRUCTURED_REPLY_MAGIC, chunk,
};

/// A simple reply or one chunk of a reply.
///
/// # Examples
///
/// ```
/// use nbd_protocol::{
///     CommandFlags, HeaderStyle, Reply, ReplyContent, ReplyHeader, Request, wire::cmd,
/// };
///
/// let style = HeaderStyle::Structured;
/// let flags = CommandFlags::NONE;
/// let read = Request { flags, command: cmd::READ, cookie: 7, offset: 4096, len: 512 };
/// let mut stream = ReplyHeader::read_data(&read, style).as_slice().to_vec();
/// assert_eq!(Reply::parse(&stream[..5], style)?, None); // incomplete
/// stream.extend([0; 512]);
///
/// let (reply, used) = Reply::parse(&stream, style)?.expect("complete");
/// assert_eq!((reply.cookie, reply.done), (7, true));
/// assert_eq!(reply.content, ReplyContent::Data { offset: 4096, len: 512 });
/// assert_eq!(stream[used..].len(), 512); // the data
/// # Ok::<(), nbd_protocol::ClientError>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Reply {
    /// The cookie of the request.
    pub cookie: u64,
    /// The offset of the request; only extended headers repeat it.
    pub request_offset: Option<u64>,
    /// Nothing more comes for that request but the data of this reply.
    pub done: bool,
    /// The result, or the data, that the reply announces.
    pub content: ReplyContent,
}

/// The content of one reply.
///
/// The server chose its offset and length. A client checks that this range lies in that of its request before it
/// allocates or writes a buffer.
///
/// # Examples
///
/// How many bytes follow a reply, of a READ or a BLOCK_STATUS that asked for `len` bytes:
///
/// ```
/// use nbd_protocol::ReplyContent;
///
/// fn follows(content: &ReplyContent, is_read: bool, len: u32) -> u32 {
///     match *content {
///         ReplyContent::Simple(Ok(())) if is_read => len,
///         ReplyContent::Data { len, .. } | ReplyContent::Extents { len, .. } => len,
///         _ => 0,
///     }
/// }
/// assert_eq!(follows(&ReplyContent::Simple(Ok(())), true, 512), 512);
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ReplyContent {
    /// Success or failure. After a successful READ its data follows, as long as was asked for.
    Simple(Result<(), NbdError>),
    /// `len` bytes of data follow; they belong at `offset`.
    Data {
        /// Offset in the export, in bytes.
        offset: u64,
        /// Length in bytes, at least 1.
        len: u32,
    },
    /// `len` zeroes belong at `offset`; nothing follows.
    Hole {
        /// Offset in the export, in bytes.
        offset: u64,
        /// Length in bytes, at least 1.
        len: u32,
    },
    /// `len` bytes of [`Extent`](crate::Extent)s follow, for [`Extent::parse_all`](crate::Extent::parse_all); the first begins where the request
    /// does.
    Extents {
        /// The context's id.
        context: u32,
        /// Length in bytes, a multiple of [`Extent::size`](crate::Extent::size), at least one extent's.
        len: u32,
    },
    /// The end of a reply.
    None,
    /// The request failed, whatever other chunks say.
    Error(NbdError),
}

impl Reply {
    /// Reads one reply header from the front of `input`; returns it and its length. `Ok(None)` if
    /// it is not complete.
    ///
    /// Data is not part of it: after [`ReplyContent::Data`] and [`ReplyContent::Extents`], and after a
    /// successful simple reply to a READ, it follows in the stream.
    ///
    /// # Errors
    ///
    /// [`ClientError::BadReplyMagic`], also for a kind of reply that `style` does not have;
    /// [`ClientError::BadChunk`]: the stream is out of step, close it.
    pub fn parse(input: &[u8], style: HeaderStyle) -> Result<Option<(Self, usize)>, ClientError> {
        let mut bytes = Bytes(input);
        let Some(magic) = bytes.u32() else { return Ok(None) };
        let reply = match (magic, style) {
            (SIMPLE_REPLY_MAGIC, HeaderStyle::Simple | HeaderStyle::Structured) => {
                Self::simple(&mut bytes)
            }
            (STRUCTURED_REPLY_MAGIC, HeaderStyle::Structured)
            | (EXTENDED_REPLY_MAGIC, HeaderStyle::Extended) => {
                Self::chunk(&mut bytes, style.is_extended())?
            }
            _ => return Err(ClientError::BadReplyMagic(magic)),
        };
        Ok(reply.map(|reply| (reply, input.len() - bytes.0.len())))
    }

    fn simple(bytes: &mut Bytes<'_>) -> Option<Self> {
        let (error, cookie) = (bytes.u32()?, bytes.u64()?);
        let result = NbdError::from_code(error).map_or(Ok(()), Err);
        let content = ReplyContent::Simple(result);
        Some(Self { cookie, request_offset: None, done: true, content })
    }

    fn chunk(bytes: &mut Bytes<'_>, extended: bool) -> Result<Option<Self>, ClientError> {
        let Some((flags, kind, cookie, request_offset, len)) = chunk_header(bytes, extended) else {
            return Ok(None);
        };
        let bad = ClientError::BadChunk { kind, len };
        let Ok(len) = u32::try_from(len) else { return Err(bad) };
        let done = flags & chunk::FLAG_DONE != 0;
        let content = match kind {
            chunk::NONE if len == 0 && done => Some(ReplyContent::None),
            chunk::OFFSET_DATA if len > 8 => {
                bytes.u64().map(|offset| ReplyContent::Data { offset, len: len - 8 })
            }
            chunk::OFFSET_HOLE if len == 12 => match (bytes.u64(), bytes.u32()) {
                (Some(_), Some(0)) => return Err(bad),
                (Some(offset), Some(len)) => Some(ReplyContent::Hole { offset, len }),
                _ => None,
            },
            chunk::BLOCK_STATUS if !extended && len >= 12 && (len - 4) % 8 == 0 => {
                bytes.u32().map(|context| ReplyContent::Extents { context, len: len - 4 })
            }
            chunk::BLOCK_STATUS_EXT if extended && len >= 24 && (len - 8) % 16 == 0 => {
                match (bytes.u32(), bytes.u32()) {
                    (Some(_), Some(count)) if count != (len - 8) / 16 => return Err(bad),
                    (Some(context), Some(_)) => {
                        Some(ReplyContent::Extents { context, len: len - 8 })
                    }
                    _ => None,
                }
            }
            _ if kind & chunk::ERROR_BIT != 0 => error(bytes, len, &bad)?,
            _ => return Err(bad),
        };
        Ok(content.map(|content| Self { cookie, request_offset, done, content }))
    }
}

/// Flags, type, cookie, offset of the request if it is there, length of the payload.
fn chunk_header(
    bytes: &mut Bytes<'_>,
    extended: bool,
) -> Option<(u16, u16, u64, Option<u64>, u64)> {
    let (flags, kind, cookie) = (bytes.u16()?, bytes.u16()?, bytes.u64()?);
    if extended {
        Some((flags, kind, cookie, Some(bytes.u64()?), bytes.u64()?))
    } else {
        Some((flags, kind, cookie, None, bytes.u32()?.into()))
    }
}

/// Code, length of the message, the message, and eight bytes of an offset: what an error chunk can hold.
/// Unknown kinds of errors start the same way.
fn error(
    bytes: &mut Bytes<'_>,
    len: u32,
    bad: &ClientError,
) -> Result<Option<ReplyContent>, ClientError> {
    if len < 6 || len as usize > 6 + MAX_STRING + 8 {
        return Err(bad.clone());
    }
    let Some(payload) = bytes.take(len as usize) else { return Ok(None) };
    let mut payload = Bytes(payload);
    let (Some(code), Some(message)) = (payload.u32(), payload.u16()) else {
        return Err(bad.clone());
    };
    if payload.take(message.into()).is_none() {
        return Err(bad.clone());
    }
    // A code of 0 is forbidden here; the request failed all the same.
    Ok(Some(ReplyContent::Error(NbdError::from_code(code).unwrap_or(NbdError::Inval))))
}
