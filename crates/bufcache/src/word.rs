//! An entry of the table: the key of a block, and a word with its frame and its state.
//!
//! ```text
//!  key    device 16 | sector 48                                    0: lookups do not find it
//!  word   frame 32 | pins 16 | used 2 | flags 14
//! ```
//!
//! | state of the word | flags | found by lookups |
//! |---|---|---|
//! | free | none (or `OVERFLOW`, which belongs to the bucket) | no |
//! | loading | `TAKEN IO`, and `WRITE` if a thread creates it | yes: the lookup waits |
//! | live | `TAKEN VALID`, and `NEW`, `DIRTY` or not | yes: a hit |
//! | being written by a thread | `TAKEN VALID WRITE` | yes: the lookup waits |
//! | being written back | `TAKEN VALID DIRTY BACK` | yes: a hit, for reading |
//! | being evicted | `TAKEN VALID EVICT` | yes: the lookup retries |
//! | dead: failed, or invalidated | `TAKEN STALE` | no (the key is 0) |
//!
//! # Which thread may change an entry
//!
//! 1. A thread takes a free word by a compare-exchange. The entry is that thread's until the word
//!    says `VALID`.
//! 2. The evictor sets `EVICT` by a compare-exchange on a word without pins, `IO`, `WRITE`, `DIRTY`
//!    and `BACK`. It may take the buffer apart once no hazard slot names the entry.
//! 3. A writer sets `WRITE` on a readable word without pins and `BACK`. It may write the bytes once
//!    no slot but its own names the entry and `READER_PIN` is not set. While `WRITE` is set, a new
//!    pin belongs to a thread that waits for the write to end; a pin converted from a guard belongs
//!    to a reader, and sets `READER_PIN`.
//! 4. Write-back sets `BACK` on a readable word that is `DIRTY`. No thread writes the bytes until
//!    `BACK` is cleared, so the device may read them.
//! 5. Pins and `used` change by read-modify-writes in any state that allows it. The frame of a
//!    taken word does not change.

use offlock_sync::atomic::{AtomicU64, Ordering};
use offlock_sync::{check, order, step};

use crate::error::GetError;
use crate::frames::Frame;

/// Names a block by its device and its first sector. 0 names no block.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct Key(u64);

/// Bits of a sector number: a device has at most `1 << SECTOR_BITS` sectors of 512 bytes.
pub(crate) const SECTOR_BITS: u32 = 48;

impl Key {
    /// Returns the key of the block at `sector`. `device` is not 0; `sector` fits [`SECTOR_BITS`].
    pub(crate) fn new(device: u16, sector: u64) -> Self {
        debug_assert!(device != 0 && sector >> SECTOR_BITS == 0);
        Self(u64::from(device) << SECTOR_BITS | sector)
    }

    pub(crate) fn device(self) -> u16 {
        (self.0 >> SECTOR_BITS) as u16
    }

    pub(crate) fn sector(self) -> u64 {
        self.0 & ((1 << SECTOR_BITS) - 1)
    }

    /// Returns a hash of 64 bits; the upper bits are mixed best.
    #[inline(always)]
    pub(crate) fn hash(self) -> u64 {
        // The multiplier of Fibonacci hashing, twice: the low bits of a key are zero because blocks
        // are aligned to their size, so the upper half is mixed into the lower between the two.
        let hash = self.0.wrapping_mul(0x9e37_79b9_7f4a_7c15);
        (hash ^ (hash >> 32)).wrapping_mul(0x9e37_79b9_7f4a_7c15)
    }
}

const PIN: u64 = 1 << 32;
const PINS: u64 = 0xffff << 32;
const USED: u64 = 1 << 48;
const USED_MASK: u64 = 3 << 48;

