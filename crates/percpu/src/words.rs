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
//! word stays readable for the life of the process.
//!
//! # Invariants
//!
//! 1. `base` points to a word of the region of CPU 0 of a chunk; the same place in the regions of
//!    all CPUs below `cpu::possible()` belongs to the same `Words`, and to no other.
//! 2. The words of a new `Words` are 0.

use std::marker::PhantomData;
use std::ptr::NonNull;

use crate::cpu::CpuId;
use crate::error::AllocError;
use crate::sync::atomic::AtomicU64;
use crate::sync::cpu;

pub(crate) use self::imp::STRIDE;

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
        Ok(Self { base: imp::take()?, _owns: PhantomData })
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
        unsafe { imp::give_back(self.base) };
    }
}

#[cfg(not(any(offlock_loom, offlock_shuttle)))]
mod imp {
    use std::ptr::{self, NonNull};
    use std::time::{Duration, Instant};

    use crate::error::{AllocError, Forked};
    use crate::fork::Generation;
    use crate::starting::starting;
    use crate::sync::atomic::{AtomicU64, Ordering};
    use crate::sync::native::OnceLock;
    use crate::sync::{Mutex, MutexGuard, cpu, thread};

    /// Bytes between one CPU's word and the next CPU's. A guess: 8,192 words before the next chunk.
    pub(crate) const STRIDE: usize = 1 << 16;
    const WORD: usize = size_of::<AtomicU64>();

    #[derive(Debug)]
    struct Pool {
        /// The part of the last chunk's first region that was never handed out.
        fresh: *mut u8,
        left: usize,
        returned: Vec<NonNull<AtomicU64>>,
        /// Words handed out at some time: what `returned` may have to hold.
        made: usize,
    }

    // SAFETY: the pointers are to chunks, which belong to the pool and are never unmapped.
    unsafe impl Send for Pool {}

    static POOL: Mutex<Pool> =
        Mutex::new(Pool { fresh: ptr::null_mut(), left: 0, returned: Vec::new(), made: 0 });

    /// How long the child of a fork tries for a lock that its holder may have left behind. A guess:
    /// a holder that exists needs microseconds, or its next slice of time.
    const PATIENCE: Duration = Duration::from_millis(10);

    /// Locks the pool; refused in a fork child to which the lock came without its holder.
    fn lock() -> Result<MutexGuard<'static, Pool>, Forked> {
        static BORN: OnceLock<Generation> = OnceLock::new();
        /// The process, by its generation, that lost its patience: there the first try decides.
        static ABANDONED_IN: AtomicU64 = AtomicU64::new(u64::MAX);

