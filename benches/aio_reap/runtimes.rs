//! Asynchronous runtimes as peers, behind the feature `runtimes`: one task for each read in flight, and
//! each runtime with the settings of the raw ring where it has them.

use std::io;
use std::mem::MaybeUninit;
use std::rc::Rc;
use std::slice;

use aio_reap::{AlignedBuf, IoBuf as _, IoBufMut as _};
use compio::BufResult;
use compio::io::AsyncReadAt;

use crate::device::{BLOCK, open};
use crate::reads::{Feed, Job, Reader};

/// A block for any of them.
struct Buf(AlignedBuf);

impl Buf {
    fn new() -> Self {
        Self(AlignedBuf::zeroed(BLOCK, BLOCK))
    }
}

// SAFETY: the bytes are on the heap, initialised, and stay in place while the value moves.
unsafe impl tokio_uring::buf::IoBuf for Buf {
    fn stable_ptr(&self) -> *const u8 {
        self.0.as_ptr()
    }

    fn bytes_init(&self) -> usize {
        0
    }

    fn bytes_total(&self) -> usize {
        self.0.len()
    }
}

// SAFETY: as above; all of it is initialised always.
unsafe impl tokio_uring::buf::IoBufMut for Buf {
    fn stable_mut_ptr(&mut self) -> *mut u8 {
        self.0.as_mut_ptr()
    }

    unsafe fn set_init(&mut self, _pos: usize) {}
}

// SAFETY: the bytes are on the heap and stay in place while the value moves; all of it is initialised
// always.
unsafe impl monoio::buf::IoBufMut for Buf {
    fn write_ptr(&mut self) -> *mut u8 {
        self.0.as_mut_ptr()
    }

    fn bytes_total(&mut self) -> usize {
        self.0.len()
    }

    unsafe fn set_init(&mut self, _pos: usize) {}
}

impl compio::buf::IoBuf for Buf {
    fn as_init(&self) -> &[u8] {
        &[]
    }
}

impl compio::buf::SetLen for Buf {
    unsafe fn set_len(&mut self, _len: usize) {}
}

impl compio::buf::IoBufMut for Buf {
    fn as_uninit(&mut self) -> &mut [MaybeUninit<u8>] {
        let (at, len) = (self.0.as_mut_ptr().cast(), self.0.len());
        // SAFETY: the buffer's bytes, borrowed as long as it is; compio writes only bytes to them.
        unsafe { slice::from_raw_parts_mut(at, len) }
    }
}

/// Awaits one read after the other as the feed says: one task of a runtime, whose answers `$split` takes
/// apart.
macro_rules! reads {
    ($file:expr, $feed:expr, $split:expr) => {{
        let (file, feed) = (Rc::clone(&$file), Rc::clone($feed));
        async move {
            let mut buf = Buf::new();
            while let Some(offset) = feed.next() {
                let (result, back) = $split(file.read_at(buf, offset).await);
                assert_eq!(result.expect("a read"), BLOCK);
                buf = back;
            }
        }
    }};
}

/// Returns the answer, which is in two parts already.
fn pair<R>(answer: (R, Buf)) -> (R, Buf) {
    answer
}

/// The flags of the raw ring: a builder of the io-uring crate in the version of these runtimes.
macro_rules! flags {
    () => {{
        let mut ring = tokio_uring::uring_builder();
        ring.setup_coop_taskrun().setup_taskrun_flag().setup_single_issuer().setup_submit_all();
        ring
    }};
}

pub(crate) fn tokio_uring(job: &Job) -> io::Result<Reader> {
    let mut builder = tokio_uring::builder();
    builder.entries(job.depth as u32).uring_builder(&flags!());
    let runtime = tokio_uring::Runtime::new(&builder)?;
    let (file, depth) = (open(&job.path)?, job.depth);
    let file = Rc::new(runtime.block_on(async { tokio_uring::fs::File::from_std(file) }));
    Ok(Box::new(move |feed: &Rc<Feed>| {
        runtime.block_on(async {
            let spawn = |_| tokio_uring::spawn(reads!(file, feed, pair));
            let tasks: Vec<_> = (0..depth).map(spawn).collect();
            for task in tasks {
                task.await.expect("a task");
            }
        });
    }))
}

pub(crate) fn monoio(job: &Job) -> io::Result<Reader> {
    let builder = monoio::RuntimeBuilder::<monoio::IoUringDriver>::new();
    let mut runtime = builder.with_entries(job.depth as u32).uring_builder(flags!()).build()?;
    let (file, depth) = (open(&job.path)?, job.depth);
    let file = Rc::new(runtime.block_on(async { monoio::fs::File::from_std(file) })?);
    Ok(Box::new(move |feed: &Rc<Feed>| {
        runtime.block_on(async {
            let spawn = |_| monoio::spawn(reads!(file, feed, pair));
            let tasks: Vec<_> = (0..depth).map(spawn).collect();
            for task in tasks {
                task.await;
            }
        });
    }))
}

pub(crate) fn compio(job: &Job) -> io::Result<Reader> {
    let mut proactor = compio::driver::ProactorBuilder::new();
    proactor.driver_type(compio::driver::DriverType::IoUring).capacity(job.depth as u32);
    proactor.coop_taskrun(true).taskrun_flag(true).single_issuer(true);
    let runtime = compio::runtime::RuntimeBuilder::new().with_proactor(proactor).build()?;
    let mut options = compio::fs::OpenOptions::new();
    options.read(true).custom_flags(libc::O_DIRECT);
    let (file, depth) = (Rc::new(runtime.block_on(options.open(&job.path))?), job.depth);
    let split = |BufResult(result, buf)| (result, buf);
    Ok(Box::new(move |feed: &Rc<Feed>| {
        runtime.block_on(async {
            let spawn = |_| compio::runtime::spawn(reads!(file, feed, split));
            let tasks: Vec<_> = (0..depth).map(spawn).collect();
            for task in tasks {
                task.await.expect("a task");
            }
        });
    }))
}
