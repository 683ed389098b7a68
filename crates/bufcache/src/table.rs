//! Where is a block? A fixed table that lookups read without a lock.
//!
//! ```text
//!  bucket of 64 bytes: | key word | key word | key word | key word |      home = hash of the key
//!  a block whose home is full lies in a later bucket; its home says OVERFLOW
//!  locks: one for a stripe of homes, for those who insert and remove
//! ```
//!
//! The table has at least two places for each buffer there can be, so that one bucket in twenty
//! overflows.
//!
//! # Invariants
//!
//! 1. A key is stored in at most one entry: keys are stored and hidden under the lock of their home.
//! 2. A block that is not in its home bucket is at most `reach` buckets behind it, and the home says
//!    OVERFLOW.

use percpu::AllocError;
use percpu::sync::atomic::{AtomicU32, Ordering};
use percpu::sync::{WordGuard, WordLock, load_own, step};

use crate::region::Array;
use crate::timed::{Holds, Timing};
use crate::word::{Entry, Key, OVERFLOW, Word};

/// Entries of a bucket: of a cache line. A model looks at all of them.
const WAYS: usize = if cfg!(any(offlock_loom, offlock_shuttle)) { 2 } else { 4 };

#[derive(Debug)]
#[repr(align(64))]
struct Bucket([Entry; WAYS]);

/// What the lock of a stripe protects: nothing but invariant 1, and the counts.
type Stripe = WordLock<()>;

#[derive(Debug)]
pub(crate) struct Table {
    buckets: Array<Bucket>,
    /// Of each bucket: blocks whose home it is, and which lie elsewhere. Changed under its lock.
    displaced: Box<[AtomicU32]>,
    stripes: Box<[Stripe]>,
    holds: Holds,
    /// Right shift of a hash that leaves the number of a bucket.
    shift: u32,
    /// See invariant 2; it only grows.
    reach: AtomicU32,
}

/// Which entry: its number in the table.
pub(crate) type Place = u32;

impl Table {
    /// For `buffers` at most.
    pub(crate) fn new(buffers: usize, holds: Holds) -> Result<Self, AllocError> {
        let buckets = (buffers * 2).div_ceil(WAYS).next_power_of_two().max(2);
        let stripes = buckets.min(if cfg!(any(offlock_loom, offlock_shuttle)) { 2 } else { 256 });
        let mut displaced = Vec::new();
        displaced.try_reserve_exact(buckets).map_err(|_| AllocError::new())?;
        displaced.extend((0..buckets).map(|_| AtomicU32::new(0)));
        Ok(Self {
            buckets: Array::new(buckets, || Bucket([(); WAYS].map(|()| Entry::new())))?,
            displaced: displaced.into(),
            stripes: (0..stripes).map(|_| WordLock::new(())).collect(),
            shift: u64::BITS - buckets.ilog2(),
            reach: AtomicU32::new(0),
            holds,
        })
    }

    #[inline(always)]
    fn home(&self, key: Key) -> usize {
        (key.hash() >> self.shift) as usize
    }

    /// The entry that seems to be that of `key`. Wait-free.
    #[inline(always)]
    pub(crate) fn find(&self, key: Key) -> Option<&Entry> {
        let home = self.home(key);
        // SAFETY: `home` has as many bits as the number of buckets, a power of two, needs.
        let bucket = unsafe { self.buckets.get_unchecked(home) };
        if let Some(entry) = bucket.0.iter().find(|entry| entry.may_be(key)) {
            return Some(entry);
        }
        if bucket.0[0].word().has(OVERFLOW) { self.find_behind(home, key) } else { None }
    }

    #[cold]
    #[inline(never)]
    fn find_behind(&self, home: usize, key: Key) -> Option<&Entry> {
        // Ordering: Acquire pairs with the Release in `Locked::insert`; the block it placed so far away
        // is seen too, or was placed after this lookup began.
        let reach = self.reach.load(Ordering::Acquire) as usize;
        (1..=reach).flat_map(|far| &self.bucket(home + far).0).find(|entry| entry.may_be(key))
    }

    fn bucket(&self, number: usize) -> &Bucket {
        &self.buckets[number & (self.buckets.len() - 1)]
    }

    /// Locks the home of `key`.
    pub(crate) fn lock(&self, key: Key) -> Locked<'_> {
        let home = self.home(key);
        let held = self.stripes[home & (self.stripes.len() - 1)].lock();
        Locked { table: self, home, key, _held: held, _timing: Timing::begin(&self.holds) }
    }

    /// Takes every lock once: what was being inserted or hidden before is in the table, or gone.
    pub(crate) fn pass_all_locks(&self) {
        self.stripes.iter().for_each(|stripe| drop(stripe.lock()));
    }

    /// The keys that are in it; of some that come or go meanwhile, too.
    pub(crate) fn keys(&self) -> impl Iterator<Item = Key> {
        self.buckets.iter().flat_map(|bucket| &bucket.0).map(Entry::key)
    }

    /// How many entries it has.
    pub(crate) fn places(&self) -> Place {
        (self.buckets.len() * WAYS) as Place
    }

    /// The entry of that number.
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
    /// Ends once the lock is free: fields drop in this order.
    _timing: Timing<'t>,
}

impl<'t> Locked<'t> {
    /// The entry of the key: nobody inserts or hides it meanwhile.
    pub(crate) fn find(&self) -> Option<&'t Entry> {
        self.table.find(self.key)
    }

    /// Gives the key, which is not in the table, a place in the state `word`; `None` if there is none.
    pub(crate) fn insert(&self, word: Word) -> Option<Place> {
        let table = self.table;
        for far in 0..table.buckets.len() {
            let number = (self.home + far) & (table.buckets.len() - 1);
            let Some(way) = table.buckets[number].0.iter().position(|at| at.take(self.key, word))
            else {
                continue;
            };
            if far > 0 {
                self.displace(far as u32);
            }
            return Some((number * WAYS + way) as Place);
        }
        None
    }

    fn displace(&self, far: u32) {
        let table = self.table;
        // Ordering: Release pairs with the Acquire in `find_behind`; see there.
        table.reach.fetch_max(far, Ordering::Release);
        let displaced = &table.displaced[self.home];
        // Ordering: Relaxed; the lock carries it.
        displaced.store(load_own(displaced) + 1, Ordering::Relaxed);
        let home = &table.buckets[self.home].0[0];
        step!("insert: mark the home of a displaced block", home.change(OVERFLOW, 0));
    }

    /// Hides the entry at `place`, which is that of the key: lookups that begin now do not find it.
    pub(crate) fn hide(&self, place: Place) {
        let table = self.table;
        let entry = table.entry(place);
        debug_assert!(entry.key() == self.key);
        entry.hide();
        if place as usize / WAYS == self.home {
            return;
        }
        let displaced = &table.displaced[self.home];
        let left = load_own(displaced) - 1;
        // Ordering: Relaxed; the lock carries it.
        displaced.store(left, Ordering::Relaxed);
        if left == 0 {
            table.buckets[self.home].0[0].change(0, OVERFLOW);
        }
    }
}
