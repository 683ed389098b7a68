//! Where the messages are: places with 32-bit indices, in chunks that never move.
//!
//! ```text
//!  chunks -> | 64 | 128 | 256 | ...        index -> chunk and place by the position of its top bit
//!  spare  -> 2                             freed last: used again without a look at the place
//!  free   -> 5 -> 3 -> 8                   the others that were freed; then those never used yet
//! ```
//!
//! A chunk is twice as large as the one before, so 26 of them hold 2^32 messages. It is allocated
//! before the lock when the hint says that the slab is full, and never freed before the slab: what
//! a burst needed once is there for the next.
//!
//! # Invariants
//!
//! 1. Places below `used` are live, `spare` or on the free list; those above were never written.
//! 2. The hint is 0 if a place is there for the next message, else the number of the chunk that is
//!    missing, counted from 1, whenever the lock is not held.

use std::alloc::{Layout, alloc, dealloc};
use std::mem::{ManuallyDrop, MaybeUninit};
use std::ptr::{self, NonNull};

use percpu::AllocError;
use percpu::sync::atomic::{AtomicU32, Ordering};
use percpu::sync::{Arc, check};

use super::fifo::NIL;

/// Places in the first chunk; a guess. Few in a model, which fills it.
const FIRST: u32 = if cfg!(any(offlock_loom, offlock_shuttle)) { 2 } else { 64 };
/// As many as 32-bit indices can use.
const CHUNKS: usize = 26;
/// Most messages of one slab.
pub(crate) const MOST: usize = (FIRST as usize) * ((1 << CHUNKS) - 1);

const _: () = assert!(MOST < NIL as usize);

/// A place for a message.
struct Place<T> {
    /// The next one of its FIFO, or of the free list.
    next: u32,
    /// The message's bytes, as its sender measured them.
    bytes: u32,
    value: MaybeUninit<T>,
}

/// Memory for the places of one chunk; their contents are the slab's.
pub(crate) struct Chunk<T> {
    places: NonNull<Place<T>>,
    /// Which one: it has [`FIRST`] times two to the power of that many places.
    number: usize,
}

// SAFETY: it owns its memory, and drops no `T`.
unsafe impl<T> Send for Chunk<T> {}

impl<T> Chunk<T> {
    fn layout(number: usize) -> Result<Layout, AllocError> {
        Layout::array::<Place<T>>((FIRST as usize) << number).map_err(|_| AllocError::new())
    }

    fn try_new(number: usize) -> Result<Self, AllocError> {
        // SAFETY: a `Place` has two numbers, so the layout is not empty.
        let places = unsafe { alloc(Self::layout(number)?) };
        let places = NonNull::new(places.cast()).ok_or_else(AllocError::new)?;
        Ok(Self { places, number })
    }

    /// The one that a hint misses; out of line, as most messages need none.
    #[cold]
    #[inline(never)]
    fn missing(hint: u32) -> Option<Self> {
        Self::try_new(hint as usize - 1).ok()
    }
}

impl<T> Drop for Chunk<T> {
    fn drop(&mut self) {
        if let Ok(layout) = Self::layout(self.number) {
            // SAFETY: allocated in `try_new` with this layout.
            unsafe { dealloc(self.places.as_ptr().cast(), layout) };
        }
    }
}

/// What was taken out.
pub(crate) struct Removed<T> {
    pub(crate) value: T,
    pub(crate) bytes: u32,
    /// The message that was behind it.
    pub(crate) next: u32,
}

/// Tells from outside the lock whether a chunk is missing.
pub(crate) struct SlabHint(Arc<AtomicU32>);

impl SlabHint {
    /// Whether a message seems to need memory that is not there.
    #[inline]
    pub(crate) fn is_short(&self) -> bool {
        // Ordering: Relaxed; as in `fill`.
        self.0.load(Ordering::Relaxed) != 0
    }

    /// Makes the chunk that seems to be missing. Fails quietly: the operation may do without.
    #[inline(always)]
    pub(crate) fn fill<T>(&self, preload: &mut Option<Chunk<T>>) {
        // Ordering: Relaxed; a hint, the lock orders what it is about.
        let missing = self.0.load(Ordering::Relaxed);
        if missing != 0 {
            *preload = Chunk::missing(missing);
        }
    }
}

/// What every message needs comes first: few lines go from CPU to CPU.
#[repr(C)]
pub(crate) struct Slab<T> {
    /// Of the first chunk, which most messages are in.
    first: *mut Place<T>,
    /// A free place that is on no list.
    spare: u32,
    free: u32,
    used: u32,
    capacity: u32,
    /// What the hint says.
    told: u32,
    /// Messages that there will be at most: no chunk is made beyond them.
    limit: u32,
    /// Of each chunk: where the place would be whose index and [`FIRST`] make 0. So its own places are
    /// found by adding that sum.
    starts: [*mut Place<T>; CHUNKS],
    /// How many of them are there.
    count: usize,
    hint: Arc<AtomicU32>,
    /// Chunks allocated under the lock.
    fallback: u64,
}

