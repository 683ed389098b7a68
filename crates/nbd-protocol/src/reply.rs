//! The headers a server sends before (or instead of) data.

use std::fmt;

use crate::error::NbdError;
use crate::wire::{SIMPLE_REPLY_MAGIC, STRUCTURED_REPLY_MAGIC, chunk};

/// Simple reply: magic, error, cookie.
const SIMPLE_LEN: usize = 16;
/// Chunk header: magic, flags, type, cookie, length.
const CHUNK_LEN: usize = 20;
/// The longest, a chunk header with the offset of the data; that with a context is shorter.
const MAX_LEN: usize = CHUNK_LEN + 8;

/// The header of one reply, at most 28 bytes, stored inline.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct ReplyHeader {
    bytes: [u8; MAX_LEN],
    len: u8,
}

impl ReplyHeader {
    /// A simple reply: success or failure of anything that is not answered in chunks.
    #[must_use]
    pub fn simple(cookie: u64, result: Result<(), NbdError>) -> Self {
        let error = result.err().map_or(0, NbdError::code);
        let mut header = Self { bytes: [0; MAX_LEN], len: 0 };
        header.put(&SIMPLE_REPLY_MAGIC.to_be_bytes());
        header.put(&error.to_be_bytes());
        header.put(&cookie.to_be_bytes());
        debug_assert_eq!(header.as_slice().len(), SIMPLE_LEN);
        header
    }

    /// What precedes the `len` bytes of a successful READ at `offset`: a simple reply, or with
    /// `structured` the one chunk that carries them all, marked as the last.
    ///
    /// A chunk must describe at least one byte, so with `len` 0 this is the chunk
    /// [`done`](Self::done). The chunk's length field holds `len + 8`: `len` past `u32::MAX - 8`
    /// cannot be sent this way; the maximum block size keeps far below.
    #[must_use]
    pub fn read_data(cookie: u64, structured: bool, offset: u64, len: u32) -> Self {
        if !structured {
            return Self::simple(cookie, Ok(()));
        }
        if len == 0 {
            return Self::done(cookie);
        }
        debug_assert!(len <= u32::MAX - 8);
        let mut header =
            Self::chunk(cookie, chunk::FLAG_DONE, chunk::OFFSET_DATA, len.saturating_add(8));
        header.put(&offset.to_be_bytes());
        header
    }

    /// What precedes the [`Extent`](crate::Extent)s of a BLOCK_STATUS, `extents` of them: the one chunk
    /// that carries them all, marked as the last. The protocol wants one extent at least.
    #[must_use]
    pub fn block_status(cookie: u64, context: u32, extents: u32) -> Self {
        debug_assert!((1..=u32::MAX / 8 - 1).contains(&extents));
        let len = extents.saturating_mul(8).saturating_add(4);
        let mut header = Self::chunk(cookie, chunk::FLAG_DONE, chunk::BLOCK_STATUS, len);
        header.put(&context.to_be_bytes());
        header
    }

    /// The failure of a request: with `chunks` an error chunk, marked as the last, else a simple
    /// reply. [`Request::wants_chunks`](crate::Request::wants_chunks) says which.
    #[must_use]
    pub fn error(cookie: u64, chunks: bool, error: NbdError) -> Self {
        if !chunks {
            return Self::simple(cookie, Err(error));
        }
        let mut header = Self::chunk(cookie, chunk::FLAG_DONE, chunk::ERROR, 6);
        header.put(&error.code().to_be_bytes());
        header.put(&0_u16.to_be_bytes()); // length of the message: none
        header
    }

    /// A last chunk without content: success.
    #[must_use]
    pub fn done(cookie: u64) -> Self {
        Self::chunk(cookie, chunk::FLAG_DONE, chunk::NONE, 0)
    }

    /// The bytes to send.
    #[must_use]
    pub fn as_slice(&self) -> &[u8] {
        &self.bytes[..usize::from(self.len)]
    }

    fn chunk(cookie: u64, flags: u16, kind: u16, len: u32) -> Self {
        let mut header = Self { bytes: [0; MAX_LEN], len: 0 };
        header.put(&STRUCTURED_REPLY_MAGIC.to_be_bytes());
        header.put(&flags.to_be_bytes());
        header.put(&kind.to_be_bytes());
        header.put(&cookie.to_be_bytes());
        header.put(&len.to_be_bytes());
        debug_assert_eq!(header.as_slice().len(), CHUNK_LEN);
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
