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
const PAYLOAD_BYTES: usize = 96;

/// Something that takes a request's result.
pub(crate) trait Deliver: 'static {
    /// What is returned is to be dropped where user code may run.
    fn deliver(self, result: RawResult) -> Option<DeferredDrop>;
}

/// What a delivery would have freed, together with user code.
pub(crate) type DeferredDrop = Rc<dyn Any>;

/// A request's result as the slots have it: two words without an owner.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RawResult {
    pub(crate) done: u64,
    /// An errno, or [`RequestError::END_OF_FILE`].
    pub(crate) error: Option<NonZeroI32>,
}

impl RawResult {
    #[inline]
    pub(crate) fn to_result(self) -> Result<usize, RequestError> {
        match self.error {
            None => Ok(self.done as usize),
            Some(reason) => Err(RequestError::new(reason, self.done as usize)),
        }
    }
}

#[repr(C)] // what most requests use comes first
pub(crate) struct Payload {
    vtable: Option<&'static VTable>,
    /// When the request was handed to the kernel, in nanoseconds. Not the cargo's business: it
    /// lies in room that the alignment would waste.
    pub(crate) stamp: u64,
    bytes: Bytes,
}

#[repr(align(16))]
struct Bytes {
    /// Only reached through pointers to the whole.
    _room: MaybeUninit<[u8; PAYLOAD_BYTES]>,
}

struct VTable {
    /// Moves the value out and delivers to it.
    deliver: unsafe fn(*mut u8, RawResult) -> Option<DeferredDrop>,
    /// Moves the value out and drops it.
    discard: unsafe fn(*mut u8),
}

trait HasVTable: Deliver + Sized {
    const VTABLE: VTable = VTable {
        deliver: |value, result| {
            // SAFETY: the contract of both: a valid value that nobody uses again.
            let value = unsafe { value.cast::<Self>().read() };
            value.deliver(result)
        },
        discard: |value| {
            // SAFETY: as above.
            let value = unsafe { value.cast::<Self>().read() };
            drop(value);
        },
    };
}

impl<T: Deliver> HasVTable for T {}

impl Payload {
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
                size_of::<T>() <= PAYLOAD_BYTES && align_of::<T>() <= align_of::<Bytes>(),
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
    pub(crate) fn take_erased(&mut self) -> Option<TakenPayload> {
        let vtable = self.vtable.take()?;
        Some(TakenPayload { value: ptr::from_mut(&mut self.bytes).cast(), vtable })
    }
}

impl Drop for Payload {
    fn drop(&mut self) {
        if let Some(taken) = self.take_erased() {
            // SAFETY: unloaded just above.
            unsafe { taken.discard() }
        }
    }
}

/// A value that its cargo no longer knows of, still in the cargo's memory. Lost if not used.
#[must_use = "the value is leaked"]
pub(crate) struct TakenPayload {
    value: *mut u8,
    vtable: &'static VTable,
}

impl TakenPayload {
    /// Hands the verdict to the front end; [what is left of it](Deliver::deliver).
    ///
    /// # Safety
    ///
    /// The cargo it was unloaded from is where it was, and was not touched since. The value is
    /// moved out before anything else happens, so whatever `deliver` runs may touch the cargo.
    #[inline]
    pub(crate) unsafe fn deliver(self, result: RawResult) -> Option<DeferredDrop> {
        // SAFETY: by `Payload`'s invariant 1 the value is valid and of the vtable's type, and still
        // so as the caller says; consuming the only parcel makes this its only use.
        unsafe { (self.vtable.deliver)(self.value, result) }
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
        fn deliver(self, result: RawResult) -> Option<DeferredDrop> {
            self.1.set(result.to_result().unwrap_or(0));
            None
        }
    }

    #[test]
    fn value_is_dropped_once_whichever_way_it_leaves() {
        let (drops, got) = (Rc::new(Cell::new(0)), Rc::new(Cell::new(0)));
        let mut payload = Payload::empty();
        let probe = || Probe(Rc::clone(&drops), Rc::clone(&got));
        payload.put(probe());
        let taken = payload.take_erased().unwrap();
        assert!(payload.is_empty());
        // SAFETY: unloaded from `payload`, which was only looked at.
        assert!(unsafe { taken.deliver(RawResult { done: 9, error: None }) }.is_none());
        assert_eq!((drops.get(), got.get()), (1, 9));
        payload.put(probe());
        let taken = payload.take_erased().unwrap();
        // SAFETY: as above.
        unsafe { taken.discard() };
        assert_eq!(drops.get(), 2);
        payload.put(probe());
        // SAFETY: made from a `Probe` just above.
        drop(unsafe { payload.take::<Probe>() });
        assert_eq!(drops.get(), 3);
        // SAFETY: empty, whatever the type.
        assert!(unsafe { payload.take::<Probe>() }.is_none() && payload.take_erased().is_none());
        payload.put(probe());
        drop(payload);
        assert_eq!((drops.get(), Rc::strong_count(&drops)), (4, 1));
    }
}
