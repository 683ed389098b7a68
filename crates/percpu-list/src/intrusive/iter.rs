//! A walk that holds no lock while the caller's code runs.

use std::fmt;
use std::iter::FusedIterator;
use std::pin::Pin;

use percpu::lglock::LockError;

use crate::chunk::Chunk;
use crate::cursor::Cursor;

use super::items::Items;
use super::link::Linked;

/// Walks an [`IntrusiveList`](crate::IntrusiveList), giving out what keeps an item alive: from
/// [`IntrusiveList::iter_pinned`](crate::IntrusiveList::iter_pinned).
///
/// `pin` is called under the slot's lock with each item, for 32 at a time, and says what to give out:
/// an `Arc` upgraded from a `Weak` in the item, a count taken, a copy of what is wanted; `None` to
/// leave the item out. It must be short, as for [`IntrusiveList::for_each`](crate::IntrusiveList::for_each); and it must not drop what
/// it took: if an upgraded `Arc` is the last by then, the item is dropped inside the walk, which ends
/// the process. So filter before the upgrade, or outside.
///
/// What is seen is said at [`Iter`](crate::Iter), as is what it gives instead when the lock cannot be
/// had.
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
/// // SAFETY: what an `Arc` holds does not move, and nobody takes it out.
/// let session = unsafe { Pin::new_unchecked(session) };
/// sessions.insert(session.as_ref())?;
/// for session in sessions.iter_pinned(|session| session.this.upgrade()) {
///     let session: Arc<Session> = session?; // none whose last `Arc` is gone
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
                    // SAFETY: linked, and its slot's lock is held during this call.
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
