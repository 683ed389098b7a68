//! A priority queue without a lock: the store that finds the next message.
//!
//! ```text
//!  Core ─┬─ levels: priority -> FIFO      Bitmap, RbTree
//!        └─ slab: message, next           32-bit links
//! ```
//!
//! # Invariants
//!
//! 1. Every level in `levels` has at least one message. Each live slot of the slab is in exactly
//!    one FIFO, or is lent: its message is in a guard. Every index in a FIFO is a live slot.
//! 2. `occupied` is the sum over the FIFOs and the lent messages.

mod bitmap;
mod levels;
mod rbtree;
mod slab;

use std::num::NonZeroU32;
use std::ptr::NonNull;

use offlock_sync::AllocError;

pub use self::bitmap::{Bitmap, PRIORITIES};
pub use self::levels::Levels;
use self::levels::NIL;
pub use self::rbtree::RbTree;
pub(crate) use self::slab::MAX_MESSAGES;
use self::slab::{Chunk, Removed, Slab, SlabHint};

use crate::stats::LevelStats;

/// A message with its priority.
#[derive(Debug)]
pub(crate) struct Message<T, P> {
    pub(crate) value: T,
    pub(crate) priority: P,
}

/// Memory allocated before the lock. What an operation does not use is freed after the unlock.
pub(crate) struct Preload<T, L: Levels> {
    chunk: Option<Chunk<T>>,
    levels: L::Preload,
}

impl<T, L: Levels> Preload<T, L> {
    #[inline]
    pub(crate) fn new() -> Self {
        Self { chunk: None, levels: L::Preload::default() }
    }
}

/// A view of the free memory that is readable without the lock.
pub(crate) struct Hint<L: Levels> {
    slab: SlabHint,
    levels: L::Hint,
}

impl<L: Levels> Hint<L> {
    /// Returns whether one more message seems to need an allocation.
    #[inline]
    pub(crate) fn needs_memory(&self) -> bool {
        self.slab.needs_memory() || L::needs_memory(&self.levels)
    }

    /// Returns whether one more message seems to need a chunk of slots.
    pub(crate) fn needs_slot(&self) -> bool {
        self.slab.needs_memory()
    }

    /// Allocates the memory for one more message, if it seems to be needed.
    #[inline(always)]
    pub(crate) fn preload<T>(&self, preload: &mut Preload<T, L>) {
        self.slab.preload(&mut preload.chunk);
        self.preload_level(preload);
    }

    /// Allocates the memory for a level, if it seems to be needed.
    #[inline(always)]
    pub(crate) fn preload_level<T>(&self, preload: &mut Preload<T, L>) {
        L::preload(&self.levels, &mut preload.levels);
    }
}

/// A priority queue for one thread at a time: highest priority first, first in first out within it.
///
/// This is the store that a [`Queue`](crate::Queue) keeps under its lock. It allocates when it
/// holds more messages than ever before, and an [`RbTree`] also for more distinct priorities. Until it is dropped it frees
/// nothing, except the nodes of an [`RbTree`] beyond those that it keeps.
///
/// ```
/// use mq_rbtree::Core;
///
/// let mut core: Core<&str> = Core::new(0); // a bitmap keeps no spare nodes
/// core.push(1, "later").unwrap();
/// core.push(9, "now").unwrap();
/// assert_eq!(core.pop(), Some(("now", 9)));
/// assert_eq!(core.len(), 1);
/// ```
#[repr(C)] // the fields that every message uses come first
pub struct Core<T, L: Levels = Bitmap> {
    /// The places that are taken, also those of lent messages.
    occupied: usize,
    levels: L,
    ageing: Option<Ageing<L::Priority>>,
    lent: usize,
    slab: Slab<T>,
}

/// The state of ageing: every `every`th pop serves the next level below the last one served so.
#[derive(Clone, Copy)]
struct Ageing<P> {
    every: NonZeroU32,
    count: u32,
    last: Option<P>,
}

