//! Storage of the messages: slots with 32-bit indices, in chunks that never move.
//!
//! ```text
//!  chunks -> | 64 | 128 | 256 | ...        index -> chunk and slot by the position of its top bit
//!  spare  -> 2                             the slot freed last, reused without a read of the slot
//!  free   -> 5 -> 3 -> 8                   the other freed slots; then come those never used yet
//! ```
//!
//! Each chunk is twice as large as the one before, so 26 of them hold 2^32 - 64 messages. The last one
//! ends at the most messages that the queue may hold. A chunk is allocated before the lock if the hint
//! says that the slab is full. It is freed with the slab only: the memory of one burst serves the next.
//!
//! # Invariants
//!
//! 1. Slots below `used` are live, `spare`, or on the free list. Those above were never written.
//! 2. Whenever the lock is not held, the hint is 0 if a slot is free for the next message or if no
//!    further chunk may exist. Otherwise it is the number of the missing chunk, counted from 1.

use std::alloc::{Layout, alloc, dealloc};
use std::mem::{ManuallyDrop, MaybeUninit};
use std::ptr::{self, NonNull};
use std::sync::Arc;

use offlock_sync::AllocError;
use offlock_sync::atomic::{AtomicU32, Ordering};
use offlock_sync::check;

use super::levels::NIL;

/// Slots in the first chunk. Models have few, so that they fill it.
const FIRST_CHUNK: u32 = if cfg!(offlock_model) { 2 } else { 64 };
/// The most chunks: their slots use all 32-bit indices, except the last 64.
const MAX_CHUNKS: usize = 26;
/// The most messages of one slab.
pub(crate) const MAX_MESSAGES: usize = (FIRST_CHUNK as usize) * ((1 << MAX_CHUNKS) - 1);

const _: () = assert!(MAX_MESSAGES < NIL as usize);

/// Space for one message.
pub(crate) struct Slot<T> {
    /// The next slot of its FIFO, or of the free list.
    next: u32,
    value: MaybeUninit<T>,
}

/// The memory of one chunk. The slab owns the messages in its slots.
pub(crate) struct Chunk<T> {
    slots: NonNull<Slot<T>>,
    /// The number of the chunk, from 0.
    number: usize,
    /// The number of slots: `FIRST_CHUNK << number`, or less in the last chunk.
    len: u32,
}

// SAFETY: a chunk owns its memory and neither reads nor drops the messages in it.
unsafe impl<T> Send for Chunk<T> {}

impl<T> Chunk<T> {
    fn layout(len: u32) -> Result<Layout, AllocError> {
        Layout::array::<Slot<T>>(len as usize).map_err(|_| AllocError::new())
    }

    /// Allocates a chunk for a slab of up to `limit` slots, which are more than those of the chunks before.
    fn try_new(number: usize, limit: u32) -> Result<Self, AllocError> {
        let before = FIRST_CHUNK * ((1 << number) - 1);
        let len = (FIRST_CHUNK << number).min(limit - before);
        // SAFETY: a `Slot` contains an integer, and `len` is not 0, so the layout has a non-zero size.
        let slots = unsafe { alloc(Self::layout(len)?) };
        let slots = NonNull::new(slots.cast()).ok_or_else(AllocError::new)?;
        Ok(Self { slots, number, len })
    }

    /// Allocates the chunk that a hint names. Out of line, because most messages need none.
    #[cold]
    #[inline(never)]
    fn try_from_hint(hint: u32, limit: u32) -> Option<Self> {
        Self::try_new(hint as usize - 1, limit).ok()
    }
}

impl<T> Drop for Chunk<T> {
    fn drop(&mut self) {
        if let Ok(layout) = Self::layout(self.len) {
            // SAFETY: `try_new` allocated the memory with this layout.
            unsafe { dealloc(self.slots.as_ptr().cast(), layout) };
        }
    }
}

/// A message that was taken out of the slab.
pub(crate) struct Removed<T> {
    pub(crate) value: T,
    /// The slot that followed it in its FIFO.
    pub(crate) next: u32,
}

