//! Some seconds of calls from many threads on every real backend: none is lost or repeated, and
//! no thread sleeps for ever.
//!
//! ```sh
//! cargo test --release -p aio-reap --test remote_stress -- --ignored --test-threads 1
//! ```
//!
//! `OFFLOCK_STRESS_SECONDS` (2) is the time for each backend.
#![cfg(not(offlock_model))]

mod common;
#[path = "common/counted.rs"]
mod counted;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::Instant;

use aio_reap::{Engine, Outcome, Remote, Responder, Response, SharedFile, SubmitError};
use common::engines;
use counted::Counted;
use testkit::block_on;
use testkit::stress::{keep_running, stress_time};

const THREADS: u64 = 4;
const BLOCK: usize = 512;
/// The blocks of each thread. The last one is written by requests without a waiter.
const BLOCKS: u64 = 8;
/// The slots, and the calls that may wait for a turn: one for each request that the threads may have at a time, so that none is refused.
const CAPACITY: usize = 64;
/// The least number of requests of each thread, also on a busy machine.
const ENOUGH: u64 = 100;

/// One thread with its own blocks of the file.
struct Client {
    remote: Remote,
    file: SharedFile,
    first: u64,
    seed: u64,
    made: u64,
    full: u64,
    freed: Arc<AtomicU64>,
    called: Arc<AtomicU64>,
    callbacks: u64,
}

impl Client {
    fn random(&mut self, below: u64) -> u64 {
        self.seed = self.seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        (self.seed >> 33) % below
    }

    fn buf(&self, byte: u8) -> Counted {
        Counted::new(BLOCK, byte, &self.freed)
    }

    /// Sends a read or a write of `block`. Retries while the queue is full.
    fn send(&mut self, write: bool, block: u64, byte: u8) -> Response<Outcome<Counted>> {
        let (at, buf) = ((self.first + block) * BLOCK as u64, self.buf(byte));
        self.made += 1;
        let file = self.file.clone();
        let mut call = move |engine: &Engine, responder: Responder<Outcome<Counted>>| {
            let file = engine.attach_shared(&file);
            let done = |result, buf| _ = responder.send((result, buf));
            let sent = match write {
                true => engine.write(&file, buf, at).callback(done).map(drop).map_err(drop),
                false => engine.read(&file, buf, at).callback(done).map(drop).map_err(drop),
            };
            sent.expect("there is a slot for each");
        };
        loop {
            match self.remote.ask(call) {
                Ok(response) => return response,
                Err(SubmitError::Full(refused)) => {
                    self.full += 1;
                    call = refused;
                    thread::yield_now();
                }
                Err(error) => panic!("{error}"),
            }
        }
    }

    /// Waits for the outcome. `block_on` panics if a wake-up is lost.
    fn finish(&mut self, response: Response<Outcome<Counted>>) -> Outcome<Counted> {
        block_on(response).expect("the request has a slot")
    }

    fn step(&mut self) {
        match self.random(8) {
            0 => {
                drop(self.send(true, BLOCKS - 1, 0x33));
                if self.random(2) == 0 {
                    thread::yield_now();
                }
            }
            1 => {
                let (at, buf) = ((self.first + BLOCKS - 1) * BLOCK as u64, self.buf(0x44));
                self.made += 1;
                let called = Arc::clone(&self.called);
                let file = self.file.clone();
                let call = move |engine: &Engine| {
                    let done = move |result: Result<usize, aio_reap::RequestError>, _| {
                        result.unwrap();
                        called.fetch_add(1, Ordering::Relaxed);
                    };
                    engine.read(&engine.attach_shared(&file), buf, at).callback(done).unwrap();
                };
                // If the queue is full, the call comes back and is dropped with its buffer.
                self.callbacks += u64::from(self.remote.call(call).is_ok());
            }
            _ => {
                let burst = 1 + self.random(BLOCKS - 1);
                let byte = self.random(200) as u8;
                let writes: Vec<_> =
                    (0..burst).map(|block| self.send(true, block, byte + block as u8)).collect();
                for write in writes {
                    assert_eq!(self.finish(write).0.unwrap(), BLOCK);
                }
                for block in 0..burst {
                    let read = self.send(false, block, 0xee);
                    let (result, buf) = self.finish(read);
                    assert_eq!(result.unwrap(), BLOCK);
                    assert!(buf.0.iter().all(|&b| b == byte + block as u8), "another's bytes");
                }
            }
        }
    }
}

#[test]
#[ignore = "takes seconds per backend"]
fn stress_inv06_threads_share_an_engine() {
    for engine in engines(Engine::builder().depth(8).capacity(CAPACITY)) {
        let file = SharedFile::new(tempfile::tempfile().unwrap()).unwrap();
        let until = Instant::now() + stress_time(2);
        let remote = engine.remote();
        let (freed, called) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicU64::new(0)));
        let (made, callbacks, full) = thread::scope(|scope| {
            let clients: Vec<_> = (0..THREADS)
                .map(|nr| {
                    let mut client = Client {
                        remote: remote.clone(),
                        file: file.clone(),
                        first: nr * BLOCKS,
                        seed: nr,
                        made: 0,
                        full: 0,
                        freed: Arc::clone(&freed),
                        called: Arc::clone(&called),
                        callbacks: 0,
                    };
                    scope.spawn(move || {
                        while keep_running(until, || client.made > ENOUGH) {
                            client.step();
                        }
                        assert!(client.made > ENOUGH);
                        (client.made, client.callbacks, client.full)
                    })
                })
                .collect();
            drop(remote);
            engine.serve().unwrap();
            clients
                .into_iter()
                .map(|client| client.join().unwrap())
                .fold((0, 0, 0), |sum, one| (sum.0 + one.0, sum.1 + one.1, sum.2 + one.2))
        });
        assert!(engine.validate().is_idle());
        assert_eq!(freed.load(Ordering::Relaxed), made, "buffers");
        assert_eq!(called.load(Ordering::Relaxed), callbacks, "callbacks");
        assert_eq!(format!("{:?}", engine.remote()), "Remote { calls: 0, capacity: 64 }");
        let stats = engine.stats();
        assert_eq!((stats.stray, stats.completed), (0, stats.accepted));
        println!("{}: {made} requests, {full} found no place, {stats}", engine.backend());
    }
}