// SAFETY: it owns the messages that are live in it, which the queue around it moves and drops.
unsafe impl<T: Send> Send for Slab<T> {}

impl<T> Slab<T> {
    pub(crate) fn new() -> Self {
        Self {
            first: ptr::null_mut(),
            spare: NIL,
            free: NIL,
            used: 0,
            capacity: 0,
            told: 1,
            limit: NIL,
            starts: [ptr::null_mut(); CHUNKS],
            count: 0,
            hint: Arc::new(AtomicU32::new(1)),
            fallback: 0,
        }
    }

    pub(crate) fn hint(&self) -> SlabHint {
        SlabHint(Arc::clone(&self.hint))
    }

    pub(crate) fn fallback(&self) -> u64 {
        self.fallback
    }

    /// Places that are there, in use or not.
    pub(crate) fn capacity(&self) -> usize {
        self.capacity as usize
    }

    /// Gets now what `messages` messages need.
    pub(crate) fn reserve(&mut self, messages: usize) -> Result<(), AllocError> {
        while self.capacity() < messages {
            let chunk = Chunk::try_new(self.count)?;
            self.add(chunk);
        }
        self.tell();
        Ok(())
    }

    /// Whether a place is there for one more message.
    #[inline(always)]
    pub(crate) fn has_place(&self) -> bool {
        self.spare != NIL || self.free != NIL || self.used != self.capacity
    }

    /// Puts a message in; back it comes if there is no memory.
    #[inline(always)]
    pub(crate) fn insert(
        &mut self,
        value: T,
        bytes: u32,
        preload: &mut Option<Chunk<T>>,
    ) -> Result<u32, T> {
        if !check!("insert: a place is there", self.has_place()) && !self.grow(preload) {
            return Err(value);
        }
        Ok(self.insert_at_once(value, bytes))
    }

    /// Puts a message in: a place is there.
    #[inline(always)]
    pub(crate) fn insert_at_once(&mut self, value: T, bytes: u32) -> u32 {
        let index = if self.spare != NIL {
            std::mem::replace(&mut self.spare, NIL)
        } else if self.free != NIL {
            let index = self.free;
            // SAFETY: on the free list, so below `used` and written before.
            self.free = unsafe { (*self.place(index)).next };
            index
        } else {
            self.used += 1;
            self.used - 1
        };
        let place = Place { next: NIL, bytes, value: MaybeUninit::new(value) };
        // SAFETY: below `used`, and not live: nothing there needs to be dropped.
        unsafe { self.place(index).write(place) };
        if !self.has_place() {
            self.tell();
        }
        index
    }

    /// Takes a message out.
    ///
    /// # Safety
    ///
    /// `index` is live; from now on it is not.
    #[inline(always)]
    pub(crate) unsafe fn remove(&mut self, index: u32) -> Removed<T> {
        let place = self.place(index);
        // SAFETY: the caller says that it is live, so written; nobody else has a reference.
        let place = unsafe { &mut *place };
        // SAFETY: live, and read once: `index` is free below.
        let value = unsafe { place.value.assume_init_read() };
        let bytes = place.bytes;
        let next = place.next;
        if self.spare == NIL {
            self.spare = index;
        } else {
            place.next = self.free;
            self.free = index;
        }
        if self.told != 0 {
            self.tell();
        }
        Removed { value, bytes, next }
    }

    /// The message behind one in its FIFO.
    ///
    /// # Safety
    ///
    /// `index` is live.
    #[inline(always)]
    pub(crate) unsafe fn next(&self, index: u32) -> u32 {
        // SAFETY: the caller says that it is live, so written.
        unsafe { (*self.place(index)).next }
    }

    /// Puts a message behind another.
    ///
    /// # Safety
    ///
    /// `index` is live.
    #[inline(always)]
    pub(crate) unsafe fn set_next(&mut self, index: u32, next: u32) {
        // SAFETY: the caller says that it is live, so written; nobody else has a reference.
        unsafe { (*self.place(index)).next = next };
    }

    /// A message, and its bytes.
    ///
    /// # Safety
    ///
    /// `index` is live.
    pub(crate) unsafe fn get(&self, index: u32) -> (&T, u32) {
        // SAFETY: the caller says that it is live, so written.
        let place = unsafe { &*self.place(index) };
        // SAFETY: as above.
        (unsafe { place.value.assume_init_ref() }, place.bytes)
    }

