//! The set of priorities that have messages: finds the FIFO of a priority, and the highest one.

use std::fmt;

use offlock_sync::AllocError;

use crate::stats::LevelStats;

/// An ordered set of priorities, each with the list of its messages.
///
/// There are two: [`Bitmap`](crate::Bitmap) for the numbers 0 to 32,767, and
/// [`RbTree`](crate::RbTree) for keys of any ordered type. The trait is sealed. Code that is
/// generic over it works with both:
///
/// ```
/// use mq_rbtree::{Levels, Queue, SendError};
///
/// fn send_twice<L: Levels>(
///     queue: &Queue<&'static str, L>,
///     priority: L::Priority,
/// ) -> Result<(), SendError<&'static str>> {
///     queue.try_send("first", priority)?;
///     queue.try_send("second", priority)
/// }
///
/// let numbers = Queue::new(8).unwrap();
/// let keys = Queue::with_keys(8).unwrap();
/// send_twice(&numbers, 7)?;
/// send_twice(&keys, ("urgent", 7))?;
/// # Ok::<(), mq_rbtree::SendError<&str>>(())
/// ```
pub trait Levels: Sized + sealed::Sealed {
    /// The type of a message's priority.
    type Priority: Copy + fmt::Debug;

    /// Whether comparing priorities runs the user's code, which may panic.
    #[doc(hidden)]
    const COMPARES: bool;

    /// A view of the free memory for levels that is readable without the lock.
    #[doc(hidden)]
    type Hint: Send + Sync;

    /// Memory for a new level, allocated before the lock. What is not used is freed after the
    /// unlock.
    #[doc(hidden)]
    type Preload: Default;

    /// Identifies a level: valid from [`get_or_insert`](Self::get_or_insert) until
    /// [`remove`](Self::remove).
    #[doc(hidden)]
    type Level: Copy + PartialEq;

    /// Creates an empty set. If levels are tree nodes, it keeps up to `spare` freed ones.
    #[doc(hidden)]
    fn new(spare: usize) -> Self;

    #[doc(hidden)]
    fn hint(&self) -> Self::Hint;

    /// Checks that messages may have this priority.
    ///
    /// # Errors
    ///
    /// The priority as a number, for the error.
    #[doc(hidden)]
    fn check(priority: Self::Priority) -> Result<(), u32>;

    /// Returns whether a new level seems to need an allocation. By default none does.
    #[doc(hidden)]
    #[inline(always)]
    fn needs_memory(_hint: &Self::Hint) -> bool {
        false
    }

    /// Allocates memory for a new level if it seems to be needed.
    ///
    /// A failed allocation is not reported, because the operation may find memory under the lock.
    #[doc(hidden)]
    #[inline(always)]
    fn preload(_hint: &Self::Hint, _preload: &mut Self::Preload) {}

    /// Stores preloaded memory for a level, as far as there is room for it.
    #[doc(hidden)]
    fn keep_preload(&mut self, _preload: &mut Self::Preload) {}

    /// Returns the level of a priority, which is valid; inserts one with an empty FIFO if there is
    /// none.
    ///
    /// The caller pushes a message to the level, or removes it, before it calls anything else.
    ///
    /// A new level takes its memory from the kept one, then from `preload`. As the last resort it
    /// is allocated here, and counted.
    #[doc(hidden)]
    fn get_or_insert(
        &mut self,
        priority: Self::Priority,
        preload: &mut Self::Preload,
    ) -> Result<Self::Level, AllocError>;

    /// Does the same without allocating. Returns `None` if a new level needs memory that is not
    /// kept; then nothing has changed.
    #[doc(hidden)]
    fn get_or_insert_no_alloc(&mut self, priority: Self::Priority) -> Option<Self::Level>;

    /// Moves memory for one level into `preload`, so that a later `get_or_insert` with it, of a
    /// priority that has messages now, cannot fail. By default that needs no memory.
    #[doc(hidden)]
    fn take_lent_memory(&mut self, _preload: &mut Self::Preload) -> Result<(), AllocError> {
        Ok(())
    }

    /// Removes a level whose FIFO has become empty.
    ///
    /// # Safety
    ///
    /// `level` was returned by a method of this set and has not been removed since.
    #[doc(hidden)]
    unsafe fn remove(&mut self, level: Self::Level, preload: &mut Self::Preload);

    /// Returns the FIFO of a level.
    ///
    /// # Safety
    ///
    /// `level` was returned by a method of this set and has not been removed since.
    #[doc(hidden)]
    unsafe fn fifo(&mut self, level: Self::Level) -> &mut Fifo;

    /// Returns the priority of a level.
    ///
    /// # Safety
    ///
    /// `level` was returned by a method of this set and has not been removed since.
    #[doc(hidden)]
    unsafe fn priority(&self, level: Self::Level) -> Self::Priority;

    /// Returns the highest level.
    #[doc(hidden)]
    fn highest(&self) -> Option<Self::Level>;

    /// Returns the highest level below a priority. The priority itself need not have a level.
    #[doc(hidden)]
    fn below(&self, priority: Self::Priority) -> Option<Self::Level>;

    /// Returns whether messages of priority `a` are served before those of `b`.
    #[doc(hidden)]
    fn is_above(a: Self::Priority, b: Self::Priority) -> bool;

    /// Allocates the memory for `messages` messages of distinct priorities now.
    #[doc(hidden)]
    fn reserve(&mut self, _messages: usize) -> Result<(), AllocError> {
        Ok(())
    }

    #[doc(hidden)]
    fn stats(&self) -> LevelStats;

    /// Checks the structure, and passes each level to `each`, highest first.
    ///
    /// # Panics
    ///
    /// Panics with the invariant that is violated.
    #[doc(hidden)]
    fn validate(&self, each: impl FnMut(Self::Priority, Fifo));
}

pub(crate) mod sealed {
    pub trait Sealed {}
}

// The messages of one priority, oldest first: a list linked through the slab.

/// The index that stands for no message.
pub(crate) const NIL: u32 = u32::MAX;

/// The list of the messages of one priority: indices into the slab, [`NIL`] if the list is empty.
#[doc(hidden)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fifo {
    pub(crate) head: u32,
    pub(crate) tail: u32,
    pub(crate) len: u32,
}

impl Fifo {
    pub(crate) const EMPTY: Self = Self { head: NIL, tail: NIL, len: 0 };

    pub(crate) fn is_empty(&self) -> bool {
        self.head == NIL
    }
}
