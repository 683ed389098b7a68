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

/// The set-up flags of the ring: those that the engine asks for.
pub(crate) const FLAGS: &str = "io_uring: COOP_TASKRUN | TASKRUN_FLAG | SINGLE_ISSUER | SUBMIT_ALL, where the kernel knows them";

/// The ring, and the buffers by their token.
struct Raw {
    ring: IoUring,
    file: File,
    bufs: Vec<AlignedBuf>,
    spare: Vec<u64>,
}

impl Raw {
    fn new(job: &Job) -> io::Result<Self> {
        Ok(Self {
            ring: ring(job.depth)?,
            file: open(&job.path)?,
            bufs: (0..job.depth).map(|_| AlignedBuf::zeroed(BLOCK, BLOCK)).collect(),
            spare: (0..job.depth as u64).collect(),
        })
    }
}

#[inline(always)]
fn entry(fd: types::Fd, bufs: &mut [AlignedBuf], token: u64, offset: u64) -> squeue::Entry {
    let (buf, len) = (bufs[token as usize].as_mut_ptr(), BLOCK as u32);
    opcode::Read::new(fd, buf, len).offset(offset).build().user_data(token)
}

/// Reads with one system call for each batch: what completed is submitted again together.
pub(crate) fn reads(job: &Job) -> io::Result<Box<dyn Reader>> {
    Ok(Box::new(Raw::new(job)?))
}

impl Reader for Raw {
    fn read(&mut self, feed: &Rc<Feed>) {
        let Self { ring, file, bufs, spare } = self;
        let fd = types::Fd(file.as_raw_fd());
        loop {
            let mut queue = ring.submission();
            while let Some(token) = spare.pop() {
                let Some(offset) = feed.next() else {
                    spare.push(token);
                    break;
                };
                let entry = entry(fd, bufs, token, offset);
                // SAFETY: the kernel alone uses the buffer until its token comes back, which `read` waits
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
