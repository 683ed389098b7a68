//! The statistics of a table, and the check of its invariants.

use std::fmt;

use offlock_sync::atomic::Ordering;

use crate::core::{Core, RetireLists, State};
use crate::id::MAX_GENERATION;
use crate::slab::{FULL, LAST_KEY, NotLive, SLOTS, Slab, slab_of};
use crate::table::CtxTable;

/// The statistics of a table. Returned by [`CtxTable::stats`].
///
/// Exact while no thread changes the table. During changes, each number is right for some moment.
///
/// ```
/// use radix_ctx::CtxTable;
///
/// let table = CtxTable::new();
/// let id = table.insert("alice")?;
/// let reference = table.get_ref(id)?;
/// table.remove(id)?;
/// let stats = table.stats();
/// assert_eq!((stats.live, stats.pending), (0, 1));
/// println!("{stats}");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct TableStats {
    /// The number of live contexts.
    pub live: u64,
    /// The number of removed contexts that are not dropped yet, including the next field.
    pub pending: u64,
    /// The number of removed contexts that only references keep.
    pub referenced: u64,
    /// The number of indexes that will not be used again, because their generations are used up.
    pub exhausted: u64,
    /// The number of slabs, which have 64 slots each.
    pub slabs: u64,
    /// The number of nodes in the tree above the slabs.
    pub nodes: u64,
    /// The number of levels of those nodes.
    pub height: u32,
    /// The size of the table, its slabs and its nodes in bytes, without memory that contexts own, the
    /// counts of references, and memory that waits for readers.
    pub bytes: u64,
}

impl<T: Send + Sync + 'static> CtxTable<T> {
    /// Returns the number of live contexts. Blocks shortly on the table's lock.
    #[must_use]
    pub fn len(&self) -> usize {
        let core = self.core();
        core.len(&core.lock()) as usize
    }

    /// Returns whether no context is live. Blocks like [`len`](Self::len).
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns the statistics of the table. Blocks shortly on the table's lock.
    #[must_use]
    pub fn stats(&self) -> TableStats {
        self.core().stats()
    }

    /// Checks the invariants of the table. No thread may change the table meanwhile.
    ///
    /// # Panics
    ///
    /// Panics if an invariant does not hold.
    #[doc(hidden)]
    pub fn validate(&self) {
        self.core().validate();
    }
}

impl<T: Send + Sync + 'static> Core<T> {
    /// Returns the number of live contexts. Exact while no thread inserts or removes one.
    fn len(&self, state: &State<T>) -> u64 {
        state.in_use().saturating_sub(self.pending(state))
    }

    fn stats(&self) -> TableStats {
        let state = self.lock();
        let (live, pending) = (self.len(&state), self.pending(&state));
        let (slabs, exhausted) = (state.slabs, state.exhausted);
        drop(state);
        let lists = self
            .lists
            .get()
            .map_or(0, |lists| lists.capacity() * size_of::<RetireLists>().max(128));
        let bytes = size_of::<Self>()
            + self.slabs.tree().bytes()
            + slabs as usize * Slab::<T>::BYTES
            + lists;
        TableStats {
            live,
            pending,
            // Ordering: Relaxed; a statistic.
            referenced: self.referenced.load(Ordering::Relaxed),
            exhausted,
            slabs,
            nodes: self.slabs.tree().node_count() as u64,
            height: self.slabs.tree().height(),
            bytes: bytes as u64,
        }
    }

    fn validate(&self) {
        let state = self.lock();
        self.slabs.tree().validate(|word| {
            // SAFETY: invariant 4 of `slab`: it is in the tree, and this thread holds the lock.
            slab_of::<T>(word).is_some_and(|slab| unsafe { slab.as_ref() }.used() != FULL)
        });
        let (mut used, mut slabs) = (0, 0);
        let mut from = 0;
        let mut live = 0;
        while let Some((key, slab)) = self.slabs.next_slab(from, LAST_KEY) {
            // SAFETY: invariant 4 of `slab`: it is in the tree, and this thread holds the lock.
            let it = unsafe { slab.as_ref() };
            assert_eq!(it.key(), key);
            slabs += 1;
            used += u64::from(it.used().count_ones());
            for number in 0..SLOTS {
                let index = it.index(number);
                // Ordering: Relaxed; no thread changes the table, by the contract of `validate`.
                let slot = it.slot(index).state.load(Ordering::Relaxed);
                let is_used = it.used() >> number & 1 == 1;
                match NotLive::read(slot) {
                    None => {
                        live += 1;
                        assert!(is_used, "{index} is live and vacant");
                        assert_eq!(slot as u32, index, "the state of {index}");
                    }
                    Some(state) => {
                        assert!(is_used || !state.is_dead(), "{index} is dead and vacant");
                        assert!(state.next() <= MAX_GENERATION, "{index}: {state:?}");
                        assert!(state.is_dead() || state.link() == index, "{index}: {state:?}");
                    }
                }
            }
            from = key + 1;
        }
        assert_eq!((used, slabs), (state.used + state.exhausted, state.slabs), "used slots, slabs");
        assert_eq!(self.len(&state), live, "live contexts");
    }
}

impl fmt::Display for TableStats {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { live, pending, referenced, exhausted, slabs, nodes, height, bytes } = self;
        write!(
            f,
            "{live} live, {pending} pending ({referenced} referenced), {exhausted} exhausted; \
             {slabs} slabs, {nodes} nodes, {height} levels, {bytes} bytes"
        )
    }
}
