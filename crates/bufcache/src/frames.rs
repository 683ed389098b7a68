//! Memory for buffers: one region, in frames that are aligned to their size.
//!
//! ```text
//!  region | chunk: the largest size | chunk | ...        a chunk has frames of one size
//!  frame  size class 3 | unit 29                         unit: the smallest size
//! ```
//!
//! The region is reserved at once and touched frame by frame. Which frames are free is told under
//! the lock of [`Cold`](crate::cold::Cold); here are their bytes, and what those who wait for one look
//! at.
//!
//! # Invariants
//!
//! 1. The bytes of a frame belong to whoever took it off the free list, until the entry that has it
//!    is `VALID`; then they are read only, by those who keep the entry from being taken apart, but while
//!    it says `WRITE` and no other slot names it: then they are the writer's.

use std::ptr::NonNull;
use std::time::Duration;

use percpu::AllocError;
use percpu::sync::atomic::{AtomicI32, AtomicU32, AtomicU64, Ordering};
use percpu::sync::{Futex, thread_id};

use crate::dirty::NIL;
use crate::region::Region;
use crate::table::Place;

/// A frame: which unit it begins at, and how large it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Frame(pub(crate) u32);

const UNIT_BITS: u32 = 29;
/// Most units of a region.
pub(crate) const MOST_UNITS: usize = (1 << UNIT_BITS) - 1;

impl Frame {
    pub(crate) fn new(unit: u32, class: u8) -> Self {
        debug_assert!(unit >> UNIT_BITS == 0 && class < 8);
        Self(u32::from(class) << UNIT_BITS | unit)
    }

    #[inline(always)]
    pub(crate) fn unit(self) -> u32 {
        self.0 & ((1 << UNIT_BITS) - 1)
    }

    /// Its size in units is two to this power.
    #[inline(always)]
    pub(crate) fn class(self) -> u8 {
        (self.0 >> UNIT_BITS) as u8
    }
}

/// What is told about a frame to those who wait for it; hits never touch it.
#[derive(Debug)]
pub(crate) struct Header {
    /// Rings when a load is over.
    pub(crate) loaded: Futex,
    /// Why the load failed: an errno, or a code of `error`.
    failure: AtomicI32,
    /// The entry that has the frame.
    place: AtomicU32,
    /// Of the list of dirty buffers.
    links: Links,
    /// How far the log must be durable before the block is written.
    lsn: AtomicU64,
    /// How many hold it back from being written.
    holds: AtomicU32,
    /// Failed tries of the cleaner.
    tries: AtomicU32,
    /// When it became dirty, in milliseconds of the cache's life.
    since: AtomicU64,
    /// The thread that has claimed the load, or 0.
    claimer: AtomicU64,
}

/// Links of a list of frames; touched under the lock of the list.
#[derive(Debug)]
pub(crate) struct Links {
    previous: AtomicU32,
    next: AtomicU32,
    /// Which of all that were ever put on a list; 0 while it is on none.
    number: AtomicU64,
}

// Ordering: Relaxed, all; the lock of the list carries them.
impl Links {
    fn new() -> Self {
        let [previous, next] = [NIL; 2].map(AtomicU32::new);
        Self { previous, next, number: AtomicU64::new(0) }
    }

    pub(crate) fn previous(&self) -> u32 {
        self.previous.load(Ordering::Relaxed)
    }

    pub(crate) fn next(&self) -> u32 {
        self.next.load(Ordering::Relaxed)
    }

    pub(crate) fn number(&self) -> u64 {
        self.number.load(Ordering::Relaxed)
    }

    pub(crate) fn set_number(&self, number: u64) {
        self.number.store(number, Ordering::Relaxed);
    }

    pub(crate) fn set(&self, previous: u32, next: u32) {
        self.previous.store(previous, Ordering::Relaxed);
        self.next.store(next, Ordering::Relaxed);
    }

    pub(crate) fn set_previous(&self, previous: u32) {
        self.previous.store(previous, Ordering::Relaxed);
    }

    pub(crate) fn set_next(&self, next: u32) {
        self.next.store(next, Ordering::Relaxed);
    }
}

impl Header {
    /// The caller has the frame, and gives it to a block: what was said of another is forgotten.
    pub(crate) fn set_place(&self, place: Place) {
        // Ordering: Relaxed, both; what makes the frame another's carries it.
        self.place.store(place, Ordering::Relaxed);
        self.lsn.store(0, Ordering::Relaxed);
        self.claimer.store(0, Ordering::Relaxed);
    }

