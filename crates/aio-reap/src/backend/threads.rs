//! The backend that works on every system: a pool of threads that make blocking system calls.

use std::io;
use std::os::fd::RawFd;
use std::time::Duration;

use super::Backend;
use super::pool::Pool;
use crate::raw::{RawCompletion, Stop, Submitted};
use crate::slab::Batch;

/// The backend on a thread pool alone.
pub(crate) struct Threads {
    pool: Pool,
}

impl Threads {
    pub(crate) fn new(workers: usize, depth: usize) -> io::Result<Self> {
        let mut pool = Pool::new(workers, depth)?;
        pool.start_worker()?; // so that a system without threads fails now
        Ok(Self { pool })
    }
}

impl Backend for Threads {
    fn submit(&mut self, batch: Batch<'_>) -> Submitted {
        let offered = batch.len();
        for (accepted, sub) in batch.enumerate() {
            if self.pool.push(sub).is_err() {
                return Submitted { accepted, stop: Some(Stop::Busy) };
            }
        }
        Submitted { accepted: offered, stop: None }
    }

    fn reap(&mut self, budget: usize, each: impl FnMut(RawCompletion)) {
        self.pool.reap(budget, each);
    }

    fn wait(&mut self, timeout: Option<Duration>) -> io::Result<()> {
        super::wait_readable(&[self.pool.notifier()], timeout)
    }

    fn cancel(&mut self, user_data: u64) -> bool {
        self.pool.cancel(user_data)
    }

    fn acknowledge(&mut self) {
        self.pool.acknowledge();
    }

    fn wake_fds(&self) -> Vec<RawFd> {
        vec![self.pool.notifier()]
    }
}
