//! The link that an item embeds, and the trait of types with a link.

use std::fmt;
use std::marker::{PhantomData, PhantomPinned};
use std::process;
use std::ptr::NonNull;

use percpu::CpuId;
use percpu::lglock::LockError;
use percpu::sync::step;

use crate::anchor::Anchor;
use crate::core::remove_from_home;
use crate::domain::Domain;

/// The field by which an item is on an [`IntrusiveList`](super::IntrusiveList), or on none.
///
/// A link is made for one domain, which it keeps alive, and the item can be on lists of that domain
/// only. It is `!Unpin`, because an item is pinned while it is on a list.
///
/// ```
/// use percpu_list::{IntrusiveList, Link, linked};
///
/// struct Session {
///     name: &'static str,
///     link: Link,
/// }
/// linked!(Session => link);
///
/// let sessions = IntrusiveList::new();
/// let alice = Box::pin(Session { name: "alice", link: Link::new(sessions.domain()) });
/// sessions.insert(alice.as_ref())?;
/// assert!(alice.link.is_linked() && alice.name == "alice");
/// assert!(alice.link.remove()?); // does not need the list
/// assert!(sessions.is_empty());
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[repr(C)]
pub struct Link {
    anchor: Anchor,
    domain: Domain,
    _pinned: PhantomPinned,
}

// The crate documentation says how much memory a link takes. The atomics of a model are larger.
#[cfg(not(any(offlock_loom, offlock_shuttle)))]
const _: () = assert!(size_of::<Link>() == 24);

impl Link {
    /// Creates a link that is on no list. Its first slot is that of the current CPU: adding the
    /// item there takes one lock, and adding it to another slot takes two.
    #[must_use]
    pub fn new(domain: &Domain) -> Self {
        Self {
            anchor: Anchor::new(domain.current_slot()),
            domain: domain.clone(),
            _pinned: PhantomPinned,
        }
    }

    /// Returns whether the item is on a list. Another thread may change that at any time.
    #[must_use]
    pub fn is_linked(&self) -> bool {
        self.anchor.is_linked()
    }

    /// Returns the slot that the item was last added to. It is the CPU, if the domain has a slot
    /// for each CPU.
    #[must_use]
    pub fn slot(&self) -> CpuId {
        self.anchor.home()
    }

    /// Returns the domain whose lists the item may be on.
    #[must_use]
    pub fn domain(&self) -> &Domain {
        &self.domain
    }

    /// Removes the item from its list, and returns whether it was on one.
    ///
    /// Blocks while another thread holds the slot. If several threads remove the item, one call
    /// returns true.
    ///
    /// # Errors
    ///
    /// [`LockError::Deadlock`] if this thread holds the slot, in a locked walk or a snapshot. The
    /// item stays on its list.
    pub fn remove(&self) -> Result<bool, LockError> {
        let from = self.domain.current_slot();
        // SAFETY: `&self` keeps the anchor alive, and a link is only on lists of its domain.
        unsafe { remove_from_home(&self.domain, &self.anchor, from, None, true) }
    }

    /// Removes the item from its list, if the slot is free. Never blocks, and may be called in a
    /// signal handler.
    ///
    /// # Errors
    ///
    /// The errors of [`remove`](Self::remove), and [`LockError::WouldBlock`] where that waits.
    pub fn try_remove(&self) -> Result<bool, LockError> {
        let from = self.domain.current_slot();
        // SAFETY: `&self` keeps the anchor alive, and a link is only on lists of its domain.
        unsafe { remove_from_home(&self.domain, &self.anchor, from, None, false) }
    }

    /// Removes an item that is being dropped from its list. The `Drop` that
    /// [`linked!`](crate::linked) implements calls it first.
    ///
    /// # Aborts
    ///
    /// If the slot cannot be locked, because this thread is inside a locked walk of it or has a
    /// snapshot. The walk may be reading the item.
    #[doc(hidden)]
    #[inline]
    pub fn unlink_in_drop(&self) {
        if self.is_linked() {
            step!("drop: leave the list first", self.unlink_or_abort());
        }
    }

