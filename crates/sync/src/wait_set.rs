//! The list of waiters: wakers in order under a lock, of tasks and of threads.
//!
//! Waiters of several conditions may share a list: each has a key, and [`WaitSet::take`] ends the waits
//! of one key.
//!
//! ```text
//!  WaitSet: lock, first, last --> | Waiter: waker | <-> | Waiter: waker |     in futures or on stacks
//! ```
//!
//! A waiter lists itself and then looks at its condition once more; the other side changes the
//! condition and then looks for waiters. A fence between the two steps of each side makes one of
//! them see the other:
//!
//! ```text
//!   waiter                                   waker
//!   under the lock: listed += 1              change the condition
//!   fence(SeqCst)                            fence(SeqCst)
//!   the condition holds?                     listed != 0? take the first waiter, wake it
//! ```
//!
//! # Invariants
//!
//! 1. The entry of a waiter is used under the lock only.
//! 2. While an entry is linked, its waiter is pinned and not dropped: the drop unlinks it first.
//! 3. No code of the user runs under the lock: wakers are cloned before it is taken, and woken and
//!    dropped after it was released.
//! 4. A waiter that was woken looks at its condition afterwards, or wakes the next waiter in its place. So a
//!    wait that is cancelled takes no wake-up with it.
//! 5. `List::woken` counts the waiters that were woken and have not begun to look since. Each of them will
//!    see one unit, so a wake-up is needed only for the units above that number.

use std::cell::Cell;
use std::fmt;
use std::marker::PhantomPinned;
use std::ops::Range;
use std::pin::{Pin, pin};
use std::ptr::NonNull;
use std::task::{Context, Poll, Waker};
use std::time::Instant;

use crate::atomic::{AtomicUsize, Ordering};
use crate::cell::UnsafeCell;
use crate::panics::exhaust;
use crate::{WordLock, block_on, fence, step};

/// A list of waiters in the order in which they began to wait.
///
/// ```
/// use std::pin::pin;
/// use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
/// use std::task::{Context, Poll, Waker};
///
/// use offlock_sync::WaitSet;
///
/// let (open, set) = (AtomicBool::new(false), WaitSet::new());
/// let mut waiter = pin!(set.waiter());
/// let mut poll = || {
///     let ready = || open.load(Relaxed).then_some("open");
///     waiter.as_mut().poll(&mut Context::from_waker(Waker::noop()), ready)
/// };
/// assert_eq!(poll(), Poll::Pending);
/// open.store(true, Relaxed);
/// set.wake_all();
/// assert_eq!(poll(), Poll::Ready("open"));
/// ```
pub struct WaitSet {
    /// The number of linked waiters. Changed under the lock.
    listed: AtomicUsize,
    list: WordLock<List>,
}

/// The ends of the list, and the number of the next waiter.
struct List {
    first: Link,
    last: Link,
    next_number: u64,
    /// Invariant 5.
    woken: usize,
}

type Link = Option<NonNull<UnsafeCell<Entry>>>;

// SAFETY: the pointers lead to entries, which are used under the lock only (invariant 1) and live
// while they are linked (invariant 2). A waker may be used on any thread.
unsafe impl Send for List {}

impl List {
    /// Runs `f` on an entry. `self` is the list under the lock, so no other thread uses the entry
    /// (invariant 1).
    ///
    /// # Safety
    ///
    /// The entry is linked, and so alive (invariant 2), or the caller borrows its waiter.
    unsafe fn with<R>(
        &mut self,
        at: NonNull<UnsafeCell<Entry>>,
        f: impl FnOnce(&mut Entry) -> R,
    ) -> R {
        // SAFETY: alive, as the caller promises. A shared reference to the cell, beside which others
        // may exist.
        let cell = unsafe { at.as_ref() };
        // SAFETY: only the holder of the lock uses the entry, and `f` calls no code that could reach it
        // by another way.
        cell.with_mut(|entry| f(unsafe { &mut *entry }))
    }

