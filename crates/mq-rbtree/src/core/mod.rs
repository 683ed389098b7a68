//! A priority queue without a lock: which message comes next, and where it is.
//!
//! ```text
//!  Core ─┬─ levels: priority -> FIFO      Bitmap, RbTree
//!        └─ slab: message, next           32-bit links
//! ```
//!
//! # Invariants
//!
//! 1. A level has messages; what is live in the slab is in exactly one FIFO.
//! 2. `len` and `bytes` are the sums over the FIFOs.

mod bitmap;
mod fifo;
mod levels;
mod rbtree;
mod slab;

use std::num::NonZeroU32;

use percpu::AllocError;

pub use self::bitmap::{Bitmap, PRIORITIES};
use self::fifo::{Fifo, NIL};
pub use self::levels::Levels;
pub use self::rbtree::RbTree;
pub(crate) use self::slab::MAX_MESSAGES;
use self::slab::{Chunk, Removed, Slab, SlabHint};
use crate::stats::LevelStats;

/// A message on its way in or out.
#[derive(Debug)]
pub(crate) struct Message<T, P> {
    pub(crate) value: T,
    pub(crate) priority: P,
    pub(crate) bytes: u32,
}

/// Memory got before the lock; what is left in it is freed after the unlock.
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

/// Tells without the lock what a message would need.
pub(crate) struct Hint<L: Levels> {
    slab: SlabHint,
    levels: L::Hint,
}

impl<L: Levels> Hint<L> {
    /// Whether one more message seems to need memory that is not there.
    #[inline]
    pub(crate) fn needs_memory(&self, priority: L::Priority) -> bool {
        self.slab.needs_memory() || L::needs_memory(&self.levels, priority)
    }

    /// Gets memory for one more message, if it seems to be needed.
    #[inline(always)]
    pub(crate) fn preload<T>(&self, priority: L::Priority, preload: &mut Preload<T, L>) {
        self.slab.preload(&mut preload.chunk);
        L::preload(&self.levels, priority, &mut preload.levels);
    }
}

/// A priority queue of `T` for one thread at a time: the highest priority first, first in first out
/// within it.
///
/// What [`Queue`](crate::Queue) has under its lock. Allocates when it holds more messages, or more
/// different priorities, than before; frees nothing before it is dropped, but nodes of an
/// [`RbTree`] beyond those it keeps.
#[repr(C)] // what every message needs comes first
pub struct Core<T, L: Levels = Bitmap> {
    len: usize,
    bytes: u64,
    levels: L,
    ageing: Option<Ageing<L::Priority>>,
    slab: Slab<T>,
}

/// Every so many receives serve the level below the one served that way before.
struct Ageing<P> {
    every: NonZeroU32,
    count: u32,
    last: Option<P>,
}

impl<T, L: Levels> Core<T, L> {
    /// An empty one that keeps up to `spare` nodes for levels to come, if levels are nodes.
    ///
    /// # Errors
    ///
    /// [`AllocError`] if there is no memory.
    pub fn try_new(spare: usize) -> Result<Self, AllocError> {
        let (slab, levels) = (Slab::new(), L::try_new(spare)?);
        Ok(Self { slab, levels, len: 0, bytes: 0, ageing: None })
    }

    pub(crate) fn hint(&self) -> Hint<L> {
        Hint { slab: self.slab.hint(), levels: self.levels.hint() }
    }

    /// Every `every`th [`pop`](Self::pop) takes the oldest message not of the highest priority, but
    /// of the next lower one than such a pop took last, and after the lowest of the highest again.
    ///
    /// So a message is popped, at the latest, after `every` times as many pops as there are
    /// priorities with messages, for each message of its own priority that is ahead of it.
    pub fn set_ageing(&mut self, every: Option<NonZeroU32>) {
        self.ageing = every.map(|every| Ageing { every, count: 0, last: None });
    }

    /// Says that there will be no more than `messages` messages.
    pub(crate) fn set_limit(&mut self, messages: usize) {
        self.slab.set_limit(messages);
    }

    /// Gets now the memory for `messages` messages, of whatever priorities.
    ///
    /// # Errors
    ///
    /// [`AllocError`] if there is not so much.
    pub fn reserve(&mut self, messages: usize) -> Result<(), AllocError> {
        self.slab.reserve(messages)?;
        self.levels.reserve(messages)
    }

    /// Messages in it.
    #[must_use]
    pub fn len(&self) -> usize {
        self.len
    }

