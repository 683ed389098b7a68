//! What a table consists of just now.

use std::fmt;

use percpu::sync::atomic::Ordering;

use super::core::Core;
use super::ctx_table::CtxTable;
use super::quota::Usage;
use super::retire_list::RetireLists;
use super::slab::{FULL, NotLive, SLOTS, Slab};
use super::slab_tree::LAST_KEY;

/// What a table consists of just now. From [`CtxTable::stats`].
///
/// Exact while nobody changes the table; beside changes each number is right for some moment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct TableStats {
    /// Live contexts.
    pub live: u64,
    /// Reserved ids, not live.
    pub reserved: u64,
    /// Removed contexts whose index is not free yet; the following are among them.
    pub pending: u64,
    /// Those that only references keep.
    pub referenced: u64,
    /// Indexes that will not be used again: their generations are used up.
    pub exhausted: u64,
    /// Blocks of 64 slots.
    pub slabs: u64,
    /// Nodes of the tree above them.
    pub nodes: u64,
    /// Levels of those nodes.
    pub height: u32,
    /// Bytes of the table, its slabs, and its nodes, without what contexts own, and without the counts
    /// of references and what waits for readers.
    pub bytes: u64,
    /// Drops of removed contexts that panicked; the panic ended there.
    pub panics: u64,
}

impl<T: Send + Sync + 'static> CtxTable<T> {
    /// How many contexts are live. Blocks shortly on the table's lock.
    #[must_use]
    pub fn len(&self) -> usize {
        let core = self.core();
        core.len(&core.lock()) as usize
    }

    /// Whether no context is live. As [`len`](Self::len).
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// What counts for the quota. Blocks shortly.
    #[must_use]
    pub fn usage(&self) -> Usage {
        let core = self.core();
        let (contexts, weight) = core.quota.usage();
        let contexts = match contexts {
            Some(contexts) => contexts,
            // Ordering: Relaxed; a statistic.
            None => {
                let state = core.lock();
                core.len(&state) + core.counters.reserved.load(Ordering::Relaxed)
            }
        };
        Usage { contexts, weight }
    }

    /// What the table consists of. Blocks shortly on its lock.
    #[must_use]
    pub fn stats(&self) -> TableStats {
        self.core().stats()
    }

    /// Returns memory that is kept for the next insert.
    ///
    /// A table frees its slabs and nodes by itself when the last slot of them is vacant, a grace
    /// period later, but for one slab.
    pub fn shrink_to_fit(&self) {
        self.core().shrink();
    }

    /// Checks what must hold while nobody changes the table: the invariants of the modules.
    ///
    /// # Panics
    ///
    /// Panics if something does not hold.
    #[doc(hidden)]
    pub fn validate(&self) {
        self.core().validate();
    }
}

impl<T: Send + Sync + 'static> Core<T> {
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
            // Ordering: Relaxed, all; statistics.
            reserved: self.counters.reserved.load(Ordering::Relaxed),
            pending,
            referenced: self.counters.referenced.load(Ordering::Relaxed),
            exhausted,
            slabs,
            nodes: self.slabs.tree().node_count() as u64,
            height: self.slabs.tree().height(),
            bytes: bytes as u64,
            panics: self.counters.panics.load(Ordering::Relaxed),
        }
    }

    fn validate(&self) {
        let state = self.lock();
        // SAFETY: under the lock.
        let edit = unsafe { self.slabs.tree().edit() };
        edit.validate().expect("a sound tree");
        let (mut used, mut slabs, mut empty) = (0, 0, 0);
        let mut from = 0;
        let mut live = 0;
        while let Some((key, slab)) = self.slabs.next_slab(from, LAST_KEY) {
            // SAFETY: invariant 4 of `slab`: found under the lock.
            let it = unsafe { slab.as_ref() };
            assert_eq!(it.key(), key);
            slabs += 1;
            used += u64::from(it.used().count_ones());
            empty += u64::from(it.used() == 0);
            for number in 0..SLOTS {
                let index = it.index(number);
                // Ordering: Relaxed; nobody changes it, says the caller.
                let slot = it.slot(index).state.load(Ordering::Relaxed);
                let is_used = it.used() >> number & 1 == 1;
                match NotLive::read(slot) {
                    None => {
                        live += 1;
                        assert!(is_used, "{index} is live and vacant");
                        assert_eq!(slot as u32, index, "the state of {index}");
                    }
                    Some(gone) => {
                        assert!(is_used || !gone.is_dead(), "{index} is pending and vacant");
                        assert!(gone.next() <= self.limits.generations, "{index}: {gone:?}");
                    }
                }
            }
            if it.used() == FULL {
                assert_ne!(edit.first_not_full(key, key), Some(key), "slab {key} is full");
            } else {
                assert_eq!(edit.first_not_full(key, key), Some(key), "slab {key} is not full");
            }
            from = key + 1;
        }
        assert_eq!((used, slabs), (state.used + state.exhausted, state.slabs), "used slots, slabs");
        assert!(empty <= slabs);
        drop(edit);
        assert_eq!(self.len(&state), live, "live contexts");
    }
}

impl fmt::Display for TableStats {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            live,
            reserved,
            pending,
            referenced,
            exhausted,
            slabs,
            nodes,
            height,
            bytes,
            panics,
        } = self;
        write!(
            f,
            "{live} live, {reserved} reserved, {pending} pending ({referenced} referenced), \
             {exhausted} exhausted; {slabs} slabs, {nodes} nodes, {height} levels, {bytes} bytes; \
             {panics} panics"
        )
    }
}
