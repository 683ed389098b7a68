//! Memory for buffers: one region, in frames of one size, each aligned to it.
//!
//! The region is reserved at once, and the system backs a frame with memory at its first use. This
//! module has the bytes and a header for each frame; the free frames are in
//! [`Policy`](crate::policy::Policy), under its lock.
//!
//! # Invariants
//!
//! 1. The thread that takes a free frame owns its bytes until the entry with the frame
//!    is `VALID`. From then on the bytes are read-only, and a reader keeps the entry by a slot or a
//!    pin. The exception is a word with `WRITE` whose entry no other slot names: its writer owns
//!    the bytes.

use std::marker::PhantomData;
use std::ops::Deref;
use std::ptr::{self, NonNull};

use offlock_percpu::AllocError;
use offlock_sync::atomic::{AtomicBool, AtomicI32, AtomicU32, AtomicU64, Ordering};

/// Names a frame by its number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Frame(pub(crate) u32);

/// The number of an entry in the table.
pub(crate) type Place = u32;

/// The link behind the last frame of a list.
pub(crate) const NIL: u32 = u32::MAX;

/// The largest number of frames: the entries of the table, up to four for each, have numbers of 32
/// bits.
pub(crate) const MOST_FRAMES: usize = (1 << 29) - 1;

/// The [loader](Header::loader) of a frame that an engine of a thread fills. No thread has this number.
pub(crate) const IN_ENGINE: u64 = u64::MAX;

/// The state of a frame beside the word of its entry. Hits never access it.
#[derive(Debug)]
pub(crate) struct Header {
    /// Why the load failed: an errno, or a code of [`Failure`](crate::error::Failure).
    failure: AtomicI32,
    /// The number of the entry that has the frame.
    place: AtomicU32,
    /// The links of the list of dirty buffers.
    pub(crate) links: Links,
    /// The serial number of the insertion into that list; 0 while the frame is on none.
    number: AtomicU64,
    /// The position up to which the log must be durable before the block is written.
    lsn: AtomicU64,
    /// Set if a write of the block has failed since it became dirty.
    failed: AtomicBool,
    /// The time at which the buffer became dirty, in milliseconds since the cache was made.
    since: AtomicU64,
    /// The thread that [claimed](crate::Device::claim) the load, or [`IN_ENGINE`], or 0. If the
    /// claimer waits for the block, it waits for itself.
    loader: AtomicU64,
}

impl Header {
    /// Gives the frame to the entry at `place`, and clears what belonged to the block before. The
    /// caller owns the frame.
    pub(crate) fn set_place(&self, place: Place) {
        // Ordering: Relaxed; the lock of the lists by which a thread takes and gives a frame orders
        // this after the uses by the owner before, and the Release in `Entry::publish` carries it
        // to readers.
        self.place.store(place, Ordering::Relaxed);
        self.lsn.store(0, Ordering::Relaxed);
        self.loader.store(0, Ordering::Relaxed);
    }

    /// Returns the thread that claimed the load, which may have passed it to another thread;
    /// [`IN_ENGINE`]; or 0.
    pub(crate) fn loader(&self) -> u64 {
        // Ordering: Relaxed; a thread finds its own store, and any other value is not its number. The
        // fence in `refuses_wait` orders `IN_ENGINE`.
        self.loader.load(Ordering::Relaxed)
    }

    pub(crate) fn set_loader(&self, loader: u64) {
        // Ordering: Relaxed; as in `loader`. A thread that reads the earlier value `IN_ENGINE` is
        // refused a wait, which it may be.
        self.loader.store(loader, Ordering::Relaxed);
    }

    pub(crate) fn place(&self) -> Place {
        // Ordering: Relaxed; the caller keeps the frame by a pin, a slot or a mark, whose Acquire
        // on the word carries the store in `set_place`.
        self.place.load(Ordering::Relaxed)
    }