/// A view of the slab that shows without the lock whether a chunk is missing.
pub(crate) struct SlabHint {
    missing: Arc<AtomicU32>,
    limit: u32,
}

impl SlabHint {
    /// Returns whether one more message seems to need a chunk.
    #[inline]
    pub(crate) fn needs_memory(&self) -> bool {
        // Ordering: Relaxed; a hint. The operation checks again under the lock, which orders the
        // slots.
        self.missing.load(Ordering::Relaxed) != 0
    }

    /// Allocates the chunk that seems to be missing.
    ///
    /// A failed allocation is not reported, because the operation may find a free slot under the
    /// lock.
    #[inline(always)]
    pub(crate) fn preload<T>(&self, preload: &mut Option<Chunk<T>>) {
        // Ordering: Relaxed; a hint. The operation checks again under the lock, which orders the
        // slots.
        let missing = self.missing.load(Ordering::Relaxed);
        if missing != 0 {
            *preload = Chunk::try_from_hint(missing, self.limit);
        }
    }
}

/// The slots, the lists of free ones, and the hint.
///
/// The fields that every message uses come first, so that few cache lines move between CPUs.
#[repr(C)]
pub(crate) struct Slab<T> {
    /// The first chunk, which holds most messages.
    first: *mut Slot<T>,
    /// A free slot that is on no list, or [`NIL`].
    spare: u32,
    free: u32,
    used: u32,
    capacity: u32,
    /// The value that was last stored in the hint.
    published: u32,
    /// The most slots. It is set before the first chunk.
    limit: u32,
    /// For each chunk, the address at which slot index + [`FIRST_CHUNK`] = 0 would lie. Adding that
    /// sum to it gives the address of a slot of the chunk.
    bases: [*mut Slot<T>; MAX_CHUNKS],
    /// The number of chunks.
    count: usize,
    hint: Arc<AtomicU32>,
    /// The number of chunks allocated under the lock.
    fallback: u64,
}

