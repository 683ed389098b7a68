//! A bitmap of three levels over the priorities 0 to 32,767: each operation reads three words.
//!
//! The highest priority is cached with its FIFO. A receive finds the message without a search, and
//! an empty queue that gets messages of one priority again and again does not touch the bitmap.
//!
//! ```text
//!  highest          the highest priority that has messages, and its FIFO
//!                   and for the priorities below it:
//!  top    8 bits    which words of `middle` are not zero
//!  middle 512 bits  which pages have messages
//!  page   64 bits   which of its priorities have messages, and 64 FIFOs
//! ```
//!
//! A page is allocated when one of its priorities is first used; before the lock, if the hint shows
//! that the page is missing. Pages are kept until the queue is dropped: at most 512 pages of 776
//! bytes, 0.4 MiB.
//!
//! # Invariants
//!
//! 1. Whenever the lock is not held, a bit is set exactly if its page or priority has messages
//!    other than those of `highest`. The FIFO of a priority whose bit is clear is empty.
//! 2. The page of every priority that has messages is allocated, also that of `highest`. So is each
//!    page that the hint names.
//! 3. Whenever the lock is not held, `highest` holds the messages of the highest priority that has
//!    any. It is empty only if no priority has messages.

use percpu::AllocError;
use percpu::sync::atomic::{AtomicU64, Ordering};
use percpu::sync::{Arc, check, load_own};

use super::fifo::{Fifo, NIL};
use super::levels::{Levels, sealed};
use crate::stats::LevelStats;
use percpu::alloc::try_box;

/// The number of priorities: messages have one from 0 to 32,767, as in POSIX queues on Linux.
pub const PRIORITIES: u32 = 32_768;

const WORD: u32 = u64::BITS;
const PAGES: usize = (PRIORITIES / WORD) as usize;
const WORDS: usize = PAGES / WORD as usize;

#[doc(hidden)]
pub struct Page {
    bits: u64,
    levels: [Fifo; WORD as usize],
}

impl Page {
    fn try_new() -> Result<Box<Self>, AllocError> {
        let page = Self { bits: 0, levels: [Fifo::EMPTY; WORD as usize] };
        try_box(page).map_err(|_| AllocError::new())
    }

    /// Allocates a page if `preload` has none. Out of line, because each page is needed once.
    #[cold]
    #[inline(never)]
    fn fill(preload: &mut Option<Box<Self>>) {
        if preload.is_none() {
            *preload = Self::try_new().ok();
        }
    }
}

/// The highest priority and its FIFO. Before the first message the priority is [`NIL`].
struct Highest {
    priority: u32,
    fifo: Fifo,
}

/// Levels for the priorities 0 to 32,767, found by a bitmap.
///
/// A page for 64 priorities is allocated when the first of them is used, and kept.
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
    pages: Box<[Option<Box<Page>>; PAGES]>,
    middle: [u64; WORDS],
    present: Arc<[AtomicU64; WORDS]>,
    kept: usize,
    from_preload: u64,
    fallback: u64,
}

