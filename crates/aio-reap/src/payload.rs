//! The payload of a request: its buffer and its front end (for example a callback), stored in the
//! slot without an allocation.
//!
//! ```text
//!  Payload | vtable | 96 bytes: (buffer, callback) or (buffer, queue, token) or buffer |
//! ```
//!
//! The value is written in its place and read by its own type, so only its own bytes move.
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

/// The space for the buffer and the front end of one request; a guess that fits three `Vec`s and
/// more.
const PAYLOAD_BYTES: usize = 96;

/// A front end, with its buffer, that receives a request's result.
pub(crate) trait Deliver: 'static {
    /// Delivers the result. The caller drops the returned value at a point where user code may run.
    fn deliver(self, result: RawResult) -> Option<DeferredDrop>;

    /// Drops the front end of a request that has completed, and what its result owns (an opened
    /// file). No callback runs.
    fn abandon(self, result: RawResult)
    where
        Self: Sized,
    {
        let _ = result;
        drop(self);
    }
}

/// A value whose drop may run user code and must wait until user code may run.
pub(crate) type DeferredDrop = Rc<dyn Any>;

/// A request's result as a slot stores it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RawResult {
    pub(crate) done: u64,
    /// An errno or [`RequestError::END_OF_FILE`].
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

/// Space for one value of any type that fits.
#[repr(C)] // the fields that most requests use come first
pub(crate) struct Payload {
    vtable: Option<&'static VTable>,
    bytes: Bytes,
}

/// The bytes of the value, aligned for every type that fits.
#[repr(align(16))]
struct Bytes {
    /// Accessed only through pointers to the whole.
    _room: MaybeUninit<[u8; PAYLOAD_BYTES]>,
}

/// The operations of the stored value's type.
struct VTable {
    /// Moves the value out and delivers the result to it.
    deliver: unsafe fn(*mut u8, RawResult) -> Option<DeferredDrop>,
    /// Moves the value out and abandons it with its result.
    abandon: unsafe fn(*mut u8, RawResult),
    /// Moves the value out and drops it.
    discard: unsafe fn(*mut u8),
}

/// Makes the table of a type a constant.
trait HasVTable: Deliver + Sized {
    const VTABLE: VTable = VTable {
        deliver: |value, result| {
            // SAFETY: the caller passes a pointer to a valid `Self` and does not use the value
            // again.
            let value = unsafe { value.cast::<Self>().read() };
            value.deliver(result)
        },
        abandon: |value, result| {
            // SAFETY: the caller passes a pointer to a valid `Self` and does not use the value
            // again.
            let value = unsafe { value.cast::<Self>().read() };
            value.abandon(result);
        },
        discard: |value| {
            // SAFETY: the caller passes a pointer to a valid value of the vtable's type and does
            // not use the value again.
            let value = unsafe { value.cast::<Self>().read() };
            drop(value);
        },
    };
}

impl<T: Deliver> HasVTable for T {}

impl Payload {
    pub(crate) const fn empty() -> Self {
        Self { vtable: None, bytes: Bytes { _room: MaybeUninit::uninit() } }
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.vtable.is_none()
    }

    /// Stores a value. The payload must be empty, because an old value would leak.
    #[inline]
    pub(crate) fn put<T: Deliver>(&mut self, value: T) {
        const {
            assert!(
                size_of::<T>() <= PAYLOAD_BYTES && align_of::<T>() <= align_of::<Bytes>(),
                "buffer and callback together exceed 96 bytes: box what the callback captures",
            );
        }
        debug_assert!(self.is_empty());
        // SAFETY: the assertion above checked size and alignment, and `&mut self` is exclusive.
        unsafe { ptr::from_mut(&mut self.bytes).cast::<T>().write(value) };
        self.vtable = Some(&T::VTABLE);
    }

