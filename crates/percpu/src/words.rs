//! A pool of per-CPU words: one 64-bit word for every CPU, at 8 bytes each.
//!
//! Every CPU has a region of its own, and a word has the same offset in each region:
//!
//! ```text
//!  chunk -> | cpu 0: w0 w1 w2 ... | cpu 1: w0 w1 w2 ... | ...     STRIDE bytes (64 KiB) each
//!             ^                     ^
//!             base of w0            base + STRIDE
//! ```
//!
//! The word of CPU n is at `base + n * STRIDE`. The stride is a power of two and a compile-time
//! constant, so that a section computes the address with a shift. A page of a chunk takes no memory
//! until its first use. The pool never unmaps a chunk, so the address of a word stays readable for
//! the life of the process. A [`WordBlock`] is [`BLOCK`] words that are adjacent in each region.
//! Blocks have chunks of their own.
//!
//! # Invariants
//!
//! 1. `base` points to a word in the region of CPU 0 of a chunk. The words at the same offset in
//!    the regions of all CPUs below `cpu::possible_cpus()` belong to the same `Words`, and to no other.
//!    The same holds for each word of a `WordBlock`.
//! 2. The words of a new `Words`, and of a new `WordBlock`, are 0.

use std::mem::ManuallyDrop;
use std::ptr::NonNull;

use offlock_sync::AllocError;
use offlock_sync::atomic::AtomicU64;

use crate::cpu::{self, CpuId};

pub(crate) use self::imp::STRIDE;

/// One word for every CPU.
#[derive(Debug)]
pub(crate) struct Words {
    base: NonNull<AtomicU64>,
}

// SAFETY: `base` points to atomics that this `Words` owns (invariant 1).
unsafe impl Send for Words {}
// SAFETY: `&Words` gives `&AtomicU64` only, which is `Sync`.
unsafe impl Sync for Words {}

impl Words {
    /// Takes a word for every CPU from the pool. All words are 0.
    ///
    /// Blocks briefly while another thread takes or returns words. May map memory.
    pub(crate) fn new() -> Result<Self, AllocError> {
        Ok(Self { base: imp::WORDS.take()? })
    }

    /// Returns a pointer to the word of CPU 0.
    #[allow(dead_code, reason = "only sections compute addresses")]
    #[inline(always)]
    pub(crate) fn base(&self) -> *mut AtomicU64 {
        self.base.as_ptr()
    }

    /// Returns a second handle to the same words, which must not be used after `self` is dropped.
    ///
    /// For the put of a reference, which may let another thread free the structure that contains
    /// `self`. A `&Words` argument would promise that the structure outlives the call.
    #[inline(always)]
    pub(crate) fn alias(&self) -> ManuallyDrop<Self> {
        ManuallyDrop::new(Self { base: self.base })
    }

    /// Returns the word of `cpu`.
    ///
    /// # Panics
    ///
    /// Panics if `cpu` is not below `cpu::possible_cpus()`.
    #[inline(always)]
    pub(crate) fn slot(&self, cpu: CpuId) -> &AtomicU64 {
        assert!(cpu.index() < cpu::possible_cpus(), "{cpu} has no slot");
        // SAFETY: the region of `cpu` exists (the assertion), so the address is inside the chunk.
        let word = unsafe { self.base.byte_add(cpu.index() * STRIDE) };
        // SAFETY: invariant 1: an initialised word that belongs to `self`, and chunks are never
        // unmapped.
        unsafe { word.as_ref() }
    }

    /// Iterates over the words of all CPUs, ascending.
    pub(crate) fn iter(&self) -> impl Iterator<Item = &AtomicU64> {
        (0..cpu::possible_cpus()).map(|cpu| self.slot(CpuId::new(cpu as u32)))
    }
}

impl Drop for Words {
    fn drop(&mut self) {
        // SAFETY: `base` is from `take`, and this `Words` is not used after its drop.
        unsafe { imp::WORDS.give_back(self.base) };
    }
}