/// A bitmap of the allocated pages that is readable without the lock.
#[doc(hidden)]
pub struct PageHint(Arc<[AtomicU64; WORDS]>);

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
    #[inline(always)]
    fn page(&self, number: usize) -> Option<&Page> {
        self.pages.get(number)?.as_deref()
    }

    /// Stores the preloaded page at a number that has none, or else allocates one.
    #[cold]
    #[inline(never)]
    fn allocate_page(
        &mut self,
        number: usize,
        preload: &mut Option<Box<Page>>,
    ) -> Result<(), AllocError> {
        let page = match preload.take() {
            Some(page) => {
                self.from_preload += 1;
                page
            }
            None => {
                let page = Page::try_new()?;
                self.fallback += 1;
                page
            }
        };
        self.install_page(number, page);
        Ok(())
    }

    fn install_page(&mut self, number: usize, page: Box<Page>) {
        self.pages[number] = Some(page);
        self.kept += 1;
        let (word, bit) = split(number as u32);
        let there = load_own(&self.present[word]);
        // Ordering: Relaxed; a hint that publishes nothing. The lock orders its writers.
        self.present[word].store(there | 1 << bit, Ordering::Relaxed);
    }

    /// Returns the page of a priority that `get_or_insert` has returned; by invariant 2 it is
    /// allocated.
    #[inline(always)]
    fn page_of(&mut self, priority: u32) -> (&mut Page, u32) {
        let (number, bit) = split(priority);
        match self.pages[number].as_deref_mut() {
            Some(page) => (page, bit),
            None => unreachable!("a level's page is there"),
        }
    }

    /// Counts the priorities that have messages.
    ///
    /// This is computed on demand, because a counter would be written with every message.
    fn live(&self) -> usize {
        let with_messages = |&page: &usize| {
            let (word, bit) = split(page as u32);
            self.middle[word] & (1 << bit) != 0
        };
        let bits = (0..PAGES).filter(with_messages).filter_map(|page| self.page(page));
        let below: u32 = bits.map(|page| page.bits.count_ones()).sum();
        below as usize + usize::from(!self.highest.fifo.is_empty())
    }

    /// Sets the bits of a priority below `highest`.
    #[inline(always)]
    fn set(&mut self, priority: u32) {
        let (number, bit) = split(priority);
        self.page_of(priority).0.bits |= 1 << bit;
        let (word, bit) = split(number as u32);
        self.middle[word] |= 1 << bit;
        self.top |= 1 << word;
    }

    /// Clears the bits of a priority below `highest`.
    #[inline(always)]
    fn clear(&mut self, priority: u32) {
        let (number, bit) = split(priority);
        let page = self.page_of(priority).0;
        page.bits &= !(1 << bit);
        if page.bits == 0 {
            let (word, bit) = split(number as u32);
            self.middle[word] &= !(1 << bit);
            if self.middle[word] == 0 {
                self.top &= !(1 << word);
            }
        }
    }

    /// Moves `highest` into its page, and makes a higher priority the new `highest`.
    fn demote(&mut self, priority: u32) {
        let below = std::mem::replace(&mut self.highest, Highest { priority, fifo: Fifo::EMPTY });
        let (page, bit) = self.page_of(below.priority);
        page.levels[bit as usize] = below.fifo;
        self.set(below.priority);
    }

    /// Moves the highest priority of the pages, if there is one, into `highest`.
    fn promote(&mut self) {
        let Some(priority) = self.highest_in_pages() else { return };
        let (page, bit) = self.page_of(priority);
        let fifo = std::mem::replace(&mut page.levels[bit as usize], Fifo::EMPTY);
        self.highest = Highest { priority, fifo };
        self.clear(priority);
    }

    /// Returns the highest priority below `highest`.
    #[inline(always)]
    fn highest_in_pages(&self) -> Option<u32> {
        let word = highest_bit(self.top)? as usize;
        self.highest_of(word, self.middle[word])
    }

    /// Returns the highest priority in the pages that one word of the middle level names.
    #[inline(always)]
    fn highest_of(&self, word: usize, middle: u64) -> Option<u32> {
        let number = word as u32 * WORD + highest_bit(middle)?;
        let bit = highest_bit(self.page(number as usize)?.bits)?;
        Some(number * WORD + bit)
    }
}

impl sealed::Sealed for Bitmap {}

impl Levels for Bitmap {
    const COMPARES: bool = false;

    type Priority = u32;
    type Hint = PageHint;
    type Preload = Option<Box<Page>>;
    type Level = u32;

    fn try_new(_spare: usize) -> Result<Self, AllocError> {
        let pages = try_box([const { None }; PAGES]).map_err(|_| AllocError::new())?;
        Ok(Self {
            highest: Highest { priority: NIL, fifo: Fifo::EMPTY },
            top: 0,
            inserted: 0,
            pages,
            middle: [0; WORDS],
            present: Arc::new(std::array::from_fn(|_| AtomicU64::new(0))),
            kept: 0,
            from_preload: 0,
            fallback: 0,
        })
    }

    fn hint(&self) -> PageHint {
        PageHint(Arc::clone(&self.present))
    }

    #[inline(always)]
    fn check(priority: u32) -> Result<(), u32> {
        if priority < PRIORITIES { Ok(()) } else { Err(priority) }
    }

    #[inline(always)]
    fn needs_memory(hint: &PageHint, priority: u32) -> bool {
        let (word, bit) = split(priority / WORD);
        // Ordering: Relaxed; a hint. The operation checks again under the lock, which orders the
        // pages.
        let there = hint.0.get(word).map_or(0, |there| there.load(Ordering::Relaxed));
        there & (1 << bit) == 0
    }

    #[inline(always)]
    fn preload(hint: &PageHint, priority: u32, preload: &mut Option<Box<Page>>) {
        if Self::needs_memory(hint, priority) {
            Page::fill(preload);
        }
    }

    fn keep_preload(&mut self, priority: u32, preload: &mut Option<Box<Page>>) {
        let (number, _) = split(priority);
        if self.pages[number].is_none() {
            if let Some(page) = preload.take() {
                self.install_page(number, page);
            }
        }
    }

