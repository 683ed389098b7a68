//! A pool of per-CPU words: one 64-bit word for every CPU, at 8 bytes each.
//!
//! A cache line per CPU would waste 120 of 128 bytes on a counter. Here every CPU has a region of
//! its own, and one word lies at the same place in each:
//!
//! ```text
//!  chunk -> | cpu 0: w0 w1 w2 ... | cpu 1: w0 w1 w2 ... | ...     STRIDE bytes (64 KiB) each
//!             ^                     ^
//!             base of w0            base + STRIDE
//! ```
//!
//! A word of CPU n is at `base + n * STRIDE`; the stride is a power of two and a compile-time
//! constant, so that a section gets there with a shift. A chunk is address space until it is
//! touched, and is kept for the next words when its last one goes: an address that once was a
//! word stays readable for the life of the process. A [`WordBlock`] is [`BLOCK`] words that are side
//! by side in each region, from chunks of its own.
//!
//! # Invariants
//!
//! 1. `base` points to a word of the region of CPU 0 of a chunk; the same place in the regions of
//!    all CPUs below `cpu::possible()` belongs to the same `Words`, and to no other. So for each
//!    word of a `WordBlock`.
//! 2. The words of a new `Words`, and of a new `WordBlock`, are 0.

use std::marker::PhantomData;
use std::mem::ManuallyDrop;
use std::ptr::NonNull;

use crate::cpu::CpuId;
use crate::error::AllocError;
use crate::sync::atomic::AtomicU64;
use crate::sync::cpu;

pub(crate) use self::imp::STRIDE;

/// Uses the pool of words for the first time: reads the topology and maps the first chunk.
pub(crate) fn start() {
    drop(Words::new());
}

/// One word for every CPU.
#[derive(Debug)]
pub(crate) struct Words {
    base: NonNull<AtomicU64>,
    _owns: PhantomData<AtomicU64>,
}

// SAFETY: what is behind `base` is atomics, owned by this `Words` (invariant 1).
unsafe impl Send for Words {}
// SAFETY: as above; `&Words` gives `&AtomicU64` only.
unsafe impl Sync for Words {}

impl Words {
    /// Takes a word for every CPU from the pool, all 0.
    ///
    /// Blocks shortly while another thread takes or returns words; may map memory.
    pub(crate) fn new() -> Result<Self, AllocError> {
        Ok(Self { base: imp::WORDS.take()?, _owns: PhantomData })
    }

    /// The word of CPU 0.
    #[cfg(all(
        target_arch = "x86_64",
        not(any(offlock_loom, offlock_shuttle, offlock_portable, offlock_virtual_cpu))
    ))]
    #[inline(always)]
    pub(crate) fn base(&self) -> *mut AtomicU64 {
        self.base.as_ptr()
    }

    /// Hands the words over as a pointer.
    pub(crate) fn into_raw(self) -> NonNull<AtomicU64> {
        let base = self.base;
        std::mem::forget(self);
        base
    }

    /// # Safety
    ///
    /// `base` came from [`Words::into_raw`], and only one `Words` made from it is ever dropped.
    #[inline(always)]
    pub(crate) unsafe fn from_raw(base: NonNull<AtomicU64>) -> Self {
        Self { base, _owns: PhantomData }
    }

    /// The same words, to be used no longer than `self`: for a put, after which another thread may
    /// free what `self` is part of. A `&Words` in it would promise that it outlives the call.
    #[inline(always)]
    pub(crate) fn alias(&self) -> ManuallyDrop<Self> {
        ManuallyDrop::new(Self { base: self.base, _owns: PhantomData })
    }

    /// The word of `cpu`.
    ///
    /// # Panics
    ///
    /// Panics if `cpu` is not below `cpu::possible()`.
    #[inline(always)]
    pub(crate) fn slot(&self, cpu: CpuId) -> &AtomicU64 {
        assert!(cpu.index() < cpu::possible(), "{cpu} has no slot");
        // SAFETY: just checked.
        unsafe { self.slot_unchecked(cpu) }
    }

    /// The word of `cpu`, for a fast path that has its number from a section or from
    /// `cpu::current`.
    ///
    /// # Safety
    ///
    /// `cpu` is below `cpu::possible()`.
    #[inline(always)]
    pub(crate) unsafe fn slot_unchecked(&self, cpu: CpuId) -> &AtomicU64 {
        debug_assert!(cpu.index() < cpu::possible(), "{cpu} has no slot");
        // SAFETY: the region of `cpu` exists, says the caller, so the place is inside the chunk.
        let word = unsafe { self.base.byte_add(cpu.index() * STRIDE) };
        // SAFETY: invariant 1; the memory stays as long as `self`.
        unsafe { word.as_ref() }
    }

    /// The words of all CPUs, ascending.
    pub(crate) fn iter(&self) -> impl Iterator<Item = &AtomicU64> {
        (0..cpu::possible()).map(|cpu| self.slot(CpuId::new(cpu as u32)))
    }
}

