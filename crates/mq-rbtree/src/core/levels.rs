//! What finds the FIFO of a priority, and the highest one.

use std::fmt;

use percpu::AllocError;

use super::fifo::Fifo;
use crate::stats::LevelStats;

/// An ordered set of priorities, each with the list of its messages: [`Bitmap`](crate::Bitmap) for
/// 0 to 32,767, [`RbTree`](crate::RbTree) for any ordered key.
///
/// Sealed: its methods trust the queue that calls them.
pub trait Levels: Sized + sealed::Sealed {
    /// What messages are ordered by.
    type Priority: Copy + fmt::Debug;

    /// Whether the order of priorities is the user's code, which may panic.
    #[doc(hidden)]
    const COMPARES: bool;

    /// Tells without the lock what a new level would need.
    #[doc(hidden)]
    type Hint: Send + Sync;

    /// Memory for a new level, got before the lock; what is left in it is freed after the unlock.
    #[doc(hidden)]
    type Preload: Default;

    /// A level: valid from [`get_or_insert`](Self::get_or_insert) until [`remove`](Self::remove).
    #[doc(hidden)]
    type Level: Copy + PartialEq;

    /// An empty set that keeps up to `spare` freed nodes, where levels are nodes.
    #[doc(hidden)]
    fn try_new(spare: usize) -> Result<Self, AllocError>;

    #[doc(hidden)]
    fn hint(&self) -> Self::Hint;

    /// Whether there is such a priority.
    #[doc(hidden)]
    fn is_valid(priority: Self::Priority) -> bool;

    /// Whether a new level for this priority seems to need memory that is not there.
    #[doc(hidden)]
    fn needs_memory(hint: &Self::Hint, priority: Self::Priority) -> bool;

    /// Gets memory for a new level if one seems to be needed. Fails quietly: the operation may do
    /// without.
    #[doc(hidden)]
    fn preload(hint: &Self::Hint, priority: Self::Priority, preload: &mut Self::Preload);

    /// Keeps what was made before the lock for a level of this priority, as far as there is room: for a
    /// sender that waits, and whose message another thread will put in.
    #[doc(hidden)]
    fn keep_preload(&mut self, priority: Self::Priority, preload: &mut Self::Preload);

    /// The level of a priority; a new one, with an empty list, if there is none. Nothing else is
    /// called until a message was put into it, or it was left.
    ///
    /// Takes memory from what is kept, from `preload`, or else allocates here and counts that.
    ///
    /// The priority is valid.
    #[doc(hidden)]
    fn get_or_insert(
        &mut self,
        priority: Self::Priority,
        preload: &mut Self::Preload,
    ) -> Result<Self::Level, AllocError>;

    /// The same without memory that is not kept: `None` if some is needed, and nothing has changed.
    #[doc(hidden)]
    fn get_or_insert_no_alloc(&mut self, priority: Self::Priority) -> Option<Self::Level>;

    /// Removes a level whose list has become empty.
    ///
    /// # Safety
    ///
    /// `level` came from this set and was not left since.
    #[doc(hidden)]
    unsafe fn remove(&mut self, level: Self::Level, preload: &mut Self::Preload);

    /// The list of a level.
    ///
    /// # Safety
    ///
    /// As for [`remove`](Self::remove).
    #[doc(hidden)]
    unsafe fn fifo(&mut self, level: Self::Level) -> &mut Fifo;

    /// The priority of a level.
    ///
    /// # Safety
    ///
    /// As for [`remove`](Self::remove).
    #[doc(hidden)]
    unsafe fn priority(&self, level: Self::Level) -> Self::Priority;

    /// The highest level.
    #[doc(hidden)]
    fn highest(&self) -> Option<Self::Level>;

    /// The level of a priority.
    #[doc(hidden)]
    fn find(&self, priority: Self::Priority) -> Option<Self::Level>;

    /// The highest level below a priority, which itself need not have one.
    #[doc(hidden)]
    fn below(&self, priority: Self::Priority) -> Option<Self::Level>;

    /// Whether `a` is served before `b`.
    #[doc(hidden)]
    fn is_above(a: Self::Priority, b: Self::Priority) -> bool;

    /// Gets now what `messages` messages, each of another priority, may need later.
    #[doc(hidden)]
    fn reserve(&mut self, messages: usize) -> Result<(), AllocError>;

    #[doc(hidden)]
    fn stats(&self) -> LevelStats;

    /// Checks the structure, and shows each level to `each`, the highest first.
    ///
    /// # Panics
    ///
    /// Panics with the name of what does not hold.
    #[doc(hidden)]
    fn validate(&self, each: impl FnMut(Self::Priority, Fifo));
}

pub(crate) mod sealed {
    pub trait Sealed {}
}