    pub(crate) fn set_failure(&self, failure: i32) {
        // Ordering: Relaxed; the Release in `Entry::change`, which sets `FAILED`, carries it.
        self.failure.store(failure, Ordering::Relaxed);
    }

    pub(crate) fn failure(&self) -> i32 {
        // Ordering: Relaxed; the caller has seen `FAILED` by an Acquire on the word.
        self.failure.load(Ordering::Relaxed)
    }

    pub(crate) fn number(&self) -> u64 {
        // Ordering: Relaxed, here and below; the lock of the list orders the accesses.
        self.number.load(Ordering::Relaxed)
    }

    pub(crate) fn set_number(&self, number: u64) {
        self.number.store(number, Ordering::Relaxed);
    }

    /// Raises the log position to `lsn` if it is lower. The caller owns the frame, or has its entry
    /// marked `WRITE`.
    pub(crate) fn raise_lsn(&self, lsn: u64) {
        // Ordering: Relaxed; the Release in `Entry::change` or `Entry::publish`, which ends the
        // write, carries it to `lsn`.
        self.lsn.store(self.lsn().max(lsn), Ordering::Relaxed);
    }

    /// Returns the log position. The caller writes the buffer or writes it back.
    pub(crate) fn lsn(&self) -> u64 {
        // Ordering: Relaxed; the Acquire by which the caller marked the word `WRITE` or `BACK`
        // carries the store in `raise_lsn`.
        self.lsn.load(Ordering::Relaxed)
    }

    /// Notes whether a write of the block has failed since it became dirty.
    pub(crate) fn set_failed(&self, failed: bool) {
        // Ordering: Relaxed, here and below; the thread that has marked the word `BACK` or `WRITE` changes
        // it, and its change of the word carries it to the next. A walk of the dirty list reads it
        // as a hint.
        self.failed.store(failed, Ordering::Relaxed);
    }

    pub(crate) fn has_failed(&self) -> bool {
        self.failed.load(Ordering::Relaxed)
    }

    pub(crate) fn set_since(&self, since: u64) {
        // Ordering: Relaxed; the lock of the list of dirty buffers carries it to `since`.
        self.since.store(since, Ordering::Relaxed);
    }

    pub(crate) fn since(&self) -> u64 {
        // Ordering: Relaxed; the lock of the list of dirty buffers carries the store in
        // `set_since`.
        self.since.load(Ordering::Relaxed)
    }
}

/// The frames of a cache: their memory and their headers.
#[derive(Debug)]
pub(crate) struct FrameMemory {
    region: Region,
    /// The binary logarithm of the size of a frame in bytes.
    shift: u32,
    headers: Box<[Header]>,
    /// Stands for the bytes in a model, which reports racing accesses.
    #[cfg(offlock_loom)]
    shadows: Box<[offlock_sync::cell::UnsafeCell<u64>]>,
}

// SAFETY: the region is memory of the process, which any thread may use and unmap.
unsafe impl Send for FrameMemory {}
// SAFETY: invariant 1 orders the accesses of the bytes; the headers are atomics.
unsafe impl Sync for FrameMemory {}

impl FrameMemory {
    /// Reserves memory for `count` frames of `1 << shift` bytes.
    pub(crate) fn new(count: usize, shift: u32) -> Result<Self, AllocError> {
        let region = Region::new(count << shift, 1 << shift)?;
        let mut headers = Vec::new();
        headers.try_reserve_exact(count).map_err(|_| AllocError::new())?;
        headers.extend((0..count).map(|_| Header {
            failure: AtomicI32::new(0),
            place: AtomicU32::new(0),
            links: Links::new(),
            number: AtomicU64::new(0),
            lsn: AtomicU64::new(0),
            failed: AtomicBool::new(false),
            since: AtomicU64::new(0),
            loader: AtomicU64::new(0),
        }));
        Ok(Self {
            region,
            shift,
            headers: headers.into(),
            #[cfg(offlock_loom)]
            shadows: (0..count).map(|_| offlock_sync::cell::UnsafeCell::new(0)).collect(),
        })
    }