        let born = BORN.get_or_init(Generation::current);
        let first = born.lock(&POOL);
        if first.is_ok() {
            return first;
        }
        // Ordering: Relaxed, here and below; a hint, of which the value is all.
        let (here, began) = (Generation::current().number(), Instant::now());
        while ABANDONED_IN.load(Ordering::Relaxed) != here {
            thread::yield_now();
            if let Ok(pool) = born.lock(&POOL) {
                return Ok(pool);
            }
            if began.elapsed() > PATIENCE {
                ABANDONED_IN.store(here, Ordering::Relaxed);
            }
        }
        first
    }

    pub(super) fn take() -> Result<NonNull<AtomicU64>, AllocError> {
        starting(take_from_pool) // it allocates under the lock
    }

    fn take_from_pool() -> Result<NonNull<AtomicU64>, AllocError> {
        let cpus = cpu::possible(); // reads /sys the first time: not under the lock
        // A fork child whose parent was just here has no pool, and goes without.
        let mut pool = lock().map_err(|_| AllocError::new())?;
        if let Some(base) = pool.returned.pop() {
            return Ok(base);
        }
        // Room for every word, so that giving one back never allocates, and never fails.
        let made = pool.made;
        pool.returned.try_reserve(made + 1).map_err(|_| AllocError::new())?;
        if pool.left == 0 {
            pool.fresh = map(cpus * STRIDE)?.as_ptr();
            pool.left = STRIDE / WORD;
        }
        let base = pool.fresh.cast::<AtomicU64>();
        // SAFETY: one word further in the same region, or its end.
        pool.fresh = unsafe { pool.fresh.add(WORD) };
        pool.left -= 1;
        pool.made += 1;
        Ok(NonNull::new(base).expect("a mapping is not at null"))
    }

    /// # Safety
    ///
    /// `base` came from `take` and was not given back since; nobody uses its words any more.
    pub(super) unsafe fn give_back(base: NonNull<AtomicU64>) {
        for cpu in 0..cpu::possible() {
            // SAFETY: every CPU's region is in the chunk.
            let word = unsafe { base.byte_add(cpu * STRIDE) };
            // Ordering: Relaxed; the pool's lock carries it to the next owner.
            // SAFETY: a word of the caller's.
            unsafe { word.as_ref() }.store(0, Ordering::Relaxed);
        }
        if let Ok(mut pool) = lock() {
            pool.returned.push(base); // within the capacity that `take` reserved
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

    #[cfg(test)]
    mod tests {
        use std::mem::ManuallyDrop;

        use crate::cpu::CpuId;
        use crate::error::NewError;
        use crate::fork::child::in_child;
        use crate::gate::ReadWriteGate;
        use crate::sync::atomic::Ordering;
        use crate::words::Words;

        #[test]
        fn inv18_words_of_different_cpus_are_pages_apart() {
            let words = Words::new().unwrap();
            let at: Vec<usize> = words.iter().map(|word| std::ptr::from_ref(word).addr()).collect();
            for pair in at.windows(2) {
                assert_eq!(pair[1] - pair[0], super::STRIDE);
            }
        }

        #[test]
        fn a_returned_word_comes_back_as_zero() {
            for _ in 0..3 {
                let words: Vec<Words> = (0..100).map(|_| Words::new().unwrap()).collect();
                for word in words.iter().flat_map(Words::iter) {
                    assert_eq!(word.swap(7, Ordering::Relaxed), 0);
                }
            }
        }

        /// The parent's lock is taken at the fork, and nobody in the child will unlock it.
        #[test]
        fn inv15_a_child_without_a_pool_says_so_and_loses_nothing() {
            // The parent drops the closure, and must not wait for itself.
            let words = ManuallyDrop::new(Words::new().unwrap());
            let held = super::lock().unwrap();
            assert!(in_child(|| {
                drop(ManuallyDrop::into_inner(words));
                let given_back = matches!(ReadWriteGate::new(7), Err(NewError(7)));
                let began = std::time::Instant::now();
                let refused = (0..100).all(|_| Words::new().is_err());
                given_back && refused && began.elapsed() < 50 * super::PATIENCE // patient once
            }));
            drop(held);
            assert!(Words::new().is_ok());
        }

        /// More than one chunk holds; no two of them overlap.
        #[test]
        fn more_words_than_a_chunk_are_all_different() {
            let words: Vec<Words> = (0..10_000).map(|_| Words::new().unwrap()).collect();
            let last = CpuId::new(crate::topology().capacity() as u32 - 1);
            for (i, words) in words.iter().enumerate() {
                words.slot(last).store(i as u64, Ordering::Relaxed);
            }
            for (i, words) in words.iter().enumerate() {
                assert_eq!(words.slot(last).load(Ordering::Relaxed), i as u64);
            }
        }
    }
}

/// A model's words: an array of the checker's atomics.
#[cfg(any(offlock_loom, offlock_shuttle))]
mod imp {
    use std::ptr::NonNull;

    use crate::error::AllocError;
    use crate::sync::atomic::AtomicU64;
    use crate::sync::cpu;

    pub(crate) const STRIDE: usize = size_of::<AtomicU64>();

    pub(super) fn take() -> Result<NonNull<AtomicU64>, AllocError> {
        let words: Box<[AtomicU64]> = (0..cpu::possible()).map(|_| AtomicU64::new(0)).collect();
        Ok(NonNull::from(Box::leak(words)).cast())
    }

    /// # Safety
    ///
    /// `base` came from `take` and was not given back since; nobody uses its words any more.
    pub(super) unsafe fn give_back(base: NonNull<AtomicU64>) {
        let words = std::ptr::slice_from_raw_parts_mut(base.as_ptr(), cpu::possible());
        // SAFETY: the slice that `take` leaked.
        drop(unsafe { Box::from_raw(words) });
    }
}