impl<T, L: Levels> Core<T, L> {
    /// Creates an empty queue that keeps up to `spare` freed tree nodes for reuse.
    ///
    /// A [`Bitmap`] has no nodes and ignores `spare`.
    #[must_use]
    pub fn new(spare: usize) -> Self {
        let (slab, levels) = (Slab::new(), L::new(spare));
        Self { slab, levels, occupied: 0, ageing: None, lent: 0 }
    }

    pub(crate) fn hint(&self) -> Hint<L> {
        Hint { slab: self.slab.hint(), levels: self.levels.hint() }
    }

    /// Makes every `every`th [`pop`](Self::pop) serve the priorities in turn.
    ///
    /// Such a pop takes the oldest message of the next lower priority than the one that the
    /// previous such pop served. After the lowest priority it starts again at the highest. `None`
    /// turns ageing off.
    ///
    /// The wait of a message is bounded: for each older message of its own priority, and for
    /// itself, at most `every` pops for each priority that has messages.
    pub fn set_ageing(&mut self, every: Option<NonZeroU32>) {
        self.ageing = every.map(|every| Ageing { every, count: 0, last: None });
    }

    /// Sets the most messages that the queue will ever hold, so that no memory is allocated for
    /// more. Nothing was allocated before.
    pub(crate) fn set_limit(&mut self, messages: usize) {
        self.slab.set_limit(messages);
    }

    /// Allocates the memory for `messages` messages of any priorities now.
    ///
    /// # Errors
    ///
    /// [`AllocError`] if memory is exhausted, or if `messages` is above 2^32 - 64.
    pub fn reserve(&mut self, messages: usize) -> Result<(), AllocError> {
        self.slab.reserve(messages)?;
        self.levels.reserve(messages)
    }

    /// Returns the number of messages.
    #[must_use]
    pub fn len(&self) -> usize {
        self.occupied - self.lent
    }

    /// Returns the number of messages, with those that are lent.
    #[inline(always)]
    pub(crate) fn occupied(&self) -> usize {
        self.occupied
    }

    /// Returns the number of lent messages.
    pub(crate) fn lent(&self) -> usize {
        self.lent
    }

    /// Returns true if there is no message.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns whether a message of this priority would be the next one if it was pushed now. Without messages
    /// each is, also with ageing.
    #[inline(always)]
    pub(crate) fn is_next(&self, priority: L::Priority) -> bool {
        let Some(highest) = self.levels.highest() else { return true };
        // SAFETY: `highest` has just returned the level.
        self.ageing.is_none() && L::is_above(priority, unsafe { self.levels.priority(highest) })
    }

    /// Returns the number of messages that fit without another allocation of slots.
    #[must_use]
    pub fn capacity(&self) -> usize {
        self.slab.capacity()
    }

    /// Appends a message to those of its priority. The priority comes first, other than in
    /// [`Queue::send`](crate::Queue::send).
    ///
    /// # Errors
    ///
    /// Returns the value if the priority is invalid, if memory is exhausted, or if the queue holds
    /// 2^32 - 64 messages. The queue is unchanged; also if a comparison of keys panics, which drops the
    /// value, as in `BTreeMap::insert`.
    pub fn push(&mut self, priority: L::Priority, value: T) -> Result<(), T> {
        if L::check(priority).is_err() {
            return Err(value);
        }
        let (message, preload) = (Message { value, priority }, &mut Preload::new());
        // The level comes first: the search runs the comparisons of the keys, which may panic, and
        // nothing has changed before it.
        let pushed = match self.get_or_insert_level(priority, preload) {
            // SAFETY: the level has just been returned.
            Ok(level) => unsafe { self.push_to_level(level, message, preload) },
            Err(AllocError { .. }) => Err(message),
        };
        pushed.map_err(|message| message.value)
    }

    /// Removes and returns the next message with its priority, or `None` if the queue is empty.
    pub fn pop(&mut self) -> Option<(T, L::Priority)> {
        self.pop_with(&mut Preload::new()).map(|message| (message.value, message.priority))
    }

