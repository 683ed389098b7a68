//! A bitmap of three levels over the priorities 0 to 32,767: each operation reads three words.
//!
//! The highest priority is cached with its FIFO. A receive finds the message without a search, and
//! an empty queue that gets messages of one priority again and again does not touch the bitmap.
//!
//! ```text
//!  highest            the highest priority that has messages, and its FIFO
//!                     and for the priorities below it:
//!  top        8 bits  which words of `middle` are not zero
//!  middle   512 bits  which words of `bits` are not zero
//!  bits  32,768 bits  which priorities have messages
//!  fifos              their FIFOs, 384 KiB of which the system provides the pages that are used
//! ```
//!
//! # Invariants
//!
//! 1. Whenever the lock is not held, a bit is set exactly if its word or priority has messages other than
//!    those of `highest`.
//! 2. The FIFO of a priority whose bit is set is initialised.
//! 3. Whenever the lock is not held, `highest` holds the messages of the highest priority that has
//!    any. It is empty only if no priority has messages.

use std::mem::MaybeUninit;

use offlock_sync::AllocError;

use super::levels::{Fifo, NIL};
use super::levels::{Levels, sealed};
use crate::stats::LevelStats;

/// The number of priorities: messages have one from 0 to 32,767, as in POSIX queues on Linux.
pub const PRIORITIES: u32 = 32_768;

const WORD: u32 = u64::BITS;
const WORDS: usize = (PRIORITIES / WORD) as usize;
const MIDDLE: usize = WORDS / WORD as usize;

/// The highest priority and its FIFO. Before the first message the priority is [`NIL`].
struct Highest {
    priority: u32,
    fifo: Fifo,
}

/// Levels for the priorities 0 to 32,767, found by a bitmap.
///
/// Every priority has its place from the start, so no operation allocates for one.
///
/// ```
/// use mq_rbtree::{Bitmap, Queue, PRIORITIES};
///
/// let queue: Queue<&str, Bitmap> = Queue::new(8)?; // the default: `Queue<&str>` is the same type
/// queue.send("lowest", 0)?;
/// queue.send("highest", PRIORITIES - 1)?;
/// assert!(queue.send("no such priority", PRIORITIES).is_err());
/// assert_eq!(queue.receive()?, ("highest", 32_767));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[repr(C)] // the fields that every message uses come first
pub struct Bitmap {
    highest: Highest,
    top: u64,
    /// How often a priority without messages got one.
    inserted: u64,
    bits: Box<[u64; WORDS]>,
    fifos: Vec<MaybeUninit<Fifo>>,
    middle: [u64; MIDDLE],
}

/// Returns the highest set bit of a word.
#[inline(always)]
fn highest_bit(word: u64) -> Option<u32> {
    word.checked_ilog2()
}

/// Returns the bits of a word below `bit`.
#[inline(always)]
fn below_bit(word: u64, bit: u32) -> u64 {
    word & ((1 << bit) - 1)
}

#[inline(always)]
fn split(priority: u32) -> (usize, u32) {
    ((priority / WORD) as usize, priority % WORD)
}

impl Bitmap {
    /// Returns whether the bit of a priority is set; false of what is no priority of a bitmap.
    #[inline(always)]
    fn is_set(&self, priority: u32) -> bool {
        let (word, bit) = split(priority);
        self.bits.get(word).is_some_and(|word| word & (1 << bit) != 0)
    }

    /// Counts the priorities that have messages.
    ///
    /// This is computed on demand, because a counter would be written with every message.
    fn live(&self) -> usize {
        let below: u32 = self.bits.iter().map(|word| word.count_ones()).sum();
        below as usize + usize::from(!self.highest.fifo.is_empty())
    }

    /// Sets the bits of a priority below `highest`, which has this FIFO.
    #[inline(always)]
    fn set(&mut self, priority: u32, fifo: Fifo) {
        self.fifos[priority as usize].write(fifo);
        let (word, bit) = split(priority);
        self.bits[word] |= 1 << bit;
        let (middle, bit) = split(word as u32);
        self.middle[middle] |= 1 << bit;
        self.top |= 1 << middle;
    }

    /// Clears the bits of a priority below `highest`.
    #[inline(always)]
    fn clear(&mut self, priority: u32) {
        let (word, bit) = split(priority);
        self.bits[word] &= !(1 << bit);
        if self.bits[word] == 0 {
            let (middle, bit) = split(word as u32);
            self.middle[middle] &= !(1 << bit);
            if self.middle[middle] == 0 {
                self.top &= !(1 << middle);
            }
        }
    }

    /// Moves the next priority with its FIFO, if there is one, into `highest`.
    fn promote(&mut self) {
        let Some(priority) = self.highest_set() else { return };
        // SAFETY: invariant 2; the bit of the priority is set.
        let fifo = unsafe { self.fifos[priority as usize].assume_init() };
        self.highest = Highest { priority, fifo };
        self.clear(priority);
    }

