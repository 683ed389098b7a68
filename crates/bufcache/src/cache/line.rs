//! Tasks in line for the lock of a block.
//!
//! The end of a write wakes every waiter of the frame. So only the first task in line waits for it.
//! Each other task waits until it is the first, or for a quarter of the patience: the first one may
//! be a future that is polled no more.

use std::future::poll_fn;
use std::task::{Context, Poll, Waker};
use std::time::Instant;

use offlock_sync::{Mutex, step};

use super::Shared;
use super::timer::HAS_TIME;
use crate::error::GetError;
use crate::wait::{Wakers, wake_all};
use crate::word::Key;

/// The tasks in line for each block.
#[derive(Debug)]
pub(super) struct Line(Mutex<Wakers<Key>>);

impl Line {
    pub(super) fn new() -> Self {
        Self(Mutex::new(Wakers::new()))
    }
}

/// The place of a task in the line. Its drop wakes the next task.
pub(crate) struct InLine<'c> {
    line: &'c Line,
    key: Key,
    /// The number of the place, or 0.
    number: u64,
}

impl InLine<'_> {
    /// Returns ready once the task is the first. The first call joins the line.
    fn poll(&mut self, context: &mut Context<'_>) -> Poll<()> {
        let new = context.waker().clone(); // foreign code, as is its drop: not under the lock
        let mut line = self.line.0.lock();
        let mut old = None;
        if self.number == 0 {
            self.number = line.add(self.key, new);
        } else {
            old = Some(line.replace(self.key, self.number, new));
        }
        let is_first = line.first_of(self.key).is_none_or(|first| first == self.number);
        drop(line);
        drop(old);
        if is_first { Poll::Ready(()) } else { Poll::Pending }
    }
}

impl Drop for InLine<'_> {
    fn drop(&mut self) {
        let mut line = self.line.0.lock();
        let was_first = line.first_of(self.key).is_some_and(|first| first == self.number);
        let left = line.remove(self.key, self.number);
        let next = line.first_of(self.key).filter(|_| was_first);
        // Takes its waker, because a clone is foreign code: not under the lock.
        let next = next.map(|next| line.replace(self.key, next, Waker::noop().clone()));
        drop(line);
        drop(left);
        step!("line: wake the next", wake_all(next));
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
        let end = Instant::now().checked_add(self.time_left(since)? / 4).filter(|_| HAS_TIME);
        let mut in_line = InLine { line: &self.line, key, number: 0 };
        let mut alarm = self.timer.alarm();
        poll_fn(|context| {
            if in_line.poll(context).is_ready() || end.is_some_and(|end| Instant::now() >= end) {
                return Poll::Ready(());
            }
            end.inspect(|end| alarm.set(*end, context.waker()));
            Poll::Pending
        })
        .await;
        self.time_left(since)?;
        Ok(in_line)
    }
}
