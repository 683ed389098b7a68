//! The threads and tasks that wait for a change of a table.
//!
//! ```text
//!   waiting task                   removing thread
//!   tasks += 1                     make the slot dead
//!   heavy()                        light()
//!   removed? else wait             tasks != 0? wake
//!
//!   waiting thread                 reclaiming thread, or that of the last reference
//!   threads += 1                   make the slot vacant
//!   lock the table, unlock         lock the table, make the index vacant, unlock
//!   done? else wait                threads != 0? wake
//! ```
//!
//! So a change costs a light fence and a load while no thread or task waits. A blocked thread waits for the end of a reclaim
//! or for the last reference to a removed context, and every such event wakes every blocked thread. A task waits
//! for the removal of one context, and only that removal wakes it.
//!
//! # Invariants
//!
//! 1. `threads` is the number of blocked threads, `tasks` the number of registered wakers.
//! 2. No user code runs under the locks: conditions are checked, and wakers are cloned, woken and dropped,
//!    without them.
//! 3. If a waker panics, the other wakers are still woken.

use std::collections::BTreeMap;
use std::mem;
use std::task::Waker;
use std::time::Instant;

use offlock_percpu::fence::{heavy, light};
use offlock_sync::atomic::{AtomicUsize, Ordering};
use offlock_sync::{Condvar, Mutex, check, step};

use crate::user_code::FirstPanic;

#[derive(Debug, Default)]
pub(super) struct Waiters {
    threads: AtomicUsize,
    /// The number of times that threads were woken.
    changes: Mutex<u64>,
    changed: Condvar,
    tasks: AtomicUsize,
    wakers: Mutex<Wakers>,
}

#[derive(Debug, Default)]
struct Wakers {
    /// By the index of the slot and the number of the registration.
    registered: BTreeMap<(u32, u64), Waker>,
    last: u64,
}

/// The registration of a future. The number 0 means that there is none.
#[derive(Debug, Default)]
pub(super) struct Registration {
    index: u32,
    number: u64,
}

/// Counts a blocked thread until it is dropped.
pub(super) struct CountedThread<'a>(&'a AtomicUsize);

