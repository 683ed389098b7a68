//! A stash of objects on every CPU.
//!
//! ```text
//!  get -> cpu 0: try-lock, | a b c - |  pop          busy, or empty: None
//!  put -> cpu 1: try-lock, | d - - - |  push         busy, or full: the object back
//! ```
//!
//! Nobody waits: a stash that somebody else is using counts as empty to `get` and as full to `put`.
//! Two threads meet at one stash only if one was moved or preempted in the few instructions that it
//! held the lock, or if `drain` comes by.
//!
//! # Invariants
//!
//! 1. `objects` is touched only by the holder of `locked`.
//! 2. No code of the caller's runs while a stash is locked.
//! 3. `objects` has room for `each` objects and never holds more.

use std::fmt;
use std::iter::FusedIterator;

use crate::error::{AllocError, out_of_memory};
use crate::slots::{Iter, PerCpu};
use crate::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use crate::sync::cell::UnsafeCell;
use crate::sync::mutant;

/// Objects kept per CPU for who needs one next.
///
/// For objects that are dear to make: a buffer, a node with its locks. Lock-free, as every
/// operation gives up rather than wait: one compare-exchange on a line of this CPU and a store.
/// Memory for the stashes is allocated by the constructor, and never after it.
///
/// Objects move between threads, so a cache that is shared needs `T: Send`, and no more:
///
/// ```compile_fail,E0277
/// fn shared<T: Sync>(_: &T) {}
/// shared(&percpu::cache::ObjectCache::<std::rc::Rc<u8>>::new(1));
/// ```
///
/// Dropping the cache drops what is in it. A fork child has copies of what was kept; a stash that
/// another thread was using at the fork stays busy in the child, and what is in it unused.
///
/// ```
/// use percpu::cache::ObjectCache;
///
/// let buffers = ObjectCache::new(4); // up to four for each CPU
/// let mut buffer: Vec<u8> = buffers.get_or_else(|| Vec::with_capacity(4096));
/// buffer.extend_from_slice(b"reply");
/// buffer.clear(); // the next user gets it as we leave it
/// drop(buffers.put(buffer)); // kept, or handed back to us and freed here
/// ```
pub struct ObjectCache<T> {
    stashes: PerCpu<Stash<T>>,
    each: usize,
}

/// What one CPU keeps.
struct Stash<T> {
    locked: AtomicBool,
    /// Times that a call found it locked.
    busy: AtomicU64,
    /// Written by the holder of the lock alone, read by anybody.
    tally: Tally,
    objects: UnsafeCell<Vec<T>>,
}

#[derive(Default)]
struct Tally {
    hits: AtomicU64,
    empty: AtomicU64,
    kept: AtomicU64,
    full: AtomicU64,
}

// SAFETY: by invariant 1 one thread at a time has the objects, which moves them between threads
// as far as `T` can tell: `T: Send` suffices, `&T` is never shared.
unsafe impl<T: Send> Sync for Stash<T> {}

/// How often an [`ObjectCache`] could help, over all CPUs, since it was made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct ObjectStats {
    /// `get` found an object.
    pub hits: u64,
    /// `get` found none.
    pub empty: u64,
    /// `put` kept the object.
    pub kept: u64,
    /// `put` handed the object back for want of room.
    pub full: u64,
    /// `get`, `put` or a drain found the stash in use, and went without it.
    pub busy: u64,
}

impl fmt::Display for ObjectStats {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { hits, empty, kept, full, busy } = self;
        write!(f, "get: {hits} found, {empty} empty; put: {kept} kept, {full} full; {busy} busy")
    }
}

impl<T> ObjectCache<T> {
    /// Makes a cache that keeps up to `each` objects for every possible CPU, and keeps none yet.
    ///
    /// # Aborts
    ///
    /// Like `Box::new`, if there is no memory, or never could be for so many;
    /// [`try_new`](Self::try_new) returns that.
    #[must_use]
    pub fn new(each: usize) -> Self {
        Self::try_new(each).unwrap_or_else(|_| out_of_memory::<T>(each))
    }

    /// Makes a cache that keeps up to `each` objects for every possible CPU, and keeps none yet.
    ///
    /// # Errors
    ///
    /// [`AllocError`] if there is no memory for the stashes, or could not be for any machine.
    pub fn try_new(each: usize) -> Result<Self, AllocError> {
        let mut failed = false;
        let stashes = PerCpu::try_new(|_| {
            let mut objects = Vec::new();
            failed |= objects.try_reserve_exact(each).is_err();
            Stash::with(objects)
        })?;
        if failed { Err(AllocError::new()) } else { Ok(Self { stashes, each }) }
    }

