//! The threads and tasks that wait for a change of a table.
//!
//! ```text
//!   waiting thread or task         changing thread
//!   count += 1                     change the state of a slot, or `reclaiming`
//!   heavy()                        light()
//!   done? else wait                count != 0? wake
//! ```
//!
//! So a change costs a light fence and a load while there are no waiters. A blocked thread is woken by
//! every change. A waker is registered for a slot or for the table. A waker of a slot is woken by changes
//! of that slot and by [`notify_all`](Waiters::notify_all), a waker of the table by every change of a slot.
//!
//! # Invariants
//!
//! 1. `count` is the number of blocked threads and of registered wakers, `slot_wakers` the number of
//!    wakers that are registered for a slot.
//! 2. No user code runs under the lock: conditions are checked, and wakers are cloned, woken and dropped,
//!    without it.
//! 3. If a waker panics, the other wakers are still woken, and the changing thread goes on.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, DefaultHasher};
use std::mem;
use std::task::Waker;
use std::time::Instant;

use percpu::fence::{heavy, light};
use percpu::sync::atomic::{AtomicUsize, Ordering};
use percpu::sync::{Condvar, Mutex, check, step};

use super::panics::contained;

#[derive(Debug)]
pub(super) struct Waiters {
    count: AtomicUsize,
    slot_wakers: AtomicUsize,
    waiting: Mutex<Waiting>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct Waiting {
    /// The number of times that threads were woken.
    changes: u64,
    wakers: Map<WaiterKey, Wakers>,
    next: u64,
}

/// Without a random seed, so that the runs of a model have the same order. The keys come from the table,
/// not from an attacker.
type Map<K, V> = HashMap<K, V, BuildHasherDefault<DefaultHasher>>;

/// Wakers by the numbers of their registrations.
type Wakers = Map<u64, Waker>;

/// The index of a slot, or `None` for the table.
type WaiterKey = Option<u32>;

/// The registration of a future. The number 0 means that there is none.
#[derive(Debug, Default)]
pub(super) struct Registration {
    key: WaiterKey,
    number: u64,
}

/// Wakers that are not registered any more. The drop wakes them.
#[derive(Debug, Default)]
pub(super) struct WakeList {
    slot: Wakers,
    table: Wakers,
    all: Map<WaiterKey, Wakers>,
}

impl Drop for WakeList {
    fn drop(&mut self) {
        let all = mem::take(&mut self.all).into_values();
        let wakers = [mem::take(&mut self.slot), mem::take(&mut self.table)];
        for waker in wakers.into_iter().chain(all).flat_map(HashMap::into_values) {
            contained(|| waker.wake());
        }
    }
}

/// Counts a blocked thread until it is dropped.
struct CountedThread<'a>(&'a AtomicUsize);

impl<'a> CountedThread<'a> {
    fn new(count: &'a AtomicUsize) -> Self {
        // Ordering: Relaxed; the `heavy` in `wait` orders it before the check of the condition.
        count.fetch_add(1, Ordering::Relaxed);
        Self(count)
    }
}

