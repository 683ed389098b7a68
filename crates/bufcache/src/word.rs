//! What an entry of the table says: which block is there, in which frame, and who may do what.
//!
//! ```text
//!  key    device 16 | sector 48                                    0: nobody can find it
//!  word   frame 32 | pins 16 | used 2 | flags 14
//! ```
//!
//! | state of the word | flags | found by lookups |
//! |---|---|---|
//! | free | none (or `OVERFLOW`, which belongs to the bucket) | no |
//! | loading | `TAKEN IO` | yes: wait |
//! | live | `TAKEN VALID`, and `NEW`, `DIRTY` or not | yes: a hit |
//! | being written by a thread | `TAKEN VALID WRITE` | yes: wait |
//! | being given to the device | `TAKEN VALID DIRTY BACK` | yes: a hit, for reading |
//! | being evicted | `TAKEN VALID EVICT` | yes: look again |
//! | dead: failed, or invalidated | `TAKEN STALE` | no (the key is 0) |
//!
//! # Who may change it
//!
//! 1. A free word is taken by a compare-exchange; from then on the place is the taker's until it
//!    says `VALID`.
//! 2. `EVICT` is set by a compare-exchange on a word without pins, `IO`, `WRITE`, `DIRTY` or `BACK`; it is
//!    the right to take the buffer apart, once no thread's slot names the entry.
//! 3. `WRITE` is set on a readable word without pins or `BACK`; it is the right to write the bytes, once
//!    no slot but the writer's names the entry, unless `HELD` came meanwhile: pins that come under
//!    `WRITE` are those of who waits for its end, but that of a guard is one of who reads on. `BACK` is set on a readable word that is `DIRTY`: nobody
//!    writes the bytes until it goes, so the device may read them.
//! 4. Pins and `used` change by read-modify-writes, by whoever can see the entry in a state that
//!    allows it; the frame of a taken word does not change.

use percpu::sync::atomic::{AtomicU64, Ordering};
use percpu::sync::{mutant, order};

use crate::error::GetError;
use crate::frames::Frame;

/// Which block: never 0 for one that exists.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Key(u64);

/// Sectors of 512 bytes that a device may have.
pub(crate) const SECTOR_BITS: u32 = 48;

impl Key {
    /// Of no block.
    pub(crate) const NONE: Self = Self(0);

    /// `device` is not 0, and `sector` fits [`SECTOR_BITS`].
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

    /// Spread over 64 bits; the upper ones are the best.
    #[inline(always)]
    pub(crate) fn hash(self) -> u64 {
        // The multiplier of Fibonacci hashing, and what it leaves in the low bits mixed in: blocks
        // are multiples of their size.
        let hash = self.0.wrapping_mul(0x9e37_79b9_7f4a_7c15);
        (hash ^ (hash >> 32)).wrapping_mul(0x9e37_79b9_7f4a_7c15)
    }
}

const PIN: u64 = 1 << 32;
const PINS: u64 = 0xffff << 32;
const USED: u64 = 1 << 48;
const USED_MASK: u64 = 3 << 48;

/// Something is here.
pub(crate) const TAKEN: u64 = 1 << 50;
/// The bytes are those of the block.
pub(crate) const VALID: u64 = 1 << 51;
/// Somebody takes it apart, or looks whether that can be done.
pub(crate) const EVICT: u64 = 1 << 52;
/// The device works on it.
pub(crate) const IO: u64 = 1 << 53;
/// Nobody finds it any more: it goes with its last user.
pub(crate) const STALE: u64 = 1 << 54;
/// The load failed: it goes with the last who waited for it.
pub(crate) const FAILED: u64 = 1 << 57;
/// In the newer half of probation: hits do not count.
pub(crate) const NEW: u64 = 1 << 55;
/// One thread writes it: others wait.
pub(crate) const WRITE: u64 = 1 << 58;
/// The device does not have what is here.
pub(crate) const DIRTY: u64 = 1 << 59;
/// The device is being given what is here.
pub(crate) const BACK: u64 = 1 << 60;
/// Somebody sleeps until `WRITE` or `BACK` goes.
pub(crate) const WAITED: u64 = 1 << 61;
/// Under `WRITE`: a guard has become a pin, whose slot the writer looks for in vain.
pub(crate) const HELD: u64 = 1 << 62;
/// Hits of the block are for the shadows of the policy. The sign of the word: a hit tests it by one instruction,
/// where the block's hash would be computed anew. A block may have it that is not in the sample, which costs time.
pub(crate) const SAMPLED: u64 = 1 << 63;
/// Of the first entry of a bucket: a block whose home this is may lie in a later one. Not part of
/// the entry's own state.
pub(crate) const OVERFLOW: u64 = 1 << 56;

/// One look at a word.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct Word(pub(crate) u64);

impl Word {
    /// A block that is about to be read, pinned by whoever reads it.
    pub(crate) fn loading(frame: Frame) -> Self {
        Self(u64::from(frame.0) | TAKEN | IO | PIN)
    }