    /// Returns the level of a priority, for [`push_to_level`](Self::push_to_level).
    ///
    /// Nothing else may be called in between: a new level is empty, which invariant 1 forbids. If a
    /// comparison of keys panics, nothing has changed.
    #[inline(always)]
    pub(crate) fn get_or_insert_level(
        &mut self,
        priority: L::Priority,
        preload: &mut Preload<T, L>,
    ) -> Result<L::Level, AllocError> {
        self.levels.get_or_insert(priority, &mut preload.levels)
    }

    /// Appends a message to the level that [`get_or_insert_level`](Self::get_or_insert_level) has
    /// just returned. If memory is exhausted it returns the message, and removes the level if it is
    /// empty.
    ///
    /// # Safety
    ///
    /// `get_or_insert_level` has returned `level`, and nothing else was called since.
    #[inline(always)]
    pub(crate) unsafe fn push_to_level(
        &mut self,
        level: L::Level,
        message: Message<T, L::Priority>,
        preload: &mut Preload<T, L>,
    ) -> Result<(), Message<T, L::Priority>> {
        if !self.slab.make_room(&mut preload.chunk) {
            // SAFETY: the caller guarantees a level of this queue.
            unsafe { self.remove_if_empty(level, preload) };
            return Err(message);
        }
        // SAFETY: the caller guarantees a level of this queue, and a slot is free.
        unsafe { self.push_to_level_no_alloc(level, message) };
        Ok(())
    }

    /// Appends a slot to a level.
    ///
    /// # Safety
    ///
    /// The level is in the set. The slot holds a message and is in no FIFO; none follows it.
    #[inline(always)]
    unsafe fn link_last(&mut self, level: L::Level, index: u32) {
        // SAFETY: the caller guarantees a level of this queue.
        let fifo = unsafe { self.levels.fifo(level) };
        fifo.len += 1;
        let tail = std::mem::replace(&mut fifo.tail, index);
        if tail == NIL {
            fifo.head = index;
        } else {
            // SAFETY: by invariant 1 the FIFO names live slots, and `tail` was its last one.
            unsafe { self.slab.set_next(tail, index) };
        }
    }

    /// Removes a level that has lost its last message.
    ///
    /// # Safety
    ///
    /// The level is in the set, and its FIFO is empty.
    #[inline(always)]
    unsafe fn remove_level(&mut self, level: L::Level, preload: &mut Preload<T, L>) {
        // SAFETY: the caller guarantees an empty level of the set.
        unsafe { self.levels.remove(level, &mut preload.levels) };
        if let Some(level) = self.levels.highest() {
            // SAFETY: `highest` has just returned the level.
            let next = unsafe { self.levels.fifo(level) }.head;
            self.slab.prefetch_first(next);
        }
    }

    /// Appends a message for which a slot is free and memory for its level is stored.
    #[inline(always)]
    pub(crate) fn push_stored(&mut self, message: Message<T, L::Priority>) {
        match self.get_or_insert_level_no_alloc(message.priority) {
            // SAFETY: the level has just been returned.
            Some(level) => unsafe { self.push_to_level_no_alloc(level, message) },
            None => unreachable!("a claim has its memory"),
        }
    }

    /// Returns the level of a priority, for
    /// [`push_to_level_no_alloc`](Self::push_to_level_no_alloc), without allocating.
    ///
    /// Returns `None` if the message needs memory that is not stored here; then nothing has
    /// changed. If a comparison of keys panics, nothing has changed either.
    #[inline(always)]
    pub(crate) fn get_or_insert_level_no_alloc(
        &mut self,
        priority: L::Priority,
    ) -> Option<L::Level> {
        if self.slab.has_free_slot() { self.levels.get_or_insert_no_alloc(priority) } else { None }
    }

    /// Appends a message to a level.
    ///
    /// # Safety
    ///
    /// `get_or_insert_level` or `get_or_insert_level_no_alloc` has returned `level`, and nothing else was
    /// called since. A slot is free, as it is after the second one.
    #[inline(always)]
    pub(crate) unsafe fn push_to_level_no_alloc(
        &mut self,
        level: L::Level,
        message: Message<T, L::Priority>,
    ) {
        // SAFETY: the caller guarantees a free slot.
        let index = unsafe { self.slab.insert(message.value) };
        // SAFETY: the caller guarantees a level of this queue, and the slot was just filled.
        unsafe { self.link_last(level, index) };
        self.occupied += 1;
    }

