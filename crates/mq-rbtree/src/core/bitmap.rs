//! The priorities 0 to 32,767 as a bitmap of three levels: any of its operations looks at three
//! words. The highest is at hand, so that a receive need not look for it before it takes the message:
//! each word would be asked for by what the one before it says.
//!
//! ```text
//!  top    8 bits    which words of `middle` are not zero
//!  middle 512 bits  which pages have messages
//!  page   64 bits   which of its priorities have messages, and 64 FIFOs
//! ```
//!
//! Pages are allocated when one of their priorities is first used, before the lock if the hint says
//! that it is not there, and stay: 512 pages of 776 bytes are 0.4 MiB at most.
//!
//! # Invariants
//!
//! 1. A bit is set if and only if what it stands for has messages, whenever the lock is not held.
//! 2. A page that has messages is there; so is each that the hint names.
//! 3. `end` is one more than the highest priority that has messages, or 0, whenever invariant 1 holds.

use percpu::AllocError;
use percpu::sync::atomic::{AtomicU64, Ordering};
use percpu::sync::{Arc, mutant};

use super::fifo::Fifo;
use super::levels::{Levels, sealed};
use crate::stats::LevelStats;
use percpu::alloc::try_box;

/// Priorities: 0 to one less. As POSIX on Linux has them.
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

    /// Out of line, as a page is needed once.
    #[cold]
    #[inline(never)]
    fn preload(preload: &mut Option<Box<Self>>) {
        if preload.is_none() {
            *preload = Self::try_new().ok();
        }
    }
}

/// Priorities 0 to 32,767, found by a bitmap: [`Levels`] that allocate a page for 64 priorities once.
pub struct Bitmap {
    end: u32,
    top: u64,
    middle: [u64; WORDS],
    pages: Box<[Option<Box<Page>>; PAGES]>,
    there: Arc<[AtomicU64; WORDS]>,
    live: usize,
    kept: usize,
    from_cache: u64,
    from_preload: u64,
    fallback: u64,
}

/// Which pages are there.
#[doc(hidden)]
pub struct PageHint(Arc<[AtomicU64; WORDS]>);

/// The highest bit of a word that has one.
#[inline(always)]
fn highest_bit(word: u64) -> Option<u32> {
    word.checked_ilog2()
}

/// The bits below one.
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

    /// Puts a page where there is none.
    #[cold]
    #[inline(never)]
    fn add_page(
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
        self.put_page(number, page);
        Ok(())
    }

    fn put_page(&mut self, number: usize, page: Box<Page>) {
        self.pages[number] = Some(page);
        self.kept += 1;
        let (word, bit) = split(number as u32);
        // Ordering: Relaxed, both; a hint, and the caller's lock orders the writers.
        let there = self.there[word].load(Ordering::Relaxed);
        self.there[word].store(there | 1 << bit, Ordering::Relaxed);
    }

    /// The highest priority that has messages.
    #[inline(always)]
    fn search(&self) -> Option<u32> {
        let word = highest_bit(self.top)? as usize;
        self.highest_of(word, self.middle[word])
    }

    /// The highest priority of a page that has messages, of those in `middle` and `top`.
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
    type Place = u32;

    fn try_new(_spare: usize) -> Result<Self, AllocError> {
        let pages = try_box([const { None }; PAGES]).map_err(|_| AllocError::new())?;
        Ok(Self {
            end: 0,
            top: 0,
            middle: [0; WORDS],
            pages,
            there: Arc::new(std::array::from_fn(|_| AtomicU64::new(0))),
            live: 0,
            kept: 0,
            from_cache: 0,
            from_preload: 0,
            fallback: 0,
        })
    }

    fn hint(&self) -> PageHint {
        PageHint(Arc::clone(&self.there))
    }

    #[inline(always)]
    fn is_valid(priority: u32) -> bool {
        priority < PRIORITIES
    }

    #[inline(always)]
    fn is_short(hint: &PageHint, priority: u32) -> bool {
        let (word, bit) = split(priority / WORD);
        // Ordering: Relaxed; a hint, the lock orders what it is about.
        let there = hint.0.get(word).map_or(0, |there| there.load(Ordering::Relaxed));
        there & (1 << bit) == 0
    }

    #[inline(always)]
    fn fill(hint: &PageHint, priority: u32, preload: &mut Option<Box<Page>>) {
        if Self::is_short(hint, priority) {
            Page::preload(preload);
        }
    }

    fn stock(&mut self, priority: u32, preload: &mut Option<Box<Page>>) {
        let (number, _) = split(priority);
        if self.pages[number].is_none() {
            if let Some(page) = preload.take() {
                self.put_page(number, page);
            }
        }
    }

    #[inline(always)]
    fn enter(&mut self, priority: u32, preload: &mut Option<Box<Page>>) -> Result<u32, AllocError> {
        let (number, bit) = split(priority);
        let stores_all = mutant("bitmap-stores-without-a-second-look") && preload.is_some();
        if self.pages[number].is_none() || stores_all {
            self.add_page(number, preload)?;
        }
        let Some(page) = self.pages[number].as_deref_mut() else { unreachable!("put there above") };
        let mask = 1 << bit;
        if page.bits & mask == 0 {
            page.bits |= mask;
            self.from_cache += 1;
            self.live += 1;
            let (word, bit) = split(number as u32);
            self.middle[word] |= 1 << bit;
            self.top |= 1 << word;
            self.end = self.end.max(priority + 1);
        }
        Ok(priority)
    }

    #[inline(always)]
    unsafe fn leave(&mut self, place: u32, _preload: &mut Option<Box<Page>>) {
        let (number, bit) = split(place);
        let Some(page) = self.pages[number].as_deref_mut() else {
            unreachable!("a level's page is there")
        };
        debug_assert!(page.levels[bit as usize].is_empty());
        page.bits &= !(1 << bit);
        self.live -= 1;
        if page.bits == 0 {
            let (word, bit) = split(number as u32);
            self.middle[word] &= !(1 << bit);
            if self.middle[word] == 0 {
                self.top &= !(1 << word);
            }
        }
        if self.end == place + 1 {
            self.end = self.search().map_or(0, |highest| highest + 1);
        }
    }

    #[inline(always)]
    unsafe fn fifo(&mut self, place: u32) -> &mut Fifo {
        let (number, bit) = split(place);
        match self.pages[number].as_deref_mut() {
            Some(page) => &mut page.levels[bit as usize],
            None => unreachable!("a level's page is there"),
        }
    }

    #[inline(always)]
    unsafe fn priority(&self, place: u32) -> u32 {
        place
    }

    #[inline(always)]
    fn highest(&self) -> Option<u32> {
        self.end.checked_sub(1)
    }

    fn find(&self, priority: u32) -> Option<u32> {
        let (number, bit) = split(priority);
        let there = self.page(number)?.bits & (1 << bit) != 0;
        there.then_some(priority)
    }

    fn below(&self, priority: u32) -> Option<u32> {
        let priority = priority.min(PRIORITIES);
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
                self.put_page(number, Page::try_new()?);
            }
        }
        Ok(())
    }

    fn stats(&self) -> LevelStats {
        let Self { live, kept, from_cache, from_preload, fallback, .. } = *self;
        let from_cache = from_cache - from_preload - fallback;
        LevelStats { live, kept, from_cache, from_preload, fallback }
    }

    fn validate(&self, mut each: impl FnMut(u32, Fifo)) {
        let mut live = 0;
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
        assert_eq!(live, self.live, "the number of levels");
        assert_eq!(self.search(), self.end.checked_sub(1), "the highest level");
    }
}