/// The number of words that a [`WordBlock`] has for every CPU.
pub(crate) const BLOCK: usize = if cfg!(offlock_model) { 2 } else { 64 };

/// [`BLOCK`] words for every CPU.
#[derive(Debug)]
pub(crate) struct WordBlock {
    base: NonNull<AtomicU64>,
}

// SAFETY: `base` points to atomics that this `WordBlock` owns (invariant 1).
unsafe impl Send for WordBlock {}
// SAFETY: `&WordBlock` gives `&AtomicU64` only, which is `Sync`.
unsafe impl Sync for WordBlock {}

impl WordBlock {
    /// Takes a block from the pool of blocks. All words are 0. May block and may map memory, like
    /// [`Words::new`].
    pub(crate) fn new() -> Result<Self, AllocError> {
        Ok(Self { base: imp::BLOCKS.take()? })
    }

    /// Returns word `i` of every CPU. The caller must not use it after the block is dropped.
    ///
    /// # Panics
    ///
    /// Panics if `i` is not below [`BLOCK`].
    #[inline(always)]
    pub(crate) fn words(&self, i: usize) -> ManuallyDrop<Words> {
        assert!(i < BLOCK, "word {i} of {BLOCK}");
        // SAFETY: `i < BLOCK`, so the address is inside the block.
        let base = unsafe { self.base.byte_add(imp::place(i)) };
        ManuallyDrop::new(Words { base })
    }
}

impl Drop for WordBlock {
    fn drop(&mut self) {
        // SAFETY: `base` is from `take`, and this block is not used after its drop.
        unsafe { imp::BLOCKS.give_back(self.base) };
    }
}

#[cfg(not(offlock_model))]
mod imp {
    use std::ptr::{self, NonNull};

    use offlock_sync::AllocError;
    use offlock_sync::atomic::{AtomicU64, Ordering};
    use offlock_sync::std_lock::Mutex;

    use crate::cpu;

    /// The size in bytes of the region of one CPU, with 8,192 words.
    pub(crate) const STRIDE: usize = 1 << 16;
    const WORD: usize = size_of::<AtomicU64>();

    /// A pool that gives out `unit` words per CPU at a time.
    #[derive(Debug)]
    pub(super) struct Pool {
        unit: usize,
        free: Mutex<Free>,
    }

    #[derive(Debug)]
    struct Free {
        /// The first unit that was never taken, in the region of CPU 0 of the last chunk.
        fresh: *mut u8,
        /// The number of units from `fresh` to the end of the region.
        fresh_units: usize,
        /// The units that were given back.
        returned: Vec<NonNull<AtomicU64>>,
        /// The number of units taken from `fresh` so far: an upper bound of the length of
        /// `returned`.
        made: usize,
    }

    // SAFETY: the pointers point into chunks, which belong to the pool and are never unmapped.
    unsafe impl Send for Free {}

    pub(super) static WORDS: Pool = Pool::new(1);
    pub(super) static BLOCKS: Pool = Pool::new(super::BLOCK);

    const _: () = assert!((STRIDE / WORD).is_multiple_of(super::BLOCK), "blocks fill a region");

    /// Returns the distance in bytes from the start of a block to its word `i`, in every region.
    #[inline(always)]
    pub(super) const fn place(i: usize) -> usize {
        i * WORD
    }

    impl Pool {
        const fn new(unit: usize) -> Self {
            Self {
                unit,
                free: Mutex::new(Free {
                    fresh: ptr::null_mut(),
                    fresh_units: 0,
                    returned: Vec::new(),
                    made: 0,
                }),
            }
        }

