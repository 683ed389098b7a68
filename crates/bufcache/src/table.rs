//! The table from blocks to entries: of fixed size, and read by lookups without a lock.
//!
//! ```text
//!  bucket of 64 bytes: | key word | key word | key word | key word |      home = hash of the key
//!  a block whose home is full lies in a later bucket; its home says OVERFLOW
//!  locks: one for a stripe of homes, taken to insert and to hide
//! ```
//!
//! The table has at least two entries for each buffer there can be, so that one bucket in twenty
//! overflows.
//!
//! # Invariants
//!
//! 1. A key is stored in at most one entry: keys are stored and hidden under the lock of their
//!    home.
//! 2. A block that is not in its home bucket is at most `far` buckets behind it, see
//!    [`Displaced`], and the home says OVERFLOW.

use offlock_percpu::AllocError;
use offlock_sync::atomic::{AtomicU64, Ordering};
use offlock_sync::{WordGuard, WordLock, load_own, step};

use crate::frames::{Array, Place};
use crate::word::{Entry, EntryWord, Key, OVERFLOW, SAMPLED};

/// Entries of a bucket, which is one cache line. Few in a model, which explores the load of each.
const WAYS: usize = if cfg!(offlock_model) { 2 } else { 4 };

#[derive(Debug)]
#[repr(align(64))]
struct Bucket([Entry; WAYS]);

/// The lock of a stripe of homes. It protects invariant 1 and the counts in `displaced`.
type Stripe = WordLock<()>;

#[derive(Debug)]
pub(crate) struct Table {
    buckets: Array<Bucket>,
    /// For each bucket, the [`Displaced`] blocks. Changed under the lock of the home.
    displaced: Box<[Displaced]>,
    stripes: Box<[Stripe]>,
    /// The number of entries that are `SAMPLED`. An atomic of `std`, which no model explores,
    /// because nothing but the choice of the policy depends on it.
    sampled: std::sync::atomic::AtomicUsize,
    /// A hash shifted right by this is the number of a bucket.
    shift: u32,
}

/// The blocks of one home that lie in a later bucket: their number in the upper half, and the
/// largest distance of one since there were none in the lower.
#[derive(Debug)]
struct Displaced(AtomicU64);

impl Displaced {
    const ONE: u64 = 1 << 32;

    /// Returns the largest distance of a block.
    fn far(&self) -> usize {
        // Ordering: Relaxed; `OVERFLOW`, which the caller has found, carries the distances of blocks
        // that were placed before it was set. A block that is placed meanwhile need not be found.
        (self.0.load(Ordering::Relaxed) % Self::ONE) as usize
    }

    /// Adds a block. The caller has the lock of the home.
    fn add(&self, far: usize) {
        let before = load_own(&self.0);
        let far = (far as u64).max(before % Self::ONE);
        // Ordering: Relaxed; the lock of the home carries it to the next holder, and the change to
        // `OVERFLOW` that follows to `far`.
        self.0.store((before / Self::ONE + 1) * Self::ONE + far, Ordering::Relaxed);
    }

    /// Removes a block. Returns whether none is left. The caller has the lock of the home.
    fn remove(&self) -> bool {
        let left = load_own(&self.0) - Self::ONE;
        let is_empty = left < Self::ONE;
        // Ordering: Relaxed; the lock of the home carries it to the next holder.
        self.0.store(if is_empty { 0 } else { left }, Ordering::Relaxed);
        is_empty
    }
}

impl Table {
    /// Makes a table for at most `buffers` buffers.
    pub(crate) fn new(buffers: usize) -> Result<Self, AllocError> {
        let buckets = (buffers * 2).div_ceil(WAYS).next_power_of_two().max(2);
        let stripes = buckets.min(if cfg!(offlock_model) { 2 } else { 256 });
        let mut displaced = Vec::new();
        displaced.try_reserve_exact(buckets).map_err(|_| AllocError::new())?;
        displaced.extend((0..buckets).map(|_| Displaced(AtomicU64::new(0))));
        Ok(Self {
            buckets: Array::new(buckets, || Bucket([(); WAYS].map(|()| Entry::new())))?,
            displaced: displaced.into(),
            stripes: (0..stripes).map(|_| WordLock::new(())).collect(),
            shift: u64::BITS - buckets.ilog2(),
            sampled: std::sync::atomic::AtomicUsize::new(0),
        })
    }

    #[inline(always)]
    fn home(&self, key: Key) -> usize {
        (key.hash() >> self.shift) as usize
    }

    /// Returns the entry that seems to be that of `key`: a hint, which [`Entry::look`] confirms.
    /// Wait-free.
    #[inline(always)]
    pub(crate) fn find(&self, key: Key) -> Option<&Entry> {
        let home = self.home(key);
        // SAFETY: the number of buckets is a power of two of at least 2, `1 << (64 - shift)`, and
        // `home` is a hash shifted right by `shift`.
        let bucket = unsafe { self.buckets.get_unchecked(home) };
        if let Some(entry) = bucket.0.iter().find(|entry| entry.may_be(key)) {
            return Some(entry);
        }
        if bucket.0[0].word().has(OVERFLOW) { self.find_behind(home, key) } else { None }
    }

