//! The error of a write that the kernel takes in part and then refuses reports the number of bytes
//! written.
//!
//! The program has only one test, because the limit of the file size belongs to the process.
#![cfg(not(offlock_model))]

mod common;

use std::io;
use std::sync::mpsc;

use aio_reap::{CompletionQueue, Engine, RequestError};
use common::on_every_backend;

const LIMIT: usize = 511;
const LEN: usize = 1024;

/// Limits the file size until it is dropped, because the test harness may print to a file.
struct Limit(libc::rlimit);

impl Limit {
    fn new(bytes: usize) -> Self {
        // SAFETY: the call takes no pointer. It ignores the signal that would end the process when
        // a write exceeds the limit.
        unsafe { libc::signal(libc::SIGXFSZ, libc::SIG_IGN) };
        let mut before = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
        // SAFETY: the kernel stores one limit in `old`.
        assert_eq!(unsafe { libc::getrlimit(libc::RLIMIT_FSIZE, &raw mut before) }, 0);
        set(libc::rlimit { rlim_cur: bytes as libc::rlim_t, ..before });
        Self(before)
    }
}

impl Drop for Limit {
    fn drop(&mut self) {
        set(self.0);
    }
}

fn set(limit: libc::rlimit) {
    // SAFETY: the kernel reads one limit.
    assert_eq!(unsafe { libc::setrlimit(libc::RLIMIT_FSIZE, &raw const limit) }, 0);
}

fn check(front: &str, result: Result<usize, RequestError>) {
    let error = result.unwrap_err();
    let reported = (error.errno(), error.transferred());
    assert_eq!(reported, (libc::EFBIG, LIMIT), "{front}");
    assert_eq!(error.to_string(), "File too large (os error 27), after 511 bytes", "{front}");
    assert_eq!(io::Error::from(error).raw_os_error(), Some(libc::EFBIG), "{front}");
}

fn local(engine: &Engine, file: &std::fs::File) {
    let file = engine.attach(file.try_clone().unwrap()).unwrap();
    let write = || engine.write(&file, vec![7; LEN], 0);
    check("wait", write().submit().unwrap().wait().0);
    let operation = write().submit().unwrap();
    check("block_on", engine.block_on(operation).unwrap().0);
    let (send, receive) = mpsc::channel();
    write().callback(move |result, _| send.send(result).unwrap()).unwrap();
    let queue = CompletionQueue::new();
    write().enqueue(&queue, 3).unwrap();
    engine.drain().unwrap();
    check("callback", receive.recv().unwrap());
    check("queue", queue.pop().unwrap().result);
}

#[test]
fn inv18_a_refused_write_reports_its_bytes() {
    on_every_backend(|engine| {
        let file = tempfile::tempfile().unwrap();
        let _limit = Limit::new(LIMIT);
        local(engine, &file);
        assert_eq!(file.metadata().unwrap().len(), LIMIT as u64);
    });
}
