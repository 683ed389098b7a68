//! Reads by the engine, in token mode, and by the peer underneath: the io-uring crate, with nothing but a loop
//! around it.

use std::io;
use std::os::fd::AsRawFd;
use std::rc::Rc;

use aio_reap::{AlignedBuf, BackendKind, CompletionQueue, Engine};
use io_uring::{opcode, types};

use crate::device::{BLOCK, open};
use crate::nops::ring;
use crate::reads::{Feed, Job, Reader};

/// The set-up flags of the ring: those that the engine asks for.
pub(crate) const FLAGS: &str = "io_uring: COOP_TASKRUN | TASKRUN_FLAG | SINGLE_ISSUER | SUBMIT_ALL, where the kernel knows them";

fn buffers(job: &Job) -> Vec<AlignedBuf> {
    (0..job.depth).map(|_| AlignedBuf::zeroed(BLOCK, BLOCK)).collect()
}

fn engine(job: &Job, backend: BackendKind) -> io::Result<Reader> {
    let engine = Engine::builder().backend(backend).depth(job.depth).build()?;
    let file = engine.attach(open(&job.path)?)?;
    let (queue, mut spare, depth) = (CompletionQueue::new(), buffers(job), job.depth);
    Ok(Box::new(move |feed: &Rc<Feed>| {
        // Plugged all the time, so that each wait submits and sleeps in one system call.
        let _plug = engine.plug();
        loop {
            while let Some(buf) = spare.pop() {
                let Some(offset) = feed.next() else {
                    spare.push(buf);
                    break;
                };
                engine.read(&file, buf, offset).enqueue(&queue, offset).expect("a slot");
            }
            if spare.len() == depth {
                return;
            }
            engine.wait(None).expect("wait");
            while let Some(completion) = queue.pop() {
                assert_eq!(completion.result.expect("a read"), BLOCK);
                spare.push(completion.buf);
            }
        }
    }))
}

pub(crate) fn uring(job: &Job) -> io::Result<Reader> {
    engine(job, BackendKind::Uring)
}

pub(crate) fn aio(job: &Job) -> io::Result<Reader> {
    engine(job, BackendKind::Aio)
}

/// Reads with one system call for each batch: what completed is submitted again together.
pub(crate) fn raw(job: &Job) -> io::Result<Reader> {
    let (mut ring, file) = (ring(job.depth)?, open(&job.path)?);
    // The buffers by their token.
    let (mut bufs, mut spare) = (buffers(job), (0..job.depth as u64).collect::<Vec<_>>());
    Ok(Box::new(move |feed: &Rc<Feed>| {
        let fd = types::Fd(file.as_raw_fd());
        loop {
            let mut queue = ring.submission();
            while let Some(token) = spare.pop() {
                let Some(offset) = feed.next() else {
                    spare.push(token);
                    break;
                };
                let buf = bufs[token as usize].as_mut_ptr();
                let read = opcode::Read::new(fd, buf, BLOCK as u32).offset(offset);
                // SAFETY: the kernel alone uses the buffer until its token comes back, which this waits for.
                unsafe { queue.push(&read.build().user_data(token)) }
                    .expect("as many entries as buffers");
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
    }))
}