impl Drop for CountedThread<'_> {
    fn drop(&mut self) {
        // Ordering: Relaxed; a thread that still reads the old count only takes the lock in vain.
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Waiters {
    pub(super) fn new() -> Self {
        Self {
            count: AtomicUsize::new(0),
            slot_wakers: AtomicUsize::new(0),
            waiting: Mutex::default(),
            changed: Condvar::new(),
        }
    }

    /// Wakes the blocked threads and the wakers of the table, after a change. Wait-free while there are
    /// none.
    ///
    /// Runs wakers, so the caller holds no lock and no guard.
    #[inline(always)]
    pub(super) fn notify(&self) {
        if self.has_waiters() {
            drop(self.take_table());
        }
    }

    /// Wakes the blocked threads, after a change that no waker waits for.
    pub(super) fn notify_threads(&self) {
        if self.has_waiters() {
            drop(self.take(true, |_, _| ()));
        }
    }

    /// Wakes like [`notify`](Self::notify), and also the wakers of the slot that was changed.
    #[inline(always)]
    pub(super) fn notify_slot(&self, index: u32) {
        if self.has_waiters() {
            drop(self.take_both(index));
        }
    }

    /// Wakes like [`notify`](Self::notify), and also the wakers of all slots.
    pub(super) fn notify_all(&self) {
        if self.has_waiters() {
            drop(self.take_all());
        }
    }

    /// Takes the wakers of a slot, after a change of it. The caller notifies the other waiters later.
    /// Wait-free while no slot has wakers.
    #[inline(always)]
    pub(super) fn take_slot(&self, index: u32) -> Option<WakeList> {
        // Pairs with the `heavy` of a waiter: it sees the change, or this thread sees the waiter.
        step!("wake a slot: the change comes before the look for waiters", light());
        // Ordering: Relaxed; the fences order it.
        let none = self.slot_wakers.load(Ordering::Relaxed) == 0;
        (!check!("wake: no slot has a waiter", none)).then(|| self.take_slot_cold(index))
    }

    /// Wakes the blocked threads, and takes the wakers of the table, which the drop of the result wakes.
    #[inline(always)]
    pub(super) fn take_threads(&self) -> Option<WakeList> {
        self.has_waiters().then(|| self.take_table())
    }

    #[inline(always)]
    fn has_waiters(&self) -> bool {
        // Pairs with the `heavy` of a waiter: it sees the change, or this thread sees the waiter.
        step!("wake: the change comes before the look for waiters", light());
        // Ordering: Relaxed; the fences order it.
        !check!("wake: the table has no waiter", self.count.load(Ordering::Relaxed) == 0)
    }

    /// Takes the wakers that `pick` moves to the list, and wakes the blocked threads if `threads`.
    fn take(&self, threads: bool, pick: impl FnOnce(&mut Waiting, &mut WakeList)) -> WakeList {
        let mut woken = WakeList::default();
        let mut waiting = self.waiting.lock();
        if threads {
            waiting.changes += 1;
            self.changed.notify_all();
        }
        pick(&mut waiting, &mut woken);
        let all = woken.all.iter();
        let all = all.fold((0, 0), |(slots, all), (key, wakers)| {
            (slots + usize::from(key.is_some()) * wakers.len(), all + wakers.len())
        });
        let (slots, all) = (woken.slot.len() + all.0, woken.table.len() + all.1);
        // Ordering: Relaxed, both; under the lock.
        self.slot_wakers.fetch_sub(slots, Ordering::Relaxed);
        self.count.fetch_sub(woken.slot.len() + all, Ordering::Relaxed);
        drop(waiting);
        woken
    }

    #[cold]
    #[inline(never)]
    fn take_table(&self) -> WakeList {
        self.take(true, |waiting, woken| woken.table = waiting.remove(None))
    }

    #[cold]
    #[inline(never)]
    fn take_slot_cold(&self, index: u32) -> WakeList {
        self.take(false, |waiting, woken| woken.slot = waiting.remove(Some(index)))
    }

    #[cold]
    #[inline(never)]
    fn take_both(&self, index: u32) -> WakeList {
        self.take(true, |waiting, woken| {
            woken.slot = waiting.remove(Some(index));
            woken.table = waiting.remove(None);
        })
    }

    #[cold]
    #[inline(never)]
    fn take_all(&self) -> WakeList {
        self.take(true, |waiting, woken| mem::swap(&mut woken.all, &mut waiting.wakers))
    }

    /// Blocks until `done` returns a value, or until the deadline.
    ///
    /// Calls `done` after each change, without the lock.
    pub(super) fn wait<R>(
        &self,
        deadline: Option<Instant>,
        mut done: impl FnMut() -> Option<R>,
    ) -> Option<R> {
        let _counted = CountedThread::new(&self.count);
        // Pairs with the `light` of a thread that changes the table.
        step!("wait: the count comes before the look at the condition", heavy());
        loop {
            let seen = self.waiting.lock().changes;
            if let Some(got) = done() {
                return Some(got);
            }
            let left = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
            let mut waiting = self.waiting.lock();
            if !check!("wait: no change since the condition was false", waiting.changes == seen) {
                continue;
            }
            match left {
                None => self.changed.wait(&mut waiting),
                Some(left) if left.is_zero() => return None,
                Some(left) => drop(self.changed.wait_for(&mut waiting, left)),
            }
        }
    }

    /// Registers a waker for the next change of a slot or of the table. The caller checks its condition
    /// after this. Returns false if there is no memory.
    pub(super) fn register(
        &self,
        registration: &mut Registration,
        key: WaiterKey,
        waker: &Waker,
    ) -> bool {
        let waker = waker.clone();
        let mut waiting = self.waiting.lock();
        if let Some(known) = waiting.find(registration) {
            // A thread that changes the table after the `heavy` of the first registration finds this
            // registration, or has removed it.
            let replaced = mem::replace(known, waker);
            drop(waiting);
            contained(|| drop(replaced));
            return true;
        }
        waiting.next += 1;
        let number = waiting.next;
        if let Err(refused) = waiting.add(key, number, waker) {
            drop(waiting);
            contained(|| drop(refused));
            return false;
        }
        *registration = Registration { key, number };
        // Ordering: Relaxed, both; `heavy` orders them before the caller's check.
        self.slot_wakers.fetch_add(usize::from(key.is_some()), Ordering::Relaxed);
        self.count.fetch_add(1, Ordering::Relaxed);
        drop(waiting);
        // Pairs with the `light` of a thread that changes the table.
        step!("register: the count comes before the look at the condition", heavy());
        true
    }

    /// Removes a registration.
    pub(super) fn leave(&self, registration: &mut Registration) {
        let registration = mem::take(registration);
        if registration.number == 0 {
            return;
        }
        let mut waiting = self.waiting.lock();
        let left = waiting.forget(&registration);
        if left.is_some() {
            // Ordering: Relaxed, both; under the lock.
            self.slot_wakers.fetch_sub(usize::from(registration.key.is_some()), Ordering::Relaxed);
            self.count.fetch_sub(1, Ordering::Relaxed);
        }
        drop(waiting);
        contained(|| drop(left));
    }
}

impl Waiting {
    fn find(&mut self, registration: &Registration) -> Option<&mut Waker> {
        self.wakers.get_mut(&registration.key)?.get_mut(&registration.number)
    }

    /// Adds a waker, or returns it if there is no memory.
    fn add(&mut self, key: WaiterKey, number: u64, waker: Waker) -> Result<(), Waker> {
        if self.wakers.try_reserve(1).is_err() {
            return Err(waker);
        }
        let wakers = self.wakers.entry(key).or_default();
        if wakers.try_reserve(1).is_ok() {
            wakers.insert(number, waker);
            return Ok(());
        }
        if wakers.is_empty() {
            self.wakers.remove(&key);
        }
        Err(waker)
    }

    fn remove(&mut self, key: WaiterKey) -> Wakers {
        self.wakers.remove(&key).unwrap_or_default()
    }

    fn forget(&mut self, registration: &Registration) -> Option<Waker> {
        let wakers = self.wakers.get_mut(&registration.key)?;
        let waker = wakers.remove(&registration.number);
        if wakers.is_empty() {
            self.wakers.remove(&registration.key);
        }
        waker
    }
}

#[cfg(all(test, not(any(offlock_loom, offlock_shuttle))))]
mod tests {
    use std::panic::{AssertUnwindSafe, catch_unwind};

    use super::*;

    /// Threads and wakers that have left are not counted: otherwise every change would take the lock.
    #[test]
    fn inv18_waiters_that_left_are_not_counted() {
        let waiters = Waiters::new();
        let panic = catch_unwind(AssertUnwindSafe(|| {
            waiters.wait(None, || -> Option<()> { panic!("half-way") })
        }));
        assert!(panic.is_err());
        let mut registrations = [const { Registration { key: None, number: 0 } }; 4];
        for (at, registration) in registrations.iter_mut().enumerate() {
            for _ in 0..2 {
                let key = (at != 0).then_some(at as u32 / 2);
                assert!(waiters.register(registration, key, Waker::noop()));
            }
        }
        let counts =
            || (waiters.count.load(Ordering::Relaxed), waiters.slot_wakers.load(Ordering::Relaxed));
        assert_eq!(counts(), (4, 3));
        drop(waiters.take_slot(0));
        assert_eq!(counts(), (3, 2));
        waiters.leave(&mut registrations[1]);
        waiters.leave(&mut registrations[2]);
        assert_eq!(counts(), (2, 1));
        waiters.notify();
        assert_eq!(counts(), (1, 1));
        waiters.notify_slot(7);
        assert_eq!(counts(), (1, 1));
        waiters.notify_all();
        assert_eq!(counts(), (0, 0));
        assert!(waiters.waiting.lock().wakers.is_empty());
    }
}