    #[cold]
    #[inline(never)]
    fn unlink_or_abort(&self) {
        if let Err(error) = self.remove() {
            eprintln!(
                "percpu-list: an item was dropped while it was on a list, and cannot be removed: \
                 {error} (in a locked walk, in the closure of `iter_pinned`, or while this thread \
                 has a snapshot)"
            );
            process::abort();
        }
    }

    #[inline(always)]
    pub(super) fn anchor(&self) -> &Anchor {
        &self.anchor
    }
}

/// Removes an item whose own `Drop` did not. By the contract of [`Linked`] the link is then the
/// first field that is dropped.
impl Drop for Link {
    fn drop(&mut self) {
        self.unlink_in_drop();
    }
}

impl fmt::Debug for Link {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Link")
            .field("linked", &self.is_linked())
            .field("slot", &self.slot())
            .finish_non_exhaustive()
    }
}

/// A type with a [`Link`] in it, whose values may be items of an
/// [`IntrusiveList`](super::IntrusiveList). The macro [`linked!`](crate::linked) implements it
/// safely.
///
/// ```
/// use percpu_list::{IntrusiveList, Link, Linked, linked};
///
/// fn count<T: Linked>(list: &IntrusiveList<T>) -> usize {
///     list.len()
/// }
///
/// struct Session {
///     link: Link,
/// }
/// linked!(Session => link);
///
/// assert_eq!(count(&IntrusiveList::<Session>::new()), 0);
/// ```
///
/// # Safety
///
/// - `LINK` is the offset of a field of type [`Link`], in every value.
/// - The type is not `Unpin`.
/// - The drop of a value unlinks its link before it changes or drops any other part of the value.
///   Either the `Drop` of the type calls `Link::remove` first, or the type has no `Drop` and the
///   link is the field that is declared first.
/// - Nothing replaces the link of a value that was pinned.
/// - While a value is on a list, there is no `&mut` to it or to a part of it, because walks read
///   it. The exception is the `Drop` of the value, which only reads through its `&mut self` until
///   it has unlinked the value. For a type that is not `Unpin`, the compiler does not assume that a
///   `&mut` is the only reference.
pub unsafe trait Linked: Sync + Sized {
    /// The offset of the link in bytes.
    const LINK: usize;
}

/// Returns the link of an item.
#[inline(always)]
pub(super) fn link_of<T: Linked>(item: &T) -> &Link {
    // SAFETY: by the contract of `Linked` this is the offset of a field.
    let link = unsafe { NonNull::from(item).byte_add(T::LINK) }.cast::<Link>();
    // SAFETY: by the contract of `Linked` the field is a `Link`, and it is borrowed with the item.
    unsafe { link.as_ref() }
}

/// Returns a pointer to the anchor of an item, with the provenance of the whole item.
#[inline(always)]
pub(super) fn anchor_of<T: Linked>(item: &T) -> NonNull<Anchor> {
    // SAFETY: by the contract of `Linked` this is the offset of a `Link`, whose first field is the
    // anchor.
    unsafe { NonNull::from(item).byte_add(T::LINK) }.cast()
}

/// Returns the item of an anchor.
///
/// # Safety
///
/// The pointer is from [`anchor_of`], for an item of this type.
#[inline(always)]
pub(super) unsafe fn item_of<T: Linked>(anchor: NonNull<Anchor>) -> NonNull<T> {
    // SAFETY: `anchor_of` added the same offset to a pointer to an item.
    unsafe { anchor.byte_sub(T::LINK) }.cast()
}

/// A type that is never `Unpin`, but that a `where` clause may name. It prevents that a user of
/// [`linked!`](crate::linked) implements `Unpin`.
#[doc(hidden)]
#[derive(Debug)]
pub struct Pinned<'a>(PhantomPinned, PhantomData<&'a ()>);