impl Drop for CountedThread<'_> {
    fn drop(&mut self) {
        // Ordering: Relaxed; a thread that still reads the old count only takes the lock in vain.
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Waiters {
    /// Wakes the blocked threads. Wait-free while there are none. The caller has unlocked the table after
    /// it made the change: either the waiter sees the change, or this thread sees the waiter.
    #[inline]
    pub(super) fn wake_threads(&self) {
        // Ordering: Relaxed; the table's lock orders it.
        if !check!("wake: no thread waits", self.threads.load(Ordering::Relaxed) == 0) {
            *self.changes.lock() += 1;
            self.changed.notify_all();
        }
    }

    /// Wakes the tasks that wait for the removal of the context at `index`. Wait-free while no task waits.
    ///
    /// Runs wakers, so the caller holds no lock and no guard.
    #[inline]
    pub(super) fn wake_tasks(&self, index: u32) {
        if self.has_tasks() {
            self.take_and_wake(Some(index));
        }
    }

    /// Wakes all tasks. The rest is as for [`wake_tasks`](Self::wake_tasks).
    pub(super) fn wake_all_tasks(&self) {
        if self.has_tasks() {
            self.take_and_wake(None);
        }
    }

    #[inline]
    fn has_tasks(&self) -> bool {
        // Pairs with the `heavy` in `register`: the task sees the removal, or this thread sees the task. The
        // fence of `Core::retire` and those of guards do so too, so no model can see it missing.
        light();
        // Ordering: Relaxed; the fences order it.
        !check!("wake a task: no task waits", self.tasks.load(Ordering::Relaxed) == 0)
    }

    #[cold]
    #[inline(never)]
    fn take_and_wake(&self, index: Option<u32>) {
        let mut wakers = self.wakers.lock();
        let registered = &mut wakers.registered;
        let mut woken = Vec::new();
        match index {
            None => woken.extend(mem::take(registered).into_values()),
            Some(index) => {
                let of_index = (index, 0)..=(index, u64::MAX);
                while let Some((&key, _)) = registered.range(of_index.clone()).next() {
                    woken.extend(registered.remove(&key));
                }
            }
        }
        // Ordering: Relaxed; under the lock.
        self.tasks.store(wakers.registered.len(), Ordering::Relaxed);
        drop(wakers);
        let mut panic = FirstPanic::default();
        woken.into_iter().for_each(|waker| panic.call(|| waker.wake()));
        panic.resume();
    }

    /// Counts the calling thread as a blocked one. It takes the table's lock before it looks at what it
    /// waits for.
    pub(super) fn count_thread(&self) -> CountedThread<'_> {
        // Ordering: Relaxed; the table's lock orders it.
        self.threads.fetch_add(1, Ordering::Relaxed);
        CountedThread(&self.threads)
    }

    /// Blocks until `done` returns a value, or until the deadline.
    ///
    /// Calls `done` after each change, without the lock.
    pub(super) fn wait<R>(
        &self,
        _counted: &CountedThread<'_>,
        deadline: Option<Instant>,
        mut done: impl FnMut() -> Option<R>,
    ) -> Option<R> {
        loop {
            let seen = *self.changes.lock();
            if let Some(got) = done() {
                return Some(got);
            }
            let left = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
            let mut changes = self.changes.lock();
            if !check!("wait: no change since the condition was false", *changes == seen) {
                continue;
            }
            match left {
                None => self.changed.wait(&mut changes),
                Some(left) if left.is_zero() => return None,
                Some(left) => drop(self.changed.wait_for(&mut changes, left)),
            }
        }
    }

    /// Registers a waker for the removal of the context at `index`. The caller checks its condition after this.
    pub(super) fn register(&self, registration: &mut Registration, index: u32, waker: &Waker) {
        let waker = waker.clone();
        let mut wakers = self.wakers.lock();
        if registration.number == 0 {
            wakers.last += 1;
            *registration = Registration { index, number: wakers.last };
        }
        let key = (registration.index, registration.number);
        let replaced = wakers.registered.insert(key, waker);
        // Ordering: Relaxed; `heavy` orders it before the caller's check.
        self.tasks.store(wakers.registered.len(), Ordering::Relaxed);
        drop(wakers);
        drop(replaced);
        // Pairs with the `light` of a thread that removes the context.
        step!("register: the count comes before the look at the condition", heavy());
    }

    /// Removes a registration.
    pub(super) fn leave(&self, registration: &Registration) {
        if registration.number == 0 {
            return;
        }
        let mut wakers = self.wakers.lock();
        let left = wakers.registered.remove(&(registration.index, registration.number));
        // Ordering: Relaxed; under the lock.
        self.tasks.store(wakers.registered.len(), Ordering::Relaxed);
        drop(wakers);
        drop(left);
    }
}

#[cfg(all(test, not(offlock_model)))]
mod tests {
    use std::panic::{AssertUnwindSafe, catch_unwind};

    use super::*;

    /// Threads and tasks that have left are not counted: otherwise every change would take the lock.
    #[test]
    fn inv18_waiters_that_left_are_not_counted() {
        let waiters = Waiters::default();
        let panic = catch_unwind(AssertUnwindSafe(|| {
            waiters.wait(&waiters.count_thread(), None, || -> Option<()> { panic!("half-way") })
        }));
        assert!(panic.is_err());
        let mut registrations: [Registration; 4] = Default::default();
        for (at, registration) in registrations.iter_mut().enumerate() {
            for _ in 0..2 {
                waiters.register(registration, at as u32 / 2, Waker::noop());
            }
        }
        let counts =
            || (waiters.threads.load(Ordering::Relaxed), waiters.tasks.load(Ordering::Relaxed));
        assert_eq!(counts(), (0, 4));
        waiters.wake_tasks(0);
        assert_eq!(counts(), (0, 2));
        waiters.leave(&registrations[0]);
        waiters.leave(&registrations[2]);
        assert_eq!(counts(), (0, 1));
        waiters.wake_tasks(7);
        assert_eq!(counts(), (0, 1));
        waiters.wake_all_tasks();
        assert_eq!(counts(), (0, 0));
    }
}