        /// Takes a unit of words, all 0.
        pub(super) fn take(&self) -> Result<NonNull<AtomicU64>, AllocError> {
            let cpus = cpu::possible_cpus(); // before the lock, because the first call reads /sys
            let mut free = self.free.lock();
            if let Some(base) = free.returned.pop() {
                return Ok(base);
            }
            // Room for every unit, so that `give_back` never allocates and never fails.
            let made = free.made;
            free.returned.try_reserve(made + 1).map_err(|_| AllocError::new())?;
            if free.fresh_units == 0 {
                free.fresh = map(cpus * STRIDE)?.as_ptr();
                free.fresh_units = STRIDE / (self.unit * WORD);
            }
            let base = free.fresh.cast::<AtomicU64>();
            // SAFETY: the result is in the same region or at its end, because `fresh_units` was not
            // 0.
            free.fresh = unsafe { free.fresh.add(self.unit * WORD) };
            free.fresh_units -= 1;
            free.made += 1;
            Ok(NonNull::new(base).expect("a mapping is not at null"))
        }

        /// Returns a unit of words to the pool.
        ///
        /// # Safety
        ///
        /// `base` is a result of `take` of this pool and was not given back since. No thread uses
        /// its words any more.
        pub(super) unsafe fn give_back(&self, base: NonNull<AtomicU64>) {
            for cpu in 0..cpu::possible_cpus() {
                for i in 0..self.unit {
                    // SAFETY: the chunk has a region for every CPU, each with the whole unit.
                    let word = unsafe { base.byte_add(cpu * STRIDE + place(i)) };
                    // SAFETY: an initialised word of the unit, in a chunk that is never unmapped.
                    let word = unsafe { word.as_ref() };
                    // A word that is 0 is not written, because the store would take a page of
                    // memory for a CPU that never used its words.
                    // Ordering: Relaxed, both; the lock of the pool carries the 0 to the next
                    // owner.
                    if word.load(Ordering::Relaxed) != 0 {
                        word.store(0, Ordering::Relaxed);
                    }
                }
            }
            self.free.lock().returned.push(base); // within the capacity that `take` reserved
        }
    }

    /// Maps `len` bytes of zeroed memory.
    fn map(len: usize) -> Result<NonNull<u8>, AllocError> {
        let prot = libc::PROT_READ | libc::PROT_WRITE;
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        // SAFETY: a new anonymous mapping at an address that the kernel chooses.
        let at = unsafe { libc::mmap(ptr::null_mut(), len, prot, flags, -1, 0) };
        if at == libc::MAP_FAILED {
            // `ENOMEM`, or `EAGAIN` or `EPERM` in a program that locks its memory (`mlockall`).
            return Err(AllocError::new());
        }
        // A huge page would be the memory of many CPUs. A kernel without them refuses, which is as good.
        // SAFETY: advice about the new mapping, which changes no contents.
        let _ = unsafe { libc::madvise(at, len, libc::MADV_NOHUGEPAGE) };
        Ok(NonNull::new(at.cast()).expect("a mapping is not at null"))
    }
}

/// The words of a model: an array of the checker's atomics.
#[cfg(offlock_model)]
mod imp {
    use std::ptr::NonNull;

    use offlock_sync::AllocError;
    use offlock_sync::atomic::AtomicU64;

    use crate::cpu;

    pub(crate) const STRIDE: usize = size_of::<AtomicU64>();

    /// A pool that gives out as many words per CPU at a time as its field says.
    pub(super) struct Pool(usize);

    pub(super) static WORDS: Pool = Pool(1);
    pub(super) static BLOCKS: Pool = Pool(super::BLOCK);

    /// Returns the distance in bytes from the start of a block to its word `i`. The words of all
    /// CPUs with one `i` are adjacent.
    pub(super) fn place(i: usize) -> usize {
        i * cpu::possible_cpus() * STRIDE
    }

    impl Pool {
        pub(super) fn take(&self) -> Result<NonNull<AtomicU64>, AllocError> {
            let count = self.0 * cpu::possible_cpus();
            let words: Box<[AtomicU64]> = (0..count).map(|_| AtomicU64::new(0)).collect();
            Ok(NonNull::from(Box::leak(words)).cast())
        }

