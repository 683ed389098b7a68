//! The backend that works on every system: a pool of threads that make blocking system calls.
//!
//! ```text
//!  engine ──push──► todo ──take──► worker ──finish──► done ──drain──► engine
//!                 (condvar)                └─ eventfd, when `done` was empty
//! ```
//!
//! # Invariants
//!
//! 1. A job is in `todo`, or one worker performs it, or its completion is in `done`.
//! 2. If `done` is not empty, the notifier was signalled after the last drain, or will be: the
//!    worker that makes `done` non-empty signals after its push, without a lock.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::time::Duration;

use offlock_sync::{Arc, Condvar, Mutex, spawn, step, thread};

use super::Backend;
use crate::op::{RawCompletion, Stop, Sub, Submitted};
use crate::slab::Batch;
use crate::sys;

/// The two queues between an engine and its threads. `J` is a job and `D` its completion.
pub(crate) struct Jobs<J, D> {
    todo: Mutex<Todo<J>>,
    more: Condvar,
    done: Mutex<VecDeque<D>>,
}

/// The queue of jobs that no worker has taken.
struct Todo<J> {
    jobs: VecDeque<J>,
    /// The number of workers that sleep in `take`.
    idle: usize,
    closed: bool,
}

impl<J, D> Jobs<J, D> {
    /// Makes queues that hold `capacity` jobs without further allocation.
    pub(crate) fn new(capacity: usize) -> Self {
        let jobs = VecDeque::with_capacity(capacity);
        Self {
            todo: Mutex::new(Todo { jobs, idle: 0, closed: false }),
            more: Condvar::new(),
            done: Mutex::new(VecDeque::with_capacity(capacity)),
        }
    }

    /// Queues a job. Returns whether there are more queued jobs than idle workers.
    pub(crate) fn push(&self, job: J) -> bool {
        let mut todo = self.todo.lock();
        todo.jobs.push_back(job);
        let all_busy = todo.idle < todo.jobs.len();
        drop(todo);
        step!("push: wake a worker", self.more.notify_one());
        all_busy
    }

    /// Takes the oldest job. Sleeps while there is none. Returns `None` after `close`, when no job
    /// is left.
    pub(crate) fn take(&self) -> Option<J> {
        let mut todo = self.todo.lock();
        loop {
            if let Some(job) = todo.jobs.pop_front() {
                return Some(job);
            }
            if todo.closed {
                return None;
            }
            todo.idle += 1;
            self.more.wait(&mut todo);
            todo.idle -= 1;
        }
    }

    /// Adds a completion. Returns whether the caller must signal the notifier, because the queue
    /// was empty.
    #[must_use = "the engine may be asleep"]
    pub(crate) fn finish(&self, done: D) -> bool {
        let mut queue = self.done.lock();
        queue.push_back(done);
        queue.len() == 1
    }

    /// Takes the completions.
    pub(crate) fn drain(&self, each: impl FnMut(D)) {
        self.done.lock().drain(..).for_each(each);
    }

    /// Takes back the oldest job that is `wanted`, if no worker has taken it.
    pub(crate) fn withdraw(&self, wanted: impl Fn(&J) -> bool) -> Option<J> {
        let mut todo = self.todo.lock();
        let at = todo.jobs.iter().position(wanted)?;
        todo.jobs.remove(at)
    }

    /// Makes workers return from `take` when the queue is empty.
    pub(crate) fn close(&self) {
        self.todo.lock().closed = true;
        step!("close: wake every worker", self.more.notify_all());
    }
}

/// A job of the thread pool.
struct Job(Sub);

// SAFETY: the pointer in `op` names a buffer that the engine keeps alive and does not use until the
// completion (contract 2 of `backend`), so the worker is the only thread that uses it.
unsafe impl Send for Job {}

/// The state that the engine and the workers share.
struct Shared {
    jobs: Jobs<Job, RawCompletion>,
    notifier: OwnedFd,
}

