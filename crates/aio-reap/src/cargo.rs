//! What travels with a request: its buffer and whoever waits for it, stored in the slot without an
//! allocation.
//!
//! ```text
//!  Cargo | vtable | stamp | 96 bytes: (buffer, callback) or (buffer, queue, token) or buffer |
//! ```
//!
//! The value is written where it stays and read out by its own type, so only its own bytes move.
//!
//! # Invariants
//!
//! 1. `vtable` is `Some` exactly while `bytes` holds a valid, owned value of its type.

use std::any::Any;
use std::mem::{MaybeUninit, align_of, size_of};
use std::num::NonZeroI32;
use std::ptr;
use std::rc::Rc;

use crate::error::RequestError;

/// Room for the buffer and the front end of one request; a guess that fits three `Vec`s.
const CARGO_BYTES: usize = 96;

/// Something that takes a request's result.
pub(crate) trait Deliver: 'static {
    /// What is returned is to be dropped where user code may run.
    fn deliver(self, verdict: Verdict) -> Option<Remains>;
}

/// What a delivery would have freed, together with user code.
pub(crate) type Remains = Rc<dyn Any>;

/// A request's result as the slots have it: two words without an owner.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Verdict {
    pub(crate) done: u64,
    /// An errno, or [`RequestError::END_OF_FILE`].
    pub(crate) error: Option<NonZeroI32>,
}

impl Verdict {
    #[inline]
    pub(crate) fn result(self) -> Result<usize, RequestError> {
        match self.error {
            None => Ok(self.done as usize),
            Some(reason) => Err(RequestError::new(reason, self.done as usize)),
        }
    }
}

#[repr(C)] // what most requests use comes first
pub(crate) struct Cargo {
    vtable: Option<&'static VTable>,
    /// When the request was handed to the kernel, in nanoseconds. Not the cargo's business: it
    /// lies in room that the alignment would waste.
    pub(crate) stamp: u64,
    bytes: Bytes,
}

#[repr(align(16))]
struct Bytes {
    /// Only reached through pointers to the whole.
    _room: MaybeUninit<[u8; CARGO_BYTES]>,
}

struct VTable {
    /// Moves the value out and delivers to it.
    deliver: unsafe fn(*mut u8, Verdict) -> Option<Remains>,
    /// Moves the value out and drops it.
    discard: unsafe fn(*mut u8),
}

trait HasVTable: Deliver + Sized {
    const VTABLE: VTable = VTable {
        deliver: |value, verdict| {
            // SAFETY: the contract of both: a valid value that nobody uses again.
            let value = unsafe { value.cast::<Self>().read() };
            value.deliver(verdict)
        },
        discard: |value| {
            // SAFETY: as above.
            let value = unsafe { value.cast::<Self>().read() };
            drop(value);
        },
    };
}

impl<T: Deliver> HasVTable for T {}

impl Cargo {
    pub(crate) const fn empty() -> Self {
        Self { vtable: None, stamp: 0, bytes: Bytes { _room: MaybeUninit::uninit() } }
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.vtable.is_none()
    }

    /// Stores a value; what was stored before would be leaked.
    #[inline]
    pub(crate) fn put<T: Deliver>(&mut self, value: T) {
        const {
            assert!(
                size_of::<T>() <= CARGO_BYTES && align_of::<T>() <= align_of::<Bytes>(),
                "buffer and callback together exceed 96 bytes: box what the callback captures",
            );
        }
        debug_assert!(self.is_empty());
        // SAFETY: size and alignment were checked above.
        unsafe { ptr::from_mut(&mut self.bytes).cast::<T>().write(value) };
        self.vtable = Some(&T::VTABLE);
    }

    /// Takes the value back; `None` if there is none.
    ///
    /// # Safety
    ///
    /// The value was stored as a `T`.
    pub(crate) unsafe fn take<T: Deliver>(&mut self) -> Option<T> {
        self.vtable.take()?;
        // SAFETY: invariant 1, and the caller vouches for the type; without the vtable it is not
        // used again.
        Some(unsafe { ptr::from_ref(&self.bytes).cast::<T>().read() })
    }

    /// Gives the value up without moving it; `None` if there is none.
    #[inline]
    pub(crate) fn unload(&mut self) -> Option<Parcel> {
        let vtable = self.vtable.take()?;
        Some(Parcel { value: ptr::from_mut(&mut self.bytes).cast(), vtable })
    }
}

impl Drop for Cargo {
    fn drop(&mut self) {
        if let Some(parcel) = self.unload() {
            // SAFETY: unloaded just above.
            unsafe { parcel.discard() }
        }
    }
}

/// A value that its cargo no longer knows of, still in the cargo's memory. Lost if not used.
#[must_use = "the value is leaked"]
pub(crate) struct Parcel {
    value: *mut u8,
    vtable: &'static VTable,
}

impl Parcel {
    /// Hands the verdict to the front end; [what is left of it](Deliver::deliver).
    ///
    /// # Safety
    ///
    /// The cargo it was unloaded from is where it was, and was not touched since. The value is
    /// moved out before anything else happens, so whatever `deliver` runs may touch the cargo.
    #[inline]
    pub(crate) unsafe fn deliver(self, verdict: Verdict) -> Option<Remains> {
        // SAFETY: by `Cargo`'s invariant 1 the value is valid and of the vtable's type, and still
        // so as the caller says; consuming the only parcel makes this its only use.
        unsafe { (self.vtable.deliver)(self.value, verdict) }
    }

    /// Drops the value.
    ///
    /// # Safety
    ///
    /// As for [`deliver`](Self::deliver).
    pub(crate) unsafe fn discard(self) {
        // SAFETY: as in `deliver`.
        unsafe { (self.vtable.discard)(self.value) }
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;

    struct Probe(Rc<Cell<u32>>, Rc<Cell<usize>>);

    impl Drop for Probe {
        fn drop(&mut self) {
            self.0.set(self.0.get() + 1);
        }
    }

    impl Deliver for Probe {
        fn deliver(self, verdict: Verdict) -> Option<Remains> {
            self.1.set(verdict.result().unwrap_or(0));
            None
        }
    }

    #[test]
    fn value_is_dropped_once_whichever_way_it_leaves() {
        let (drops, got) = (Rc::new(Cell::new(0)), Rc::new(Cell::new(0)));
        let mut cargo = Cargo::empty();
        let probe = || Probe(Rc::clone(&drops), Rc::clone(&got));
        cargo.put(probe());
        let parcel = cargo.unload().unwrap();
        assert!(cargo.is_empty());
        // SAFETY: unloaded from `cargo`, which was only looked at.
        assert!(unsafe { parcel.deliver(Verdict { done: 9, error: None }) }.is_none());
        assert_eq!((drops.get(), got.get()), (1, 9));
        cargo.put(probe());
        let parcel = cargo.unload().unwrap();
        // SAFETY: as above.
        unsafe { parcel.discard() };
        assert_eq!(drops.get(), 2);
        cargo.put(probe());
        // SAFETY: made from a `Probe` just above.
        drop(unsafe { cargo.take::<Probe>() });
        assert_eq!(drops.get(), 3);
        // SAFETY: empty, whatever the type.
        assert!(unsafe { cargo.take::<Probe>() }.is_none() && cargo.unload().is_none());
        cargo.put(probe());
        drop(cargo);
        assert_eq!((drops.get(), Rc::strong_count(&drops)), (4, 1));
    }
}
