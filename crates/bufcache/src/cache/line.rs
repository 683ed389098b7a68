//! Tasks in line for the lock of a block.
//!
//! The end of a write wakes every waiter of the frame. So only the first task in line waits for it.
//! Each other task waits until it is the first, or for a quarter of the patience: the first one may
//! be a future that is polled no more.

use std::task::Waker;
use std::time::Instant;

use percpu::sync::{Mutex, step};

use super::Shared;
use crate::error::GetError;
use crate::wait::{Reply, wake_all};
use crate::word::Key;

/// The tasks in line for each block, in the order in which they came.
#[derive(Debug)]
pub(super) struct Line(Mutex<Vec<(Key, Waker)>>);

impl Line {
    pub(super) fn new() -> Self {
        Self(Mutex::new(Vec::new()))
    }

    /// Adds a task. Returns whether it is the first.
    fn join(&self, key: Key, waker: &Waker) -> Result<bool, GetError> {
        let mut line = self.0.lock();
        line.try_reserve(1).map_err(|_| GetError::NoMemory)?;
        let is_first = line.iter().all(|(of, _)| *of != key);
        line.push((key, waker.clone()));
        Ok(is_first)
    }

    /// Removes a task. Returns the waker of the task that is the first instead.
    fn leave(&self, key: Key, waker: &Waker) -> Option<Waker> {
        let mut line = self.0.lock();
        let first = line.iter().position(|(of, _)| *of == key)?;
        let own = line.iter().position(|(_, known)| known.will_wake(waker))?;
        let left = line.remove(own);
        let next = || line[own..].iter().find(|(of, _)| *of == key).map(|(_, next)| next.clone());
        let next = if own == first { next() } else { None };
        drop(line);
        drop(left);
        next
    }
}

/// The place of a task in the line. Its drop wakes the next task.
pub(crate) struct InLine<'c> {
    cache: &'c Shared,
    key: Key,
    waker: Waker,
}

impl Drop for InLine<'_> {
    fn drop(&mut self) {
        let next = self.cache.line.leave(self.key, &self.waker);
        step!("line: wake the next", wake_all(next));
        self.cache.timer.remove(&self.waker);
    }
}

impl Shared {
    /// Waits, as a task, until it is the first in line for the lock of a block, or for a quarter of
    /// the rest of the patience.
    pub(crate) async fn stand_in_line(
        &self,
        key: Key,
        since: &mut Option<Instant>,
    ) -> Result<InLine<'_>, GetError> {
        let left = self.time_left(since)?;
        let woken = Reply::new();
        let in_line = InLine { cache: self, key, waker: woken.waker() };
        if !self.line.join(key, &in_line.waker)? {
            self.wake_after(left / 4, &in_line.waker);
            let _ = woken.wait().await;
            self.time_left(since)?;
        }
        Ok(in_line)
    }
}