        /// Returns a unit of words to the pool.
        ///
        /// # Safety
        ///
        /// `base` is a result of `take` of this pool and was not given back since. No thread uses
        /// its words any more.
        pub(super) unsafe fn give_back(&self, base: NonNull<AtomicU64>) {
            let count = self.0 * cpu::possible_cpus();
            let words = std::ptr::slice_from_raw_parts_mut(base.as_ptr(), count);
            // SAFETY: `take` leaked this slice. By the contract of this function it has no other
            // user.
            drop(unsafe { Box::from_raw(words) });
        }
    }
}

#[cfg(all(test, not(offlock_model)))]
mod tests {
    use super::*;
    use offlock_sync::atomic::Ordering;

    #[test]
    fn inv18_words_of_different_cpus_are_pages_apart() {
        let (words, block) = (Words::new().unwrap(), WordBlock::new().unwrap());
        let addresses = |words: &Words| -> Vec<usize> {
            words.iter().map(|word| std::ptr::from_ref(word).addr()).collect()
        };
        let [first, last] = [0, BLOCK - 1].map(|i| addresses(&block.words(i)));
        assert_eq!((first[0] % (BLOCK * 8), last[0] - first[0]), (0, (BLOCK - 1) * 8));
        for at in [addresses(&words), first, last] {
            assert!(at.windows(2).all(|pair| pair[1] - pair[0] == STRIDE));
        }
    }

    /// A huge page would be the memory of 32 CPUs, on the node of the first thread.
    #[test]
    fn inv18_words_of_different_cpus_share_no_huge_page() {
        if !std::path::Path::new("/sys/kernel/mm/transparent_hugepage").exists() {
            return;
        }
        let at = Words::new().unwrap().base().addr();
        let maps = std::fs::read_to_string("/proc/self/smaps").unwrap();
        let is_around = |line: &str| {
            let (start, end) = line.split_whitespace().next()?.split_once('-')?;
            let [start, end] = [start, end].map(|hex| usize::from_str_radix(hex, 16));
            Some((start.ok()?..end.ok()?).contains(&at))
        };
        let lines = maps.lines().skip_while(|line| is_around(line) != Some(true));
        let flags = lines.into_iter().find(|line| line.starts_with("VmFlags:")).unwrap();
        assert!(flags.split_whitespace().any(|flag| flag == "nh"), "{flags}");
    }

    #[test]
    fn returned_words_come_back_as_zero() {
        for _ in 0..3 {
            let words: Vec<Words> = (0..100).map(|_| Words::new().unwrap()).collect();
            let blocks: Vec<_> = (0..300).map(|_| WordBlock::new().unwrap()).collect();
            let in_blocks =
                blocks.iter().flat_map(|block| (0..BLOCK).rev().map(|i| block.words(i)));
            let all: Vec<_> = words.iter().map(Words::alias).chain(in_blocks).collect();
            for (name, words) in all.iter().enumerate() {
                let fill = |word: &AtomicU64| word.swap(name as u64 + 1, Ordering::Relaxed);
                assert!(words.iter().all(|word| fill(word) == 0));
            }
            for (name, words) in all.iter().enumerate() {
                let value = name as u64 + 1;
                assert!(words.iter().all(|word| word.load(Ordering::Relaxed) == value));
            }
        }
    }

    /// 10,000 words need more than one chunk. No two words overlap.
    #[test]
    fn words_of_two_chunks_do_not_overlap() {
        let words: Vec<Words> = (0..10_000).map(|_| Words::new().unwrap()).collect();
        let last = CpuId::new(crate::possible_cpus() as u32 - 1);
        for (i, words) in words.iter().enumerate() {
            words.slot(last).store(i as u64, Ordering::Relaxed);
        }
        for (i, words) in words.iter().enumerate() {
            assert_eq!(words.slot(last).load(Ordering::Relaxed), i as u64);
        }
    }
}
