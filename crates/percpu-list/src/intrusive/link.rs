//! What an item embeds, and the promise that it makes.

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

/// What an item of an [`IntrusiveList`](super::IntrusiveList) embeds: its place on one list of a
/// domain, or on none.
///
/// Made for a domain, of which it counts as a user, and never for another. `!Unpin`: an item is
/// pinned while it is on a list.
#[repr(C)]
pub struct Link {
    anchor: Anchor,
    domain: Domain,
    _pinned: PhantomPinned,
}

// What the crate's page says of memory; a model's atomics are larger.
#[cfg(not(any(offlock_loom, offlock_shuttle)))]
const _: () = assert!(size_of::<Link>() == 24);

impl Link {
    /// Makes a link for an item on no list. Its first slot is that of the CPU that the caller runs
    /// on: adding it there takes one lock, adding it elsewhere two, once.
    #[must_use]
    pub fn new(domain: &Domain) -> Self {
        Self {
            anchor: Anchor::new(domain.current_slot()),
            domain: domain.clone(),
            _pinned: PhantomPinned,
        }
    }

    /// True if the item is on a list; by the time it is known it may have changed.
    #[must_use]
    pub fn is_linked(&self) -> bool {
        self.anchor.is_linked()
    }

    /// The slot that the item was added to last: the CPU, if the domain has a slot for each.
    #[must_use]
    pub fn slot(&self) -> CpuId {
        self.anchor.home()
    }

    /// The domain whose lists the item may be on.
    #[must_use]
    pub fn domain(&self) -> &Domain {
        &self.domain
    }

    /// Takes the item off the list that it is on, whichever that is. False if it is on none.
    ///
    /// Blocks while another thread holds the slot's lock. Of all that try, one gets true.
    ///
    /// # Errors
    ///
    /// [`LockError::Deadlock`] if this thread holds the slot, in a locked walk or a snapshot. The
    /// item is where it was.
    pub fn remove(&self) -> Result<bool, LockError> {
        let from = self.domain.current_slot();
        // SAFETY: we are borrowed, and a link's lists are of its domain.
        unsafe { remove_from_home(&self.domain, &self.anchor, from, None, true) }
    }

    /// Takes the item off its list, if the slot's lock is free. Never blocks: for signal handlers.
    ///
    /// # Errors
    ///
    /// As [`remove`](Self::remove), and [`LockError::WouldBlock`].
    pub fn try_remove(&self) -> Result<bool, LockError> {
        let from = self.domain.current_slot();
        // SAFETY: as in `remove`.
        unsafe { remove_from_home(&self.domain, &self.anchor, from, None, false) }
    }

    /// Takes an item that is being destroyed off its list: what [`linked!`](crate::linked) does first
    /// in the item's `Drop`.
    ///
    /// # Aborts
    ///
    /// If it cannot: this thread is inside a locked walk of that slot, or has a snapshot, so that
    /// another thread may be reading the item.
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
                "percpu-list: an item is dropped on its list, and cannot leave it: {error} (in a \
                 locked walk, in what `iter_pinned` was given, or under a snapshot)"
            );
            process::abort();
        }
    }

    #[inline(always)]
    pub(super) fn anchor(&self) -> &Anchor {
        &self.anchor
    }
}

/// For an item whose own `Drop` has not done it: then nothing of the item but its link may be gone.
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
/// [`IntrusiveList`](super::IntrusiveList). The macro [`linked!`](crate::linked) implements it safely.
///
/// # Safety
///
/// - `LINK` is the offset of a field of type [`Link`], in every value.
/// - The type is not `Unpin`.
/// - When a value is dropped, its link is unlinked before anything else of it is changed or
///   destroyed: by `Link::remove` first thing in its `Drop`; or the link is the field that is
///   declared first, and the type has no `Drop`.
/// - Nothing replaces the link of a value that was pinned.
/// - While a value is on a list nobody has `&mut` to it or to a part of it: walks read it. Its own
///   `Drop` has, and until it has unlinked the value it only reads through that: of a type that is
///   not `Unpin` the compiler does not take a `&mut` for the only reference.
pub unsafe trait Linked: Sync + Sized {
    /// Where the link is: the field's offset in bytes.
    const LINK: usize;
}

/// The link of an item.
#[inline(always)]
pub(super) fn link_of<T: Linked>(item: &T) -> &Link {
    // SAFETY: a field's offset, by the contract of `Linked`.
    let link = unsafe { NonNull::from(item).byte_add(T::LINK) }.cast::<Link>();
    // SAFETY: the field is a `Link`, borrowed as long as the item.
    unsafe { link.as_ref() }
}

/// The anchor of an item, by a pointer that may be used for all of the item.
#[inline(always)]
pub(super) fn anchor_of<T: Linked>(item: &T) -> NonNull<Anchor> {
    // SAFETY: a field's offset, by the contract of `Linked`; the anchor is the field's first.
    unsafe { NonNull::from(item).byte_add(T::LINK) }.cast()
}

/// The item of an anchor.
///
/// # Safety
///
/// The pointer is from [`anchor_of`] an item of this type.
#[inline(always)]
pub(super) unsafe fn item_of<T: Linked>(anchor: NonNull<Anchor>) -> NonNull<T> {
    // SAFETY: the way back.
    unsafe { anchor.byte_sub(T::LINK) }.cast()
}

/// Never `Unpin`, but in a way that may be asked for: what keeps a user of
/// [`linked!`](crate::linked) from implementing `Unpin`.
#[doc(hidden)]
#[derive(Debug)]
pub struct Pinned<'a>(PhantomPinned, PhantomData<&'a ()>);