    /// True if there is no message in it.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The sum of the bytes that the messages were said to have.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Messages of one priority.
    #[must_use]
    pub fn len_at(&mut self, priority: L::Priority) -> usize {
        match self.levels.find(priority) {
            // SAFETY: found just now.
            Some(level) => unsafe { self.levels.fifo(level) }.len as usize,
            None => 0,
        }
    }

    /// Messages that fit without more memory than there is.
    #[must_use]
    pub fn capacity(&self) -> usize {
        self.slab.capacity()
    }

    /// Puts a message behind those of its priority.
    ///
    /// # Errors
    ///
    /// The value, if there is no such priority, no memory, or there are 2^32 messages: nothing was
    /// changed.
    pub fn push(&mut self, priority: L::Priority, value: T) -> Result<(), T> {
        if !L::is_valid(priority) {
            return Err(value);
        }
        self.push_with(Message { value, priority, bytes: 0 }, &mut Preload::new())
            .map_err(|message| message.value)
    }

    /// Takes the message that is next.
    pub fn pop(&mut self) -> Option<(T, L::Priority)> {
        self.pop_with(&mut Preload::new()).map(|message| (message.value, message.priority))
    }

    /// Takes out every message that `take` wants and hands it to `out`, the highest priority first.
    ///
    /// If one of them panics, what was not looked at stays.
    ///
    /// ```
    /// let mut core: mq_rbtree::Core<u32> = mq_rbtree::Core::try_new(0)?;
    /// for (n, priority) in [(1, 5), (2, 7), (3, 5), (4, 7)] {
    ///     core.push(priority, n).unwrap();
    /// }
    /// let mut odd = Vec::new();
    /// core.drain_filter(|n, _| n % 2 == 1, |n, priority| odd.push((n, priority)));
    /// assert_eq!(odd, [(1, 5), (3, 5)]);
    /// assert_eq!(core.pop(), Some((2, 7)));
    /// # Ok::<(), std::io::Error>(())
    /// ```
    pub fn drain_filter(
        &mut self,
        take: impl FnMut(&T, L::Priority) -> bool,
        mut out: impl FnMut(T, L::Priority),
    ) {
        self.extract(&mut Preload::new(), take, |message| out(message.value, message.priority));
    }

    /// The message that is next; ageing is not looked at.
    #[must_use]
    pub fn peek(&mut self) -> Option<(&T, L::Priority)> {
        let level = self.levels.highest()?;
        // SAFETY: found just now.
        let head = unsafe { self.levels.fifo(level) }.head;
        // SAFETY: as above.
        let priority = unsafe { self.levels.priority(level) };
        // SAFETY: a level has messages, and what a FIFO names is live.
        Some((unsafe { self.slab.get(head) }.0, priority))
    }

    /// The priority is valid. Back comes the message if there is no memory.
    #[inline(always)]
    pub(crate) fn push_with(
        &mut self,
        message: Message<T, L::Priority>,
        preload: &mut Preload<T, L>,
    ) -> Result<(), Message<T, L::Priority>> {
        // The level first: what it takes to find it may panic, and then nothing is to be undone.
        match self.get_or_insert_level(message.priority, preload) {
            Ok(level) => self.push_to_level(level, message, preload),
            Err(AllocError { .. }) => Err(message),
        }
    }

    /// Keeps what was made before the lock for a message that another thread will put in.
    pub(crate) fn keep_preload(&mut self, priority: L::Priority, preload: &mut Preload<T, L>) {
        self.slab.keep_preload(&mut preload.chunk);
        self.levels.keep_preload(priority, &mut preload.levels);
    }

    /// The level for a message that [`push_to_level`](Self::push_to_level) puts there next, before anything else is
    /// done. Panics if the order of priorities does, and has changed nothing then.
    #[inline(always)]
    pub(crate) fn get_or_insert_level(
        &mut self,
        priority: L::Priority,
        preload: &mut Preload<T, L>,
    ) -> Result<L::Level, AllocError> {
        self.levels.get_or_insert(priority, &mut preload.levels)
    }

