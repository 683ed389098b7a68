//! Takes frames for misses: free ones first, then those of buffers that the policy chooses.
//!
//! # Evicting
//!
//! Under the lock of the lists the policy marks a few candidates `EVICT` and takes them off its
//! lists. Without a lock, one fence and one scan of all slots follow for all of them. Candidates in
//! use go back to the lists; the others are hidden from lookups, and their entries and frames are
//! freed.

use std::ops::Deref;
use std::time::{Duration, Instant};

use arrayvec::ArrayVec;
use offlock_percpu::AllocError;
use offlock_sync::atomic::Ordering;
use offlock_sync::{Arc, WordLock, check, step};

use super::miss::Pinned;
use super::write::is_marked;
use super::{Lookup, Shared, new_counter};
use crate::error::GetError;
use crate::frames::{Frame, FrameMemory};
use crate::hazard;
use crate::policy::{Eviction, Looks, PASSES, Policy, Samples, Shadows, sampled_blocks};
use crate::source::Source;
use crate::stats::Counter;
use crate::wait::is_blocking;
use crate::word::{
    BACK, DIRTY, EVICT, Entry, EntryWord, IO, Key, MOST_PINS, NEW, SAMPLED, STALE, WAITED, WRITE,
};

/// The most buffers of one eviction, with one fence and one scan.
const BATCH: usize = 8;
/// The most buffers that one eviction visits under the lock: 64 took 2 us if half were dirty. A
/// model has one or two.
pub(super) const LOOKS: u32 = if cfg!(offlock_model) { 2 } else { 24 };
/// A short search ends after so many buffers in a row that are in use and were not used lately. A pass
/// over so many takes less time than a wait.
const IN_A_ROW: usize = if cfg!(offlock_model) { 1 } else { 1024 };
/// As [`IN_A_ROW`], for a cache of which less than a sixteenth is clean. The thread that waits then writes
/// 64 buffers, and its next search finds them after 64 visits.
const DIRTY_IN_A_ROW: usize = IN_A_ROW.div_ceil(16);

/// The buffers of one eviction.
type Batch = ArrayVec<Frame, BATCH>;

/// The number of buffers that a search visits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Search {
    /// In a cache of which less than a sixteenth is clean, ends at the first buffer that would be
    /// evicted if it were not dirty: the thread that waits writes it, and those that are due after
    /// it. Otherwise as `Short`.
    UntilDirty,
    /// Ends after [`IN_A_ROW`] buffers that are in use. A thread that waits repeats it.
    Short,
    /// Visits every buffer: the search before [`GetError::NoFreeBuffers`].
    Full,
}

/// A wait for a free buffer.
pub(super) struct BufferWait {
    /// The begin of the wait.
    since: Option<Instant>,
    patience: Duration,
    /// The next search.
    pub(super) search: Search,
}

impl BufferWait {
    pub(super) fn new(patience: Duration) -> Self {
        // A call that does not wait writes nothing.
        let search = if patience.is_zero() { Search::Short } else { Search::UntilDirty };
        Self { since: None, patience, search }
    }
}

/// The frames of a cache: their memory, the lists of the policy, and the choice of the rule.
///
/// # Locks
///
/// The lock of the lists is the last one: no other lock is taken under it. The lock of the shadows is
/// only tried, and the lock of the lists is taken under it. The lock of a home is never held beside either.
///
/// # Invariants
///
/// 1. A frame is free, on a list, or owned: by a load, by the evictor that has marked its entry `EVICT`,
///    or by a [`Spare`](super::miss::Spare).
/// 2. A buffer is freed once, after no lookup finds it, no slot names its entry and no pin holds it.
/// 3. A dirty buffer is never evicted.
/// 4. Nothing allocates after `new`, and no call holds the lock of the lists for more than [`LOOKS`]
///    visits.
pub(crate) struct Frames {
    memory: FrameMemory,
    pub(super) lists: WordLock<Policy>,
    /// Hits of sampled blocks, for the shadows.
    pub(super) samples: Samples,
    shadows: WordLock<Option<Shadows>>,
    /// Set while claims are refused, see [`Shadows::is_selective`]. An atomic of `std`, which no model
    /// explores, because it is a hint.
    is_selective: std::sync::atomic::AtomicBool,
    pub(crate) evictions: Counter,
    /// Claims of blocks that were not worth a buffer.
    pub(crate) claims_refused: Counter,
}