    #[inline(always)]
    pub(crate) fn header(&self, frame: Frame) -> &Header {
        &self.headers[frame.0 as usize]
    }

    /// Returns the size of a frame in bytes.
    pub(crate) fn size(&self) -> usize {
        1 << self.shift
    }

    /// Returns the number of frames.
    pub(crate) fn count(&self) -> usize {
        self.headers.len()
    }

    /// Returns the size of all frames in bytes.
    pub(crate) fn capacity(&self) -> usize {
        self.bytes_of(self.headers.len())
    }

    /// Returns the size of so many frames in bytes.
    pub(crate) fn bytes_of(&self, frames: usize) -> usize {
        frames << self.shift
    }

    /// Returns the bytes of a frame. Invariant 1 says which thread may access them.
    #[inline(always)]
    pub(crate) fn bytes(&self, frame: Frame) -> NonNull<[u8]> {
        let offset = (frame.0 as usize) << self.shift;
        // SAFETY: the frame lies in the region, so the offset is less than the region's length.
        let start = unsafe { self.region.start().add(offset) };
        NonNull::slice_from_raw_parts(start, self.size())
    }

    /// Reports a read of the frame's bytes to a model.
    #[inline(always)]
    pub(crate) fn reading(&self, frame: Frame) {
        if cfg!(offlock_loom) {
            self.reading_at(self.bytes(frame));
        }
    }

    /// Reports a read of these bytes, which are those of a frame, to a model.
    #[inline(always)]
    pub(crate) fn reading_at(&self, bytes: NonNull<[u8]>) {
        #[cfg(offlock_loom)]
        {
            let offset = bytes.cast::<u8>().addr().get() - self.region.start().addr().get();
            // SAFETY: invariant 1 excludes writers; loom reports a violation.
            self.shadows[offset >> self.shift].with(|at| unsafe { at.read() });
        }
        let _ = bytes;
    }

    /// Reports a write of the frame's bytes to a model.
    #[inline(always)]
    pub(crate) fn writing(&self, frame: Frame) {
        #[cfg(offlock_loom)]
        // SAFETY: the caller owns the bytes (invariant 1); loom reports a violation.
        self.shadows[frame.0 as usize].with_mut(|at| unsafe { at.write(1) });
        let _ = frame;
    }
}

// Memory mapped from the system, in huge pages where possible.
//
// Beyond a few megabytes the TLB does not cover a cache in pages of 4 KiB, and each hit would wait
// for a page walk.

/// The size of a huge page on most machines. On others it is an alignment that does no harm.
const HUGE: usize = 2 << 20;

/// A reserved anonymous mapping. It reads as zeros, and the system backs it with memory at first
/// use.
#[derive(Debug)]
pub(crate) struct Region {
    start: NonNull<u8>,
    mapped: NonNull<libc::c_void>,
    len: usize,
}

impl Region {
    /// Maps `len` bytes, aligned to `align`, a power of two.
    pub(crate) fn new(len: usize, align: usize) -> Result<Self, AllocError> {
        let align = if len >= HUGE { align.max(HUGE) } else { align };
        let len = len.checked_add(align).ok_or_else(AllocError::new)?;
        let prot = libc::PROT_READ | libc::PROT_WRITE;
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        // SAFETY: a new anonymous mapping at an address that the kernel chooses overlaps no other.
        let at = unsafe { libc::mmap(ptr::null_mut(), len, prot, flags, -1, 0) };
        if at == libc::MAP_FAILED {
            return Err(AllocError::new());
        }
        let mapped = NonNull::new(at).ok_or_else(AllocError::new)?;
        let skip = at.cast::<u8>().align_offset(align);
        // SAFETY: `len` includes `align` bytes more than asked for, and `skip` is less than
        // `align`.
        let start = unsafe { mapped.cast::<u8>().add(skip) };
        let region = Self { start, mapped, len };
        if align >= HUGE {
            region.use_huge_pages();
        }
        Ok(region)
    }

