//! Who waits for something of a table, blocked or as a future.
//!
//! ```text
//!   waiter                         who changes something
//!   count += 1                     change it (the state of a slot, the reclaimer)
//!   heavy()                        light()
//!   done? else wait                count != 0? wake whom it concerns
//! ```
//!
//! So nobody pays for waiters while there are none. A blocked thread is woken by every change. A waker
//! is of a slot, and woken by changes of that one and by [`notify_all`](Waiters::notify_all); or it is
//! of the table, and woken by every change.
//!
//! # Invariants
//!
//! 1. `count` is the number of blocked threads and of registered wakers; `of_slots` that of wakers of
//!    slots.
//! 2. No code of others' runs under the lock: what is waited for is looked at, and wakers are cloned,
//!    woken and dropped, without it.
//! 3. A waker that panics keeps nobody else from being woken, nor who wakes from going on.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, DefaultHasher};
use std::mem;
use std::task::Waker;
use std::time::Instant;

use percpu::fence::{heavy, light};
use percpu::sync::atomic::{AtomicUsize, Ordering};
use percpu::sync::{Condvar, Mutex, check};

use super::panics::contained;

#[derive(Debug)]
pub(super) struct Waiters {
    count: AtomicUsize,
    of_slots: AtomicUsize,
    waiting: Mutex<Waiting>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct Waiting {
    /// How often threads were woken.
    changes: u64,
    wakers: Map<Whose, Wakers>,
    next: u64,
}

/// Not seeded, so that models see the same order each time; the keys are the table's.
type Map<K, V> = HashMap<K, V, BuildHasherDefault<DefaultHasher>>;

/// By the numbers of their places.
type Wakers = Map<u64, Waker>;

/// The index of a slot; or nothing, for the table.
type Whose = Option<u32>;

/// A future's place among the waiters; 0 is none.
#[derive(Debug, Default)]
pub(super) struct Place {
    whose: Whose,
    number: u64,
}

/// Wakers that were taken from their places; a drop wakes them.
#[derive(Debug, Default)]
pub(super) struct Woken {
    of_slot: Wakers,
    of_table: Wakers,
    of_all: Map<Whose, Wakers>,
}

impl Drop for Woken {
    fn drop(&mut self) {
        let all = mem::take(&mut self.of_all).into_values();
        let wakers = [mem::take(&mut self.of_slot), mem::take(&mut self.of_table)];
        for waker in wakers.into_iter().chain(all).flat_map(HashMap::into_values) {
            contained(|| waker.wake());
        }
    }
}

/// A blocked thread, as long as it is counted.
struct Counted<'a>(&'a AtomicUsize);

impl<'a> Counted<'a> {
    fn new(count: &'a AtomicUsize) -> Self {
        // Ordering: Relaxed; `heavy` orders it before the checks, for `notify`.
        count.fetch_add(1, Ordering::Relaxed);
        Self(count)
    }
}

