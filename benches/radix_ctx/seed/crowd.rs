//! 512 threads with one AIO context each, and how long all their requests take.
//!
//! The threads live as long as the crowd, so that a run has no thread to start. A run lasts from
//! when the last of them is ready until the last is done.

use std::fs::File;
use std::io;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
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

/// The current run, and the number of threads that have finished it.
#[derive(Default)]
struct State {
    run: Option<Run>,
    number: u64,
    done: usize,
    /// The threads are to end; one of them may have panicked.
    over: bool,
}

/// The gate at which the threads wait for the next run, and the leader for its end.
#[derive(Default)]
struct Gate {
    state: Mutex<State>,
    begun: Condvar,
    ended: Condvar,
}

impl Gate {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The run after the one called `number`; `None` when there is no other.
    fn next(&self, number: u64) -> Option<(u64, Run)> {
        let wait = |state: &mut State| state.number == number && !state.over;
        let state =
            self.begun.wait_while(self.lock(), wait).unwrap_or_else(PoisonError::into_inner);
        if state.over { None } else { state.run.map(|run| (state.number, run)) }
    }

    fn done(&self, threads: usize) {
        let mut state = self.lock();
        state.done += 1;
        if state.done == threads {
            self.ended.notify_one();
        }
    }

    /// Starts `run` and returns the time that it took.
    fn lead(&self, run: Run, threads: usize) -> Duration {
        let mut state = self.lock();
        (state.run, state.done) = (Some(run), 0);
        state.number += 1;
        let start = Instant::now();
        self.begun.notify_all();
        let wait = |state: &mut State| state.done < threads && !state.over;
        let state = self.ended.wait_while(state, wait).unwrap_or_else(PoisonError::into_inner);
        assert!(!state.over, "a thread panicked");
        start.elapsed()
    }
}

/// Ends the crowd when it is dropped, also by the panic of one thread, so that no thread waits for
/// that one.
struct Over<'a>(&'a Gate);

impl Drop for Over<'_> {
    fn drop(&mut self) {
        self.0.lock().over = true;
        self.0.begun.notify_all();
        self.0.ended.notify_one();
    }
}

/// Starts the threads on `cpus`, lets `lead` ask for runs, and ends them. `lead` gets a function
/// that does a run and says how long it took.
///
/// # Errors
///
/// The errno of `sched_setaffinity`, or of a thread that could not be started.
pub(super) fn with_crowd<T>(
    files: &[File],
    cpus: &[usize],
    before: &Side<impl Registry>,
    after: &Side<impl Registry>,
    lead: impl FnOnce(&mut dyn FnMut(Run) -> Duration) -> T,
) -> io::Result<T> {
    let threads = before.ids.len();
    let gate = Gate::default();
    let work = |thread: usize| {
        let mut requests = Requests::new(&files[thread], thread);
        let mut number = 0;
        let panicked = Over(&gate);
        while let Some((next, run)) = gate.next(number) {
            number = next;
            for _ in 0..run.requests {
                if run.before {
                    requests.one(&before.registry, before.ids[thread]);
                } else {
                    requests.one(&after.registry, after.ids[thread]);
                }
            }
            gate.done(threads);
        }
        drop(panicked); // or it is over already
    };
    let work = &work;
    with_cpus(cpus, || {
        thread::scope(|scope| {
            let _over = Over(&gate);
            for thread in 0..threads {
                let builder = thread::Builder::new().stack_size(STACK);
                builder.spawn_scoped(scope, move || work(thread))?;
            }
            Ok(lead(&mut |run| gate.lead(run, threads)))
        })
    })?
}