    #[inline(always)]
    pub(crate) fn start(&self) -> NonNull<u8> {
        self.start
    }

    /// Advises the system to use huge pages. The system may ignore the advice.
    fn use_huge_pages(&self) {
        // SAFETY: the range is the mapping made in `new`, and the advice does not change its
        // contents.
        let _ = unsafe { libc::madvise(self.mapped.as_ptr(), self.len, libc::MADV_HUGEPAGE) };
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        // SAFETY: the range is the mapping made in `new`. References into it borrow the owner of
        // this region, which is being dropped.
        unsafe { libc::munmap(self.mapped.as_ptr(), self.len) };
    }
}

/// A fixed array of values in a region.
#[derive(Debug)]
pub(crate) struct Array<T> {
    region: Region,
    len: usize,
    of: PhantomData<T>,
}

// SAFETY: the array owns its values and its region, as a boxed slice owns its memory.
unsafe impl<T: Send> Send for Array<T> {}
// SAFETY: a shared array gives out shared references to its values only.
unsafe impl<T: Sync> Sync for Array<T> {}

impl<T> Array<T> {
    /// Makes an array of `len` values, each from one call of `make`.
    pub(crate) fn new(len: usize, mut make: impl FnMut() -> T) -> Result<Self, AllocError> {
        let bytes = len.checked_mul(size_of::<T>()).ok_or_else(AllocError::new)?;
        let region = Region::new(bytes, align_of::<T>())?;
        let mut array = Self { region, len: 0, of: PhantomData };
        while array.len < len {
            // SAFETY: `array.len` is less than `len`, for which the region has room.
            let at = unsafe { array.start().add(array.len) };
            // SAFETY: `at` is in the region, aligned for `T`, and only this function uses it yet.
            unsafe { at.write(make()) };
            array.len += 1;
        }
        Ok(array)
    }

    #[inline(always)]
    fn start(&self) -> NonNull<T> {
        self.region.start().cast()
    }
}

impl<T> Deref for Array<T> {
    type Target = [T];

    #[inline(always)]
    fn deref(&self) -> &[T] {
        let all = NonNull::slice_from_raw_parts(self.start(), self.len);
        // SAFETY: `new` wrote `len` values at the start of the region.
        unsafe { all.as_ref() }
    }
}

impl<T> Drop for Array<T> {
    fn drop(&mut self) {
        let all = NonNull::slice_from_raw_parts(self.start(), self.len);
        // SAFETY: `new` wrote `len` values, to which no reference is left. The region is unmapped
        // after this.
        unsafe { all.drop_in_place() };
    }
}

/// Returns `len` copies of a value on the heap, or an error if there is no memory.
pub(crate) fn boxed<T: Clone>(value: T, len: usize) -> Result<Box<[T]>, AllocError> {
    let mut values = Vec::new();
    values.try_reserve_exact(len).map_err(|_| AllocError::new())?;
    values.resize(len, value);
    Ok(values.into())
}

// Lists of frames: of dirty buffers through their headers, and of the policy through links of its own.
//
// Nothing here allocates after `new`.

/// The links of a frame on a list. Atomics of `std`, which no model explores: each access is under the lock
/// of the list.
#[derive(Debug)]
pub(crate) struct Links {
    previous: std::sync::atomic::AtomicU32,
    next: std::sync::atomic::AtomicU32,
}

/// A doubly linked list, the newest frame first.
#[derive(Clone, Copy, Debug)]
pub(crate) struct List {
    first: u32,
    last: u32,
    pub(crate) len: usize,
}

// Ordering: Relaxed, also in `List`; the lock of the list orders the accesses.
impl Links {
    pub(crate) fn new() -> Self {
        let [previous, next] = [NIL; 2].map(std::sync::atomic::AtomicU32::new);
        Self { previous, next }
    }

