//! Reads by the engine, in token mode.

use std::io;
use std::rc::Rc;

use aio_reap::{AlignedBuf, BackendKind, CompletionQueue, Engine, File};

use crate::device::{BLOCK, open};
use crate::reads::{Feed, Job, Reader};

struct Ours {
    engine: Engine,
    file: File,
    queue: CompletionQueue<AlignedBuf>,
    spare: Vec<AlignedBuf>,
    depth: usize,
}

fn reads(job: &Job, backend: BackendKind) -> io::Result<Box<dyn Reader>> {
    let engine = Engine::builder().backend(backend).depth(job.depth).build()?;
    let file = engine.attach(open(&job.path)?)?;
    let spare: Vec<AlignedBuf> = (0..job.depth).map(|_| AlignedBuf::zeroed(BLOCK, BLOCK)).collect();
    Ok(Box::new(Ours { engine, file, queue: CompletionQueue::new(), spare, depth: job.depth }))
}

pub(crate) fn uring(job: &Job) -> io::Result<Box<dyn Reader>> {
    reads(job, BackendKind::Uring)
}

pub(crate) fn aio(job: &Job) -> io::Result<Box<dyn Reader>> {
    reads(job, BackendKind::Aio)
}

impl Reader for Ours {
    fn read(&mut self, feed: &Rc<Feed>) {
        let Self { engine, file, queue, spare, depth } = self;
        // Plugged all the time, so that each wait submits and sleeps in one system call.
        let _plug = engine.plug();
        loop {
            while let Some(buf) = spare.pop() {
                let Some(offset) = feed.next() else {
                    spare.push(buf);
                    break;
                };
                engine.read(file, buf, offset).enqueue(queue, offset).expect("a slot");
            }
            if spare.len() == *depth {
                return;
            }
            engine.wait(None).expect("wait");
            while let Some(completion) = queue.pop() {
                assert_eq!(completion.result.expect("a read"), BLOCK);
                spare.push(completion.buf);
            }
        }
    }
}
