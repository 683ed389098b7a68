//! The peer underneath: the io-uring crate, with nothing but a loop around it.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::rc::Rc;

use aio_reap::AlignedBuf;
use io_uring::{IoUring, opcode, squeue, types};

use crate::device::{BLOCK, open};
use crate::nops::ring;
use crate::reads::{Feed, Job, Reader};

/// What its ring is set up with: what the engine asks for.
pub(crate) const FLAGS: &str = "io_uring: COOP_TASKRUN | TASKRUN_FLAG | SINGLE_ISSUER | SUBMIT_ALL, where the kernel knows them";

/// The ring, and the buffers by their token.
struct Raw {
    ring: IoUring,
    file: File,
    bufs: Vec<AlignedBuf>,
    spare: Vec<u64>,
    /// The kernel knows file and buffers by their numbers.
    registered: bool,
}

impl Raw {
    fn new(job: &Job) -> io::Result<Self> {
        Ok(Self {
            ring: ring(job.depth)?,
            file: open(&job.path)?,
            bufs: (0..job.depth).map(|_| AlignedBuf::zeroed(BLOCK, BLOCK)).collect(),
            spare: (0..job.depth as u64).collect(),
            registered: false,
        })
    }
}

#[inline(always)]
fn entry(
    fd: types::Fd,
    bufs: &mut [AlignedBuf],
    registered: bool,
    token: u64,
    offset: u64,
) -> squeue::Entry {
    let (buf, len) = (bufs[token as usize].as_mut_ptr(), BLOCK as u32);
    let entry = if registered {
        opcode::ReadFixed::new(types::Fixed(0), buf, len, token as u16).offset(offset).build()
    } else {
        opcode::Read::new(fd, buf, len).offset(offset).build()
    };
    entry.user_data(token)
}

/// Reads with one system call for each batch: what completed is submitted again together.
pub(crate) fn reads(job: &Job) -> io::Result<Box<dyn Reader>> {
    Ok(Box::new(Raw::new(job)?))
}

/// The same with a registered file and registered buffers.
pub(crate) fn registered(job: &Job) -> io::Result<Box<dyn Reader>> {
    let mut raw = Raw { registered: true, ..Raw::new(job)? };
    let mut bufs = Vec::new();
    for buf in &mut raw.bufs {
        bufs.push(libc::iovec { iov_base: buf.as_mut_ptr().cast(), iov_len: BLOCK });
    }
    // SAFETY: the ring goes before the buffers.
    unsafe { raw.ring.submitter().register_buffers(&bufs) }?;
    raw.ring.submitter().register_files(&[raw.file.as_raw_fd()])?;
    Ok(Box::new(raw))
}

impl Reader for Raw {
    fn read(&mut self, feed: &Rc<Feed>) {
        let Self { ring, file, bufs, spare, registered } = self;
        let fd = types::Fd(file.as_raw_fd());
        loop {
            let mut queue = ring.submission();
            while let Some(token) = spare.pop() {
                let Some(offset) = feed.next() else {
                    spare.push(token);
                    break;
                };
                let entry = entry(fd, bufs, *registered, token, offset);
                // SAFETY: the buffer is nobody else's until its token comes back, which `read` waits
                // for.
                unsafe { queue.push(&entry) }.expect("as many entries as buffers");
            }
            drop(queue);
            if spare.len() == bufs.len() {
                return;
            }
            ring.submit_and_wait(1).expect("wait");
            for completion in ring.completion() {
                assert_eq!(completion.result(), BLOCK as i32);
                spare.push(completion.user_data());
            }
        }
    }
}
