//! Where the messages are: slots with 32-bit indices, in chunks that never move.
//!
//! ```text
//!  chunks -> | 64 | 128 | 256 | ...        index -> chunk and slot by the position of its top bit
//!  spare  -> 2                             freed last: used again without a look at the slot
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
//! 2. The hint is 0 if a slot is there for the next message, else the number of the chunk that is
//!    missing, counted from 1, whenever the lock is not held.

use std::alloc::{Layout, alloc, dealloc};
use std::mem::{ManuallyDrop, MaybeUninit};
use std::ptr::{self, NonNull};

use percpu::AllocError;
use percpu::sync::atomic::{AtomicU32, Ordering};
use percpu::sync::{Arc, check};

use super::fifo::NIL;

/// Places in the first chunk; a guess. Few in a model, which fills it.
const FIRST_CHUNK: u32 = if cfg!(any(offlock_loom, offlock_shuttle)) { 2 } else { 64 };
/// As many as 32-bit indices can use.
const MAX_CHUNKS: usize = 26;
/// Most messages of one slab.
pub(crate) const MAX_MESSAGES: usize = (FIRST_CHUNK as usize) * ((1 << MAX_CHUNKS) - 1);

const _: () = assert!(MAX_MESSAGES < NIL as usize);

/// A slot for a message.
struct Slot<T> {
    /// The next one of its FIFO, or of the free list.
    next: u32,
    /// The message's bytes, as its sender measured them.
    bytes: u32,
    value: MaybeUninit<T>,
}

/// Memory for the slots of one chunk; their contents are the slab's.
pub(crate) struct Chunk<T> {
    slots: NonNull<Slot<T>>,
    /// Which one: it has [`FIRST_CHUNK`] times two to the power of that many slots.
    number: usize,
}

// SAFETY: it owns its memory, and drops no `T`.
unsafe impl<T> Send for Chunk<T> {}

impl<T> Chunk<T> {
    fn layout(number: usize) -> Result<Layout, AllocError> {
        Layout::array::<Slot<T>>((FIRST_CHUNK as usize) << number).map_err(|_| AllocError::new())
    }

    fn try_new(number: usize) -> Result<Self, AllocError> {
        // SAFETY: a `Slot` has two numbers, so the layout is not empty.
        let slots = unsafe { alloc(Self::layout(number)?) };
        let slots = NonNull::new(slots.cast()).ok_or_else(AllocError::new)?;
        Ok(Self { slots, number })
    }

    /// The one that a hint misses; out of line, as most messages need none.
    #[cold]
    #[inline(never)]
    fn try_from_hint(hint: u32) -> Option<Self> {
        Self::try_new(hint as usize - 1).ok()
    }
}

impl<T> Drop for Chunk<T> {
    fn drop(&mut self) {
        if let Ok(layout) = Self::layout(self.number) {
            // SAFETY: allocated in `try_new` with this layout.
            unsafe { dealloc(self.slots.as_ptr().cast(), layout) };
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
    pub(crate) fn needs_memory(&self) -> bool {
        // Ordering: Relaxed; as in `fill`.
        self.0.load(Ordering::Relaxed) != 0
    }

    /// Makes the chunk that seems to be missing. Fails quietly: the operation may do without.
    #[inline(always)]
    pub(crate) fn preload<T>(&self, preload: &mut Option<Chunk<T>>) {
        // Ordering: Relaxed; a hint, the lock orders what it is about.
        let missing = self.0.load(Ordering::Relaxed);
        if missing != 0 {
            *preload = Chunk::try_from_hint(missing);
        }
    }
}

/// What every message needs comes first: few lines go from CPU to CPU.
#[repr(C)]
pub(crate) struct Slab<T> {
    /// Of the first chunk, which most messages are in.
    first: *mut Slot<T>,
    /// A free slot that is on no list.
    spare: u32,
    free: u32,
    used: u32,
    capacity: u32,
    /// What the hint says.
    published: u32,
    /// Messages that there will be at most: no chunk is made beyond them.
    limit: u32,
    /// Of each chunk: where the slot would be whose index and [`FIRST_CHUNK`] make 0. So its own slots are
    /// found by adding that sum.
    bases: [*mut Slot<T>; MAX_CHUNKS],
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
            published: 1,
            limit: NIL,
            bases: [ptr::null_mut(); MAX_CHUNKS],
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
            self.add_chunk(chunk);
        }
        self.update_hint();
        Ok(())
    }

    /// Whether a slot is there for one more message.
    #[inline(always)]
    pub(crate) fn has_free_slot(&self) -> bool {
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
        if !check!("insert: a slot is free", self.has_free_slot()) && !self.grow(preload) {
            return Err(value);
        }
        Ok(self.insert_no_alloc(value, bytes))
    }