// SAFETY: the slab owns its messages and gives out no shared access to them beyond its own borrow,
// so `T: Send` suffices.
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
            limit: MAX_MESSAGES as u32,
            bases: [ptr::null_mut(); MAX_CHUNKS],
            count: 0,
            hint: Arc::new(AtomicU32::new(1)),
            fallback: 0,
        }
    }

    pub(crate) fn hint(&self) -> SlabHint {
        SlabHint { missing: self.hint.clone(), limit: self.limit }
    }

    pub(crate) fn fallback(&self) -> u64 {
        self.fallback
    }

    /// Returns the number of slots, free or not.
    pub(crate) fn capacity(&self) -> usize {
        self.capacity as usize
    }

    /// Allocates the chunks for `messages` messages now.
    pub(crate) fn reserve(&mut self, messages: usize) -> Result<(), AllocError> {
        if messages > MAX_MESSAGES {
            return Err(AllocError::new());
        }
        while self.capacity() < messages {
            let chunk = Chunk::try_new(self.count, self.limit)?;
            self.add_chunk(chunk);
        }
        Ok(())
    }

    /// Returns whether a slot is free for one more message.
    #[inline(always)]
    pub(crate) fn has_free_slot(&self) -> bool {
        self.spare != NIL || self.free != NIL || self.used != self.capacity
    }

    /// Makes a slot free for one more message. Returns false if memory is exhausted.
    #[inline(always)]
    pub(crate) fn make_room(&mut self, preload: &mut Option<Chunk<T>>) -> bool {
        check!("insert: a slot is free", self.has_free_slot()) || self.grow(preload)
    }

    /// Stores a message in a free slot, and returns its index.
    ///
    /// # Safety
    ///
    /// A slot is free: [`has_free_slot`](Self::has_free_slot).
    #[inline(always)]
    pub(crate) unsafe fn insert(&mut self, value: T) -> u32 {
        let index = if self.spare != NIL {
            std::mem::replace(&mut self.spare, NIL)
        } else if self.free != NIL {
            let index = self.free;
            // SAFETY: `index` is on the free list, so by invariant 1 it is below `used` and was
            // written.
            self.free = unsafe { (*self.slot(index)).next };
            index
        } else {
            self.used += 1;
            self.used - 1
        };
        let slot = Slot { next: NIL, value: MaybeUninit::new(value) };
        // SAFETY: the caller guarantees a free slot, so the chunk of `index` exists. The slot is not
        // live: overwriting it drops no message.
        unsafe { self.slot(index).write(slot) };
        // A full queue that may not grow takes and frees its last slot again and again.
        if !self.has_all_chunks() {
            self.update_hint();
        }
        index
    }

    /// Takes a message out.
    ///
    /// # Safety
    ///
    /// `index` is a live slot. This call frees it.
    #[inline(always)]
    pub(crate) unsafe fn remove(&mut self, index: u32) -> Removed<T> {
        let slot = self.slot(index);
        // SAFETY: the caller guarantees a live slot, which was written; `&mut self` excludes other
        // references to it.
        let slot = unsafe { &mut *slot };
        // SAFETY: the slot is live, so its value is initialised; it is read once, because the slot
        // is freed below.
        let value = unsafe { slot.value.assume_init_read() };
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
        Removed { value, next }
    }

    /// Returns the slot that follows a message in its FIFO.
    ///
    /// # Safety
    ///
    /// `index` is a live slot.
    #[inline(always)]
    pub(crate) unsafe fn next(&self, index: u32) -> u32 {
        // SAFETY: the caller guarantees a live slot, which was written.
        unsafe { (*self.slot(index)).next }
    }

    /// Sets the slot that follows a message in its FIFO.
    ///
    /// # Safety
    ///
    /// `index` is a live slot.
    #[inline(always)]
    pub(crate) unsafe fn set_next(&mut self, index: u32, next: u32) {
        // SAFETY: the caller guarantees a live slot, which was written; `&mut self` excludes other
        // references to it.
        unsafe { (*self.slot(index)).next = next };
    }

    /// Returns a message.
    ///
    /// # Safety
    ///
    /// `index` is a live slot.
    pub(crate) unsafe fn get(&self, index: u32) -> &T {
        // SAFETY: the caller guarantees a live slot, which was written.
        let slot = unsafe { &*self.slot(index) };
        // SAFETY: the value of a live slot is initialised.
        unsafe { slot.value.assume_init_ref() }
    }

    /// Returns the address of a message, which stays valid until it is removed.
    ///
    /// # Safety
    ///
    /// `index` is a live slot.
    pub(crate) unsafe fn value(&self, index: u32) -> NonNull<T> {
        // SAFETY: the caller guarantees a live slot, which is in the memory of a chunk.
        let value = unsafe { &raw mut (*self.slot(index)).value };
        // SAFETY: the address of a field is not null. A `MaybeUninit<T>` has the layout of a `T`.
        unsafe { NonNull::new_unchecked(value.cast()) }
    }

    /// Prefetches what the receives after the next one need: in a deep queue it has left the caches.
    /// `head` is the next message of its FIFO, and `before` was the one before it.
    ///
    /// # Safety
    ///
    /// `head` is a live slot.
    #[inline(always)]
    pub(crate) unsafe fn prefetch_after(&self, before: u32, head: u32) {
        // SAFETY: the caller guarantees a live slot. The call before this one has prefetched it.
        let next = unsafe { self.next(head) };
        let at = self.slot(if next == NIL { head } else { next }).cast_const();
        prefetch(at);
        // Small messages stored one after another: those that follow are in the next lines, and the
        // links to them are no faster than the receiver.
        if size_of::<Slot<T>>() <= 32 && head.wrapping_sub(before) < 64 {
            prefetch(at.wrapping_byte_add(4 * 64));
            prefetch(at.wrapping_byte_add(5 * 64));
        }
    }

    /// Prefetches the first message of a level.
    #[inline(always)]
    pub(crate) fn prefetch_first(&self, head: u32) {
        prefetch(self.slot(head).cast_const());
    }

    /// Returns the address of a slot whose index is below `capacity`.
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

    /// Adds a chunk: the preloaded one if it is the missing one, otherwise one allocated here.
    /// Returns false if memory or indices are exhausted.
    #[cold]
    #[inline(never)]
    fn grow(&mut self, preload: &mut Option<Chunk<T>>) -> bool {
        if self.capacity == self.limit {
            return false;
        }
        let is_missing = |chunk: &mut Chunk<T>| {
            check!("grow: the chunk is still missing", chunk.number == self.count)
        };
        let chunk = match preload.take_if(is_missing) {
            Some(chunk) => chunk,
            None => {
                let Ok(chunk) = Chunk::try_new(self.count, self.limit) else { return false };
                self.fallback += 1;
                chunk
            }
        };
        self.add_chunk(chunk);
        true
    }

    fn add_chunk(&mut self, chunk: Chunk<T>) {
        self.capacity += chunk.len;
        let chunk = ManuallyDrop::new(chunk);
        let base = chunk.slots.as_ptr().wrapping_sub((FIRST_CHUNK as usize) << chunk.number);
        self.bases[self.count] = base;
        if self.count == 0 {
            self.first = chunk.slots.as_ptr();
        }
        self.count += 1;
        self.update_hint();
    }

    /// Sets the most messages that the queue will hold, so that no slot is allocated for more. There is no
    /// chunk yet.
    pub(crate) fn set_limit(&mut self, messages: usize) {
        debug_assert!(self.count == 0 && messages <= MAX_MESSAGES);
        self.limit = messages as u32;
    }

    /// Returns whether no chunk is missing: a slot is free, or the slab may not grow.
    #[inline(always)]
    fn has_all_chunks(&self) -> bool {
        self.has_free_slot() || self.capacity == self.limit
    }

    /// Restores invariant 2.
    #[cold]
    #[inline(never)]
    fn update_hint(&mut self) {
        let room = self.has_all_chunks();
        let missing = if room { 0 } else { self.count as u32 + 1 };
        if missing != self.published {
            self.published = missing;
            // Ordering: Relaxed; a hint that publishes nothing. The lock orders its writers.
            self.hint.store(missing, Ordering::Relaxed);
        }
    }

    /// Checks the invariants. `live` is the number of messages, in FIFOs or lent.
    ///
    /// # Panics
    ///
    /// Panics with the invariant that is violated.
    pub(crate) fn validate(&self, live: usize) {
        for (number, start) in self.bases.iter().enumerate() {
            assert_eq!(start.is_null(), number >= self.count, "a chunk in its place");
        }
        let slots = (FIRST_CHUNK as usize) * ((1 << self.count) - 1);
        assert_eq!(
            self.capacity as usize,
            slots.min(self.limit as usize),
            "the slots of all chunks"
        );
        assert!(self.spare == NIL || self.spare < self.used, "a spare slot that was never used");
        let mut free = usize::from(self.spare != NIL);
        let mut at = self.free;
        while at != NIL {
            assert!(at < self.used, "a free slot that was never used");
            free += 1;
            assert!(free <= self.used as usize, "a circle in the free list");
            // SAFETY: `at` is below `used`, so by invariant 1 it was written.
            at = unsafe { (*self.slot(at)).next };
        }
        assert_eq!(live + free, self.used as usize, "slots that are neither live nor free");
        let room = self.has_all_chunks();
        assert_eq!(self.published == 0, room, "the hint");
    }
}

/// Asks for a cache line that is needed soon.
#[inline(always)]
fn prefetch<T>(at: *const T) {
    #[cfg(target_arch = "x86_64")]
    {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        // SAFETY: a prefetch does not access memory as far as the program can tell, so any address
        // is valid.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(at.cast()) };
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _nothing_to_ask = at;
}

impl<T> Drop for Slab<T> {
    fn drop(&mut self) {
        for (number, base) in self.bases[..self.count].iter().enumerate() {
            let (len, before) = (FIRST_CHUNK << number, FIRST_CHUNK * ((1 << number) - 1));
            if let Some(slots) = NonNull::new(base.wrapping_add(len as usize)) {
                drop(Chunk { slots, number, len: len.min(self.capacity - before) });
            }
        }
    }
}