    /// Has the processor fetch a message that is wanted soon: in a deep queue it has left the caches.
    #[inline(always)]
    pub(crate) fn prefetch(&self, index: u32) {
        #[cfg(target_arch = "x86_64")]
        {
            use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
            let place = self.place(index).cast_const().cast();
            // SAFETY: a prefetch reads nothing as far as the program can tell, wherever it points.
            unsafe { _mm_prefetch::<_MM_HINT_T0>(place) };
        }
        #[cfg(not(target_arch = "x86_64"))]
        let _nothing_to_ask = index;
    }

    /// Where a place is that is below `capacity`.
    #[inline(always)]
    fn place(&self, index: u32) -> *mut Place<T> {
        debug_assert!(index < self.capacity);
        if index < FIRST {
            return self.first.wrapping_add(index as usize);
        }
        let at = u64::from(index) + u64::from(FIRST);
        let number = (at.ilog2() - FIRST.ilog2()) as usize;
        self.starts[number].wrapping_add(at as usize)
    }

    /// Adds a chunk: the one made before the lock, or one made here.
    #[cold]
    #[inline(never)]
    fn grow(&mut self, preload: &mut Option<Chunk<T>>) -> bool {
        if self.count == CHUNKS {
            return false;
        }
        let is_missing = |chunk: &mut Chunk<T>| {
            check!("grow: the chunk is still missing", chunk.number == self.count)
        };
        let chunk = match preload.take_if(is_missing) {
            Some(chunk) => chunk,
            None => match Chunk::try_new(self.count) {
                Ok(chunk) => {
                    self.fallback += 1;
                    chunk
                }
                Err(_) => return false,
            },
        };
        self.add(chunk);
        self.tell();
        true
    }

    /// Adds a chunk that was made before the lock, if it is the one that is missing.
    pub(crate) fn stock(&mut self, preload: &mut Option<Chunk<T>>) {
        if !self.has_room() {
            if let Some(chunk) = preload.take_if(|chunk| chunk.number == self.count) {
                self.add(chunk);
                self.tell();
            }
        }
    }

    fn add(&mut self, chunk: Chunk<T>) {
        let places = (FIRST as usize) << chunk.number;
        self.capacity += places as u32;
        let chunk = ManuallyDrop::new(chunk);
        self.starts[self.count] = chunk.places.as_ptr().wrapping_sub(places);
        if self.count == 0 {
            self.first = chunk.places.as_ptr();
        }
        self.count += 1;
    }

    /// Sees to it that no memory is got for more messages than these.
    pub(crate) fn set_limit(&mut self, messages: usize) {
        self.limit = u32::try_from(messages).unwrap_or(NIL);
    }

    /// Whether no chunk is missing, be it because there can be no more messages.
    fn has_room(&self) -> bool {
        let full = self.count == CHUNKS || self.capacity >= self.limit;
        self.has_place() || full
    }

    /// Makes invariant 2 true again.
    #[cold]
    #[inline(never)]
    fn tell(&mut self) {
        let room = self.has_room();
        let missing = if room { 0 } else { self.count as u32 + 1 };
        if missing != self.told {
            self.told = missing;
            // Ordering: Relaxed; a hint, and the caller's lock orders the writers.
            self.hint.store(missing, Ordering::Relaxed);
        }
    }

    /// Checks the invariants, with the number of messages that the FIFOs have.
    ///
    /// # Panics
    ///
    /// Panics with the name of what does not hold.
    pub(crate) fn validate(&self, live: usize) {
        for (number, start) in self.starts.iter().enumerate() {
            assert_eq!(start.is_null(), number >= self.count, "a chunk in its place");
        }
        let places = (FIRST as usize) * ((1 << self.count) - 1);
        assert_eq!(self.capacity as usize, places, "the places of all chunks");
        assert!(self.spare == NIL || self.spare < self.used, "a spare place that was never used");
        let mut free = usize::from(self.spare != NIL);
        let mut at = self.free;
        while at != NIL {
            assert!(at < self.used, "a free place that was never used");
            free += 1;
            assert!(free <= self.used as usize, "a circle in the free list");
            // SAFETY: below `used`, so written.
            at = unsafe { (*self.place(at)).next };
        }
        assert_eq!(live + free, self.used as usize, "places that are neither live nor free");
        let room = self.has_room();
        assert_eq!(self.told == 0, room, "the hint");
    }
}

impl<T> Drop for Slab<T> {
    fn drop(&mut self) {
        for (number, start) in self.starts[..self.count].iter().enumerate() {
            if let Some(places) = NonNull::new(start.wrapping_add((FIRST as usize) << number)) {
                drop(Chunk { places, number });
            }
        }
    }
}
