//! Requests of other threads.

mod file;
mod inbox;
pub(crate) mod mailbox;
mod operation;
mod pending;
mod request;
mod sent;
mod shared;

use std::fmt;

use percpu::sync::Arc;

pub use self::file::SharedFile;
pub(crate) use self::inbox::Inbox;
pub use self::operation::RemoteOperation;
pub(crate) use self::pending::PendingRemote;
pub use self::request::{RemoteRequest, RemoteRequestId};
pub(crate) use self::shared::Shared;
use crate::buf::{IoBuf, IoBufMut};
use crate::buf_list::{BufList, IoVecs};
use crate::held_buf::HeldBuf;
use crate::op::{AllocateMode, Kind, Memory, Op};

/// A handle through which other threads send requests to an engine, from [`Engine::remote`].
///
/// Clones are cheap. A request goes into a queue, and the engine performs it in its next turn. The
/// thread that makes the queue non-empty wakes the engine, so a burst costs one wake-up. The buffer
/// comes back with the result, through a [`RemoteOperation`] or a callback. To send a request takes
/// two short locks and no allocation.
///
/// At most [`EngineBuilder::remote_capacity`] requests exist at a time, from the submission until
/// the result is collected (or the callback begins). The engine's slots are a second limit: remote
/// requests wait for a free slot in one queue with the futures of [`Request::submit_async`].
///
/// The shutdown or the drop of the engine performs every request that has a slot. A request that
/// comes too late or has no slot then ends with `ECANCELED`. Every request gets a result.
///
/// [`Engine::remote`]: crate::Engine::remote
/// [`EngineBuilder::remote_capacity`]: crate::EngineBuilder::remote_capacity
/// [`Request::submit_async`]: crate::Request::submit_async
///
/// ```
/// use aio_reap::{Engine, Remote, SharedFile};
///
/// # fn main() -> std::io::Result<()> {
/// let (to_main, from_engine) = std::sync::mpsc::channel::<Remote>();
/// let engine = std::thread::spawn(move || {
///     let engine = Engine::new()?;
///     to_main.send(engine.remote()).unwrap();
///     engine.serve() // until the last remote is dropped
/// });
/// let remote = from_engine.recv().unwrap();
/// let file = SharedFile::new(tempfile::tempfile()?)?;
/// let write = remote.write(&file, b"hello".to_vec(), 0).submit()?;
/// assert_eq!(write.wait().0?, 5); // or `.await`, on any executor
/// let (read, buf) = remote.read(&file, vec![0; 5], 0).submit()?.wait();
/// assert_eq!((read?, &buf[..]), (5, &b"hello"[..]));
/// drop(remote);
/// engine.join().unwrap()
/// # }
/// ```
pub struct Remote {
    shared: Arc<Shared>,
}

impl Remote {
    pub(crate) fn new(shared: &Arc<Shared>) -> Self {
        shared.mailbox.add_sender();
        Self { shared: Arc::clone(shared) }
    }