    #[inline(always)]
    pub(crate) fn pop_with(
        &mut self,
        preload: &mut Preload<T, L>,
    ) -> Option<Message<T, L::Priority>> {
        let remove = |slab: &mut Slab<T>, head| {
            // SAFETY: `unlink_first` passes the head of a FIFO, which by invariant 1 is a live slot,
            // and takes it out of its FIFO.
            let Removed { value, next } = unsafe { slab.remove(head) };
            (value, next)
        };
        let level = self.next_level()?;
        // SAFETY: the level has just been returned.
        let (value, priority) = unsafe { self.unlink_first(level, preload, remove) };
        self.occupied -= 1;
        Some(Message { value, priority })
    }

    /// Returns the level of the next message. This runs the comparisons of ageing, which may panic.
    #[inline(always)]
    fn next_level(&mut self) -> Option<L::Level> {
        let highest = self.levels.highest()?;
        Some(if self.ageing.is_some() { self.ageing_level(highest) } else { highest })
    }

    /// Takes the first message of a level out of its FIFO. `take` gets its slot, and returns a result
    /// and the slot that follows it.
    ///
    /// # Safety
    ///
    /// The level is in the set.
    #[inline(always)]
    unsafe fn unlink_first<R>(
        &mut self,
        level: L::Level,
        preload: &mut Preload<T, L>,
        take: impl FnOnce(&mut Slab<T>, u32) -> (R, u32),
    ) -> (R, L::Priority) {
        // SAFETY: the caller guarantees a level of the set.
        let priority = unsafe { self.levels.priority(level) };
        // SAFETY: the caller guarantees a level of the set.
        let fifo = unsafe { self.levels.fifo(level) };
        let head = fifo.head;
        let (taken, next) = take(&mut self.slab, head);
        fifo.head = next;
        fifo.len -= 1;
        if next == NIL {
            fifo.tail = NIL;
            // SAFETY: the level is still in the set, and its FIFO is empty.
            unsafe { self.remove_level(level, preload) };
        } else {
            // SAFETY: by invariant 1 the FIFO names live slots.
            unsafe { self.slab.prefetch_after(head, next) };
        }
        (taken, priority)
    }

    /// Returns the level that the next pop serves: the highest, or by ageing another one.
    #[cold]
    #[inline(never)]
    fn ageing_level(&mut self, highest: L::Level) -> L::Level {
        let Some(ageing) = &mut self.ageing else { return highest };
        ageing.count += 1;
        if ageing.count < ageing.every.get() {
            return highest;
        }
        let level = ageing.last.and_then(|last| self.levels.below(last)).unwrap_or(highest);
        ageing.count = 0; // after the comparisons, which may panic
        // SAFETY: `below` or `highest` has just returned the level.
        ageing.last = Some(unsafe { self.levels.priority(level) });
        level
    }

    /// Removes a level that has no messages.
    ///
    /// # Safety
    ///
    /// `level` is in the set.
    #[cold]
    #[inline(never)]
    unsafe fn remove_if_empty(&mut self, level: L::Level, preload: &mut Preload<T, L>) {
        // SAFETY: the caller guarantees a level of the set.
        if unsafe { self.levels.fifo(level) }.is_empty() {
            // SAFETY: the caller guarantees a level of the set, and its FIFO is empty.
            unsafe { self.levels.remove(level, &mut preload.levels) };
        }
    }

    pub(crate) fn level_stats(&self) -> LevelStats {
        self.levels.stats()
    }

    /// Returns how many chunks of slots were allocated inside a push, because none was preloaded.
    pub(crate) fn slab_fallback(&self) -> u64 {
        self.slab.fallback()
    }