/// The entry belongs to a block, or did until its buffer died.
pub(crate) const TAKEN: u64 = 1 << 50;
/// The frame holds the bytes of the block.
pub(crate) const VALID: u64 = 1 << 51;
/// A thread takes the buffer apart, or checks whether it can.
pub(crate) const EVICT: u64 = 1 << 52;
/// The block is being loaded.
pub(crate) const IO: u64 = 1 << 53;
/// The buffer is dead: lookups do not find it, and it is freed after its last user.
pub(crate) const STALE: u64 = 1 << 54;
/// The load failed: the buffer is freed after the last thread that waited for it.
pub(crate) const FAILED: u64 = 1 << 57;
/// The buffer is in the newer half of probation, where hits do not count.
pub(crate) const NEW: u64 = 1 << 55;
/// One thread writes the bytes; other threads wait.
pub(crate) const WRITE: u64 = 1 << 58;
/// The bytes are newer than those of the device.
pub(crate) const DIRTY: u64 = 1 << 59;
/// The bytes are being written to the device.
pub(crate) const BACK: u64 = 1 << 60;
/// A thread or task waits until `WRITE` or `BACK` is cleared; a task may wait for the last pin too.
pub(crate) const WAITED: u64 = 1 << 61;
/// While `WRITE` is set: a guard became a pin. The scan of the slots does not find that reader.
pub(crate) const READER_PIN: u64 = 1 << 62;
/// Hits of the block are passed to the shadows of the policy.
///
/// It is the sign bit of the word, so a hit tests it with one instruction and need not compute the
/// block's hash.
pub(crate) const SAMPLED: u64 = 1 << 63;
/// In the first entry of a bucket: a block with this home may lie in a later bucket.
///
/// Not part of the entry's own state: the flag stays when the entry is freed.
pub(crate) const OVERFLOW: u64 = 1 << 56;

/// One value of an entry's word.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct EntryWord(pub(crate) u64);

impl EntryWord {
    /// Returns the word of a block that is about to be loaded, with the loader's pin.
    pub(crate) fn loading(frame: Frame) -> Self {
        Self(u64::from(frame.0) | TAKEN | IO | PIN)
    }

    /// Returns this word with more flags.
    pub(crate) fn with(self, flags: u64) -> Self {
        Self(self.0 | flags)
    }

    /// Returns this word with one more pin, for a thread that waits.
    pub(crate) fn pinned_once_more(self) -> Self {
        Self(self.0 + PIN)
    }

    #[inline(always)]
    pub(crate) fn frame(self) -> Frame {
        Frame(self.0 as u32)
    }

    #[inline(always)]
    pub(crate) fn has(self, flags: u64) -> bool {
        self.0 & flags != 0
    }

    /// Returns whether a reader may read the bytes.
    #[inline(always)]
    pub(crate) fn is_readable(self) -> bool {
        self.0 & (VALID | EVICT | IO | STALE | WRITE) == VALID
    }

    pub(crate) fn pins(self) -> u64 {
        (self.0 & PINS) >> 32
    }

    /// Returns the number of hits since the policy last took the count: at most 3.
    #[inline(always)]
    pub(crate) fn used(self) -> u64 {
        (self.0 & USED_MASK) >> 48
    }
}

/// An entry of the table.
#[derive(Debug)]
pub(crate) struct Entry {
    key: AtomicU64,
    word: AtomicU64,
}

/// The largest number of pins of one buffer.
pub(crate) const MOST_PINS: u64 = 0xffff;

impl Entry {
    pub(crate) fn new() -> Self {
        Self { key: AtomicU64::new(0), word: AtomicU64::new(0) }
    }

    /// Returns whether the entry seems to be that of `key`. A hint: [`look`](Self::look) confirms
    /// it.
    #[inline(always)]
    pub(crate) fn may_be(&self, key: Key) -> bool {
        // Ordering: Relaxed; the caller uses the entry only after `look`.
        self.key.load(Ordering::Relaxed) == key.0
    }

    /// Returns the word if the entry is that of `key`.
    #[inline(always)]
    pub(crate) fn look(&self, key: Key) -> Option<EntryWord> {
        // Ordering: SeqCst pairs with the SeqCst fence in `hazard::barrier`, by which an evictor or
        // a writer follows its mark: this load finds the mark, or the scan finds this thread's
        // slot. As an Acquire it pairs with the Release in `publish` and carries the frame's bytes.
        // It comes before the load of the key, which differs if the entry is another block's by
        // now.
        let order = order!(SeqCst, "look: the bytes are there before");
        let word = EntryWord(self.word.load(order));
        // Ordering: Relaxed; the Acquire above orders this load after that of the word. Pairs with
        // the Release in `free`, which carries the hidden key; see litmus/word-free.litmus.
        let is_same = self.key.load(Ordering::Relaxed) == key.0;
        check!("lookup: the entry is still that of the key", is_same).then_some(word)
    }

    /// Returns the word.
    #[inline(always)]
    pub(crate) fn word(&self) -> EntryWord {
        // Ordering: Acquire pairs with the Release in `publish`, `unpin` and `try_change`. It
        // carries the frame's bytes, and orders what follows after the reads under a pin.
        EntryWord(self.word.load(order!(Acquire, "word: the load has ended before")))
    }