    /// The same, where hits may be sampled.
    pub(crate) fn sampled_if(self, sampled: bool) -> Self {
        Self(self.0 | if sampled { SAMPLED } else { 0 })
    }

    /// The same, with a pin for somebody who waits.
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

    /// A reader may look at the bytes.
    #[inline(always)]
    pub(crate) fn is_readable(self) -> bool {
        self.0 & (VALID | EVICT | IO | STALE | WRITE) == VALID
    }

    pub(crate) fn pins(self) -> u64 {
        (self.0 & PINS) >> 32
    }

    /// Hits since the policy looked last: up to 3.
    #[inline(always)]
    pub(crate) fn used(self) -> u64 {
        (self.0 & USED_MASK) >> 48
    }
}

/// A place in the table.
#[derive(Debug)]
pub(crate) struct Entry {
    key: AtomicU64,
    word: AtomicU64,
}

/// The most pins of one buffer.
pub(crate) const MOST_PINS: u64 = 0xffff;

impl Entry {
    pub(crate) fn new() -> Self {
        Self { key: AtomicU64::new(0), word: AtomicU64::new(0) }
    }

    /// Whether the entry is that of `key`: a hint, to be looked at again.
    #[inline(always)]
    pub(crate) fn may_be(&self, key: Key) -> bool {
        // Ordering: Relaxed; nothing behind it is touched before `look`.
        self.key.load(Ordering::Relaxed) == key.0
    }

    /// The word, if the entry is that of `key`.
    #[inline(always)]
    pub(crate) fn look(&self, key: Key) -> Option<Word> {
        // Ordering: SeqCst pairs with the fence of who marked it: this look comes before that fence, or
        // finds the mark (see `hazard`). As an Acquire it pairs with the Release in `publish` and carries
        // the frame's bytes. Before the key: were the place another block's by now, the key says so.
        let word = Word(self.word.load(Ordering::SeqCst));
        // Ordering: Relaxed; the load above was of this key or of one before it, and a key that is
        // found now was stored before its word, see `take`.
        (self.key.load(Ordering::Relaxed) == key.0).then_some(word)
    }

    /// The word, for whoever has a claim on the entry.
    #[inline(always)]
    pub(crate) fn word(&self) -> Word {
        // Ordering: Acquire pairs with the Release in `publish`, `unpin` and `try_change`; it carries the
        // frame's bytes, and what was read under a pin.
        Word(self.word.load(Ordering::Acquire))
    }

    /// Whose block it is, for whoever has the entry.
    pub(crate) fn key(&self) -> Key {
        // Ordering: Relaxed; the caller's claim has carried it here.
        Key(self.key.load(Ordering::Relaxed))
    }

    /// Takes a free place for `key`, in the state `word`. The caller has the lock of the key's home.
    pub(crate) fn take(&self, key: Key, word: Word) -> bool {
        // Ordering: Relaxed, both; a hint, and the place itself carries nothing but `OVERFLOW`.
        let free = self.word.load(Ordering::Relaxed);
        if free & !OVERFLOW != 0 {
            return false;
        }
        // Ordering: Acquire pairs with the Release in `free`: what was done with the place before
        // is over. Relaxed on failure: another took it.
        let acquire = order!(Acquire, "take: the place was freed before");
        let taken = self.word.compare_exchange(free, free | word.0, acquire, Ordering::Relaxed);
        if taken.is_err() {
            return false;
        }
        // Ordering: Relaxed; the lock of the home carries it to those who insert. A reader that finds it
        // looks at the word, which says `IO` until it is published.
        self.key.store(key.0, Ordering::Relaxed);
        true
    }

    /// Sets and clears flags. Returns what was there.
    pub(crate) fn change(&self, set: u64, clear: u64) -> Word {
        // Ordering: Relaxed; `try_change` orders.
        let mut seen = self.word.load(Ordering::Relaxed);
        loop {
            match self.try_change(Word(seen), set, clear) {
                Ok(()) => return Word(seen),
                Err(now) => seen = now.0,
            }
        }
    }

    /// The same, if the word is still what was `seen`.
    pub(crate) fn try_change(&self, seen: Word, set: u64, clear: u64) -> Result<(), Word> {
        let next = seen.0 & !clear | set;
        // Ordering: AcqRel pairs with itself and with the Acquire in `look`; it carries the frame's
        // bytes from whoever filled it, and to whoever takes it apart what readers by pin have read.
        self.word
            .compare_exchange(seen.0, next, Ordering::AcqRel, Ordering::Relaxed)
            .map(drop)
            .map_err(Word)
    }

    /// Counts a hit, unless three are counted or none is wanted.
    #[inline(always)]
    pub(crate) fn count_hit(&self, word: Word) {
        if word.0 & NEW == 0 && word.used() < 3 {
            // One that fails is another's hit that is counted, or the policy's look.
            // Ordering: Relaxed; a statistic of the policy.
            let _ = self.word.compare_exchange(
                word.0,
                word.0 + USED,
                Ordering::Relaxed,
                Ordering::Relaxed,
            );
        }
    }