/// The engine's handle of its thread pool: the whole backend, or that of the operations that Linux AIO
/// lacks.
pub(crate) struct Pool {
    shared: Arc<Shared>,
    workers: Vec<thread::JoinHandle<()>>,
    max_workers: usize,
    held: usize,
}

impl Pool {
    /// Makes a pool without threads. A thread starts if a job finds none idle, up to `max_workers`.
    pub(crate) fn new(max_workers: usize, capacity: usize) -> io::Result<Self> {
        let shared = Shared { jobs: Jobs::new(capacity), notifier: sys::eventfd()? };
        let workers = Vec::with_capacity(max_workers);
        Ok(Self { shared: Arc::new(shared), workers, max_workers, held: 0 })
    }

    pub(crate) fn notifier(&self) -> RawFd {
        self.shared.notifier.as_raw_fd()
    }

    /// Starts one thread. The pool needs at least one.
    pub(crate) fn start_worker(&mut self) -> io::Result<()> {
        let shared = Arc::clone(&self.shared);
        let name = format!("aio-reap-{}", self.workers.len());
        let worker = spawn(name, move || work(&shared))?;
        self.workers.push(worker);
        Ok(())
    }

    /// Queues one request. Fails if there is no thread and none can start.
    pub(crate) fn push(&mut self, sub: Sub) -> io::Result<()> {
        if self.workers.is_empty() {
            self.start_worker()?;
        }
        self.held += 1;
        if self.shared.jobs.push(Job(sub)) && self.workers.len() < self.max_workers {
            // After an error the existing threads perform the job, only later.
            let _ = self.start_worker();
        }
        Ok(())
    }
}

impl Backend for Pool {
    fn submit(&mut self, batch: Batch<'_>) -> Submitted {
        let offered = batch.len();
        for (accepted, sub) in batch.enumerate() {
            if self.push(sub).is_err() {
                return Submitted { accepted, stop: Some(Stop::Busy) };
            }
        }
        Submitted { accepted: offered, stop: None }
    }

    fn reap(&mut self, each: &mut dyn FnMut(RawCompletion)) {
        if self.held == 0 {
            return;
        }
        let held = &mut self.held;
        self.shared.jobs.drain(|done| {
            *held -= 1;
            each(done);
        });
    }

    fn wait(&mut self, timeout: Option<Duration>) -> io::Result<()> {
        super::wait_readable(&[self.notifier()], timeout)
    }

    /// Completes a request with ECANCELED if no thread has begun it. Returns whether it did.
    fn cancel(&mut self, user_data: u64) -> bool {
        let jobs = &self.shared.jobs;
        let withdrawn = jobs.withdraw(|Job(sub)| sub.user_data == user_data).is_some();
        if withdrawn && jobs.finish(RawCompletion { user_data, result: -libc::ECANCELED }) {
            sys::signal(&self.shared.notifier);
        }
        withdrawn
    }

    fn acknowledge(&mut self) {
        // Also if no request is in the pool: a worker may signal after its completion was reaped.
        if !self.workers.is_empty() {
            sys::drain(&self.shared.notifier);
        }
    }

    fn wake_fds(&self) -> Vec<RawFd> {
        vec![self.notifier()]
    }
}

impl Drop for Pool {
    /// Waits until the workers have performed the queued jobs, so no request in flight is lost.
    fn drop(&mut self) {
        self.shared.jobs.close();
        for worker in self.workers.drain(..) {
            let _ = worker.join(); // `work` does not panic
        }
    }
}

fn work(shared: &Shared) {
    while let Some(Job(Sub { user_data, op })) = shared.jobs.take() {
        // SAFETY: by contract 2 of `backend` the buffer and the descriptor are valid until the pool
        // reports the completion.
        let result = unsafe { crate::op::perform(&op) };
        if shared.jobs.finish(RawCompletion { user_data, result }) {
            sys::signal(&shared.notifier);
        }
    }
}