    /// Checks the invariants of all parts. Tests call it after every step.
    ///
    /// # Panics
    ///
    /// Panics with the invariant that is violated.
    #[doc(hidden)]
    pub fn validate(&self) {
        let mut len = 0;
        let mut last = None;
        self.levels.validate(|priority, fifo| {
            assert!(last.is_none_or(|last| L::is_above(last, priority)), "the order of levels");
            last = Some(priority);
            let (mut at, mut tail, mut count) = (fifo.head, NIL, 0);
            while at != NIL {
                count += 1;
                assert!(len + count <= self.len(), "more messages than counted");
                tail = at;
                // SAFETY: by invariant 1 `at`, an index from the FIFO, is a live slot.
                at = unsafe { self.slab.next(at) };
            }
            assert_eq!((count, tail), (fifo.len as usize, fifo.tail), "a FIFO");
            len += count;
        });
        assert_eq!(len, self.len(), "the number of messages");
        self.slab.validate(self.occupied);
    }
}

/// Drops the remaining messages, also if the drop of one panics.
struct DropRest<'c, T, L: Levels>(&'c mut Core<T, L>);

impl<T, L: Levels> Drop for DropRest<'_, T, L> {
    fn drop(&mut self) {
        while self.0.pop().is_some() {}
    }
}

impl<T, L: Levels> Core<T, L> {
    /// Drops every message. Out of line: without optimization its frame has room for one, also where none
    /// is dropped.
    #[inline(never)]
    fn drop_messages(&mut self) {
        self.ageing = None; // without ageing, no comparison of keys runs
        let rest = DropRest(self);
        while rest.0.pop().is_some() {}
    }
}

impl<T, L: Levels> Drop for Core<T, L> {
    fn drop(&mut self) {
        if std::mem::needs_drop::<T>() {
            self.drop_messages();
        }
    }
}

impl<T, L: Levels> std::fmt::Debug for Core<T, L> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let mut debug = f.debug_struct("Core");
        debug.field("len", &self.len()).finish_non_exhaustive()
    }
}

// The removal of messages out of order.

impl<T, L: Levels> Core<T, L> {
    /// Removes every message that `take` selects and passes it to `out`, highest priority first.
    ///
    /// If `take` or `out` panics, the messages not yet examined stay in the queue.
    pub fn drain_filter(
        &mut self,
        take: impl FnMut(&T, L::Priority) -> bool,
        mut out: impl FnMut(T, L::Priority),
    ) {
        self.extract(&mut Preload::new(), take, |message| out(message.value, message.priority));
    }

    /// Removes the messages that `take` selects, highest priority first, and passes them to `out`.
    ///
    /// If `take` or `out` panics, the messages not yet examined stay.
    pub(crate) fn extract(
        &mut self,
        preload: &mut Preload<T, L>,
        mut take: impl FnMut(&T, L::Priority) -> bool,
        mut out: impl FnMut(Message<T, L::Priority>),
    ) {
        let mut next_level = self.levels.highest();
        // Bounds the loop: with an inconsistent order of keys, `below` could lead around in a
        // circle.
        let mut levels = self.levels.stats().live;
        while let Some(level) = next_level.filter(|_| levels > 0) {
            levels -= 1;
            // SAFETY: `highest` or `below` has just returned the level.
            let priority = unsafe { self.levels.priority(level) };
            let mut previous = NIL;
            // SAFETY: the level is still in the set: nothing was removed since it was returned.
            let mut at = unsafe { self.levels.fifo(level) }.head;
            while at != NIL {
                // SAFETY: by invariant 1 `at`, an index from the FIFO, is a live slot.
                let next = unsafe { self.slab.next(at) };
                // SAFETY: `at` is a live slot, as for the line above.
                if take(unsafe { self.slab.get(at) }, priority) {
                    // SAFETY: the level is in the set as long as its FIFO has a message, and `at`
                    // is still in it.
                    let fifo = unsafe { self.levels.fifo(level) };
                    fifo.len -= 1;
                    if previous == NIL {
                        fifo.head = next;
                    } else {
                        // SAFETY: `previous` stayed in the FIFO, so by invariant 1 it is live.
                        unsafe { self.slab.set_next(previous, next) };
                    }
                    if next == NIL {
                        fifo.tail = previous;
                    }
                    let empty = fifo.is_empty();
                    // SAFETY: `at` was live, and it has just left its FIFO.
                    let Removed { value, .. } = unsafe { self.slab.remove(at) };
                    self.occupied -= 1;
                    if empty {
                        // SAFETY: the level is still in the set, and its FIFO has just become
                        // empty.
                        unsafe { self.levels.remove(level, &mut preload.levels) };
                    }
                    out(Message { value, priority });
                } else {
                    previous = at;
                }
                at = next;
            }
            next_level = self.levels.below(priority);
        }
    }
}