impl Deref for Frames {
    type Target = FrameMemory;

    #[inline(always)]
    fn deref(&self) -> &FrameMemory {
        &self.memory
    }
}

impl Frames {
    /// Returns `count` frames of `1 << shift` bytes.
    pub(super) fn new(
        (count, shift): (usize, u32),
        eviction: Eviction,
    ) -> Result<Self, AllocError> {
        let (rule, sampled) = match eviction {
            Eviction::Adaptive => (Eviction::A2, sampled_blocks(count)),
            fixed => (fixed, 0),
        };
        let memory = FrameMemory::new(count, shift)?;
        Ok(Self {
            memory,
            lists: WordLock::new(Policy::new(rule, count)?),
            shadows: WordLock::new(if sampled > 0 { Some(Shadows::new(sampled)?) } else { None }),
            samples: Samples::new(sampled, count)?,
            is_selective: std::sync::atomic::AtomicBool::new(false),
            evictions: new_counter(),
            claims_refused: new_counter(),
        })
    }

    /// Returns the bytes of the buffers in use, and the rule in force.
    pub(crate) fn state(&self) -> (usize, Eviction) {
        let lists = self.lists.lock();
        (self.memory.bytes_of(lists.in_use()), lists.rule())
    }

    /// Returns the entry of a frame that the caller keeps.
    pub(super) fn entry<'l>(&self, lookup: &'l Lookup, frame: Frame) -> &'l Entry {
        lookup.entry(self.memory.header(frame).place())
    }

    /// Takes a frame off the lists. `None` if the search finds no buffer that may be evicted. `is_dirty`
    /// tells whether less than a sixteenth of the cache is clean.
    pub(super) fn take(&self, lookup: &Lookup, search: Search, is_dirty: bool) -> Option<Frame> {
        // The number of visits since the last eviction, and since a use was lowered.
        let (mut looked, mut idle) = (0, 0);
        let is_mostly_dirty = search != Search::Full && is_dirty;
        let (in_a_row, of_one_list, mut of_dead) = match search {
            Search::UntilDirty | Search::Short => {
                let in_a_row = if is_mostly_dirty { DIRTY_IN_A_ROW } else { IN_A_ROW };
                // A quarter, so that the search gets to the next list before it ends.
                (in_a_row, Some(in_a_row.div_ceil(4)), LOOKS as usize)
            }
            Search::Full => (usize::MAX, None, usize::MAX),
        };
        let mut looks = Looks::new(of_one_list);
        looks.until_dirty = search == Search::UntilDirty && is_mostly_dirty;
        loop {
            let mut victims = Batch::new();
            (looks.left, looks.lowered) = (LOOKS, false);
            let all = {
                let mut lists = self.lists.lock();
                if let Some(frame) = lists.take() {
                    return Some(frame);
                }
                lists.note_full();
                let all = lists.len();
                looks.pass = looked / all.max(1);
                self.choose(lookup, &mut lists, &mut victims, BATCH, &mut looks);
                all
            };
            let taken = LOOKS - looks.left;
            let dead = std::mem::replace(&mut of_dead, LOOKS as usize);
            if self.free_marked(lookup, victims, &mut looks) + self.free_dead(lookup, dead) > 0 {
                (looked, idle) = (0, 0);
                looks.main = 0; // all lists are visited again
                continue;
            }
            if looks.has_met_dirty {
                return None;
            }
            looked += taken as usize;
            idle = if looks.lowered { 0 } else { idle + taken as usize };
            if taken == 0 || idle >= all.min(in_a_row) || looked >= PASSES * all {
                return None;
            }
        }
    }

    /// Takes a few buffers to evict off the lists.
    fn choose(
        &self,
        lookup: &Lookup,
        lists: &mut Policy,
        victims: &mut Batch,
        most: usize,
        looks: &mut Looks,
    ) {
        // Fewer in a small cache, of which a whole batch would be a large part.
        let most = most.min(BATCH).min((self.memory.count() / 64).max(1));
        while victims.len() < most {
            let Some(frame) = lists.pick(|frame| self.entry(lookup, frame), looks) else { break };
            victims.push(frame);
        }
    }

    /// Frees the marked buffers that are not in use, and puts the others back. Returns the number
    /// freed.
    fn free_marked(&self, lookup: &Lookup, victims: Batch, looks: &mut Looks) -> usize {
        if victims.is_empty() {
            return 0;
        }
        let place_of = |&frame: &Frame| self.memory.header(frame).place();
        let places: ArrayVec<_, BATCH> = victims.iter().map(place_of).collect();
        let entries: ArrayVec<_, BATCH> = places.iter().map(|&at| lookup.entry(at)).collect();
        let mut in_use = [false; BATCH];
        step!("evict: scan the slots", hazard::mark_protected(&entries, &mut in_use));
        for at in 0..victims.len() {
            let (entry, place) = (entries[at], places[at]);
            // A guard may have become a pin since the mark. The pin comes before the clear of its
            // slot, so it is here if the scan did not find the slot.
            in_use[at] |= !check!("evict: no pin after the scan", entry.word().pins() == 0);
            if in_use[at] {
                entry.change(0, EVICT | NEW); // it stays in the main list
                continue;
            }
            lookup.lock(entry.key()).hide(place);
            lookup.free(place);
        }
        let mut lists = self.lists.lock();
        let mut freed = 0;
        // Backwards, because the frame freed last is taken first: so blocks that are loaded one
        // after another get ascending addresses again, which the CPU prefetches.
        for at in (0..victims.len()).rev() {
            let frame = victims[at];
            if !in_use[at] {
                lists.give(frame);
                freed += 1;
                continue;
            }
            if check!("evict: the buffer is not stale", !entries[at].word().has(STALE)) {
                lists.keep(frame);
                looks.main += 1;
            } else {
                lists.push_dead(frame); // invalidated meanwhile
            }
        }
        drop(lists);
        self.evictions.add(freed as i64);
        freed
    }

    /// Frees one of the `most` oldest invalidated buffers, if one of them is not in use. Returns
    /// the number freed.
    pub(super) fn free_dead(&self, lookup: &Lookup, most: usize) -> usize {
        let mut lists = self.lists.lock();
        for _ in 0..lists.dead().min(most) {
            let Some(frame) = lists.take_dead() else { break };
            drop(lists);
            let entry = self.entry(lookup, frame);
            debug_assert!(entry.word().has(STALE), "a live buffer among the dead");
            // The entry is hidden, so it gets no new users.
            let is_unused = hazard::is_left(entry);
            if is_unused {
                lookup.free(self.memory.header(frame).place());
            }
            lists = self.lists.lock();
            if is_unused {
                lists.give(frame);
                return 1;
            }
            lists.push_dead(frame); // at the other end of the list
        }
        0
    }

    /// Frees a frame that is on no list.
    pub(crate) fn give(&self, frame: Frame) {
        self.lists.lock().give(frame);
    }

    /// Visits each buffer at most once, in the order of the policy, until `buffers` are evicted.
    /// Returns the number of evicted buffers.
    pub(crate) fn shrink(&self, lookup: &Lookup, buffers: usize) -> usize {
        let mut freed = 0;
        let mut left = self.lists.lock().len();
        let mut looks = Looks::new(None);
        while freed < buffers {
            freed += self.free_dead(lookup, LOOKS as usize);
            let mut victims = Batch::new();
            let most = left.min(LOOKS as usize) as u32;
            looks.left = most;
            self.choose(lookup, &mut self.lists.lock(), &mut victims, buffers - freed, &mut looks);
            left -= (most - looks.left) as usize;
            // No buffer is left, or other threads have taken the rest.
            if victims.is_empty() && (left == 0 || looks.left == most) {
                break;
            }
            freed += self.free_marked(lookup, victims, &mut looks);
        }
        freed
    }

    /// Puts a buffer that is being loaded on a list of the policy.
    pub(super) fn admit(&self, lookup: &Lookup, frame: Frame, key: Key) {
        let mut lists = self.lists.lock();
        lists.insert(|frame| self.entry(lookup, frame), frame, key);
        let is_full = lists.is_nearly_full();
        drop(lists);
        self.note_miss(lookup, key, is_full);
    }

    /// Takes a buffer off the list from which it may be evicted, if it is on one.
    pub(super) fn withdraw(&self, frame: Frame) {
        self.lists.lock().withdraw(frame);
    }

    /// Moves a stale buffer from the policy to the list of the dead. The caller keeps it from being
    /// freed.
    pub(super) fn move_to_dead(&self, frame: Frame) {
        let mut lists = self.lists.lock();
        // If the buffer is on no list, an evictor has it, and will find it stale.
        if lists.withdraw(frame) {
            lists.push_dead(frame);
        }
    }

    // The sampling of an adaptive cache: passes sampled requests to the shadows of its policy.

    /// Returns the word of a block that is about to be loaded into that frame, for
    /// [`admit`](Self::admit).
    pub(super) fn loading(&self, frame: Frame, key: Key) -> EntryWord {
        // Most misses begin on probation, so the policy need not set `NEW`.
        EntryWord::loading(frame).with(if self.samples.takes(key) { NEW | SAMPLED } else { NEW })
    }

    /// Passes a hit of a block whose word says `SAMPLED` to the shadows. Does not write to shared
    /// memory.
    #[cold]
    pub(crate) fn note_hit(&self, key: Key, record: u32) {
        if self.samples.is_open() {
            self.samples.add(record, key);
        }
    }

    /// If the block is in the sample, passes the hits in the rings and this miss to the shadows. If
    /// another thread has their lock, this miss is lost. `is_full` tells whether the cache is full.
    pub(super) fn note_miss(&self, lookup: &Lookup, key: Key, is_full: bool) {
        if !self.samples.takes(key) {
            return;
        }
        let Some(mut shadows) = self.shadows.try_lock() else { return };
        let Some(shadows) = shadows.as_mut() else { return };
        if is_full {
            self.samples.open();
            shadows.follow(lookup.sampled());
        }
        let mut changes = false;
        for tag in self.samples.drain() {
            changes |= shadows.request(tag, true);
        }
        changes |= shadows.request(Samples::tag(key), false);
        if changes {
            self.lists.lock().set_rule(shadows.rule());
            self.is_selective.store(shadows.is_selective(), Ordering::Relaxed); // a hint
        }
    }

    /// Returns whether a block that is not cached is worth a buffer, for a caller that can do
    /// without. While few requests hit, a block is if it was evicted from probation or refused
    /// lately, or if there is room.
    pub(super) fn is_worth_a_buffer(&self, lookup: &Lookup, key: Key) -> bool {
        if !self.is_selective.load(Ordering::Relaxed) {
            return true;
        }
        let mut lists = self.lists.lock();
        let is_worth = lists.has_room() || lists.knows(key);
        drop(lists);
        if !is_worth {
            self.claims_refused.add(1);
            self.note_miss(lookup, key, true);
        }
        is_worth
    }
}