impl Drop for Words {
    fn drop(&mut self) {
        // SAFETY: `take` gave it to this `Words`, which goes.
        unsafe { imp::WORDS.give_back(self.base) };
    }
}

/// How many words a [`WordBlock`] has for every CPU.
pub(crate) const BLOCK: usize = if cfg!(any(offlock_loom, offlock_shuttle)) { 2 } else { 64 };

/// [`BLOCK`] times a word for every CPU.
#[derive(Debug)]
pub(crate) struct WordBlock {
    base: NonNull<AtomicU64>,
    _owns: PhantomData<AtomicU64>,
}

// SAFETY: as for `Words`.
unsafe impl Send for WordBlock {}
// SAFETY: as for `Words`.
unsafe impl Sync for WordBlock {}

impl WordBlock {
    /// Takes a block from its pool, all 0. As [`Words::new`].
    pub(crate) fn new() -> Result<Self, AllocError> {
        Ok(Self { base: imp::BLOCKS.take()?, _owns: PhantomData })
    }

    /// Word `i` of every CPU, to be used no longer than the block.
    ///
    /// # Panics
    ///
    /// Panics if `i` is not below [`BLOCK`].
    #[inline(always)]
    pub(crate) fn words(&self, i: usize) -> ManuallyDrop<Words> {
        assert!(i < BLOCK, "word {i} of {BLOCK}");
        // SAFETY: just checked: inside the block.
        let base = unsafe { self.base.byte_add(imp::place(i)) };
        ManuallyDrop::new(Words { base, _owns: PhantomData })
    }
}

impl Drop for WordBlock {
    fn drop(&mut self) {
        // SAFETY: `take` gave it to this block, which goes.
        unsafe { imp::BLOCKS.give_back(self.base) };
    }
}

#[cfg(not(any(offlock_loom, offlock_shuttle)))]
mod imp {
    use std::ptr::{self, NonNull};

    use crate::error::AllocError;
    use crate::starting::starting;
    use crate::sync::atomic::{AtomicU64, Ordering};
    use crate::sync::{Mutex, cpu};

    /// Bytes between one CPU's word and the next CPU's. A guess: 8,192 words before the next chunk.
    pub(crate) const STRIDE: usize = 1 << 16;
    const WORD: usize = size_of::<AtomicU64>();

    /// Hands out `unit` words per CPU at a time.
    #[derive(Debug)]
    pub(super) struct Pool {
        unit: usize,
        free: Mutex<Free>,
    }

    #[derive(Debug)]
    struct Free {
        /// The part of the last chunk's first region that was never handed out.
        fresh: *mut u8,
        left: usize,
        returned: Vec<NonNull<AtomicU64>>,
        /// Units handed out at some time: what `returned` may have to hold.
        made: usize,
    }

    // SAFETY: the pointers are to chunks, which belong to the pool and are never unmapped.
    unsafe impl Send for Free {}

    pub(super) static WORDS: Pool = Pool::new(1);
    pub(super) static BLOCKS: Pool = Pool::new(super::BLOCK);

    const _: () = assert!((STRIDE / WORD).is_multiple_of(super::BLOCK), "blocks fill a region");