// Lent messages: out of the levels, in their slots.

/// A message in a guard: it is in no FIFO, and keeps its slot and its place.
pub(crate) struct Lent<T, P> {
    index: u32,
    /// The message in its slot, which does not move.
    pub(crate) value: NonNull<T>,
    pub(crate) priority: P,
}

impl<T, L: Levels> Core<T, L> {
    /// Lends the next message: it keeps its slot and its place until [`put_back`](Self::put_back)
    /// or [`take_lent`](Self::take_lent). Moves the memory for its level into `preload`.
    ///
    /// # Errors
    ///
    /// [`AllocError`] if that memory is missing; no message was lent.
    pub(crate) fn lend(
        &mut self,
        preload: &mut Preload<T, L>,
    ) -> Result<Option<Lent<T, L::Priority>>, AllocError> {
        let ageing = self.ageing;
        // The level comes first: the comparisons of keys may panic, and only the count of ageing has changed
        // before.
        let Some(level) = self.next_level() else { return Ok(None) };
        if let Err(error) = self.levels.take_lent_memory(&mut preload.levels) {
            self.ageing = ageing;
            return Err(error);
        }
        let lend = |slab: &mut Slab<T>, head| {
            // SAFETY: `unlink_first` passes the head of a FIFO, which by invariant 1 is a live slot.
            let next = unsafe { slab.next(head) };
            // SAFETY: the slot is live, as for the line above.
            ((head, unsafe { slab.value(head) }), next)
        };
        // SAFETY: the level has been returned, and no level was removed since.
        let ((index, value), priority) = unsafe { self.unlink_first(level, preload, lend) };
        self.lent += 1;
        Ok(Some(Lent { index, value, priority }))
    }

    /// Puts a lent message back, in front of the messages of its priority. If a comparison of keys
    /// panics, nothing has changed.
    ///
    /// # Safety
    ///
    /// The message is lent by this queue, and the caller gives it up; `lend` has returned `preload`
    /// with it.
    pub(crate) unsafe fn put_back(
        &mut self,
        lent: &Lent<T, L::Priority>,
        preload: &mut Preload<T, L>,
    ) {
        let Ok(level) = self.get_or_insert_level(lent.priority, preload) else {
            unreachable!("a lent message has the memory for its level")
        };
        // SAFETY: the level has just been returned.
        let fifo = unsafe { self.levels.fifo(level) };
        fifo.len += 1;
        let next = std::mem::replace(&mut fifo.head, lent.index);
        if next == NIL {
            fifo.tail = lent.index;
        }
        // SAFETY: the caller guarantees a lent message, whose slot is live.
        unsafe { self.slab.set_next(lent.index, next) };
        self.lent -= 1;
    }

    /// Removes a lent message. `preload` gets back to the kept memory, as far as there is room.
    ///
    /// # Safety
    ///
    /// The message is lent by this queue, and the caller gives it up.
    pub(crate) unsafe fn take_lent(
        &mut self,
        lent: &Lent<T, L::Priority>,
        preload: &mut Preload<T, L>,
    ) -> T {
        // SAFETY: the caller guarantees a lent message, whose slot is live and in no FIFO.
        let Removed { value, .. } = unsafe { self.slab.remove(lent.index) };
        self.lent -= 1;
        self.occupied -= 1;
        self.levels.keep_preload(&mut preload.levels);
        value
    }
}