    /// An object that this CPU kept, as its last user left it: the one put last.
    #[inline]
    pub fn get(&self) -> Option<T> {
        self.stashes.local().try_lock()?.take()
    }

    /// An object that this CPU kept, or what `make` makes.
    ///
    /// `make` runs with nothing locked: it may use the cache, and a panic of it passes through.
    #[inline]
    pub fn get_or_else(&self, make: impl FnOnce() -> T) -> T {
        self.get().unwrap_or_else(make)
    }

    /// Keeps `object` for the next `get` on this CPU.
    ///
    /// # Errors
    ///
    /// The object itself, if this CPU keeps as many as it may, or its stash is in use.
    #[inline]
    pub fn put(&self, object: T) -> Result<(), T> {
        match self.stashes.local().try_lock() {
            Some(mut stash) => stash.keep(object, self.each),
            None => Err(object),
        }
    }

    /// Takes objects out one by one, CPU by CPU, until none is left: to give memory back.
    ///
    /// A moving target: what is put behind it stays, and a stash in use is passed by (a
    /// drain with no other user of the cache around takes everything).
    pub fn drain(&self) -> Drain<'_, T> {
        Drain { stashes: self.stashes.iter(), at: None }
    }

    /// How many objects a CPU keeps at most.
    #[must_use]
    pub fn each(&self) -> usize {
        self.each
    }

    /// How often it could help. Wait-free: a few loads for every CPU, at different moments.
    #[must_use]
    pub fn stats(&self) -> ObjectStats {
        // Ordering: Relaxed; statistics, they publish nothing.
        let read = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        self.stashes.iter().fold(ObjectStats::default(), |sum, (_, stash)| ObjectStats {
            hits: sum.hits + read(&stash.tally.hits),
            empty: sum.empty + read(&stash.tally.empty),
            kept: sum.kept + read(&stash.tally.kept),
            full: sum.full + read(&stash.tally.full),
            busy: sum.busy + read(&stash.busy),
        })
    }
}

impl<T> Stash<T> {
    fn with(objects: Vec<T>) -> Self {
        Self {
            locked: AtomicBool::new(false),
            busy: AtomicU64::new(0),
            tally: Tally::default(),
            objects: UnsafeCell::new(objects),
        }
    }

    #[inline]
    fn try_lock(&self) -> Option<Locked<'_, T>> {
        let success = if mutant("object-cache-locks-relaxed") {
            Ordering::Relaxed
        } else {
            Ordering::Acquire
        };
        // Ordering: Acquire on success pairs with the Release in `Locked::drop`; it carries the
        // objects. Relaxed on failure: nothing is read.
        if self.locked.compare_exchange(false, true, success, Ordering::Relaxed).is_err()
            && !mutant("object-cache-ignores-the-lock")
        {
            // Ordering: Relaxed; statistics.
            self.busy.fetch_add(1, Ordering::Relaxed);
            return None;
        }
        Some(Locked(self))
    }
}

/// The right to use a stash. Unlocks on drop.
struct Locked<'a, T>(&'a Stash<T>);

impl<T> Locked<'_, T> {
    #[inline]
    fn take(&mut self) -> Option<T> {
        let Tally { hits, empty, .. } = &self.0.tally;
        let object = self.with(Vec::pop);
        count(if object.is_some() { hits } else { empty });
        object
    }

    #[inline]
    fn keep(&mut self, object: T, each: usize) -> Result<(), T> {
        let Tally { kept, full, .. } = &self.0.tally;
        let refused = self.with(|objects| {
            if objects.len() >= each {
                return Err(object);
            }
            objects.push(object); // invariant 3: within its capacity, so it does not allocate
            Ok(())
        });
        count(if refused.is_ok() { kept } else { full });
        refused
    }

    #[inline]
    fn with<R>(&mut self, f: impl FnOnce(&mut Vec<T>) -> R) -> R {
        // SAFETY: invariant 1; we hold the lock until we drop, and `&mut self` lends it once.
        self.0.objects.with_mut(|objects| f(unsafe { &mut *objects }))
    }
}

impl<T> Drop for Locked<'_, T> {
    #[inline]
    fn drop(&mut self) {
        // Ordering: Release pairs with the Acquire in `try_lock`; it carries the objects.
        self.0.locked.store(false, Ordering::Release);
    }
}

/// Counts in a word that only the holder of the lock writes.
#[inline]
fn count(word: &AtomicU64) {
    // Ordering: Relaxed, both; statistics, and the lock orders the writers.
    word.store(word.load(Ordering::Relaxed) + 1, Ordering::Relaxed);
}

/// Takes objects out of an [`ObjectCache`]: see [`ObjectCache::drain`].
///
/// Dropping it leaves the rest in the cache.
pub struct Drain<'a, T> {
    stashes: Iter<'a, Stash<T>>,
    at: Option<&'a Stash<T>>,
}

