//! 512 threads with one AIO context each, and how long all their requests take.

use std::fs::File;
use std::io;
use std::sync::RwLock;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use harness::{Random, with_cpus};

use super::aio::{self, BLOCK, Handle, Request};
use super::list::Registry;

/// The size of each thread's file.
pub(super) const BYTES: usize = 256 * BLOCK;
/// Far more than a request needs.
const STACK: usize = 64 << 10;

/// One thread's requests: random blocks of its own file, read or written.
pub(super) struct Requests {
    request: Request,
    random: Random,
}

impl Requests {
    pub(super) fn new(file: &File, thread: usize) -> Self {
        let random = Random::new(1000 + thread as u64);
        Self { request: Request::new(file), random }
    }

    /// One request: two lookups, a real transfer between them.
    #[inline]
    pub(super) fn one(&mut self, registry: &impl Registry, id: u64) {
        let block = self.random.below(BYTES / BLOCK);
        let read = self.random.next() & 1 << 40 == 0;
        self.request.aim(read, block * BLOCK);
        let handle: Handle = registry.find(id).expect("it is there");
        aio::submit(handle, &mut self.request);
        let handle = registry.find(id).expect("it is there");
        aio::reap(handle);
    }
}

/// A registry and the ids of its contexts, one for each thread.
pub(super) struct Side<R> {
    pub(super) registry: R,
    pub(super) ids: Vec<u64>,
}

/// Lets each thread make so many requests on `cpus`. Returns the time from when all of them are ready until the
/// last has ended.
pub(super) fn crowd(
    files: &[File],
    cpus: &[usize],
    side: &Side<impl Registry>,
    requests: usize,
) -> io::Result<Duration> {
    let (gate, ready) = (RwLock::new(()), AtomicUsize::new(0));
    let work = |thread: usize| {
        let mut own = Requests::new(&files[thread], thread);
        // Ordering: Relaxed, both; it lines up the starts, and publishes nothing.
        ready.fetch_add(1, Ordering::Relaxed);
        drop(gate.read());
        (0..requests).for_each(|_| own.one(&side.registry, side.ids[thread]));
    };
    let work = &work;
    with_cpus(cpus, || {
        thread::scope(|scope| {
            let (closed, mut threads) = (gate.write(), Vec::new());
            for thread in 0..side.ids.len() {
                let builder = thread::Builder::new().stack_size(STACK);
                threads.push(builder.spawn_scoped(scope, move || work(thread))?);
            }
            while ready.load(Ordering::Relaxed) < threads.len() {
                thread::sleep(Duration::from_millis(1));
            }
            let start = Instant::now();
            drop(closed);
            threads.into_iter().for_each(|thread| thread.join().expect("a request"));
            Ok(start.elapsed())
        })
    })
}
