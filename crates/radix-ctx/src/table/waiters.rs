//! Who waits for something of a table, blocked or as a future.
//!
//! ```text
//!   waiter                         who changes something
//!   count += 1                     change it (the state of a slot, the reclaimer)
//!   heavy()                        light()
//!   done? else wait                count != 0? wake all
//! ```
//!
//! So nobody pays for waiters while there are none. All are woken for everything: waits are rare.
//!
//! # Invariants
//!
//! 1. `count` is the number of blocked threads that may not have seen the last change, and of
//!    registered wakers.
//! 2. Wakers are woken, and dropped, without the lock.

use std::mem;
use std::task::Waker;
use std::time::Instant;

use percpu::Forked;
use percpu::fence::{heavy, light};
use percpu::sync::atomic::{AtomicUsize, Ordering};
use percpu::sync::{Condvar, Generation, Mutex, mutant};

#[derive(Debug)]
pub(super) struct Waiters {
    count: AtomicUsize,
    wakers: Mutex<Wakers>,
    changed: Condvar,
    born: Generation,
}

#[derive(Debug, Default)]
struct Wakers {
    list: Vec<(u64, Waker)>,
    next: u64,
}

/// A future's place among the waiters; 0 is none.
#[derive(Debug, Default)]
pub(super) struct Place(u64);

impl Waiters {
    pub(super) fn new() -> Self {
        Self {
            count: AtomicUsize::new(0),
            wakers: Mutex::default(),
            changed: Condvar::new(),
            born: Generation::current(),
        }
    }

    /// True if who would have to wake us may not exist in this process.
    pub(super) fn is_inherited(&self) -> bool {
        self.born.is_inherited()
    }

    /// After a change that somebody may wait for. Wait-free while nobody does.
    #[inline(always)]
    pub(super) fn notify(&self) {
        light(); // pairs with the `heavy` of a waiter
        // Ordering: Relaxed; the fences order it.
        if self.count.load(Ordering::Relaxed) != 0 && !mutant("waiters-nobody-is-woken") {
            self.notify_slow();
        }
    }

    #[cold]
    #[inline(never)]
    fn notify_slow(&self) {
        let woken = {
            // Where that is refused nobody of this process waits.
            let Ok(mut wakers) = self.born.lock(&self.wakers) else { return };
            let woken = mem::take(&mut wakers.list);
            // Ordering: Relaxed; under the lock.
            self.count.fetch_sub(woken.len(), Ordering::Relaxed);
            self.changed.notify_all();
            woken
        };
        woken.into_iter().for_each(|(_, waker)| waker.wake());
    }

    /// Blocks until `done` gives something, or until the deadline.
    ///
    /// `done` runs under the lock of the waiters: it must neither notify nor take time.
    ///
    /// # Errors
    ///
    /// [`Forked`] in a fork child, if a thread that it may not have holds that lock.
    pub(super) fn wait<R>(
        &self,
        deadline: Option<Instant>,
        mut done: impl FnMut() -> Option<R>,
    ) -> Result<Option<R>, Forked> {
        // Ordering: Relaxed; `heavy` orders it before the checks, for `notify`.
        self.count.fetch_add(1, Ordering::Relaxed);
        heavy();
        let missed = mutant("waiters-check-first") && done().is_none();
        let mut wakers = self.born.lock(&self.wakers)?; // counted in vain if not
        if missed {
            self.changed.wait(&mut wakers);
        }
        let got = loop {
            if let Some(got) = done() {
                break Some(got);
            }
            match deadline.map(|deadline| deadline.saturating_duration_since(Instant::now())) {
                None => self.changed.wait(&mut wakers),
                Some(left) if left.is_zero() => break None,
                Some(left) => self.changed.wait_timeout(&mut wakers, left),
            }
        };
        // Ordering: Relaxed; a notify that still counts us wakes nobody.
        self.count.fetch_sub(1, Ordering::Relaxed);
        Ok(got)
    }

    /// Has `waker` woken at the next change; whoever calls this checks after it.
    ///
    /// False if there is no memory for it, or, in a fork child, no lock.
    pub(super) fn register(&self, place: &mut Place, waker: &Waker) -> bool {
        let waker = waker.clone();
        let replaced;
        let registered = {
            let Ok(mut wakers) = self.born.lock(&self.wakers) else { return false };
            let known = wakers.list.iter().position(|(number, _)| *number == place.0);
            if let Some(known) = known {
                replaced = Some(mem::replace(&mut wakers.list[known].1, waker));
                true
            } else {
                replaced = None;
                let room = wakers.list.try_reserve(1).is_ok();
                if room {
                    wakers.next += 1;
                    place.0 = wakers.next;
                    wakers.list.push((place.0, waker));
                    // Ordering: Relaxed; `heavy` orders it before the check that follows.
                    self.count.fetch_add(1, Ordering::Relaxed);
                }
                room
            }
        };
        drop(replaced);
        heavy();
        registered
    }

    /// Forgets what was registered.
    pub(super) fn leave(&self, place: &mut Place) {
        let number = mem::take(&mut place.0);
        if number == 0 {
            return;
        }
        let Ok(mut wakers) = self.born.lock(&self.wakers) else { return };
        let known = wakers.list.iter().position(|(other, _)| *other == number);
        let left = known.map(|known| wakers.list.swap_remove(known));
        if left.is_some() {
            // Ordering: Relaxed; under the lock.
            self.count.fetch_sub(1, Ordering::Relaxed);
        }
        drop(wakers);
        drop(left);
    }
}