    #[inline(always)]
    fn get_or_insert(
        &mut self,
        priority: u32,
        preload: &mut Option<Box<Page>>,
    ) -> Result<u32, AllocError> {
        let (number, _) = split(priority);
        if check!("insert: the page is still missing", self.pages[number].is_none()) {
            self.allocate_page(number, preload)?;
        }
        self.get_or_insert_no_alloc(priority).ok_or(AllocError::new())
    }

    #[inline(always)]
    fn get_or_insert_no_alloc(&mut self, priority: u32) -> Option<u32> {
        if priority != self.highest.priority {
            let (number, bit) = split(priority);
            let page = self.pages[number].as_deref()?;
            if self.highest.fifo.is_empty() {
                self.highest.priority = priority;
            } else if priority > self.highest.priority {
                self.demote(priority);
            } else if page.bits & (1 << bit) == 0 {
                self.set(priority);
                self.inserted += 1;
                return Some(priority);
            } else {
                return Some(priority);
            }
        }
        if self.highest.fifo.is_empty() {
            self.inserted += 1;
        }
        Some(priority)
    }

    #[inline(always)]
    unsafe fn remove(&mut self, level: u32, _preload: &mut Option<Box<Page>>) {
        if level != self.highest.priority {
            debug_assert!(self.page_of(level).0.levels[split(level).1 as usize].is_empty());
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
        let (page, bit) = self.page_of(level);
        &mut page.levels[bit as usize]
    }

    #[inline(always)]
    unsafe fn priority(&self, level: u32) -> u32 {
        level
    }

    #[inline(always)]
    fn highest(&self) -> Option<u32> {
        (!self.highest.fifo.is_empty()).then_some(self.highest.priority)
    }

    fn find(&self, priority: u32) -> Option<u32> {
        if priority == self.highest.priority {
            return self.highest();
        }
        let (number, bit) = split(priority);
        let there = self.page(number)?.bits & (1 << bit) != 0;
        there.then_some(priority)
    }

    fn below(&self, priority: u32) -> Option<u32> {
        if priority > self.highest()? {
            return self.highest();
        }
        let (number, bit) = split(priority);
        let bits = self.page(number).map_or(0, |page| below_bit(page.bits, bit));
        if let Some(bit) = highest_bit(bits) {
            return Some(number as u32 * WORD + bit);
        }
        let (word, bit) = split(number as u32);
        let middle = self.middle.get(word).map_or(0, |&middle| below_bit(middle, bit));
        if middle != 0 {
            return self.highest_of(word, middle);
        }
        let word = highest_bit(below_bit(self.top, word as u32))? as usize;
        self.highest_of(word, self.middle[word])
    }

    #[inline]
    fn is_above(a: u32, b: u32) -> bool {
        a > b
    }

    fn reserve(&mut self, _messages: usize) -> Result<(), AllocError> {
        for number in 0..PAGES {
            if self.pages[number].is_none() {
                self.install_page(number, Page::try_new()?);
            }
        }
        Ok(())
    }

    fn stats(&self) -> LevelStats {
        let Self { kept, inserted, from_preload, fallback, .. } = *self;
        let live = self.live();
        let from_cache = inserted - from_preload - fallback;
        LevelStats { live, kept, from_cache, from_preload, fallback }
    }

    fn validate(&self, mut each: impl FnMut(u32, Fifo)) {
        let mut live = 0;
        if !self.highest.fifo.is_empty() {
            live += 1;
            each(self.highest.priority, self.highest.fifo);
        }
        for number in (0..PAGES).rev() {
            let (word, bit) = split(number as u32);
            let bits = self.page(number).map_or(0, |page| page.bits);
            assert_eq!(bits != 0, self.middle[word] & (1 << bit) != 0, "the middle level");
            let Some(page) = self.page(number) else { continue };
            for bit in (0..WORD).rev() {
                let fifo = page.levels[bit as usize];
                assert_eq!(bits & (1 << bit) != 0, !fifo.is_empty(), "a bit and its FIFO");
                if !fifo.is_empty() {
                    live += 1;
                    each(number as u32 * WORD + bit, fifo);
                }
            }
        }
        for (word, &middle) in self.middle.iter().enumerate() {
            assert_eq!(middle != 0, self.top & (1 << word) != 0, "the top level");
        }
        assert_eq!(live, self.live(), "the number of levels");
        if self.highest.fifo.is_empty() {
            assert_eq!(live, 0, "messages below a first that has none");
        } else {
            let below = self.highest_in_pages().is_none_or(|below| below < self.highest.priority);
            assert!(below, "the first is the highest");
        }
        let page = self.page((self.highest.priority / WORD) as usize).is_some();
        assert!(page || self.highest.priority == NIL, "the page of the first");
    }
}