    /// This thread has the load of the block, and may keep it while it waits for the block.
    pub(crate) fn set_claimed(&self) {
        // Ordering: Relaxed; for this thread to find.
        self.claimer.store(thread_id(), Ordering::Relaxed);
    }

    /// Whether this thread had the load when it began. It may have given it to another.
    pub(crate) fn is_claimed_by_me(&self) -> bool {
        // Ordering: Relaxed; the thread's own store, or none of its business.
        self.claimer.load(Ordering::Relaxed) == thread_id()
    }

    pub(crate) fn place(&self) -> Place {
        // Ordering: Relaxed; as above.
        self.place.load(Ordering::Relaxed)
    }

    pub(crate) fn set_failure(&self, failure: i32) {
        // Ordering: Relaxed; the change of the word carries it.
        self.failure.store(failure, Ordering::Relaxed);
    }

    pub(crate) fn failure(&self) -> i32 {
        // Ordering: Relaxed; as above.
        self.failure.load(Ordering::Relaxed)
    }

    /// Sleeps until it rings, or for that time. No checker has time: in a model it is never over, or a
    /// ring that is missing would not be missed.
    pub(crate) fn sleep(&self, seen: u32, time: Duration) {
        if cfg!(any(offlock_loom, offlock_shuttle)) {
            self.loaded.wait(seen);
        } else {
            self.loaded.wait_for(seen, time);
        }
    }

    pub(crate) fn links(&self) -> &Links {
        &self.links
    }

    /// The caller has the frame, or its entry for writing.
    pub(crate) fn raise_lsn(&self, lsn: u64) {
        // Ordering: Relaxed; the change of the word that ends the writing carries it.
        self.lsn.store(self.lsn().max(lsn), Ordering::Relaxed);
    }

    /// For whoever writes it, or gives it to the device.
    pub(crate) fn lsn(&self) -> u64 {
        // Ordering: Relaxed; as above.
        self.lsn.load(Ordering::Relaxed)
    }

    /// Holds it back. The caller has the entry for writing.
    pub(crate) fn hold(&self) {
        // Ordering: Relaxed; as `raise_lsn`.
        self.holds.fetch_add(1, Ordering::Relaxed);
    }

    /// Returns whether it was the last.
    pub(crate) fn let_go(&self) -> bool {
        // Ordering: Release pairs with the Acquire in `is_held`; it carries what the holder did.
        self.holds.fetch_sub(1, Ordering::Release) == 1
    }

    pub(crate) fn is_held(&self) -> bool {
        // Ordering: Acquire pairs with the Release in `let_go`.
        self.holds.load(Ordering::Acquire) > 0
    }

    /// The cleaner has failed with it once more.
    pub(crate) fn count_try(&self) -> u32 {
        // Ordering: Relaxed; whoever has it marked `BACK`.
        self.tries.fetch_add(1, Ordering::Relaxed)
    }

    pub(crate) fn tries(&self) -> u32 {
        self.tries.load(Ordering::Relaxed) // as above
    }

    /// The cleaner tries no more; a flush does.
    pub(crate) fn give_up(&self) {
        self.tries.store(u32::MAX, Ordering::Relaxed); // as above
    }

    pub(crate) fn forget_tries(&self) {
        self.tries.store(0, Ordering::Relaxed); // as above
    }

    pub(crate) fn set_since(&self, since: u64) {
        // Ordering: Relaxed; the lock of the list carries it.
        self.since.store(since, Ordering::Relaxed);
    }

    pub(crate) fn since(&self) -> u64 {
        // Ordering: Relaxed; as above.
        self.since.load(Ordering::Relaxed)
    }
}

#[derive(Debug)]
pub(crate) struct Frames {
    region: Region,
    /// Log of the smallest size.
    unit: u32,
    /// Log of the largest.
    largest: u32,
    headers: Box<[Header]>,
    /// What a model sees of the bytes.
    #[cfg(offlock_loom)]
    shadows: Box<[percpu::sync::cell::UnsafeCell<u64>]>,
}

// SAFETY: bytes are shared as invariant 1 says; all else is atomics.
unsafe impl Send for Frames {}
// SAFETY: as above.
unsafe impl Sync for Frames {}