    /// Puts a message in: a slot is there.
    #[inline(always)]
    pub(crate) fn insert_no_alloc(&mut self, value: T, bytes: u32) -> u32 {
        let index = if self.spare != NIL {
            std::mem::replace(&mut self.spare, NIL)
        } else if self.free != NIL {
            let index = self.free;
            // SAFETY: on the free list, so below `used` and written before.
            self.free = unsafe { (*self.slot(index)).next };
            index
        } else {
            self.used += 1;
            self.used - 1
        };
        let slot = Slot { next: NIL, bytes, value: MaybeUninit::new(value) };
        // SAFETY: below `used`, and not live: nothing there needs to be dropped.
        unsafe { self.slot(index).write(slot) };
        if !self.has_free_slot() {
            self.update_hint();
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
        let slot = self.slot(index);
        // SAFETY: the caller says that it is live, so written; nobody else has a reference.
        let slot = unsafe { &mut *slot };
        // SAFETY: live, and read once: `index` is free below.
        let value = unsafe { slot.value.assume_init_read() };
        let bytes = slot.bytes;
        let next = slot.next;
        if self.spare == NIL {
            self.spare = index;
        } else {
            slot.next = self.free;
            self.free = index;
        }
        if self.published != 0 {
            self.update_hint();
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
        unsafe { (*self.slot(index)).next }
    }

    /// Puts a message behind another.
    ///
    /// # Safety
    ///
    /// `index` is live.
    #[inline(always)]
    pub(crate) unsafe fn set_next(&mut self, index: u32, next: u32) {
        // SAFETY: the caller says that it is live, so written; nobody else has a reference.
        unsafe { (*self.slot(index)).next = next };
    }

    /// A message, and its bytes.
    ///
    /// # Safety
    ///
    /// `index` is live.
    pub(crate) unsafe fn get(&self, index: u32) -> (&T, u32) {
        // SAFETY: the caller says that it is live, so written.
        let slot = unsafe { &*self.slot(index) };
        // SAFETY: as above.
        (unsafe { slot.value.assume_init_ref() }, slot.bytes)
    }

    /// Has the processor fetch a message that is wanted soon: in a deep queue it has left the caches.
    #[inline(always)]
    pub(crate) fn prefetch(&self, index: u32) {
        #[cfg(target_arch = "x86_64")]
        {
            use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
            let slot = self.slot(index).cast_const().cast();
            // SAFETY: a prefetch reads nothing as far as the program can tell, wherever it points.
            unsafe { _mm_prefetch::<_MM_HINT_T0>(slot) };
        }
        #[cfg(not(target_arch = "x86_64"))]
        let _nothing_to_ask = index;
    }

    /// Where a slot is that is below `capacity`.
    #[inline(always)]
    fn slot(&self, index: u32) -> *mut Slot<T> {
        debug_assert!(index < self.capacity);
        if index < FIRST_CHUNK {
            return self.first.wrapping_add(index as usize);
        }
        let at = u64::from(index) + u64::from(FIRST_CHUNK);
        let number = (at.ilog2() - FIRST_CHUNK.ilog2()) as usize;
        self.bases[number].wrapping_add(at as usize)
    }

    /// Adds a chunk: the one made before the lock, or one made here.
    #[cold]
    #[inline(never)]
    fn grow(&mut self, preload: &mut Option<Chunk<T>>) -> bool {
        if self.count == MAX_CHUNKS {
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
        self.add_chunk(chunk);
        self.update_hint();
        true
    }

    /// Adds a chunk that was made before the lock, if it is the one that is missing.
    pub(crate) fn keep_preload(&mut self, preload: &mut Option<Chunk<T>>) {
        if !self.has_all_chunks() {
            if let Some(chunk) = preload.take_if(|chunk| chunk.number == self.count) {
                self.add_chunk(chunk);
                self.update_hint();
            }
        }
    }

    fn add_chunk(&mut self, chunk: Chunk<T>) {
        let slots = (FIRST_CHUNK as usize) << chunk.number;
        self.capacity += slots as u32;
        let chunk = ManuallyDrop::new(chunk);
        self.bases[self.count] = chunk.slots.as_ptr().wrapping_sub(slots);
        if self.count == 0 {
            self.first = chunk.slots.as_ptr();
        }
        self.count += 1;
    }

    /// Sees to it that no memory is got for more messages than these.
    pub(crate) fn set_limit(&mut self, messages: usize) {
        self.limit = u32::try_from(messages).unwrap_or(NIL);
    }

    /// Whether no chunk is missing, be it because there can be no more messages.
    fn has_all_chunks(&self) -> bool {
        let full = self.count == MAX_CHUNKS || self.capacity >= self.limit;
        self.has_free_slot() || full
    }

    /// Makes invariant 2 true again.
    #[cold]
    #[inline(never)]
    fn update_hint(&mut self) {
        let room = self.has_all_chunks();
        let missing = if room { 0 } else { self.count as u32 + 1 };
        if missing != self.published {
            self.published = missing;
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
        for (number, start) in self.bases.iter().enumerate() {
            assert_eq!(start.is_null(), number >= self.count, "a chunk in its place");
        }
        let slots = (FIRST_CHUNK as usize) * ((1 << self.count) - 1);
        assert_eq!(self.capacity as usize, slots, "the slots of all chunks");
        assert!(self.spare == NIL || self.spare < self.used, "a spare slot that was never used");
        let mut free = usize::from(self.spare != NIL);
        let mut at = self.free;
        while at != NIL {
            assert!(at < self.used, "a free slot that was never used");
            free += 1;
            assert!(free <= self.used as usize, "a circle in the free list");
            // SAFETY: below `used`, so written.
            at = unsafe { (*self.slot(at)).next };
        }
        assert_eq!(live + free, self.used as usize, "slots that are neither live nor free");
        let room = self.has_all_chunks();
        assert_eq!(self.published == 0, room, "the hint");
    }
}

impl<T> Drop for Slab<T> {
    fn drop(&mut self) {
        for (number, start) in self.bases[..self.count].iter().enumerate() {
            if let Some(slots) = NonNull::new(start.wrapping_add((FIRST_CHUNK as usize) << number))
            {
                drop(Chunk { slots, number });
            }
        }
    }
}
