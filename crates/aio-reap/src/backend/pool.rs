//! A few threads that perform operations with blocking system calls.
//!
//! ```text
//!  engine ──push──► todo ──take──► worker ──finish──► done ──drain──► engine
//!                 (condvar)                └─ eventfd, when `done` was empty
//! ```
//!
//! # Invariants
//!
//! 1. A job is in exactly one of: `todo`, a worker's hands, `done`.
//! 2. If `done` is not empty, the bell was rung since it was last drained: the worker that makes
//!    it non-empty rings, under no lock, after its push.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};

use percpu::sync::{Arc, Condvar, Mutex, check, spawn, step, thread};

use crate::op::Op;
use crate::raw::{RawCompletion, Sub};
use crate::{perform, sys};

/// The two queues between an engine and its threads. `J` is a job, `D` its completion.
pub struct Jobs<J, D> {
    todo: Mutex<Todo<J>>,
    more: Condvar,
    done: Mutex<VecDeque<D>>,
}

struct Todo<J> {
    jobs: VecDeque<J>,
    /// Workers asleep in `take`.
    idle: usize,
    closed: bool,
}

impl<J, D> Jobs<J, D> {
    /// Queues with room for `capacity` jobs before they allocate.
    pub fn new(capacity: usize) -> Self {
        let jobs = VecDeque::with_capacity(capacity);
        Self {
            todo: Mutex::new(Todo { jobs, idle: 0, closed: false }),
            more: Condvar::new(),
            done: Mutex::new(VecDeque::with_capacity(capacity)),
        }
    }

    /// Hands a job to the workers. Returns whether none of them was idle.
    pub fn push(&self, job: J) -> bool {
        let mut todo = self.todo.lock();
        todo.jobs.push_back(job);
        let all_busy = todo.idle < todo.jobs.len();
        drop(todo);
        step!("push: wake a worker", self.more.notify_one());
        all_busy
    }

    /// Takes the oldest job; sleeps while there is none. `None` once closed and empty.
    pub fn take(&self) -> Option<J> {
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

    /// Adds a completion. Returns whether the bell must be rung: it is the first.
    #[must_use = "the engine may be asleep"]
    pub fn finish(&self, done: D) -> bool {
        let mut queue = self.done.lock();
        queue.push_back(done);
        queue.len() == 1
    }

    /// Takes up to `budget` completions. Returns whether some are left: then the bell must be
    /// rung again, for nobody else will.
    #[must_use = "the engine may go to sleep"]
    pub fn drain(&self, budget: usize, mut each: impl FnMut(D)) -> bool {
        let mut queue = self.done.lock();
        let count = budget.min(queue.len());
        queue.drain(..count).for_each(&mut each);
        !check!("drain: nothing is left", queue.is_empty())
    }

    /// Takes the oldest job that is `wanted` back, if no worker has it yet.
    pub fn withdraw(&self, wanted: impl Fn(&J) -> bool) -> Option<J> {
        let mut todo = self.todo.lock();
        let at = todo.jobs.iter().position(wanted)?;
        todo.jobs.remove(at)
    }

    /// Lets workers return from `take` once the queue is empty.
    pub fn close(&self) {
        self.todo.lock().closed = true;
        step!("close: wake every worker", self.more.notify_all());
    }
}

/// A job of the thread pool.
struct Job(Sub);

// SAFETY: the pointer in `op` names a buffer that the engine keeps alive and untouched until the
// completion (contract 2 of `backend`), so one other thread may use it meanwhile.
unsafe impl Send for Job {}

struct Shared {
    jobs: Jobs<Job, RawCompletion>,
    notifier: OwnedFd,
}

pub(crate) struct Pool {
    shared: Arc<Shared>,
    workers: Vec<thread::JoinHandle<()>>,
    max_workers: usize,
    held: usize,
}

impl Pool {
    /// Threads start when jobs find none idle, up to `max_workers`.
    pub(crate) fn new(max_workers: usize, capacity: usize) -> io::Result<Self> {
        let shared = Shared { jobs: Jobs::new(capacity), notifier: sys::eventfd()? };
        let workers = Vec::with_capacity(max_workers);
        Ok(Self { shared: Arc::new(shared), workers, max_workers, held: 0 })
    }