impl Shared {
    /// Returns whether less than a sixteenth of the cache is clean.
    pub(super) fn is_mostly_dirty(&self) -> bool {
        let room = self.frames.capacity();
        self.write_back.dirty_bytes() > room - room / 16
    }

    /// Pauses between two searches for a buffer. Dropping a guard is a plain store and wakes
    /// nothing, so waiters poll. Once the patience is over one full search is left.
    ///
    /// Instead of a pause, the calling thread writes dirty blocks of `source`.
    pub(super) async fn wait_for_buffers(
        &self,
        source: &Arc<Source>,
        wait: &mut BufferWait,
    ) -> Result<(), GetError> {
        if wait.search == Search::Full {
            // For a later call, because a task does not write dirty buffers itself.
            if self.write_back.dirty_bytes() > 0 {
                self.write_back.hurry();
            }
            return Err(GetError::NoFreeBuffers);
        }
        if wait.since.get_or_insert_with(Instant::now).elapsed() >= wait.patience {
            wait.search = Search::Full;
            return Ok(());
        }
        // All buffers may be dirty.
        if wait.search == Search::UntilDirty && self.is_mostly_dirty() {
            if self.write_back_due(source).await == 0 {
                wait.search = Search::Short;
            }
            return Ok(());
        }
        if self.write_back_for(source).await == 0 {
            self.counters.page_retries.add(1);
            self.waiting.sleep().await;
        }
        Ok(())
    }