    /// Takes the value back. Returns `None` if the payload is empty.
    ///
    /// # Safety
    ///
    /// A stored value is a `T`.
    pub(crate) unsafe fn take<T: Deliver>(&mut self) -> Option<T> {
        self.vtable.take()?;
        // SAFETY: by invariant 1 the bytes hold an owned value, by the contract of this function it
        // is a `T`, and it is not used again because `vtable` is now `None`.
        Some(unsafe { ptr::from_ref(&self.bytes).cast::<T>().read() })
    }

    /// Gives up the value without moving it. Returns `None` if the payload is empty.
    #[inline]
    pub(crate) fn take_erased(&mut self) -> Option<TakenPayload> {
        let vtable = self.vtable.take()?;
        Some(TakenPayload { value: ptr::from_mut(&mut self.bytes).cast(), vtable })
    }
}

impl Drop for Payload {
    fn drop(&mut self) {
        if let Some(taken) = self.take_erased() {
            // SAFETY: `self` has not moved and was not used since the call above.
            unsafe { taken.discard() }
        }
    }
}

/// A value that was taken from a payload and is still in the payload's memory. It leaks if it is
/// not used.
#[must_use = "the value is leaked"]
pub(crate) struct TakenPayload {
    value: *mut u8,
    vtable: &'static VTable,
}

impl TakenPayload {
    /// Delivers the result to the front end; see [`Deliver::deliver`].
    ///
    /// # Safety
    ///
    /// The payload has neither moved nor been used since the value was taken. The value is moved
    /// out first, so code that `deliver` runs may use the payload.
    #[inline]
    pub(crate) unsafe fn deliver(self, result: RawResult) -> Option<DeferredDrop> {
        // SAFETY: by invariant 1 of the module the value was valid and of the vtable's type, and by
        // the contract of this function it still is. `self` is consumed, so the value is used once.
        unsafe { (self.vtable.deliver)(self.value, result) }
    }

    /// Drops the value of a request that completed with `result`; see [`Deliver::abandon`].
    ///
    /// # Safety
    ///
    /// Those of [`deliver`](Self::deliver).
    pub(crate) unsafe fn abandon(self, result: RawResult) {
        // SAFETY: by invariant 1 of the module the value was valid and of the vtable's type, and by
        // the contract of this function it still is. `self` is consumed, so the value is used once.
        unsafe { (self.vtable.abandon)(self.value, result) }
    }

    /// Drops the value.
    ///
    /// # Safety
    ///
    /// Those of [`deliver`](Self::deliver).
    pub(crate) unsafe fn discard(self) {
        // SAFETY: by invariant 1 of the module the value was valid and of the vtable's type, and by
        // the contract of this function it still is. `self` is consumed, so the value is used once.
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
    fn value_is_dropped_once_however_it_leaves() {
        let (drops, got) = (Rc::new(Cell::new(0)), Rc::new(Cell::new(0)));
        let mut payload = Payload::empty();
        let probe = || Probe(Rc::clone(&drops), Rc::clone(&got));
        payload.put(probe());
        let taken = payload.take_erased().unwrap();
        assert!(payload.is_empty());
        // SAFETY: taken from `payload`, which was only read since.
        assert!(unsafe { taken.deliver(RawResult { done: 9, error: None }) }.is_none());
        assert_eq!((drops.get(), got.get()), (1, 9));
        payload.put(probe());
        let taken = payload.take_erased().unwrap();
        // SAFETY: the caller passes a pointer to a valid value of the vtable's type and does not
        // use the value again.
        unsafe { taken.discard() };
        assert_eq!(drops.get(), 2);
        payload.put(probe());
        // SAFETY: the value stored above is a `Probe`.
        drop(unsafe { payload.take::<Probe>() });
        assert_eq!(drops.get(), 3);
        // SAFETY: the payload is empty, so no value has the wrong type.
        assert!(unsafe { payload.take::<Probe>() }.is_none() && payload.take_erased().is_none());
        payload.put(probe());
        drop(payload);
        assert_eq!((drops.get(), Rc::strong_count(&drops)), (4, 1));
    }
}