    pub(crate) fn notifier(&self) -> RawFd {
        self.shared.notifier.as_raw_fd()
    }

    /// Starts one thread if it can; the pool needs at least one.
    pub(crate) fn start_worker(&mut self) -> io::Result<()> {
        let shared = Arc::clone(&self.shared);
        let name = format!("aio-reap-{}", self.workers.len());
        let worker = spawn(name, move || work(&shared))?;
        self.workers.push(worker);
        Ok(())
    }

    /// Hands over one request; an error when there is no thread and none can be started.
    pub(crate) fn push(&mut self, sub: Sub) -> io::Result<()> {
        if self.workers.is_empty() {
            self.start_worker()?;
        }
        self.held += 1;
        if self.shared.jobs.push(Job(sub)) && self.workers.len() < self.max_workers {
            // Without one more thread the others get there, only later.
            let _ = self.start_worker();
        }
        Ok(())
    }

    /// Completes a request that no thread has begun as cancelled.
    pub(crate) fn cancel(&mut self, user_data: u64) -> bool {
        let jobs = &self.shared.jobs;
        let withdrawn = jobs.withdraw(|Job(sub)| sub.user_data == user_data).is_some();
        if withdrawn && jobs.finish(RawCompletion { user_data, result: -libc::ECANCELED }) {
            sys::signal(&self.shared.notifier);
        }
        withdrawn
    }

    pub(crate) fn reap(&mut self, budget: usize, mut each: impl FnMut(RawCompletion)) {
        if self.held == 0 || budget == 0 {
            return;
        }
        let held = &mut self.held;
        let left = self.shared.jobs.drain(budget, |done| {
            *held -= 1;
            each(done);
        });
        if left {
            sys::signal(&self.shared.notifier);
        }
    }

    /// No request is with the threads.
    pub(crate) fn is_idle(&self) -> bool {
        self.held == 0
    }

    pub(crate) fn acknowledge(&self) {
        // Also when nothing is held: the bell may ring after its completion was reaped.
        if !self.workers.is_empty() {
            sys::drain(&self.shared.notifier);
        }
    }
}

impl Drop for Pool {
    /// Queued jobs are performed first: a request the engine counts as in flight is never lost.
    fn drop(&mut self) {
        self.shared.jobs.close();
        for worker in self.workers.drain(..) {
            let _ = worker.join(); // it cannot panic, see `work`
        }
    }
}

fn work(shared: &Shared) {
    while let Some(Job(Sub { user_data, op })) = shared.jobs.take() {
        let result = perform(&op);
        if shared.jobs.finish(RawCompletion { user_data, result }) {
            sys::signal(&shared.notifier);
        }
    }
}

fn perform(op: &Op) -> i32 {
    // SAFETY: contract 2 of `backend`: buffer and descriptor are ours until we report completion.
    unsafe { perform::perform(op) }
}

#[cfg(all(test, not(any(offlock_loom, offlock_shuttle))))]
mod tests {
    use super::*;

    /// Jobs that no thread has begun: there is none.
    #[test]
    fn cancelled_jobs_complete_as_such_and_ring() {
        let mut pool = Pool::new(1, 4).unwrap();
        for user_data in 0..3 {
            pool.held += 1;
            pool.shared.jobs.push(Job(Sub { user_data, op: Op::NOP }));
        }
        assert!(pool.cancel(1) && !pool.cancel(1) && !pool.cancel(7));
        assert!(sys::poll_readable(&[pool.notifier()], Some(std::time::Duration::ZERO)).unwrap());
        let mut seen = Vec::new();
        pool.reap(9, |done| seen.push((done.user_data, done.result)));
        assert_eq!(seen, [(1, -libc::ECANCELED)]);
        pool.start_worker().unwrap();
        while pool.held > 0 {
            pool.reap(9, |done| seen.push((done.user_data, done.result)));
        }
        assert_eq!(seen[1..], [(0, 0), (2, 0)]);
    }
}