    /// Puts a message into its level, which was entered just now. Back it comes if there is no memory,
    /// and the level is left.
    #[inline(always)]
    pub(crate) fn push_to_level(
        &mut self,
        level: L::Level,
        message: Message<T, L::Priority>,
        preload: &mut Preload<T, L>,
    ) -> Result<(), Message<T, L::Priority>> {
        let Message { value, priority, bytes } = message;
        let index = match self.slab.insert(value, bytes, &mut preload.chunk) {
            Ok(index) => index,
            Err(value) => {
                self.remove_if_empty(level, preload);
                return Err(Message { value, priority, bytes });
            }
        };
        // SAFETY: entered just now.
        let fifo = unsafe { self.levels.fifo(level) };
        // SAFETY: inserted just now, and what a FIFO names is live.
        unsafe { append(&mut self.slab, fifo, index) };
        self.count_pushed(bytes);
        Ok(())
    }

    /// Counts one message more.
    #[inline(always)]
    fn count_pushed(&mut self, bytes: u32) {
        self.len += 1;
        if bytes != 0 {
            self.bytes += u64::from(bytes);
        }
    }

    /// Counts one message less.
    #[inline(always)]
    fn count_removed(&mut self, bytes: u32) {
        self.len -= 1;
        if bytes != 0 {
            self.bytes -= u64::from(bytes);
        }
    }

    /// The level for a message that [`push_to_level_no_alloc`](Self::push_to_level_no_alloc) puts there next; `None` if
    /// that needs memory that is not kept here. Panics as [`get_or_insert_level`](Self::get_or_insert_level).
    #[inline(always)]
    pub(crate) fn get_or_insert_level_no_alloc(
        &mut self,
        priority: L::Priority,
    ) -> Option<L::Level> {
        if self.slab.has_free_slot() { self.levels.get_or_insert_no_alloc(priority) } else { None }
    }

    /// Puts a message into its level, which was entered at once just now: a slot is free.
    #[inline(always)]
    pub(crate) fn push_to_level_no_alloc(
        &mut self,
        level: L::Level,
        message: Message<T, L::Priority>,
    ) {
        let Message { value, bytes, .. } = message;
        let index = self.slab.insert_no_alloc(value, bytes);
        // SAFETY: entered just now.
        let fifo = unsafe { self.levels.fifo(level) };
        // SAFETY: inserted just now, and what a FIFO names is live.
        unsafe { append(&mut self.slab, fifo, index) };
        self.count_pushed(bytes);
    }

    #[inline(always)]
    pub(crate) fn pop_with(
        &mut self,
        preload: &mut Preload<T, L>,
    ) -> Option<Message<T, L::Priority>> {
        let highest = self.levels.highest()?;
        let level = if self.ageing.is_some() { self.ageing_level(highest) } else { highest };
        // SAFETY: found just now.
        let priority = unsafe { self.levels.priority(level) };
        // SAFETY: found just now.
        let fifo = unsafe { self.levels.fifo(level) };
        // SAFETY: a level has messages, and what a FIFO names is live; it is taken out of it below.
        let Removed { value, bytes, next } = unsafe { self.slab.remove(fifo.head) };
        fifo.head = next;
        fifo.len -= 1;
        if next == NIL {
            fifo.tail = NIL;
            // SAFETY: found just now, and its list is empty.
            unsafe { self.levels.remove(level, &mut preload.levels) };
            if let Some(level) = self.levels.highest() {
                // SAFETY: found just now.
                let next = unsafe { self.levels.fifo(level) }.head;
                self.slab.prefetch(next);
            }
        } else {
            // Most likely the next to be taken.
            self.slab.prefetch(next);
        }
        self.count_removed(bytes);
        Some(Message { value, priority, bytes })
    }

    /// The level whose turn it is.
    #[cold]
    #[inline(never)]
    fn ageing_level(&mut self, highest: L::Level) -> L::Level {
        let Some(ageing) = &mut self.ageing else { return highest };
        ageing.count += 1;
        if ageing.count < ageing.every.get() {
            return highest;
        }
        ageing.count = 0;
        let level = ageing.last.and_then(|last| self.levels.below(last)).unwrap_or(highest);
        // SAFETY: found just now.
        ageing.last = Some(unsafe { self.levels.priority(level) });
        level
    }

    #[cold]
    #[inline(never)]
    fn remove_if_empty(&mut self, level: L::Level, preload: &mut Preload<T, L>) {
        // SAFETY: the caller has it from the levels just now.
        if unsafe { self.levels.fifo(level) }.is_empty() {
            // SAFETY: as above, and its list is empty.
            unsafe { self.levels.remove(level, &mut preload.levels) };
        }
    }