    /// Returns the highest priority below `highest`.
    #[inline(always)]
    fn highest_set(&self) -> Option<u32> {
        let middle = highest_bit(self.top)? as usize;
        self.highest_of(middle, self.middle[middle])
    }

    /// Returns the highest priority that one word of the middle level names.
    #[inline(always)]
    fn highest_of(&self, middle: usize, bits: u64) -> Option<u32> {
        let word = middle as u32 * WORD + highest_bit(bits)?;
        Some(word * WORD + highest_bit(self.bits[word as usize])?)
    }
}

impl sealed::Sealed for Bitmap {}

impl Levels for Bitmap {
    const COMPARES: bool = false;

    type Priority = u32;
    type Hint = ();
    type Preload = ();
    type Level = u32;

    fn new(_spare: usize) -> Self {
        let mut fifos = Vec::with_capacity(PRIORITIES as usize);
        // SAFETY: the capacity was just reserved, and a `MaybeUninit` need not be initialised.
        unsafe { fifos.set_len(PRIORITIES as usize) };
        Self {
            highest: Highest { priority: NIL, fifo: Fifo::EMPTY },
            top: 0,
            inserted: 0,
            bits: Box::new([0; WORDS]),
            fifos,
            middle: [0; MIDDLE],
        }
    }

    fn hint(&self) {}

    #[inline(always)]
    fn check(priority: u32) -> Result<(), u32> {
        if priority < PRIORITIES { Ok(()) } else { Err(priority) }
    }

    #[inline(always)]
    fn get_or_insert(&mut self, priority: u32, _preload: &mut ()) -> Result<u32, AllocError> {
        self.get_or_insert_no_alloc(priority).ok_or(AllocError::new())
    }

    #[inline(always)]
    fn get_or_insert_no_alloc(&mut self, priority: u32) -> Option<u32> {
        if self.highest.fifo.is_empty() {
            self.highest.priority = priority;
        } else if priority > self.highest.priority {
            let below = Highest { priority, fifo: Fifo::EMPTY };
            let below = std::mem::replace(&mut self.highest, below);
            self.set(below.priority, below.fifo);
        } else if priority < self.highest.priority && !self.is_set(priority) {
            self.set(priority, Fifo::EMPTY);
        } else {
            return Some(priority);
        }
        self.inserted += 1;
        Some(priority)
    }

    #[inline(always)]
    unsafe fn remove(&mut self, level: u32, _preload: &mut ()) {
        if level != self.highest.priority {
            self.clear(level);
        } else if self.top != 0 {
            debug_assert!(self.highest.fifo.is_empty());
            self.promote();
        }
    }

    #[inline(always)]
    unsafe fn fifo(&mut self, level: u32) -> &mut Fifo {
        if level == self.highest.priority {
            return &mut self.highest.fifo;
        }
        debug_assert!(self.is_set(level));
        // SAFETY: the caller guarantees a level of this set, whose bit is set; invariant 2.
        unsafe { self.fifos[level as usize].assume_init_mut() }
    }

    #[inline(always)]
    unsafe fn priority(&self, level: u32) -> u32 {
        level
    }

    #[inline(always)]
    fn highest(&self) -> Option<u32> {
        (!self.highest.fifo.is_empty()).then_some(self.highest.priority)
    }

    fn below(&self, priority: u32) -> Option<u32> {
        if priority > self.highest()? {
            return self.highest();
        }
        let (word, bit) = split(priority);
        if let Some(bit) = highest_bit(below_bit(self.bits[word], bit)) {
            return Some(word as u32 * WORD + bit);
        }
        let (middle, bit) = split(word as u32);
        if let Some(found) = self.highest_of(middle, below_bit(self.middle[middle], bit)) {
            return Some(found);
        }
        let middle = highest_bit(below_bit(self.top, middle as u32))? as usize;
        self.highest_of(middle, self.middle[middle])
    }

    #[inline]
    fn is_above(a: u32, b: u32) -> bool {
        a > b
    }

    fn stats(&self) -> LevelStats {
        LevelStats { live: self.live(), from_cache: self.inserted, ..LevelStats::default() }
    }

    fn validate(&self, mut each: impl FnMut(u32, Fifo)) {
        let (mut next, mut seen) = (self.highest(), 0);
        while let Some(priority) = next {
            let fifo = if priority == self.highest.priority {
                self.highest.fifo
            } else {
                // SAFETY: invariant 2; `below` has returned a priority whose bit is set.
                unsafe { self.fifos[priority as usize].assume_init() }
            };
            assert!(!fifo.is_empty(), "a bit without messages");
            each(priority, fifo);
            (next, seen) = (self.below(priority), seen + 1);
        }
        assert_eq!(seen, self.live(), "the number of levels");
        let summary = |words: &[u64]| {
            words.iter().rev().fold(0, |summary, &word| summary << 1 | u64::from(word != 0))
        };
        for (&middle, words) in self.middle.iter().zip(self.bits.chunks(WORD as usize)) {
            assert_eq!(middle, summary(words), "the middle level");
        }
        assert_eq!(self.top, summary(&self.middle), "the top level");
    }
}