    /// Bytes from the start of a block to its word `i`, in every region.
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
                    left: 0,
                    returned: Vec::new(),
                    made: 0,
                }),
            }
        }

        pub(super) fn take(&self) -> Result<NonNull<AtomicU64>, AllocError> {
            starting(|| self.take_unit()) // it allocates under the lock
        }

        fn take_unit(&self) -> Result<NonNull<AtomicU64>, AllocError> {
            let cpus = cpu::possible(); // reads /sys the first time: not under the lock
            let mut free = self.free.lock();
            if let Some(base) = free.returned.pop() {
                return Ok(base);
            }
            // Room for every unit, so that giving one back never allocates, and never fails.
            let made = free.made;
            free.returned.try_reserve(made + 1).map_err(|_| AllocError::new())?;
            if free.left == 0 {
                free.fresh = map(cpus * STRIDE)?.as_ptr();
                free.left = STRIDE / (self.unit * WORD);
            }
            let base = free.fresh.cast::<AtomicU64>();
            // SAFETY: one unit further in the same region, or its end.
            free.fresh = unsafe { free.fresh.add(self.unit * WORD) };
            free.left -= 1;
            free.made += 1;
            Ok(NonNull::new(base).expect("a mapping is not at null"))
        }

        /// # Safety
        ///
        /// `base` came from `take` of this pool and was not given back since; nobody uses its words
        /// any more.
        pub(super) unsafe fn give_back(&self, base: NonNull<AtomicU64>) {
            for cpu in 0..cpu::possible() {
                for i in 0..self.unit {
                    // SAFETY: every CPU's region is in the chunk, and the whole unit in each.
                    let word = unsafe { base.byte_add(cpu * STRIDE + place(i)) };
                    // SAFETY: a word of the caller's.
                    let word = unsafe { word.as_ref() };
                    // Ordering: Relaxed, both; the pool's lock carries it to the next owner. Not
                    // written without need: that would take memory for CPUs that never counted.
                    if word.load(Ordering::Relaxed) != 0 {
                        word.store(0, Ordering::Relaxed);
                    }
                }
            }
            self.free.lock().returned.push(base); // within the capacity that `take` reserved
        }
    }

    fn map(len: usize) -> Result<NonNull<u8>, AllocError> {
        let prot = libc::PROT_READ | libc::PROT_WRITE;
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        // SAFETY: a new anonymous mapping at an address of the kernel's choice.
        let at = unsafe { libc::mmap(ptr::null_mut(), len, prot, flags, -1, 0) };
        if at == libc::MAP_FAILED {
            // `ENOMEM`, but also `EAGAIN` or `EPERM` in a program that locks its memory (`mlockall`).
            return Err(AllocError::new());
        }
        Ok(NonNull::new(at.cast()).expect("a mapping is not at null"))
    }
}

#[cfg(all(test, not(any(offlock_loom, offlock_shuttle))))]
mod tests;

/// A model's words: an array of the checker's atomics.
#[cfg(any(offlock_loom, offlock_shuttle))]
mod imp {
    use std::ptr::NonNull;

    use crate::error::AllocError;
    use crate::sync::atomic::AtomicU64;
    use crate::sync::cpu;

    pub(crate) const STRIDE: usize = size_of::<AtomicU64>();

    /// Hands out this many words for every CPU.
    pub(super) struct Pool(usize);

    pub(super) static WORDS: Pool = Pool(1);
    pub(super) static BLOCKS: Pool = Pool(super::BLOCK);

    /// Bytes from the start of a block to its word `i`: the words of one name are side by side.
    pub(super) fn place(i: usize) -> usize {
        i * cpu::possible() * STRIDE
    }

    impl Pool {
        pub(super) fn take(&self) -> Result<NonNull<AtomicU64>, AllocError> {
            let count = self.0 * cpu::possible();
            let words: Box<[AtomicU64]> = (0..count).map(|_| AtomicU64::new(0)).collect();
            Ok(NonNull::from(Box::leak(words)).cast())
        }

        /// # Safety
        ///
        /// `base` came from `take` of this pool and was not given back since; nobody uses its words
        /// any more.
        pub(super) unsafe fn give_back(&self, base: NonNull<AtomicU64>) {
            let count = self.0 * cpu::possible();
            let words = std::ptr::slice_from_raw_parts_mut(base.as_ptr(), count);
            // SAFETY: the slice that `take` leaked.
            drop(unsafe { Box::from_raw(words) });
        }
    }
}