    /// Returns the next newer frame.
    pub(crate) fn newer(&self) -> Option<Frame> {
        Some(self.previous.load(Ordering::Relaxed)).filter(|&at| at != NIL).map(Frame)
    }
}

impl List {
    pub(crate) const fn new() -> Self {
        Self { first: NIL, last: NIL, len: 0 }
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.first == NIL
    }

    /// Returns the oldest frame.
    pub(crate) fn last(&self) -> Option<Frame> {
        (self.last != NIL).then_some(Frame(self.last))
    }

    /// Inserts a frame that is on no list through these links, as the newest.
    pub(crate) fn push<'l>(&mut self, frame: Frame, links: impl Fn(u32) -> &'l Links) {
        self.insert(frame, (NIL, self.first), links);
    }

    /// Inserts a frame that is on no list through these links, as the oldest.
    pub(crate) fn push_last<'l>(&mut self, frame: Frame, links: impl Fn(u32) -> &'l Links) {
        self.insert(frame, (self.last, NIL), links);
    }

    fn insert<'l>(
        &mut self,
        Frame(frame): Frame,
        (previous, next): (u32, u32),
        links: impl Fn(u32) -> &'l Links,
    ) {
        links(frame).previous.store(previous, Ordering::Relaxed);
        links(frame).next.store(next, Ordering::Relaxed);
        match previous {
            NIL => self.first = frame,
            previous => links(previous).next.store(frame, Ordering::Relaxed),
        }
        match next {
            NIL => self.last = frame,
            next => links(next).previous.store(frame, Ordering::Relaxed),
        }
        self.len += 1;
    }

    /// Removes a frame, which is on the list.
    pub(crate) fn remove<'l>(&mut self, frame: Frame, links: impl Fn(u32) -> &'l Links) {
        let own = links(frame.0);
        let previous = own.previous.load(Ordering::Relaxed);
        let next = own.next.load(Ordering::Relaxed);
        match previous {
            NIL => self.first = next,
            previous => links(previous).next.store(next, Ordering::Relaxed),
        }
        match next {
            NIL => self.last = previous,
            next => links(next).previous.store(previous, Ordering::Relaxed),
        }
        self.len -= 1;
    }
}

#[cfg(all(test, not(offlock_model)))]
mod region_tests {
    use std::cell::Cell;
    use std::rc::Rc;

    use super::*;

    #[test]
    fn an_array_has_its_values_and_drops_each_once() {
        let dropped = Rc::new(Cell::new(0));
        struct Counts(Rc<Cell<u32>>, usize);
        impl Drop for Counts {
            fn drop(&mut self) {
                self.0.set(self.0.get() + 1);
            }
        }
        let mut next = 0;
        let make = || {
            next += 1;
            Counts(Rc::clone(&dropped), next)
        };
        let array = Array::new(1000, make).unwrap();
        assert!(array.iter().enumerate().all(|(at, value)| value.1 == at + 1));
        assert_eq!(dropped.get(), 0);
        drop(array);
        assert_eq!(dropped.get(), 1000);
    }

    #[test]
    fn a_region_is_aligned_zero_and_refused_where_it_cannot_be() {
        for (len, align) in [(4096, 512), (100_000, 65_536), (3 * HUGE, 4096)] {
            let region = Region::new(len, align).unwrap();
            assert_eq!(region.start().addr().get() % align, 0);
            let bytes = NonNull::slice_from_raw_parts(region.start(), len);
            // SAFETY: the region has `len` bytes, and no other reference to them exists.
            assert!(unsafe { bytes.as_ref() }.iter().all(|&byte| byte == 0));
        }
        assert!(Region::new(usize::MAX - 10, 4096).is_err());
        assert!(Region::new(1 << 60, 4096).is_err());
    }
}