    /// Returns the first entry that `accept` accepts among those from `next` on with a number in `numbers`,
    /// the entry's number, and the entry behind it. `next` is linked.
    fn find(
        &mut self,
        mut next: Link,
        numbers: Range<u64>,
        accept: impl Fn(&Entry) -> bool,
    ) -> Option<(NonNull<UnsafeCell<Entry>>, u64, Link)> {
        while let Some(at) = next {
            let look = |entry: &mut Entry| (entry.number, accept(entry), entry.next);
            // SAFETY: linked.
            let (number, is_accepted, behind) = unsafe { self.with(at, look) };
            if number >= numbers.end {
                break; // the numbers ascend
            }
            if is_accepted && number >= numbers.start {
                return Some((at, number, behind));
            }
            next = behind;
        }
        None
    }
}

/// The part of a waiter that the list uses.
struct Entry {
    state: State,
    previous: Link,
    next: Link,
    /// Of a linked waiter.
    waker: Option<Waker>,
    /// Ascending in the list. A waiter that was woken in vain keeps its number, and so its place.
    number: u64,
    /// The units that must be there for this waiter, beside one for each waiter that was woken.
    needs: usize,
    /// For [`WaitSet::take`].
    key: u64,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum State {
    Idle,
    Linked,
    /// Taken from the list by a wake-up, and counted in `List::woken`.
    Woken,
    /// Looks after a wake-up, and has not been listed or left since.
    Looking,
}

impl WaitSet {
    /// Creates a list without waiters. Does not allocate.
    #[must_use]
    pub fn new() -> Self {
        let list = List { first: None, last: None, next_number: 0, woken: 0 };
        Self { listed: AtomicUsize::new(0), list: WordLock::new(list) }
    }

    /// Creates a waiter, which waits from its first [`poll`](Waiter::poll) on. Does not allocate.
    pub fn waiter(&self) -> Waiter<'_> {
        self.create(1, 0)
    }