    /// Takes out the messages that `take` wants, the highest priority first, and hands them to
    /// `out`. If `take` or `out` panics, what was not looked at stays.
    pub(crate) fn extract(
        &mut self,
        preload: &mut Preload<T, L>,
        mut take: impl FnMut(&T, L::Priority) -> bool,
        mut out: impl FnMut(Message<T, L::Priority>),
    ) {
        let mut next = self.levels.highest();
        // An order that contradicts itself could lead around for ever.
        let mut levels = self.levels.stats().live;
        while let Some(level) = next.filter(|_| levels > 0) {
            levels -= 1;
            // SAFETY: found just now; of this turn's messages none was taken yet.
            let priority = unsafe { self.levels.priority(level) };
            let mut before = NIL;
            // SAFETY: as above.
            let mut at = unsafe { self.levels.fifo(level) }.head;
            while at != NIL {
                // SAFETY: what a FIFO names is live.
                let behind = unsafe { self.slab.next(at) };
                // SAFETY: as above.
                if take(unsafe { self.slab.get(at) }.0, priority) {
                    // SAFETY: its list is not empty: `at` is on it.
                    let fifo = unsafe { self.levels.fifo(level) };
                    fifo.len -= 1;
                    if before == NIL {
                        fifo.head = behind;
                    } else {
                        // SAFETY: it stayed on the list, so it is live.
                        unsafe { self.slab.set_next(before, behind) };
                    }
                    if behind == NIL {
                        fifo.tail = before;
                    }
                    let empty = fifo.is_empty();
                    // SAFETY: live until here, and taken out of its FIFO above.
                    let Removed { value, bytes, .. } = unsafe { self.slab.remove(at) };
                    self.count_removed(bytes);
                    if empty {
                        // SAFETY: not left before, and its list has just become empty.
                        unsafe { self.levels.remove(level, &mut preload.levels) };
                    }
                    out(Message { value, priority, bytes });
                } else {
                    before = at;
                }
                at = behind;
            }
            next = self.levels.below(priority);
        }
    }

    pub(crate) fn level_stats(&self) -> LevelStats {
        self.levels.stats()
    }

    /// Chunks of places allocated while a message was put in, because none was made before.
    pub(crate) fn slab_fallback(&self) -> u64 {
        self.slab.fallback()
    }

    /// Checks the invariants of all its parts; tests call it after every step.
    ///
    /// # Panics
    ///
    /// Panics with the name of what does not hold.
    pub fn validate(&self) {
        let (mut len, mut bytes) = (0, 0);
        let mut last = None;
        self.levels.validate(|priority, fifo| {
            assert!(last.is_none_or(|last| L::is_above(last, priority)), "the order of levels");
            last = Some(priority);
            let (mut at, mut tail, mut count) = (fifo.head, NIL, 0);
            while at != NIL {
                // SAFETY: what a FIFO names is live.
                bytes += u64::from(unsafe { self.slab.get(at) }.1);
                count += 1;
                assert!(len + count <= self.len, "more messages than counted");
                tail = at;
                // SAFETY: as above.
                at = unsafe { self.slab.next(at) };
            }
            assert_eq!((count, tail), (fifo.len as usize, fifo.tail), "a FIFO");
            len += count;
        });
        assert_eq!((len, bytes), (self.len, self.bytes), "the sums");
        self.slab.validate(len);
    }
}

/// Puts a message that was inserted behind those of its level.
///
/// # Safety
///
/// `index` and what the list names are live.
#[inline(always)]
unsafe fn append<T>(slab: &mut Slab<T>, fifo: &mut Fifo, index: u32) {
    fifo.len += 1;
    let tail = std::mem::replace(&mut fifo.tail, index);
    if tail == NIL {
        fifo.head = index;
    } else {
        // SAFETY: as the caller says.
        unsafe { slab.set_next(tail, index) };
    }
}

/// Drops what is left, also when the drop of a message panics.
struct DropRest<'c, T, L: Levels>(&'c mut Core<T, L>);

impl<T, L: Levels> Drop for DropRest<'_, T, L> {
    fn drop(&mut self) {
        while self.0.pop().is_some() {}
    }
}

impl<T, L: Levels> Drop for Core<T, L> {
    fn drop(&mut self) {
        if std::mem::needs_drop::<T>() {
            self.ageing = None; // in order nobody's comparisons run
            let rest = DropRest(self);
            while rest.0.pop().is_some() {}
        }
    }
}

impl<T, L: Levels> std::fmt::Debug for Core<T, L> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { len, bytes, .. } = self;
        f.debug_struct("Core").field("len", len).field("bytes", bytes).finish_non_exhaustive()
    }
}
