//! The walk of an intrusive list that holds no lock between items.

use std::fmt;
use std::iter::FusedIterator;
use std::pin::Pin;

use percpu::lglock::LockError;

use crate::chunk::Chunk;
use crate::cursor::Cursor;

use super::items::Items;
use super::link::Linked;

/// A walk of an [`IntrusiveList`](crate::IntrusiveList) that holds no lock while the caller's code
/// runs, for [`IntrusiveList::iter_pinned`](crate::IntrusiveList::iter_pinned).
///
/// The walk calls `pin` with each item under the slot's lock, for 32 items at a time, and returns
/// the results without the lock. `pin` returns a value that stays valid after the unlock, such as
/// an `Arc` upgraded from a `Weak` in the item, or a copy of a field. It returns `None` to leave
/// the item out.
///
/// `pin` must be short, like the closure of
/// [`IntrusiveList::for_each`](crate::IntrusiveList::for_each). It must not drop an `Arc` that it
/// has upgraded: if that was the last reference, the item is dropped inside the walk, which aborts
/// the process. So filter before the upgrade, or outside `pin`.
///
/// [`Iter`](crate::Iter) says which entries a walk sees, and which error it returns if a slot
/// cannot be locked. An item that is removed and added again counts as another entry.
///
/// ```
/// use std::pin::Pin;
/// use std::sync::{Arc, Weak};
///
/// use percpu_list::{IntrusiveList, Link, linked};
///
/// struct Session {
///     this: Weak<Session>,
///     link: Link,
/// }
/// linked!(Session => link);
///
/// let sessions = IntrusiveList::new();
/// let session = Arc::new_cyclic(|this| Session {
///     this: this.clone(),
///     link: Link::new(sessions.domain()),
/// });
/// // SAFETY: an `Arc` does not move its value, and this program does not move it out.
/// let session = unsafe { Pin::new_unchecked(session) };
/// sessions.insert(session.as_ref())?;
/// for session in sessions.iter_pinned(|session| session.this.upgrade()) {
///     let session: Arc<Session> = session?; // sessions without an `Arc` are left out
///     assert!(session.link.is_linked());
/// }
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[must_use = "it does nothing until it is iterated over"]
pub struct PinnedIter<'a, T: Linked, P, F> {
    items: &'a Items<T>,
    cursor: Cursor<'a>,
    pin: F,
    chunk: Chunk<P>,
}

impl<'a, T: Linked, P, F> PinnedIter<'a, T, P, F> {
    pub(super) fn new(items: &'a Items<T>, pin: F) -> Self {
        Self { items, cursor: Cursor::new(items.core()), pin, chunk: Chunk::new() }
    }
}

impl<T: Linked, P, F: FnMut(Pin<&T>) -> Option<P>> Iterator for PinnedIter<'_, T, P, F> {
    type Item = Result<P, LockError>;

    fn next(&mut self) -> Option<Self::Item> {
        let (items, cursor, pin) = (self.items, &mut self.cursor, &mut self.pin);
        self.chunk.next(|chunk| {
            cursor.visit_chunk(
                |_| (),
                |anchor| {
                    // SAFETY: the cursor found the anchor in an array of this core, and holds the
                    // lock of its slot during this call.
                    let found = pin(unsafe { items.item(anchor) });
                    found.map(|found| chunk.push(found)).is_some()
                },
            )
        })
    }
}

impl<T: Linked, P, F: FnMut(Pin<&T>) -> Option<P>> FusedIterator for PinnedIter<'_, T, P, F> {}

impl<T: Linked, P, F> fmt::Debug for PinnedIter<'_, T, P, F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PinnedIter").field("cursor", &self.cursor).finish_non_exhaustive()
    }
}
