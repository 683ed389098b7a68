//! Lists of buffers for vectored I/O.

use std::fmt;
use std::ops::{Deref, DerefMut};
use std::ptr;

use crate::alignment::Alignment;
use crate::buf::{IoBuf, IoBufMut};

/// The maximum number of buffers in one call (`UIO_MAXIOV`, ABI).
const MAX_BUFFERS: usize = 1024;

/// A list of buffers that one [`read_vectored`](crate::Engine::read_vectored) or
/// [`write_vectored`](crate::Engine::write_vectored) transfers, first to last.
///
/// It dereferences to the slice of buffers. It also stores the vectors for the kernel, so a list
/// that is used again costs no allocation per request.
///
/// ```
/// use aio_reap::{BufList, Engine};
///
/// # fn main() -> std::io::Result<()> {
/// let engine = Engine::new()?;
/// let file = engine.attach(tempfile::tempfile()?)?;
/// let list = BufList::new(vec![b"head".to_vec(), b"body".to_vec()])?;
/// let (written, list) = engine.write_vectored(&file, list, 0).submit()?.wait();
/// assert_eq!(written?, 8);
/// let (read, list) = engine.read_vectored(&file, list, 4).submit()?.wait();
/// assert_eq!((read?, &list[0][..]), (4, &b"body"[..]));
/// # Ok(())
/// # }
/// ```
pub struct BufList<B> {
    bufs: Vec<B>,
    /// One entry per buffer, on the heap. The kernel reads them there, and the engine advances them
    /// after a short transfer.
    vectors: Box<[libc::iovec]>,
}

/// The error of [`BufList::new`] for more than 1,024 buffers, which it returns.
///
/// ```
/// use aio_reap::{BufList, TooManyBuffers};
///
/// let many = vec![vec![0_u8; 8]; 1_025];
/// let Err(TooManyBuffers(bufs)) = BufList::new(many) else { panic!("at most 1,024") };
/// assert_eq!(bufs.len(), 1_025);
/// ```
pub struct TooManyBuffers<B>(pub Vec<B>);

/// The vectors of a list and the sums that a request needs.
pub(crate) struct IoVecs {
    pub(crate) first: *mut libc::iovec,
    pub(crate) count: u16,
    /// The sum of the lengths in bytes.
    pub(crate) len: u64,
    /// All addresses ored together, and all lengths: their low bits show the alignment.
    pub(crate) addresses: usize,
    pub(crate) lengths: u64,
}

impl IoVecs {
    /// Returns whether a direct file with this alignment takes every buffer at `offset`.
    pub(crate) fn is_aligned(&self, align: Alignment, offset: u64) -> bool {
        align.accepts(self.addresses, offset | self.lengths)
    }
}

impl<B> BufList<B> {
    /// Makes a list of `bufs`, at most 1,024. Allocates the vectors.
    ///
    /// # Errors
    ///
    /// [`TooManyBuffers`] returns the buffers if they are more.
    pub fn new(bufs: Vec<B>) -> Result<Self, TooManyBuffers<B>> {
        if bufs.len() > MAX_BUFFERS {
            return Err(TooManyBuffers(bufs));
        }
        const NONE: libc::iovec = libc::iovec { iov_base: ptr::null_mut(), iov_len: 0 };
        let vectors = vec![NONE; bufs.len()].into();
        Ok(Self { bufs, vectors })
    }

    /// Returns the buffers.
    pub fn into_inner(self) -> Vec<B> {
        self.bufs
    }

    fn iovecs(&mut self, address: impl Fn(&mut B) -> (*mut u8, usize)) -> IoVecs {
        let (mut len, mut addresses, mut lengths) = (0, 0, 0);
        for (buf, vector) in self.bufs.iter_mut().zip(&mut self.vectors) {
            let (base, bytes) = address(buf);
            len += bytes as u64;
            lengths |= bytes as u64;
            addresses |= base as usize;
            *vector = libc::iovec { iov_base: base.cast(), iov_len: bytes };
        }
        let count = self.vectors.len() as u16; // at most MAX_BUFFERS
        IoVecs { first: self.vectors.as_mut_ptr(), count, len, addresses, lengths }
    }
}

impl<B: IoBuf> BufList<B> {
    /// Fills the vectors for a write. They are valid until the list is used again or
    /// moves, except inside a [`HeldBuf`](crate::held_buf::HeldBuf).
    pub(crate) fn iovecs_for_write(&mut self) -> IoVecs {
        self.iovecs(|buf| (buf.as_ptr().cast_mut(), buf.len()))
    }
}

impl<B: IoBufMut> BufList<B> {
    /// Fills the vectors for a read. They are valid until the list is used again or
    /// moves, except inside a [`HeldBuf`](crate::held_buf::HeldBuf).
    pub(crate) fn iovecs_for_read(&mut self) -> IoVecs {
        self.iovecs(|buf| (buf.as_mut_ptr(), buf.len()))
    }
}

impl<B> Deref for BufList<B> {
    type Target = [B];

    fn deref(&self) -> &[B] {
        &self.bufs
    }
}

impl<B> DerefMut for BufList<B> {
    fn deref_mut(&mut self) -> &mut [B] {
        &mut self.bufs
    }
}

impl<B: fmt::Debug> fmt::Debug for BufList<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(&self.bufs).finish()
    }
}

// SAFETY: code follows the pointers in `vectors` only while a request on the list is in an engine,
// which owns the whole list and stays on its thread. At other times no code follows them.
unsafe impl<B: Send> Send for BufList<B> {}
// SAFETY: `&BufList` gives access only to `bufs`, not to the pointers in `vectors`.
unsafe impl<B: Sync> Sync for BufList<B> {}

impl<B> std::error::Error for TooManyBuffers<B> {}

impl<B> fmt::Debug for TooManyBuffers<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("TooManyBuffers").field(&self.0.len()).finish()
    }
}

impl<B> fmt::Display for TooManyBuffers<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} buffers are more than the {MAX_BUFFERS} of one request", self.0.len())
    }
}

impl<B> From<TooManyBuffers<B>> for std::io::Error {
    fn from(_: TooManyBuffers<B>) -> Self {
        Self::from_raw_os_error(libc::EINVAL)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn too_many_buffers_come_back() {
        let bufs = vec![Vec::<u8>::new(); MAX_BUFFERS + 1];
        let refused = BufList::new(bufs).unwrap_err();
        assert_eq!(refused.0.len(), MAX_BUFFERS + 1);
        assert!(refused.to_string().starts_with("1025 "));
        let mut list = BufList::new(vec![vec![0u8; 3]; MAX_BUFFERS]).unwrap();
        let iovecs = list.iovecs_for_read();
        assert_eq!((usize::from(iovecs.count), iovecs.len, iovecs.lengths), (MAX_BUFFERS, 3072, 3));
        assert_eq!(list.into_inner().len(), MAX_BUFFERS);
    }
}
