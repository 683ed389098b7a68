//! Tasks that use an engine of another thread.

use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use aio_reap::{Engine, Outcome, Remote, Responder, Response, SharedFile};

use crate::counted::Counted;

const LEN: usize = 512;
/// The blocks of each task. The last one is written by requests without a waiter.
const BLOCKS: u64 = 8;

/// A file, and a handle to the engine of another thread.
///
/// A task has at most `BLOCKS` unfinished requests, beside those that later ones overtake in the device, which
/// are at most `depth`. So the capacity of the engine must be `BLOCKS` for each task, plus its depth.
#[derive(Clone)]
pub(crate) struct Writer {
    remote: Remote,
    pub(crate) freed: Arc<AtomicU64>,
    file: SharedFile,
}

impl Writer {
    pub(crate) fn new(engine: &Engine) -> Self {
        let file = SharedFile::new(tempfile::tempfile().unwrap()).unwrap();
        Self { remote: engine.remote(), freed: Arc::default(), file }
    }

    /// Sends a read or a write of a block.
    fn send(&self, write: bool, block: u64, byte: u8) -> Response<Outcome<Counted>> {
        let (at, buf) = (block * LEN as u64, Counted::new(LEN, byte, &self.freed));
        let file = self.file.clone();
        let call = move |engine: &Engine, responder: Responder<Outcome<Counted>>| {
            let file = engine.attach_shared(&file);
            let request = match write {
                true => engine.write(&file, buf, at),
                false => engine.read(&file, buf, at),
            };
            let done = |result, buf| _ = responder.send((result, buf));
            request.callback(done).map_err(drop).expect("there is a slot for each");
        };
        self.remote.ask(call).expect("the engine has room for each call")
    }

    /// Writes the blocks of task `nr` and reads them back while `goes_on` returns true for the number of
    /// requests made so far. Returns that number.
    pub(crate) async fn run(self, nr: u64, goes_on: impl Fn(usize) -> bool) -> usize {
        let mut made = 0;
        while goes_on(made) {
            let blocks = nr * BLOCKS..nr * BLOCKS + BLOCKS - 1;
            let byte = |block: u64| (made as u64 + block) as u8;
            let write = |block| self.send(true, block, byte(block));
            for write in blocks.clone().map(write).collect::<Vec<_>>() {
                assert_eq!(write.await.unwrap().0.unwrap(), LEN);
            }
            for block in blocks.clone() {
                let (read, buf) = self.send(false, block, 0xee).await.unwrap();
                assert_eq!(read.unwrap(), LEN);
                assert!(buf.0.iter().all(|&b| b == byte(block)), "the bytes of another block");
            }
            drop(write(blocks.end));
            made += 2 * BLOCKS as usize - 1;
        }
        made
    }
}