impl Frames {
    /// Room for `units` of two to the power of `unit` bytes.
    pub(crate) fn new(units: usize, unit: u32, largest: u32) -> Result<Self, AllocError> {
        let region = Region::new(units << unit, 1 << largest)?;
        let mut headers = Vec::new();
        headers.try_reserve_exact(units).map_err(|_| AllocError::new())?;
        headers.extend((0..units).map(|_| Header {
            loaded: Futex::new(),
            failure: AtomicI32::new(0),
            place: AtomicU32::new(0),
            links: Links::new(),
            lsn: AtomicU64::new(0),
            holds: AtomicU32::new(0),
            tries: AtomicU32::new(0),
            since: AtomicU64::new(0),
            claimer: AtomicU64::new(0),
        }));
        Ok(Self {
            region,
            unit,
            largest,
            headers: headers.into(),
            #[cfg(offlock_loom)]
            shadows: (0..units).map(|_| percpu::sync::cell::UnsafeCell::new(0)).collect(),
        })
    }

    #[inline(always)]
    pub(crate) fn header(&self, frame: Frame) -> &Header {
        &self.headers[frame.unit() as usize]
    }

    /// Log of its size in bytes.
    #[inline(always)]
    pub(crate) fn shift(&self, frame: Frame) -> u32 {
        self.unit + u32::from(frame.class())
    }

    /// How many of the smallest it has.
    pub(crate) fn units(&self) -> usize {
        self.headers.len()
    }

    /// All of it, in bytes.
    pub(crate) fn capacity(&self) -> usize {
        self.bytes_of(self.headers.len())
    }

    /// That many units, in bytes.
    pub(crate) fn bytes_of(&self, units: usize) -> usize {
        units << self.unit
    }

    /// Whether frames of so many bytes can be had.
    pub(crate) fn has_size(&self, bytes: usize) -> bool {
        bytes.is_power_of_two() && (self.unit..=self.largest).contains(&bytes.ilog2())
    }

    /// Bytes of the largest.
    pub(crate) fn largest_size(&self) -> usize {
        1 << self.largest
    }

    /// The class of frames of two to that power of bytes.
    pub(crate) fn class(&self, shift: u32) -> u8 {
        (shift - self.unit) as u8
    }

    /// Its bytes. Whose they are, invariant 1 tells.
    #[inline(always)]
    pub(crate) fn bytes(&self, frame: Frame) -> NonNull<[u8]> {
        let offset = (frame.unit() as usize) << self.unit;
        // SAFETY: the frame lies in the region.
        let start = unsafe { self.region.start().add(offset) };
        NonNull::slice_from_raw_parts(start, 1 << self.shift(frame))
    }

    /// Tells a model that the bytes are looked at.
    #[inline(always)]
    pub(crate) fn reading(&self, frame: Frame) {
        #[cfg(offlock_loom)]
        // SAFETY: read only; loom says so if not.
        self.shadows[frame.unit() as usize].with(|at| unsafe { at.read() });
        let _ = frame;
    }

    /// Tells a model that whoever has these bytes looks at them still.
    #[inline(always)]
    pub(crate) fn reading_at(&self, bytes: NonNull<[u8]>) {
        #[cfg(offlock_loom)]
        {
            let offset = bytes.cast::<u8>().addr().get() - self.region.start().addr().get();
            // SAFETY: read only; loom says so if not.
            self.shadows[offset >> self.unit].with(|at| unsafe { at.read() });
        }
        let _ = bytes;
    }

    /// Tells a model that the bytes are written.
    #[inline(always)]
    pub(crate) fn writing(&self, frame: Frame) {
        #[cfg(offlock_loom)]
        // SAFETY: the writer's alone; loom says so if not.
        self.shadows[frame.unit() as usize].with_mut(|at| unsafe { at.write(1) });
        let _ = frame;
    }

    /// Units in so many bytes.
    pub(crate) fn units_in(&self, bytes: usize) -> usize {
        bytes >> self.unit
    }

    /// Whether the system may use huge pages. It may not where less than all is to be used: what is given
    /// back would come again with its neighbours, were those made one page later.
    pub(crate) fn set_huge(&self, huge: bool) {
        self.region.set_huge(huge);
    }

    /// Gives the memory of a frame that nobody uses back to the system, where it is pages of its own; it
    /// reads as zeros then.
    pub(crate) fn release(&self, frame: Frame) {
        let bytes = self.bytes(frame);
        // SAFETY: a number is asked for.
        let page = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
        if !usize::try_from(page).is_ok_and(|page| page <= bytes.len()) {
            return; // the rest of the page is others'
        }
        // SAFETY: a part of the region that nobody uses: whole pages, as it is aligned to its size.
        let _ = unsafe { libc::madvise(bytes.as_ptr().cast(), bytes.len(), libc::MADV_DONTNEED) };
    }
}