    /// Returns the key. The caller keeps the entry from being freed, or treats the key as a hint.
    pub(crate) fn key(&self) -> Key {
        // Ordering: Relaxed; the pin, mark or lock that keeps the entry carries the key.
        Key(self.key.load(Ordering::Relaxed))
    }

    /// Takes a free entry for `key`, in the state `word`. Returns whether the entry was free. The
    /// caller has the lock of the key's home.
    pub(crate) fn take(&self, key: Key, word: EntryWord) -> bool {
        // Ordering: Relaxed; a hint that the exchange confirms.
        let free = self.word.load(Ordering::Relaxed);
        if free & !OVERFLOW != 0 {
            return false;
        }
        // Ordering: Acquire pairs with the Release in `free`; it carries the hidden key, so that
        // the store below comes after it. Relaxed on failure: another thread took the entry.
        let acquire = order!(Acquire, "take: the place was freed before");
        let taken = self.word.compare_exchange(free, free | word.0, acquire, Ordering::Relaxed);
        if taken.is_err() {
            return false;
        }
        // Ordering: Relaxed; the lock of the home carries it to threads that insert. A reader that
        // finds the key then loads the word, which says `IO` until `publish`.
        self.key.store(key.0, Ordering::Relaxed);
        true
    }

    /// Sets and clears flags. Returns the word before the change. Lock-free.
    pub(crate) fn change(&self, set: u64, clear: u64) -> EntryWord {
        // Ordering: Relaxed; the exchange in `try_change` orders.
        let mut seen = self.word.load(Ordering::Relaxed);
        loop {
            match self.try_change(EntryWord(seen), set, clear) {
                Ok(()) => return EntryWord(seen),
                Err(now) => seen = now.0,
            }
        }
    }

    /// Sets and clears flags if the word is still `seen`. Otherwise returns the current word.
    pub(crate) fn try_change(
        &self,
        seen: EntryWord,
        set: u64,
        clear: u64,
    ) -> Result<(), EntryWord> {
        let next = seen.0 & !clear | set;
        // Ordering: the Release pairs with the Acquire in `word`, `look` and here; it carries the
        // bytes that a writer or loader stored. The Acquire pairs with the Release in `unpin`, so
        // that the evictor's use of the frame comes after the reads under a pin.
        let order = order!(AcqRel, "change: the bytes were read or written before");
        self.word
            .compare_exchange(seen.0, next, order, Ordering::Relaxed)
            .map(drop)
            .map_err(EntryWord)
    }

    /// Counts a hit, unless the count is 3 or the buffer is `NEW`.
    #[inline(always)]
    pub(crate) fn count_hit(&self, word: EntryWord) {
        // `NEW` is above the count, so one comparison asks for both.
        if word.0 & (NEW | USED_MASK) < USED_MASK {
            // A failed exchange is not repeated: a lost hit does not matter.
            // Ordering: Relaxed; a statistic of the policy.
            let _ = self.word.compare_exchange(
                word.0,
                word.0 + USED,
                Ordering::Relaxed,
                Ordering::Relaxed,
            );
        }
    }

    /// Replaces the count of hits by `keep(count)`. Returns the count before. Lock-free.
    pub(crate) fn take_used(&self, keep: impl Fn(u64) -> u64) -> u64 {
        let lower = |seen| {
            let next = seen & !USED_MASK | keep(EntryWord(seen).used()) << 48;
            (next != seen).then_some(next) // an exchange would take as long as all else here
        };
        // Ordering: Relaxed, both; a statistic of the policy.
        let updated = self.word.fetch_update(Ordering::Relaxed, Ordering::Relaxed, lower);
        let (Ok(before) | Err(before)) = updated;
        EntryWord(before).used()
    }

    /// Adds a pin if the word is still `seen`, which allows a pin and has room for one. Otherwise
    /// returns the current word.
    pub(crate) fn try_pin(&self, seen: EntryWord) -> Result<(), EntryWord> {
        debug_assert!(seen.pins() < MOST_PINS);
        // Ordering: Acquire pairs with the Release in `publish` and `try_change`; it carries the
        // bytes.
        let (order, next) = (order!(Acquire, "try_pin: the bytes are there before"), seen.0 + PIN);
        self.word
            .compare_exchange(seen.0, next, order, Ordering::Relaxed)
            .map(drop)
            .map_err(EntryWord)
    }