impl<T> Iterator for Drain<'_, T> {
    type Item = T;

    fn next(&mut self) -> Option<T> {
        loop {
            if let Some(object) =
                self.at.and_then(Stash::try_lock).and_then(|mut at| at.with(Vec::pop))
            {
                return Some(object);
            }
            self.at = self.stashes.next().map(|(_, stash)| stash);
            self.at?; // fused: after the last stash there is none to come back to
        }
    }
}

impl<T> FusedIterator for Drain<'_, T> {}

impl<T> fmt::Debug for Drain<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Drain").finish_non_exhaustive()
    }
}

impl<T> fmt::Debug for ObjectCache<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ObjectCache")
            .field("each", &self.each)
            .field("stats", &self.stats())
            .finish_non_exhaustive()
    }
}

#[cfg(all(test, not(any(offlock_loom, offlock_shuttle))))]
mod tests {
    use std::cell::Cell;
    use std::panic::{AssertUnwindSafe, catch_unwind};
    use std::rc::Rc;

    use super::*;

    /// Locks every stash, as if its user had been preempted there.
    fn lock_all<T>(cache: &ObjectCache<T>) -> Vec<Locked<'_, T>> {
        cache.stashes.iter().map(|(_, stash)| stash.try_lock().unwrap()).collect()
    }

    #[test]
    fn a_stash_in_use_is_empty_to_get_and_full_to_put() {
        let cache = ObjectCache::new(2);
        cache.put(1).unwrap();
        let locked = lock_all(&cache);
        assert_eq!(cache.get(), None);
        assert_eq!(cache.put(2), Err(2));
        assert_eq!(cache.get_or_else(|| 3), 3);
        assert_eq!(cache.drain().next(), None, "passed by");
        drop(locked);
        assert!(cache.stats().busy >= 4);
        assert_eq!(cache.drain().collect::<Vec<_>>(), [1]);
        assert_eq!(cache.drain().next(), None);
    }

    /// On one CPU at most `each` are kept, last in first out; the rest comes back.
    #[test]
    fn each_bounds_a_stash_and_the_surplus_comes_back() {
        for each in [0, 1, 3] {
            let cache = ObjectCache::try_new(each).unwrap();
            let stash = cache.stashes.local();
            let mut locked = stash.try_lock().unwrap();
            for object in 0..5 {
                let kept = locked.keep(object, each).is_ok();
                assert_eq!(kept, object < each);
            }
            for object in (0..each).rev() {
                assert_eq!(locked.take(), Some(object));
            }
            assert_eq!(locked.take(), None);
            drop(locked);
            let each = each as u64;
            let want = ObjectStats { hits: each, empty: 1, kept: each, full: 5 - each, busy: 0 };
            assert_eq!(cache.stats(), want);
            let line =
                format!("get: {each} found, 1 empty; put: {each} kept, {} full; 0 busy", 5 - each);
            assert_eq!(want.to_string(), line);
        }
    }

    #[test]
    fn a_panic_of_make_leaves_the_cache_as_it_was() {
        let cache = ObjectCache::<u8>::new(1);
        let made = catch_unwind(AssertUnwindSafe(|| cache.get_or_else(|| panic!("no memory"))));
        assert!(made.is_err());
        assert!(lock_all(&cache).iter_mut().all(|stash| stash.take().is_none()));
    }

    /// A drop that comes back to the cache finds it unlocked.
    #[test]
    fn an_object_dropped_by_its_user_may_use_the_cache() {
        struct Returns(Rc<ObjectCache<u8>>);
        impl Drop for Returns {
            fn drop(&mut self) {
                self.0.put(7).unwrap();
            }
        }
        let inner = Rc::new(ObjectCache::new(8));
        let cache = ObjectCache::new(1);
        let mut last = None;
        for _ in 0..2 {
            last = cache.put(Returns(Rc::clone(&inner))).err();
        }
        drop(last);
        drop(cache);
        assert_eq!(inner.drain().count(), 2, "each was dropped once");
    }

    /// What is shared and what is sent: the objects are moved between threads, never shared.
    const _: () = {
        const fn send<T: Send>() {}
        const fn sync<T: Sync>() {}
        sync::<ObjectCache<Cell<u8>>>();
        send::<ObjectCache<Cell<u8>>>();
        send::<Drain<'_, Cell<u8>>>();
    };

    /// A longer borrow may stand for a shorter one.
    #[expect(dead_code, reason = "compiled for the variance it needs")]
    fn covariant<'short, T>(drain: Drain<'static, T>) -> Drain<'short, T> {
        drain
    }
}