    /// Drops the buffer of a block, so that the next get reads the device, unless its word has one of the
    /// `flags`. Returns whether it was dropped.
    ///
    /// Waits for a load, an eviction, a writer and a write-back of the block. Dirty bytes are lost.
    pub(crate) async fn invalidate(
        &self,
        source: &Arc<Source>,
        key: Key,
        flags: u64,
    ) -> Result<bool, GetError> {
        let blocks = is_blocking().await;
        let (mut rounds, mut since) = (0, None);
        loop {
            let was_there = self.try_invalidate(Some(source), key, flags, blocks)?;
            if check!("invalidate: nothing is to be waited for", was_there.is_some()) {
                return Ok(was_there.unwrap_or_default());
            }
            match self.lookup.find(key).map(Entry::word) {
                Some(word) if is_marked(word) => {
                    self.wait_for_mark(word.frame(), key, is_marked, &mut since).await?;
                }
                Some(word) if word.has(IO) => {
                    let Some(frame) = self.pin_loading(key) else { continue };
                    let _pinned = Pinned(self, frame);
                    let loaded = self.wait_for_load(source, key, frame).await;
                    loaded
                        .or_else(|error| if error.is_of_a_read() { Ok(()) } else { Err(error) })?;
                }
                _ => self.waiting.moment(&mut rounds).await, // an evictor has it
            }
        }
    }