    /// Creates a waiter that [`wake_for`](Self::wake_for) wakes only if there are `needs` units for it.
    pub fn waiter_needing(&self, needs: usize) -> Waiter<'_> {
        self.create(needs, 0)
    }

    /// Creates a waiter with a key, for [`take`](Self::take). Does not allocate.
    pub fn waiter_for(&self, key: u64) -> Waiter<'_> {
        self.create(1, key)
    }

    fn create(&self, needs: usize, key: u64) -> Waiter<'_> {
        let (state, number) = (State::Idle, 0);
        let entry = Entry { state, previous: None, next: None, waker: None, number, needs, key };
        let (entry, was_listed) = (UnsafeCell::new(entry), Cell::new(false));
        Waiter { set: self, entry, was_listed, _pinned: PhantomPinned }
    }

    /// Returns the number of waiters that are listed.
    ///
    /// A thread that changes the condition under a lock, under which the waiters look at it, need not call
    /// a wake-up if this is 0 under that lock: a waiter that lists itself later sees the change.
    #[inline(always)]
    pub fn waiting(&self) -> usize {
        // Ordering: Relaxed; the caller's lock orders it, or the value is only told.
        self.listed.load(Ordering::Relaxed)
    }

    /// Returns the number of waits that have begun so far.
    pub fn begun(&self) -> u64 {
        self.list.lock().next_number
    }

    /// Blocks until `ready` returns a value, and returns it; or returns `None` at the deadline.
    ///
    /// `ready` is called after each wake-up, with no lock held. Allocates once for each thread: see
    /// [`block_on`].
    pub fn wait<R>(
        &self,
        deadline: Option<Instant>,
        mut ready: impl FnMut() -> Option<R>,
    ) -> Option<R> {
        let mut waiter = pin!(self.waiter());
        let done = block_on(
            |context| waiter.as_mut().poll(context, &mut ready),
            |woken, seen| woken.wait_until(seen, deadline),
        );
        done.or_else(ready) // it may have come before the deadline, and the thread ran after it
    }

    /// Wakes the waiter that has waited for longest. The caller has changed what it waits for.
    ///
    /// A fence and a load if there is no waiter. A panic of the waker goes on to the caller.
    pub fn wake_one(&self) {
        if self.is_empty() {
            return;
        }
        let taken = self.take_next(0..u64::MAX, usize::MAX);
        if let Some((waker, _)) = taken {
            waker.wake();
        }
    }

    /// Wakes every waiter that waits at the time of the call: see [`wake_for`](Self::wake_for).
    pub fn wake_all(&self) {
        self.wake_for(usize::MAX);
    }

    /// Wakes waiters in their order, as far as `units` suffice: one for each waiter that was woken and has not
    /// begun to look since, and those that the next waiter needs. `usize::MAX` wakes all. The caller has changed
    /// what they wait for. No waiter is woken twice by one call.
    ///
    /// A fence and a load if there is no waiter. If a waker panics, the others are woken, and the panic
    /// goes on to the caller; if another one panics meanwhile, the process aborts.
    pub fn wake_for(&self, units: usize) {
        if self.is_empty() {
            return;
        }
        // One pass: a waiter that was woken in vain is listed with its former number again.
        let mut numbers = 0..self.list.lock().next_number;
        exhaust(|| {
            let Some((waker, number)) = self.take_next(numbers.clone(), units) else {
                return false;
            };
            numbers.start = number + 1;
            waker.wake();
            true
        });
    }

    /// Ends the waits of the waiters with this key, or of all, and returns their wakers. The caller has
    /// changed what they wait for, and wakes them when it holds no lock.
    ///
    /// A fence and a load if there is no waiter; otherwise it looks at every waiter, and allocates.
    pub fn take(&self, key: Option<u64>) -> Wakers {
        let mut taken = Vec::new();
        if !self.is_empty() {
            let end = self.list.lock().next_number;
            while self.take_into(&mut taken, end, key) {
                taken.reserve(1); // without the lock, because the allocator may use the list
            }
        }
        Wakers(taken.into_iter())
    }

    /// Returns whether no waiter needs to see what the calling thread has changed.
    fn is_empty(&self) -> bool {
        // Ordering: SeqCst fence, against the one in `Waiter::list`: the waiter's second look sees the
        // change, or this load sees the waiter.
        fence!(SeqCst, "wake: before the look at the waiters");
        // Ordering: Relaxed; the fences order it.
        self.listed.load(Ordering::Relaxed) == 0
    }

    /// Unlinks the first waiter that `units` suffice for and whose number is in `numbers`. Returns its waker and
    /// its number.
    fn take_next(&self, numbers: Range<u64>, units: usize) -> Option<(Waker, u64)> {
        let mut list = self.list.lock();
        let left = units.saturating_sub(if units == usize::MAX { 0 } else { list.woken });
        if left == 0 {
            return None;
        }
        let first = list.first;
        let (at, number, _) = list.find(first, numbers, |entry| entry.needs <= left)?;
        list.woken += 1;
        Some((self.unlink(&mut list, at, State::Woken)?, number))
    }

    /// Unlinks the waiters with this key, or all, whose number is below `end`, until `taken` is full of their
    /// wakers. Returns whether one is left.
    fn take_into(&self, taken: &mut Vec<Waker>, end: u64, key: Option<u64>) -> bool {
        let mut list = self.list.lock();
        let mut next = list.first;
        let accept = |entry: &Entry| key.is_none_or(|key| key == entry.key);
        while let Some((at, _, behind)) = list.find(next, 0..end, accept) {
            if taken.len() == taken.capacity() {
                return true;
            }
            taken.extend(self.unlink(&mut list, at, State::Idle));
            next = behind;
        }
        false
    }

    /// Links an entry of a pinned waiter behind those with a lower number: at the end, unless it was woken in
    /// vain.
    fn link(&self, list: &mut List, at: NonNull<UnsafeCell<Entry>>, waker: Waker) {
        // SAFETY: the caller borrows the waiter.
        let (state, own) = unsafe { list.with(at, |entry| (entry.state, entry.number)) };
        list.woken -= usize::from(state == State::Woken);
        let mut number = own;
        if state == State::Idle {
            number = list.next_number;
            list.next_number += 1;
        }
        let (mut previous, mut next) = (list.last, None);
        while let Some(before) = previous {
            // SAFETY: linked.
            let (other, earlier) =
                unsafe { list.with(before, |entry| (entry.number, entry.previous)) };
            if other < number {
                break;
            }
            (previous, next) = (earlier, previous);
        }
        // SAFETY: the caller borrows the waiter.
        unsafe {
            list.with(at, |entry| {
                entry.state = State::Linked;
                (entry.previous, entry.next) = (previous, next);
                (entry.waker, entry.number) = (Some(waker), number);
            });
        }
        match previous {
            // SAFETY: the neighbours of a linked entry are linked, and `list` is under the lock since they were read.
            Some(previous) => unsafe { list.with(previous, |entry| entry.next = Some(at)) },
            None => list.first = Some(at),
        }
        match next {
            // SAFETY: as its other neighbour, `next` was linked when it was read under this lock.
            Some(next) => unsafe { list.with(next, |entry| entry.previous = Some(at)) },
            None => list.last = Some(at),
        }
        self.count(1);
    }

    /// Unlinks a linked entry, leaves it in `state`, and returns its waker.
    fn unlink(
        &self,
        list: &mut List,
        at: NonNull<UnsafeCell<Entry>>,
        state: State,
    ) -> Option<Waker> {
        let take = |entry: &mut Entry| {
            entry.state = state;
            (entry.previous.take(), entry.next.take(), entry.waker.take())
        };
        // SAFETY: the caller passes a linked entry.
        let (previous, next, waker) = unsafe { list.with(at, take) };
        match previous {
            // SAFETY: the neighbours of a linked entry are linked, and `list` is under the lock since they were read.
            Some(previous) => unsafe { list.with(previous, |entry| entry.next = next) },
            None => list.first = next,
        }
        match next {
            // SAFETY: as its other neighbour, `next` was linked when it was read under this lock.
            Some(next) => unsafe { list.with(next, |entry| entry.previous = previous) },
            None => list.last = previous,
        }
        self.count(-1);
        waker
    }

    /// Changes the number of linked waiters. The caller holds the lock.
    fn count(&self, change: isize) {
        // Ordering: Relaxed, both; only the holder of the lock stores, and the fences order the look of
        // a thread that does not take the lock.
        let count = self.listed.load(Ordering::Relaxed);
        self.listed.store(count.wrapping_add_signed(change), Ordering::Relaxed);
    }
}

