//! Several buffers that one request fills or writes: vectored I/O.

use std::fmt;
use std::ops::{Deref, DerefMut};
use std::ptr;

use crate::alignment::Alignment;
use crate::buf::{IoBuf, IoBufMut};

/// Most buffers the kernel takes in one call (`UIO_MAXIOV`, ABI).
const MOST: usize = 1024;

/// Buffers that one [`read_vectored`](crate::Engine::read_vectored) or
/// [`write_vectored`](crate::Engine::write_vectored) transfers, first to last.
///
/// It dereferences to the slice of buffers. What the kernel needs to know of them is stored here,
/// so a list that is used again and again costs no allocation per request.
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
    /// One entry per buffer. The kernel, or the engine for the rest of a short transfer,
    /// reads and changes them where they are: on the heap.
    vectors: Box<[libc::iovec]>,
}

/// A [`BufList`] of more than 1,024 buffers was asked for; it holds them.
pub struct TooManyBuffers<B>(pub Vec<B>);

/// What a request needs to know of a list.
pub(crate) struct Shape {
    pub(crate) first: *mut libc::iovec,
    pub(crate) count: u16,
    /// Bytes in all.
    pub(crate) len: u64,
    /// All addresses, all lengths, each ored together: the low bits say how they are aligned.
    pub(crate) addresses: usize,
    pub(crate) lengths: u64,
}

impl Shape {
    /// Returns whether a direct file with this alignment takes every buffer at `offset`.
    pub(crate) fn is_aligned(&self, align: Alignment, offset: u64) -> bool {
        align.accepts(self.addresses, offset | self.lengths)
    }
}

impl<B> BufList<B> {
    /// A list of `bufs`, at most 1,024; allocates.
    ///
    /// # Errors
    ///
    /// [`TooManyBuffers`] gives them back.
    pub fn new(bufs: Vec<B>) -> Result<Self, TooManyBuffers<B>> {
        if bufs.len() > MOST {
            return Err(TooManyBuffers(bufs));
        }
        const NONE: libc::iovec = libc::iovec { iov_base: ptr::null_mut(), iov_len: 0 };
        let vectors = vec![NONE; bufs.len()].into();
        Ok(Self { bufs, vectors })
    }

    /// The buffers.
    pub fn into_inner(self) -> Vec<B> {
        self.bufs
    }

    fn shape(&mut self, address: impl Fn(&mut B) -> (*mut u8, usize)) -> Shape {
        let (mut len, mut addresses, mut lengths) = (0, 0, 0);
        for (buf, vector) in self.bufs.iter_mut().zip(&mut self.vectors) {
            let (base, bytes) = address(buf);
            len += bytes as u64;
            lengths |= bytes as u64;
            addresses |= base as usize;
            *vector = libc::iovec { iov_base: base.cast(), iov_len: bytes };
        }
        let count = self.vectors.len() as u16; // at most MOST
        Shape { first: self.vectors.as_mut_ptr(), count, len, addresses, lengths }
    }
}

impl<B: IoBuf> BufList<B> {
    /// As the source of a write. Valid until the list is used again.
    pub(crate) fn shape_for_write(&mut self) -> Shape {
        self.shape(|buf| (buf.as_ptr().cast_mut(), buf.len()))
    }
}

impl<B: IoBufMut> BufList<B> {
    /// As the target of a read. Valid until the list is used again.
    pub(crate) fn shape_for_read(&mut self) -> Shape {
        self.shape(|buf| (buf.as_mut_ptr(), buf.len()))
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

// SAFETY: the pointers in `vectors` are only read while a request is in an engine, which owns the
// whole list and stays on its thread; elsewhere they are leftovers that nobody follows.
unsafe impl<B: Send> Send for BufList<B> {}
// SAFETY: as above; `&BufList` reaches only `bufs`.
unsafe impl<B: Sync> Sync for BufList<B> {}

impl<B> std::error::Error for TooManyBuffers<B> {}

impl<B> fmt::Debug for TooManyBuffers<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("TooManyBuffers").field(&self.0.len()).finish()
    }
}

impl<B> fmt::Display for TooManyBuffers<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} buffers are more than the {MOST} of one request", self.0.len())
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
        let bufs = vec![Vec::<u8>::new(); MOST + 1];
        let refused = BufList::new(bufs).unwrap_err();
        assert_eq!(refused.0.len(), MOST + 1);
        assert!(refused.to_string().starts_with("1025 "));
        let mut list = BufList::new(vec![vec![0u8; 3]; MOST]).unwrap();
        let shape = list.shape_for_read();
        assert_eq!((usize::from(shape.count), shape.len, shape.lengths), (MOST, 3072, 3));
        assert_eq!(list.into_inner().len(), MOST);
    }
}