    /// Adds a pin to a buffer that a slot of the caller protects. The caller reads on under the
    /// pin, even if a writer waits for the slot.
    pub(crate) fn pin_and_read_on(&self) -> Result<(), GetError> {
        let pin = |seen| {
            let unmarked = check!("pin: no writer waits for the slot", !EntryWord(seen).has(WRITE));
            let next = (seen + PIN) | if unmarked { 0 } else { READER_PIN };
            (EntryWord(seen).pins() < MOST_PINS).then_some(next)
        };
        // Ordering: Relaxed; the lookup that set the slot carried the bytes. The Release in
        // `Slot::clear` carries `READER_PIN` and the pin to the writer or evictor, which scans
        // the slots before it loads the word.
        let relaxed = Ordering::Relaxed;
        self.word.fetch_update(relaxed, relaxed, pin).map(drop).map_err(|_| GetError::TooManyPins)
    }

    /// Adds a pin, by which the caller waits for a load or a write to end.
    pub(crate) fn pin(&self) -> Result<(), GetError> {
        let mut seen = self.word();
        loop {
            if seen.pins() == MOST_PINS {
                return Err(GetError::TooManyPins);
            }
            match self.try_pin(seen) {
                Ok(()) => return Ok(()),
                Err(now) => seen = now,
            }
        }
    }

    /// Makes a loaded block readable and drops the loader's pin. Returns the new word.
    pub(crate) fn publish(&self) -> EntryWord {
        // Ordering: the Release pairs with the Acquire in `look`, `word` and `try_pin`; it
        // carries the bytes. The Acquire pairs with the Release in `unpin`, so that the
        // loader's later use of the entry comes after that of a requester that did not wait for
        // the load to end. No model needs the Acquire, because each later use follows a fence or
        // an exchange of its own.
        let order = order!(AcqRel, "publish: the bytes are there before");
        self.loaded(order, VALID)
    }

    /// Hands a loaded block to the loader as its writer, and drops its pin. Readers wait on.
    pub(crate) fn publish_locked(&self) {
        // Ordering: Relaxed, in the exchange too. It continues the release sequence of the change to
        // `WRITE` in `Shared::create`, which carries the loader's slot. The bytes are written later:
        // the change that ends the write carries them.
        self.loaded(Ordering::Relaxed, VALID | WRITE);
    }

    /// Ends the load of a block, and drops its pin. Returns the new word.
    fn loaded(&self, order: Ordering, set: u64) -> EntryWord {
        let next = |seen| (seen & !IO | set) - PIN;
        // Ordering: Relaxed, of the load; the exchange orders.
        let before = self.word.fetch_update(order, Ordering::Relaxed, |seen| Some(next(seen)));
        let (Ok(before) | Err(before)) = before;
        EntryWord(next(before))
    }

    /// Drops a pin. Returns the new word.
    pub(crate) fn unpin(&self) -> EntryWord {
        // Ordering: the Release pairs with the Acquire in `try_change` and `word` of the evictor,
        // so that it finds a slot that was set under the pin, and its writes come after the reads
        // under the pin. The Acquire pairs with the Release of the other unpins: the last one frees
        // a dead buffer.
        let order = order!(AcqRel, "unpin: the bytes were read before");
        let before = self.word.fetch_sub(PIN, order);
        debug_assert!(before & PINS != 0);
        EntryWord(before - PIN)
    }

    /// Clears the key, so that lookups that begin now do not find the entry. The caller has the
    /// lock of the home.
    pub(crate) fn hide(&self) {
        // Ordering: Relaxed; a lookup that found the key before loads the word too. The Release in
        // `free` carries this store to `take`.
        self.key.store(0, Ordering::Relaxed);
    }

    /// Frees a hidden entry, which no other thread uses. `is_first` of its bucket: then another
    /// thread may change `OVERFLOW`.
    pub(crate) fn free(&self, is_first: bool) {
        // Ordering: Release, both, pairs with the Acquire in `take` and in `look`; it carries the
        // hidden key.
        if !is_first {
            return self.word.store(0, order!(Release, "free: the key is hidden before"));
        }
        let mut kept = 0;
        step!("free: OVERFLOW is the bucket's", kept = OVERFLOW);
        self.word.fetch_and(kept, order!(Release, "free the first: the key is hidden before"));
    }
}