    #[cold]
    #[inline(never)]
    fn find_behind(&self, home: usize, key: Key) -> Option<&Entry> {
        let far = self.displaced[home].far();
        (1..=far).flat_map(|far| &self.bucket(home + far).0).find(|entry| entry.may_be(key))
    }

    /// Begins to bring the home of `key` and its lock into the cache of this CPU.
    pub(crate) fn prefetch(&self, key: Key) {
        #[cfg(target_arch = "x86_64")]
        {
            use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
            let home = self.home(key);
            let bucket = std::ptr::from_ref(self.bucket(home)).cast();
            let stripe = std::ptr::from_ref(&self.stripes[home & (self.stripes.len() - 1)]).cast();
            // SAFETY: every x86-64 CPU has the instruction, which accesses nothing.
            unsafe { _mm_prefetch::<_MM_HINT_T0>(bucket) };
            // SAFETY: as above.
            unsafe { _mm_prefetch::<_MM_HINT_T0>(stripe) };
        }
        let _ = key;
    }

    fn bucket(&self, number: usize) -> &Bucket {
        &self.buckets[number & (self.buckets.len() - 1)]
    }

    /// Locks the home of `key`. Spins and sleeps until the lock is free.
    pub(crate) fn lock(&self, key: Key) -> Locked<'_> {
        let home = self.home(key);
        let held = self.stripes[home & (self.stripes.len() - 1)].lock();
        Locked { table: self, home, key, _held: held }
    }

    /// Takes every lock once, so that insertions and removals that began before have ended.
    pub(crate) fn pass_all_locks(&self) {
        self.stripes.iter().for_each(|stripe| drop(stripe.lock()));
    }

    /// Returns the keys in the table. Keys that are inserted or hidden meanwhile may be among them.
    pub(crate) fn keys(&self) -> impl Iterator<Item = Key> {
        self.buckets.iter().flat_map(|bucket| &bucket.0).map(Entry::key)
    }

    /// Returns the number of entries.
    pub(crate) fn places(&self) -> Place {
        (self.buckets.len() * WAYS) as Place
    }

    /// Returns the addresses of the entries.
    #[cfg(not(offlock_model))]
    pub(crate) fn addresses(&self) -> std::ops::Range<*const Entry> {
        let buckets = self.buckets.as_ptr_range();
        buckets.start.cast()..buckets.end.cast()
    }

    /// Returns the number of entries that are `SAMPLED`.
    pub(crate) fn sampled(&self) -> usize {
        self.sampled.load(Ordering::Relaxed) // a hint
    }

    /// Frees an entry that is hidden and that no other thread uses.
    pub(crate) fn free(&self, place: Place) {
        let entry = self.entry(place);
        if entry.word().has(SAMPLED) {
            self.sampled.fetch_sub(1, Ordering::Relaxed); // a hint
        }
        entry.free((place as usize).is_multiple_of(WAYS));
    }

    /// Returns the entry with that number.
    pub(crate) fn entry(&self, place: Place) -> &Entry {
        &self.buckets[place as usize / WAYS].0[place as usize % WAYS]
    }
}

/// The right to insert and hide one key.
pub(crate) struct Locked<'t> {
    table: &'t Table,
    home: usize,
    key: Key,
    _held: WordGuard<'t, ()>,
}

impl<'t> Locked<'t> {
    /// Returns the entry of the key, which no other thread inserts or hides while the lock is held.
    pub(crate) fn find(&self) -> Option<&'t Entry> {
        self.table.find(self.key)
    }

    /// Inserts the key, which is not in the table, in the state `word`. Returns `None` if no entry
    /// is free.
    pub(crate) fn insert(&self, word: EntryWord) -> Option<Place> {
        let table = self.table;
        for far in 0..table.buckets.len() {
            let number = (self.home + far) & (table.buckets.len() - 1);
            let Some(way) = table.buckets[number].0.iter().position(|at| at.take(self.key, word))
            else {
                continue;
            };
            if far > 0 {
                self.displace(far);
            }
            if word.has(SAMPLED) {
                table.sampled.fetch_add(1, Ordering::Relaxed); // a hint
            }
            return Some((number * WAYS + way) as Place);
        }
        None
    }

    fn displace(&self, far: usize) {
        let table = self.table;
        table.displaced[self.home].add(far);
        let home = &table.buckets[self.home].0[0];
        step!("insert: mark the home of a displaced block", home.change(OVERFLOW, 0));
    }

    /// Hides the entry at `place`, which is that of the key, from lookups that begin now.
    pub(crate) fn hide(&self, place: Place) {
        let table = self.table;
        let entry = table.entry(place);
        debug_assert!(entry.key() == self.key);
        entry.hide();
        if place as usize / WAYS == self.home {
            return;
        }
        if table.displaced[self.home].remove() {
            table.buckets[self.home].0[0].change(0, OVERFLOW);
        }
    }
}