impl Drop for Counted<'_> {
    fn drop(&mut self) {
        // Ordering: Relaxed; a notify that still counts us wakes nobody.
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Waiters {
    pub(super) fn new() -> Self {
        Self {
            count: AtomicUsize::new(0),
            of_slots: AtomicUsize::new(0),
            waiting: Mutex::default(),
            changed: Condvar::new(),
        }
    }

    /// After a change that blocked threads, or wakers of the table, may wait for. Wait-free while there
    /// are none.
    ///
    /// Runs wakers: neither under a lock, nor with a guard.
    #[inline(always)]
    pub(super) fn notify(&self) {
        if self.is_anybody() {
            drop(self.take_table());
        }
    }

    /// [`notify`](Self::notify), after a change of a slot.
    #[inline(always)]
    pub(super) fn notify_slot(&self, index: u32) {
        if self.is_anybody() {
            drop(self.take_both(index));
        }
    }

    /// [`notify`](Self::notify), after changes of many slots.
    pub(super) fn notify_all(&self) {
        if self.is_anybody() {
            drop(self.take_all());
        }
    }

    /// After a change of a slot, by who notifies the others later: the wakers of that slot. Wait-free
    /// while no slot has any.
    #[inline(always)]
    pub(super) fn take_slot(&self, index: u32) -> Option<Woken> {
        light(); // pairs with the `heavy` of a waiter
        // Ordering: Relaxed; the fences order it.
        let none = self.of_slots.load(Ordering::Relaxed) == 0;
        (!check!("wake: no slot has a waiter", none)).then(|| self.take_of_slot(index))
    }

    /// [`notify`](Self::notify), but for the wakers, which a drop of what comes back wakes.
    #[inline(always)]
    pub(super) fn take_threads(&self) -> Option<Woken> {
        self.is_anybody().then(|| self.take_table())
    }

    #[inline(always)]
    fn is_anybody(&self) -> bool {
        light(); // pairs with the `heavy` of a waiter
        // Ordering: Relaxed; the fences order it.
        !check!("wake: the table has no waiter", self.count.load(Ordering::Relaxed) == 0)
    }

    /// Takes the wakers that `pick` picks, and wakes threads if `threads`.
    fn take(&self, threads: bool, pick: impl FnOnce(&mut Waiting, &mut Woken)) -> Woken {
        let mut woken = Woken::default();
        // Where the lock is refused nobody of this process waits.
        let mut waiting = self.waiting.lock();
        if threads {
            waiting.changes += 1;
            self.changed.notify_all();
        }
        pick(&mut waiting, &mut woken);
        let of_all = woken.of_all.iter();
        let of_all = of_all.fold((0, 0), |(slots, all), (whose, wakers)| {
            (slots + usize::from(whose.is_some()) * wakers.len(), all + wakers.len())
        });
        let (slots, all) = (woken.of_slot.len() + of_all.0, woken.of_table.len() + of_all.1);
        // Ordering: Relaxed, both; under the lock.
        self.of_slots.fetch_sub(slots, Ordering::Relaxed);
        self.count.fetch_sub(woken.of_slot.len() + all, Ordering::Relaxed);
        drop(waiting);
        woken
    }

    #[cold]
    #[inline(never)]
    fn take_table(&self) -> Woken {
        self.take(true, |waiting, woken| woken.of_table = waiting.remove(None))
    }

    #[cold]
    #[inline(never)]
    fn take_of_slot(&self, index: u32) -> Woken {
        self.take(false, |waiting, woken| woken.of_slot = waiting.remove(Some(index)))
    }

    #[cold]
    #[inline(never)]
    fn take_both(&self, index: u32) -> Woken {
        self.take(true, |waiting, woken| {
            woken.of_slot = waiting.remove(Some(index));
            woken.of_table = waiting.remove(None);
        })
    }

    #[cold]
    #[inline(never)]
    fn take_all(&self) -> Woken {
        self.take(true, |waiting, woken| mem::swap(&mut woken.of_all, &mut waiting.wakers))
    }

    /// Blocks until `done` gives something, or until the deadline.
    ///
    /// `done` runs without the lock, as often as something changes.
    pub(super) fn wait<R>(
        &self,
        deadline: Option<Instant>,
        mut done: impl FnMut() -> Option<R>,
    ) -> Option<R> {
        let _counted = Counted::new(&self.count);
        heavy();
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

    /// Has `waker` woken at the next change of a slot, or of anything; whoever calls this checks after
    /// it. False if there is no memory for it.
    pub(super) fn register(&self, place: &mut Place, whose: Whose, waker: &Waker) -> bool {
        let waker = waker.clone();
        let mut waiting = self.waiting.lock();
        if let Some(known) = waiting.find(place) {
            // Who changes something after that `heavy` finds the place, or has emptied it.
            let replaced = mem::replace(known, waker);
            drop(waiting);
            contained(|| drop(replaced));
            return true;
        }
        waiting.next += 1;
        let number = waiting.next;
        if let Err(refused) = waiting.add(whose, number, waker) {
            drop(waiting);
            contained(|| drop(refused));
            return false;
        }
        *place = Place { whose, number };
        // Ordering: Relaxed, both; `heavy` orders them before the check that follows.
        self.of_slots.fetch_add(usize::from(whose.is_some()), Ordering::Relaxed);
        self.count.fetch_add(1, Ordering::Relaxed);
        drop(waiting);
        heavy();
        true
    }

    /// Forgets what was registered.
    pub(super) fn leave(&self, place: &mut Place) {
        let place = mem::take(place);
        if place.number == 0 {
            return;
        }
        let mut waiting = self.waiting.lock();
        let left = waiting.forget(&place);
        if left.is_some() {
            // Ordering: Relaxed, both; under the lock.
            self.of_slots.fetch_sub(usize::from(place.whose.is_some()), Ordering::Relaxed);
            self.count.fetch_sub(1, Ordering::Relaxed);
        }
        drop(waiting);
        contained(|| drop(left));
    }
}

impl Waiting {
    fn find(&mut self, place: &Place) -> Option<&mut Waker> {
        self.wakers.get_mut(&place.whose)?.get_mut(&place.number)
    }

    /// Gives the waker back if there is no memory.
    fn add(&mut self, whose: Whose, number: u64, waker: Waker) -> Result<(), Waker> {
        if self.wakers.try_reserve(1).is_err() {
            return Err(waker);
        }
        let wakers = self.wakers.entry(whose).or_default();
        if wakers.try_reserve(1).is_ok() {
            wakers.insert(number, waker);
            return Ok(());
        }
        if wakers.is_empty() {
            self.wakers.remove(&whose);
        }
        Err(waker)
    }

    fn remove(&mut self, whose: Whose) -> Wakers {
        self.wakers.remove(&whose).unwrap_or_default()
    }

    fn forget(&mut self, place: &Place) -> Option<Waker> {
        let wakers = self.wakers.get_mut(&place.whose)?;
        let waker = wakers.remove(&place.number);
        if wakers.is_empty() {
            self.wakers.remove(&place.whose);
        }
        waker
    }
}

#[cfg(all(test, not(any(offlock_loom, offlock_shuttle))))]
mod tests {
    use std::panic::{AssertUnwindSafe, catch_unwind};

    use super::*;

    /// Who is not there any more is not counted: else every change looks for him.
    #[test]
    fn inv18_nobody_is_counted_who_is_gone() {
        let waiters = Waiters::new();
        let panic = catch_unwind(AssertUnwindSafe(|| {
            waiters.wait(None, || -> Option<()> { panic!("half-way") })
        }));
        assert!(panic.is_err());
        let mut places = [const { Place { whose: None, number: 0 } }; 4];
        for (at, place) in places.iter_mut().enumerate() {
            for _ in 0..2 {
                let whose = (at != 0).then_some(at as u32 / 2);
                assert!(waiters.register(place, whose, Waker::noop()));
            }
        }
        let counts =
            || (waiters.count.load(Ordering::Relaxed), waiters.of_slots.load(Ordering::Relaxed));
        assert_eq!(counts(), (4, 3));
        drop(waiters.take_slot(0));
        assert_eq!(counts(), (3, 2));
        waiters.leave(&mut places[1]);
        waiters.leave(&mut places[2]);
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