    /// Pins the buffer of a block that is being read or written.
    fn pin_loading(&self, key: Key) -> Option<Frame> {
        let home = self.lookup.lock(key);
        let entry = home.find()?;
        let word = entry.word();
        let may_pin = word.has(IO | WRITE) && word.pins() < MOST_PINS;
        let is_pinned = may_pin && entry.try_pin(word).is_ok();
        is_pinned.then(|| word.frame())
    }

    /// Invalidates a block, unless its word has one of the `flags`. Returns whether it was
    /// invalidated, or `None` if that has to wait.
    ///
    /// Unless it `blocks`, the slots of the calling thread are not the caller's: the thread that polls a
    /// task may read the block, or have a guard of it.
    pub(crate) fn try_invalidate(
        &self,
        source: Option<&Arc<Source>>,
        key: Key,
        flags: u64,
        blocks: bool,
    ) -> Result<Option<bool>, GetError> {
        hazard::reserve()?;
        loop {
            let home = self.lookup.lock(key);
            let Some(entry) = home.find() else { return Ok(Some(false)) };
            let word = entry.word();
            if word.has(flags) {
                return Ok(Some(false));
            }
            let is_own = || blocks && hazard::protected_by_me(entry) > 0;
            if word.has(IO | WRITE) && is_own() {
                return Err(GetError::WouldDeadlock);
            }
            if !word.is_readable() || word.has(BACK) {
                return Ok(None);
            }
            // Protects the entry until its frame is on the list of the dead. An evictor that has
            // the buffer marked may put it on that list first. Without the slot it could be freed
            // there, and this thread would move the frame of another block.
            let mut slot = None;
            step!("invalidate: protect the entry", slot = Some(hazard::protect(entry)?.0));
            let clear = || slot.inspect(|slot| slot.clear());
            if entry.try_change(word, STALE, DIRTY | WAITED).is_err() {
                clear();
                continue;
            }
            let frame = word.frame();
            home.hide(self.frames.header(frame).place());
            drop(home);
            if let Some(source) = source.filter(|_| word.has(DIRTY)) {
                self.write_back.unlist(&self.frames, source, [frame], |_| true);
            }
            self.frames.move_to_dead(frame);
            clear();
            // Also those that wait for pins of this buffer: the next buffer of the block has none.
            self.wake_if(word.has(WAITED), frame);
            self.frames.free_dead(&self.lookup, 1);
            return Ok(Some(true));
        }
    }
}