impl Default for WaitSet {
    fn default() -> Self {
        Self::new()
    }
}

impl fmt::Debug for WaitSet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("WaitSet").field("waiting", &self.waiting()).finish_non_exhaustive()
    }
}

/// Wakers that were taken from a list. Returned by [`WaitSet::take`]. The drop wakes them.
///
/// If a waker panics, the others are woken, and the panic goes on to the caller; if another one panics
/// meanwhile, the process aborts.
#[derive(Debug, Default)]
#[must_use = "the waits have ended, and the tasks must be woken"]
pub struct Wakers(std::vec::IntoIter<Waker>);

impl Wakers {
    /// Returns whether there is none.
    pub fn is_empty(&self) -> bool {
        self.0.as_slice().is_empty()
    }

    /// Wakes the tasks and threads. The caller holds no lock.
    pub fn wake(self) {
        drop(self);
    }
}

impl Iterator for Wakers {
    type Item = Waker;

    fn next(&mut self) -> Option<Waker> {
        self.0.next()
    }
}

impl Drop for Wakers {
    fn drop(&mut self) {
        exhaust(|| self.0.next().map(Waker::wake).is_some());
    }
}

/// One wait of a task or a thread. Made by [`WaitSet::waiter`]; the drop ends the wait.
///
/// Other threads write its entry while it is linked. So the type is not `Unpin`, its methods borrow it
/// shared, and a `&mut` to the entry exists only inside `List::with`, under the lock.
#[must_use = "it waits only while it is polled"]
pub struct Waiter<'a> {
    set: &'a WaitSet,
    entry: UnsafeCell<Entry>,
    /// Set by the owner while other threads may use the entry. Otherwise its state is [`State::Idle`], and
    /// needs no lock.
    was_listed: Cell<bool>,
    _pinned: PhantomPinned,
}

// SAFETY: the entry is used under the lock only (invariant 1), and a waker may be used on any thread.
unsafe impl Send for Waiter<'_> {}
// SAFETY: a `&Waiter` gives access to nothing: `was_listed` is used by `poll` and the drop, which borrow it
// exclusively.
unsafe impl Sync for Waiter<'_> {}

