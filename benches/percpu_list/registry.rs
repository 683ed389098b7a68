//! The interface of every implementation, and the loops that all of them run.
//!
//! What is registered are objects: a cache line each, as much as any open file or connection has at
//! least. An intrusive list links the object; a slab keeps its address; a list that owns values keeps
//! the value.

use std::hint::black_box;

use harness::Case;

/// An implementation. Static dispatch throughout.
pub(crate) trait Registry: Sync + Sized {
    /// The name in the tables.
    const NAME: &'static str;
    /// The registered object, which exists before it is added and after it is removed.
    type Object: Send + Sync;
    /// The handle by which a program removes an object.
    type Ticket<'a>: Send
    where
        Self: 'a;

    fn new() -> Self;

    /// Object `n`, on no list.
    fn object(&self, n: u64) -> Self::Object;

    /// Adds an object, which is not there.
    fn add<'a>(&'a self, object: &Self::Object) -> Self::Ticket<'a>;

    /// Removes an object; whether it was there.
    fn remove<'a>(&'a self, object: &Self::Object, ticket: Self::Ticket<'a>) -> bool;
}

/// A registry whose entries can be walked while no thread adds or removes.
pub(crate) trait Walk: Registry {
    /// Calls `f` with the number of every object: read in the object itself.
    fn each(&self, f: impl FnMut(u64));
}

/// The number of entries that `live` rows have beside those that come and go.
pub(crate) const LIVE: usize = 100_000;

/// Objects that are in a registry, until this is dropped.
pub(crate) struct Entries<'a, R: Registry> {
    registry: &'a R,
    entries: Vec<(R::Object, Option<R::Ticket<'a>>)>,
}

impl<'a, R: Registry> Entries<'a, R> {
    /// Adds objects number `first` and up.
    pub(crate) fn new(registry: &'a R, first: u64, count: usize) -> Self {
        let object = |n| registry.object(first + n);
        // All objects first: so they lie in memory in the order in which they are added.
        let objects: Vec<R::Object> = (0..count as u64).map(object).collect();
        let entry = |object| {
            let ticket = registry.add(&object);
            (object, Some(ticket))
        };
        Self { registry, entries: objects.into_iter().map(entry).collect() }
    }

    /// Removes an object and adds it again.
    #[inline]
    pub(crate) fn renew(&mut self, at: usize) {
        let (object, entry) = &mut self.entries[at];
        let ticket = entry.take().expect("it is there");
        assert!(self.registry.remove(object, ticket));
        *entry = Some(self.registry.add(object));
    }

    /// Returns the number of entries.
    pub(crate) fn len(&self) -> usize {
        self.entries.len()
    }
}

impl<R: Registry> Drop for Entries<'_, R> {
    fn drop(&mut self) {
        for (object, entry) in &mut self.entries {
            if let Some(ticket) = entry.take() {
                self.registry.remove(object, ticket);
            }
        }
    }
}

/// Adds an object and removes it, on each thread one of its own: the row `name/threads`.
pub(crate) fn pair<'a, R: Registry>(registry: &'a R, name: &str, threads: usize) -> Case<'a> {
    Case::new(name, threads, move |thread| {
        let object = registry.object(thread as u64);
        move |_| {
            let ticket = black_box(registry.add(&object));
            assert!(registry.remove(&object, ticket));
        }
    })
}
