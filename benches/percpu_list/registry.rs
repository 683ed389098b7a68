//! The interface of every implementation, and the loops that all of them run.
//!
//! What is registered are objects: a cache line each, as much as any open file or connection has at
//! least. An intrusive list links the object; a slab keeps its address; a list that owns values keeps
//! the value.

/// An implementation. Static dispatch throughout.
pub(crate) trait Registry: Send + Sync + Sized + 'static {
    /// The name in the tables.
    const NAME: &'static str;
    /// The registered object, which exists before it is added and after it is removed.
    type Object: Send + Sync;
    /// The handle by which a program removes an object.
    type Ticket: Send + Sync;

    fn new() -> Self;

    /// Object `n`, on no list.
    fn object(&self, n: u64) -> Self::Object;

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
            (0..count as u64).map(|n| registry.object(first + n)).collect();
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