    /// Makes a request like [`Engine::read`](crate::Engine::read).
    pub fn read<B: IoBufMut + Send>(
        &self,
        file: &SharedFile,
        buf: B,
        offset: u64,
    ) -> RemoteRequest<'_, B> {
        let mut buf = HeldBuf::new(buf);
        let len = buf.get().len() as u64;
        let ptr = buf.get_mut().as_mut_ptr(); // the last use of the buffer
        let op = Op { ptr, len, ..op(Kind::Read, file, offset) };
        RemoteRequest::new(&self.shared, Some(file), op, buf)
    }

    /// Makes a request like [`Engine::read_exact`](crate::Engine::read_exact).
    pub fn read_exact<B: IoBufMut + Send>(
        &self,
        file: &SharedFile,
        buf: B,
        offset: u64,
    ) -> RemoteRequest<'_, B> {
        self.read(file, buf, offset).exact()
    }

    /// Makes a request like [`Engine::write`](crate::Engine::write).
    pub fn write<B: IoBuf + Send>(
        &self,
        file: &SharedFile,
        buf: B,
        offset: u64,
    ) -> RemoteRequest<'_, B> {
        let buf = HeldBuf::new(buf);
        let (len, ptr) = (buf.get().len() as u64, buf.get().as_ptr().cast_mut());
        let op = Op { ptr, len, ..op(Kind::Write, file, offset) };
        RemoteRequest::new(&self.shared, Some(file), op, buf)
    }

    /// Makes a request like [`Engine::read_vectored`](crate::Engine::read_vectored).
    pub fn read_vectored<B: IoBufMut + Send>(
        &self,
        file: &SharedFile,
        list: BufList<B>,
        offset: u64,
    ) -> RemoteRequest<'_, BufList<B>> {
        let mut list = HeldBuf::new(list);
        let iovecs = list.get_mut().iovecs_for_read(); // the last use of the list
        self.vectored(Kind::Read, file, &iovecs, list, offset)
    }

    /// Makes a request like [`Engine::write_vectored`](crate::Engine::write_vectored).
    pub fn write_vectored<B: IoBuf + Send>(
        &self,
        file: &SharedFile,
        list: BufList<B>,
        offset: u64,
    ) -> RemoteRequest<'_, BufList<B>> {
        let mut list = HeldBuf::new(list);
        let iovecs = list.get_mut().iovecs_for_write(); // the last use of the list
        self.vectored(Kind::Write, file, &iovecs, list, offset)
    }

    fn vectored<B: Send + 'static>(
        &self,
        kind: Kind,
        file: &SharedFile,
        iovecs: &IoVecs,
        list: HeldBuf<BufList<B>>,
        offset: u64,
    ) -> RemoteRequest<'_, BufList<B>> {
        let memory = Memory::vectors(iovecs.count);
        let (ptr, len) = (iovecs.first.cast(), iovecs.len);
        let op = Op { memory, ptr, len, ..op(kind, file, offset) };
        let misaligned = file.alignment().is_some_and(|align| !iovecs.is_aligned(align, offset));
        RemoteRequest::new(&self.shared, Some(file), op, list).misaligned(misaligned)
    }

    /// Makes a request like [`Engine::fsync`](crate::Engine::fsync).
    pub fn fsync(&self, file: &SharedFile) -> RemoteRequest<'_, ()> {
        RemoteRequest::new(&self.shared, Some(file), op(Kind::Fsync, file, 0), HeldBuf::new(()))
    }

    /// Makes a request like [`Engine::fdatasync`](crate::Engine::fdatasync).
    pub fn fdatasync(&self, file: &SharedFile) -> RemoteRequest<'_, ()> {
        RemoteRequest::new(&self.shared, Some(file), op(Kind::Fdatasync, file, 0), HeldBuf::new(()))
    }

    /// Makes a request like [`Engine::allocate`](crate::Engine::allocate).
    pub fn allocate(
        &self,
        file: &SharedFile,
        mode: AllocateMode,
        offset: u64,
        len: u64,
    ) -> RemoteRequest<'_, ()> {
        let op = Op { len, ..op(mode.kind(), file, offset) };
        RemoteRequest::new(&self.shared, Some(file), op, HeldBuf::new(()))
    }

    /// Asks the engine to cancel a request with a callback, like
    /// [`RemoteOperation::cancel`](crate::RemoteOperation::cancel). Returns false if the request has
    /// completed. Never blocks.
    ///
    /// Every remote of the engine can do so. The id must be of a remote of this engine: that of
    /// another engine may name an unrelated request.
    pub fn cancel(&self, id: RemoteRequestId) -> bool {
        let mailbox = &self.shared.mailbox;
        if id.index as usize >= mailbox.capacity() {
            return false; // of another engine
        }
        let asked = mailbox.cancel_detached(id.index, id.generation);
        if asked == Some(true) {
            self.shared.notify();
        }
        asked.is_some()
    }

    /// Makes a request like [`Engine::nop`](crate::Engine::nop). It shows the cost of the way to
    /// the engine and back.
    pub fn nop(&self) -> RemoteRequest<'_, ()> {
        RemoteRequest::new(&self.shared, None, Op::NOP, HeldBuf::new(()))
    }
}

fn op(kind: Kind, file: &SharedFile, offset: u64) -> Op {
    Op { kind, block: file.block(), fd: file.fd(), offset, ..Op::NOP }
}

impl Clone for Remote {
    fn clone(&self) -> Self {
        Self::new(&self.shared)
    }
}

impl Drop for Remote {
    /// The drop of the last remote ends [`Engine::serve`](crate::Engine::serve).
    fn drop(&mut self) {
        if self.shared.mailbox.drop_sender() {
            self.shared.notify();
        }
    }
}

impl fmt::Debug for Remote {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mailbox = &self.shared.mailbox;
        let taken = mailbox.capacity() - mailbox.free_len();
        f.debug_struct("Remote").field("taken", &taken).field("of", &mailbox.capacity()).finish()
    }
}