impl Waiter<'_> {
    /// Returns what `ready` returns, once that is a value. Until then the waker of the context is woken
    /// when `ready` may have a value.
    ///
    /// `ready` is called twice at most, with no lock held. A waiter that waits again keeps its place.
    pub fn poll<R>(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        mut ready: impl FnMut() -> Option<R>,
    ) -> Poll<R> {
        let this = &*self.as_ref();
        this.begin_to_look();
        let mut value = ready();
        if value.is_none() {
            this.list(context.waker());
            value = ready();
        }
        let Some(value) = value else { return Poll::Pending };
        if this.leave() == State::Woken {
            // Since it began to look: what it was woken for may be there still.
            step!("poll: pass a late wake-up on", this.set.wake_one());
        }
        Poll::Ready(value)
    }

    /// Counts the waiter as woken no more.
    fn begin_to_look(&self) {
        if !self.was_listed.get() {
            return;
        }
        let mut list = self.set.list.lock();
        let begin = |entry: &mut Entry| {
            let woken = entry.state == State::Woken;
            if woken {
                entry.state = State::Looking;
            }
            woken
        };
        // SAFETY: the waiter is borrowed.
        let woken = unsafe { list.with(self.address(), begin) };
        list.woken -= usize::from(woken);
    }

    fn address(&self) -> NonNull<UnsafeCell<Entry>> {
        NonNull::from(&self.entry)
    }

    /// Links the waiter at the place of its number, or changes the waker of a linked one.
    fn list(&self, waker: &Waker) {
        let mut waker = waker.clone();
        self.was_listed.set(true);
        let mut list = self.set.list.lock();
        let swap = |entry: &mut Entry| {
            entry.waker.as_mut().map(|linked| std::mem::swap(linked, &mut waker)).is_some()
        };
        // SAFETY: the waiter is borrowed.
        let linked = unsafe { list.with(self.address(), swap) };
        if linked {
            drop(list);
            drop(waker); // the former waker, after the lock (invariant 3)
        } else {
            // Pinned, and unlinked by its drop (invariant 2).
            self.set.link(&mut list, self.address(), waker);
            drop(list);
        }
        // Ordering: SeqCst fence, against the one in `WaitSet::is_empty`: the caller's next look at the
        // condition sees the change, or the waker sees this waiter.
        fence!(SeqCst, "wait: before the second look");
    }

    /// Unlinks the waiter if it is linked. Returns the state that it had.
    fn leave(&self) -> State {
        if !self.was_listed.replace(false) {
            return State::Idle;
        }
        let mut list = self.set.list.lock();
        let leave = |entry: &mut Entry| std::mem::replace(&mut entry.state, State::Idle);
        // SAFETY: the waiter is borrowed.
        let state = unsafe { list.with(self.address(), leave) };
        list.woken -= usize::from(state == State::Woken);
        let linked = state == State::Linked;
        let waker =
            linked.then(|| self.set.unlink(&mut list, self.address(), State::Idle)).flatten();
        drop(list);
        drop(waker); // after the lock (invariant 3)
        state
    }
}

impl Drop for Waiter<'_> {
    /// Ends the wait, and wakes the next waiter if this one was woken and has not looked since.
    fn drop(&mut self) {
        let this = &*self;
        if matches!(this.leave(), State::Woken | State::Looking) {
            step!("cancel: pass the wake-up on", this.set.wake_one());
        }
    }
}

impl fmt::Debug for Waiter<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Waiter").field("set", self.set).finish_non_exhaustive()
    }
}

#[cfg(all(test, not(offlock_model)))]
mod tests {
    use super::*;
    use testkit::in_time;

    /// The test holds the lock: a wait that takes it would block.
    #[test]
    fn a_wait_that_was_never_listed_takes_no_lock() {
        let set: &WaitSet = Box::leak(Box::default());
        let _list = set.list.lock();
        in_time("a poll that is ready, and the drops", || {
            let mut waiter = pin!(set.waiter());
            let mut context = Context::from_waker(Waker::noop());
            assert_eq!(waiter.as_mut().poll(&mut context, || Some(7)), Poll::Ready(7));
            waiter.set(set.waiter()); // drops the first one; the second one is never polled
        });
    }
}