    /// The policy's look: how often was it used? Halves the count, or takes one off it.
    pub(crate) fn take_used(&self, keep: impl Fn(u64) -> u64) -> u64 {
        // Ordering: Relaxed, both; a statistic of the policy.
        let mut seen = self.word.load(Ordering::Relaxed);
        loop {
            let used = Word(seen).used();
            let next = seen & !USED_MASK | keep(used) << 48;
            let order = Ordering::Relaxed;
            match self.word.compare_exchange(seen, next, order, order) {
                Ok(_) => return used,
                Err(now) => seen = now,
            }
        }
    }

    /// Adds a pin, if the word is still what was `seen` and there is room. The caller has seen that
    /// the state allows it.
    pub(crate) fn try_pin(&self, seen: Word) -> Result<(), Word> {
        debug_assert!(seen.pins() < MOST_PINS);
        // Ordering: Acquire pairs with the Release in `publish`; it carries the bytes.
        self.word
            .compare_exchange(seen.0, seen.0 + PIN, Ordering::Acquire, Ordering::Relaxed)
            .map(drop)
            .map_err(Word)
    }

    /// Adds a pin to a buffer that a slot of the caller's keeps, for who reads on: also where a writer waits
    /// for the slot.
    pub(crate) fn pin_and_read_on(&self) -> Result<(), GetError> {
        let mut seen = self.word();
        loop {
            if seen.pins() == MOST_PINS {
                return Err(GetError::TooManyPins);
            }
            let unsaid = !seen.has(WRITE) || mutant("pin-without-a-word-to-the-writer");
            let next = (seen.0 + PIN) | if unsaid { 0 } else { HELD };
            // Ordering: Relaxed; the bytes came with the slot, whose end carries this to the writer: it looks
            // at the slot first.
            let order = Ordering::Relaxed;
            match self.word.compare_exchange(seen.0, next, order, order) {
                Ok(_) => return Ok(()),
                Err(now) => seen = Word(now),
            }
        }
    }

    /// The same, for who waits for a writer then.
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

    /// The bytes are there: readers may look, and the loader's pin goes. Returns the word after it.
    pub(crate) fn publish(&self) -> Word {
        // Ordering: Relaxed; the exchange orders.
        let mut seen = self.word.load(Ordering::Relaxed);
        loop {
            let next = (seen & !IO | VALID) - PIN;
            let order = match () {
                () if mutant("publish-relaxed") => Ordering::Relaxed,
                () if mutant("publish-releases-only") => Ordering::Release,
                () => Ordering::AcqRel,
            };
            // Ordering: AcqRel: Release pairs with the Acquire in `look` and in `word`; it carries the
            // bytes. Acquire pairs with the Release in `unpin`; it carries what those left behind who
            // did not wait for the end.
            match self.word.compare_exchange(seen, next, order, Ordering::Relaxed) {
                Ok(_) => return Word(next),
                Err(now) => seen = now,
            }
        }
    }

    /// The bytes are there, and are written by the loader, whose pin goes: readers wait on.
    pub(crate) fn publish_locked(&self) {
        // Ordering: Relaxed; the exchange orders.
        let mut seen = self.word.load(Ordering::Relaxed);
        loop {
            let next = (seen & !IO | VALID | WRITE) - PIN;
            // Ordering: Release, as in `publish`, though nobody reads before `WRITE` goes.
            match self.word.compare_exchange(seen, next, Ordering::Release, Ordering::Relaxed) {
                Ok(_) => return,
                Err(now) => seen = now,
            }
        }
    }

    /// Takes a pin off. Returns the word after it.
    pub(crate) fn unpin(&self) -> Word {
        // Ordering: AcqRel: Release pairs with the Acquire of `try_change` in the evictor; it carries
        // what was read under the pin, and the slot that was set under it. Acquire, of the last one to
        // leave a dead buffer, of what the others read.
        let order = if mutant("unpin-relaxed") { Ordering::Relaxed } else { Ordering::AcqRel };
        let before = self.word.fetch_sub(PIN, order);
        debug_assert!(before & PINS != 0);
        Word(before - PIN)
    }

    /// Makes it nobody's block; lookups that begin now do not find it. The caller has the lock of the
    /// home.
    pub(crate) fn hide(&self) {
        // Ordering: Relaxed; who found it before looks at the word.
        self.key.store(0, Ordering::Relaxed);
    }

    /// Gives a hidden place back. The caller has the only claim on it.
    pub(crate) fn free(&self) {
        // Ordering: Release pairs with the Acquire in `take`; it carries the hidden key.
        let kept = if mutant("free-forgets-overflow") { 0 } else { OVERFLOW };
        self.word.fetch_and(kept, order!(Release, "free: the key is hidden before"));
    }
}
