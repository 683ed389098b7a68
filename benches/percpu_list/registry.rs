//! The interface of every implementation, and the loops that all of them run.
//!
//! What is registered are objects: a cache line each, as much as any open file or connection has at
//! least. An intrusive list links the object; a slab keeps its address; a list that owns values keeps
//! the value.

use std::cell::UnsafeCell;
use std::sync::atomic::{AtomicBool, Ordering};

use harness::timed::wait;

/// An implementation. Static dispatch throughout.
pub(crate) trait Registry: Send + Sync + Sized + 'static {
    /// The name in the tables.
    const NAME: &'static str;
    /// The registered object, made of its number, which exists before it is added and after it is removed.
    type Object: From<u64> + Send + Sync;
    /// The handle by which a program removes an object.
    type Ticket: Send + Sync;

    fn new() -> Self;

    /// Adds an object, which is not there.
    fn add(&self, object: &Self::Object) -> Self::Ticket;

    /// Removes an object; whether it was there.
    fn remove(&self, object: &Self::Object, ticket: Self::Ticket) -> bool;
}

/// A registry whose entries can be walked while no thread adds or removes.
pub(crate) trait Walk: Registry {
    /// Calls `f` with the number of every object: read in the object itself.
    fn each(&self, f: impl FnMut(u64));
}

/// The number of entries that `live` rows have beside those that come and go.
pub(crate) const LIVE: usize = 100_000;

/// A registry with objects that are in it until this is dropped.
pub(crate) struct Entries<R: Registry> {
    pub(crate) registry: R,
    entries: Vec<(R::Object, Option<R::Ticket>)>,
}

impl<R: Registry> Entries<R> {
    /// Adds objects number `first` and up.
    pub(crate) fn new(first: u64, count: usize) -> Self {
        let registry = R::new();
        // All objects first: so they lie in memory in the order in which they are added.
        let objects: Vec<R::Object> =
            (0..count as u64).map(|n| R::Object::from(first + n)).collect();
        let entry = |object| {
            let ticket = registry.add(&object);
            (object, Some(ticket))
        };
        let entries = objects.into_iter().map(entry).collect();
        Self { registry, entries }
    }

    /// Removes an object and adds it again.
    #[inline]
    pub(crate) fn renew(&mut self, at: usize) {
        let (object, entry) = &mut self.entries[at];
        let ticket = entry.take().expect("it is there");
        assert!(self.registry.remove(object, ticket));
        *entry = Some(self.registry.add(object));
    }
}

impl<R: Registry> Drop for Entries<R> {
    fn drop(&mut self) {
        for (object, entry) in &mut self.entries {
            if let Some(ticket) = entry.take() {
                self.registry.remove(object, ticket);
            }
        }
    }
}

/// A place where one thread puts a value and another takes it.
pub(crate) struct Place<T> {
    is_full: AtomicBool,
    value: UnsafeCell<Option<T>>,
}

// SAFETY: by the contracts of `put` and `take` one thread at a time uses the value, and it moves a `T`.
unsafe impl<T: Send> Sync for Place<T> {}

impl<T> Place<T> {
    pub(crate) fn new() -> Self {
        Self { is_full: AtomicBool::new(false), value: UnsafeCell::new(None) }
    }

    // Ordering: Acquire loads pair with the Release store of the other thread; they carry the value.

    #[inline(always)]
    pub(crate) fn wait_until_empty(&self) {
        wait(|| !self.is_full.load(Ordering::Acquire));
    }

    /// # Safety
    ///
    /// The place is empty, and no other thread puts.
    #[inline(always)]
    pub(crate) unsafe fn put(&self, value: T) {
        // SAFETY: it is empty, by the contract of this function, and stays so until the store.
        unsafe { *self.value.get() = Some(value) };
        self.is_full.store(true, Ordering::Release);
    }

    /// Waits for the value, and calls `f` with it before the place is empty again.
    ///
    /// # Safety
    ///
    /// No other thread takes.
    #[inline(always)]
    pub(crate) unsafe fn take(&self, f: impl FnOnce(T)) {
        wait(|| self.is_full.load(Ordering::Acquire));
        // SAFETY: it is full, as was just seen, and stays so until the store.
        f(unsafe { (*self.value.get()).take() }.expect("a full place has one"));
        self.is_full.store(false, Ordering::Release);
    }

    /// Empties the place.
    pub(crate) fn clear(&mut self) -> Option<T> {
        *self.is_full.get_mut() = false;
        self.value.get_mut().take()
    }
}
