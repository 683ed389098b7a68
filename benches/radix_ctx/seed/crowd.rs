//! 512 threads with one AIO context each, and how long all their requests take.
//!
//! The threads live as long as the crowd, so that a run has no thread to start. A run lasts from
//! when the last of them is ready until the last is done.

use std::fs::File;
use std::io;
use std::sync::{Barrier, Mutex, OnceLock};
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

/// The parameters of the next run.
#[derive(Clone, Copy)]
pub(super) struct Run {
    /// Whether the list is measured, and not the table.
    pub(super) before: bool,
    /// The number of requests of each thread.
    pub(super) requests: usize,
}

/// A registry and the ids of its contexts, one for each thread.
pub(super) struct Side<R> {
    pub(super) registry: R,
    pub(super) ids: Vec<u64>,
}

/// Ends the process when a thread of the crowd panics: the others would wait for it for ever.
struct AbortOnPanic;

impl Drop for AbortOnPanic {
    fn drop(&mut self) {
        if thread::panicking() {
            std::process::abort();
        }
    }
}

/// Starts the threads on `cpus`, lets `lead` ask for runs, and ends them. `lead` gets a function
/// that does a run and says how long it took.
///
/// # Errors
///
/// If a thread cannot be started: `lead` was not called.
///
/// # Panics
///
/// Ends the process if a thread panics.
pub(super) fn with_crowd<T>(
    files: &[File],
    cpus: &[usize],
    before: &Side<impl Registry>,
    after: &Side<impl Registry>,
    lead: impl FnOnce(&mut dyn FnMut(Run) -> Duration) -> T,
) -> io::Result<T> {
    let threads = before.ids.len();
    let (next, gate) = (Mutex::new(None::<Run>), Barrier::new(threads + 1));
    // Whether all threads have started: none passes the gate otherwise.
    let started = OnceLock::<bool>::new();
    let work = |thread: usize| {
        let _abort = AbortOnPanic;
        let mut requests = Requests::new(&files[thread], thread);
        if !*started.wait() {
            return;
        }
        loop {
            gate.wait();
            let Some(run) = *next.lock().expect("a panic ends the process") else { return };
            for _ in 0..run.requests {
                if run.before {
                    requests.one(&before.registry, before.ids[thread]);
                } else {
                    requests.one(&after.registry, after.ids[thread]);
                }
            }
            gate.wait();
        }
    };
    let work = &work;
    with_cpus(cpus, || {
        thread::scope(|scope| {
            let _abort = AbortOnPanic;
            for thread in 0..threads {
                let builder = thread::Builder::new().stack_size(STACK);
                if let Err(error) = builder.spawn_scoped(scope, move || work(thread)) {
                    let _ = started.set(false);
                    let message = format!("{threads} threads: {error}");
                    return Err(io::Error::new(error.kind(), message));
                }
            }
            let _ = started.set(true);
            let result = lead(&mut |run| {
                *next.lock().expect("a panic ends the process") = Some(run);
                let start = Instant::now();
                gate.wait();
                gate.wait();
                start.elapsed()
            });
            *next.lock().expect("a panic ends the process") = None;
            gate.wait();
            Ok(result)
        })
    })
}
