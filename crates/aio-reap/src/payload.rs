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
use std::cell::RefMut;
use std::marker::PhantomData;
use std::mem::{MaybeUninit, align_of, size_of};
use std::num::NonZeroI32;
use std::ptr;
use std::rc::Rc;

use crate::buf::HeldBuf;
use crate::error::RequestError;

/// The space for the buffer and the front end of one request, which fits three `Vec`s and
/// more.
const PAYLOAD_BYTES: usize = 96;

/// The outcome of a request: the result (by default the number of bytes transferred) or the error,
/// and the buffer.
pub type Outcome<B, T = usize> = (Result<T, RequestError>, B);

/// A result that a request on a `B` may have: the type `T` of [`Request`](crate::Request),
/// [`Operation`](crate::Operation) and [`Outcome`].
///
/// | result | of |
/// |---|---|
/// | `usize`, the default | transfers: the number of bytes; and every request without a result of its own: 0 |
/// | [`File`](crate::File) | [`Engine::open`](crate::Engine::open) |
/// | [`Statx`](crate::Statx) | [`Engine::stat`](crate::Engine::stat) |
/// | `()` | [`Engine::close`](crate::Engine::close) |
///
/// The trait is sealed. Functions that are generic over requests need it as a bound.
///
/// ```
/// use aio_reap::{Engine, Operation, Reply};
///
/// fn finish<B: 'static, T: Reply<B>>(operation: Operation<B, T>) -> std::io::Result<T> {
///     Ok(operation.wait().0?)
/// }
///
/// # fn main() -> std::io::Result<()> {
/// let engine = Engine::new()?;
/// assert_eq!(finish(engine.nop().submit()?)?, 0);
/// assert!(finish(engine.stat("/").submit()?)?.is_dir());
/// # Ok(())
/// # }
/// ```
pub trait Reply<B>: Sized + 'static + sealed::Sealed {
    /// Makes the result from that of the kernel, which is used up: an opened descriptor has an
    /// owner afterwards.
    ///
    /// # Safety
    ///
    /// The request of `buf` has completed with `result`, and no other call gets this result.
    #[doc(hidden)]
    unsafe fn from_kernel(
        result: Result<usize, RequestError>,
        buf: &mut B,
    ) -> Result<Self, RequestError>;
}

pub(crate) mod sealed {
    pub trait Sealed {}

    impl Sealed for usize {}
    impl Sealed for () {}
}

impl<B> Reply<B> for usize {
    #[inline(always)]
    unsafe fn from_kernel(
        result: Result<usize, RequestError>,
        _buf: &mut B,
    ) -> Result<Self, RequestError> {
        result
    }
}

/// The receiver of a request's outcome.
pub(crate) trait Receive<B, T>: Sized + 'static {
    /// Takes the outcome of a completed request. It gets the whole delivery, which each path takes
    /// apart where it uses it, so that the buffer moves once. Values that may only be dropped where
    /// user code may run go to `deferred`.
    fn receive(delivery: Delivery<B, Self, T>, result: RawResult, deferred: &mut Vec<DeferredDrop>);
}

/// A callback.
impl<B, T: Reply<B>, F: FnOnce(Result<T, RequestError>, B) + 'static> Receive<B, T> for F {
    fn receive(
        delivery: Delivery<B, Self, T>,
        result: RawResult,
        _deferred: &mut Vec<DeferredDrop>,
    ) {
        let (callback, (result, buf)) = delivery.into_parts(result);
        callback(result, buf);
    }
}

/// None: an [`Operation`](crate::Operation) takes the outcome itself, unless it was dropped.
impl<B, T: Reply<B>> Receive<B, T> for () {
    fn receive(
        delivery: Delivery<B, Self, T>,
        result: RawResult,
        _deferred: &mut Vec<DeferredDrop>,
    ) {
        drop(delivery.into_parts(result));
    }
}

/// The buffer of a request and the receiver of its outcome.
pub(crate) struct Delivery<B, R, T> {
    buf: HeldBuf<B>,
    pub(crate) receiver: R,
    result: PhantomData<fn() -> T>,
}

impl<B: 'static, R: Receive<B, T>, T: Reply<B>> Delivery<B, R, T> {
    const VTABLE: VTable = VTable {
        end: |bytes, result, end, deferred| {
            // SAFETY: the caller passes the bytes of a valid `Self`, and does not use it again.
            unsafe { bytes.read::<Self>() }.end(result, end, deferred);
        },
        end_outside: |bytes, result, end| {
            // SAFETY: the caller passes the bytes of a valid `Self`, and does not use it again.
            let value = unsafe { bytes.read::<Self>() };
            drop(bytes);
            value.end(result, end, &mut Vec::new()); // user code may run: dropped at once
        },
    };

    #[inline]
    pub(crate) fn new(buf: HeldBuf<B>, receiver: R) -> Self {
        Self { buf, receiver, result: PhantomData }
    }

    #[inline(always)]
    fn end(self, result: RawResult, end: End, deferred: &mut Vec<DeferredDrop>) {
        match end {
            End::Deliver => R::receive(self, result, deferred),
            End::Abandon => drop(self.into_parts(result)),
            End::Discard => {}
        }
    }
}

impl<B, R, T: Reply<B>> Delivery<B, R, T> {
    /// Returns the receiver, and the outcome of the request, which has completed with `result`.
    #[inline(always)]
    pub(crate) fn into_parts(self, result: RawResult) -> (R, Outcome<B, T>) {
        (self.receiver, Self::outcome(self.buf, result))
    }

    /// Makes the outcome of the request of `buf`, which has completed with `result`.
    #[inline(always)]
    pub(crate) fn outcome(buf: HeldBuf<B>, result: RawResult) -> Outcome<B, T> {
        let mut buf = buf.into_inner();
        // SAFETY: the buffer of a request is used with its result once, because this consumes it.
        let result = unsafe { T::from_kernel(result.to_result(), &mut buf) };
        (result, buf)
    }
}

/// A value whose drop may run user code and must wait until user code may run.
pub(crate) type DeferredDrop = Rc<dyn Any>;

/// A request's result as a slot stores it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RawResult {
    pub(crate) done: u64,
    /// The errno of a request that failed.
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

/// What happens to a value that is taken out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum End {
    /// Its receiver gets the outcome.
    Deliver,
    /// The outcome and the receiver are dropped, and so is what the result owns (an opened file).
    Abandon,
    /// The request has not completed: the value is only dropped.
    Discard,
}

/// The operations of the stored value's type, which move the value out.
struct VTable {
    /// Ends the value while the memory is borrowed.
    end: unsafe fn(&mut Bytes, RawResult, End, &mut Vec<DeferredDrop>),
    /// Ends the value after the borrow, which code of the user may then take.
    end_outside: unsafe fn(RefMut<'_, Bytes>, RawResult, End),
}

impl Bytes {
    /// Moves the value out.
    ///
    /// # Safety
    ///
    /// The bytes are those of a valid `T`, which is not used again.
    #[inline(always)]
    unsafe fn read<T>(&self) -> T {
        // SAFETY: by the contract of this function.
        unsafe { ptr::from_ref(self).cast::<T>().read() }
    }
}

impl Payload {
    pub(crate) const fn empty() -> Self {
        Self { vtable: None, bytes: Bytes { _room: MaybeUninit::uninit() } }
    }

    /// Stores a value. The payload must be empty, because an old value would leak.
    #[inline]
    pub(crate) fn put<B: 'static, R: Receive<B, T>, T: Reply<B>>(
        &mut self,
        value: Delivery<B, R, T>,
    ) {
        const {
            assert!(
                size_of::<Delivery<B, R, T>>() <= PAYLOAD_BYTES
                    && align_of::<Delivery<B, R, T>>() <= align_of::<Bytes>(),
                "buffer and callback together exceed 96 bytes: box what the callback captures",
            );
        }
        debug_assert!(self.vtable.is_none());
        // SAFETY: the assertion above checked size and alignment, and `&mut self` is exclusive.
        unsafe { ptr::from_mut(&mut self.bytes).cast::<Delivery<B, R, T>>().write(value) };
        self.vtable = Some(&Delivery::<B, R, T>::VTABLE);
    }

    /// Takes the buffer of an operation back.
    ///
    /// # Safety
    ///
    /// The payload is empty, or holds a `Delivery<B, (), T>`.
    pub(crate) unsafe fn take<B, T>(&mut self) -> Option<HeldBuf<B>> {
        self.vtable.take()?;
        // SAFETY: by invariant 1 the bytes hold an owned value, by the contract of this function it
        // has this type, and it is not used again because `vtable` is now `None`.
        Some(unsafe { self.bytes.read::<Delivery<B, (), T>>() }.buf)
    }

    /// Takes the value and ends it. Has no effect on an empty payload.
    #[inline]
    pub(crate) fn end(&mut self, result: RawResult, end: End, deferred: &mut Vec<DeferredDrop>) {
        let Some(vtable) = self.vtable.take() else { return };
        // SAFETY: by invariant 1 the bytes hold an owned value of the vtable's type. It is not used
        // again, because `vtable` is now `None`.
        unsafe { (vtable.end)(&mut self.bytes, result, end, deferred) }
    }

    /// Takes the value, and ends it when the borrow is over: code of the user that runs then may use
    /// the payload.
    #[inline]
    pub(crate) fn end_outside(mut payload: RefMut<'_, Self>, result: RawResult, end: End) {
        let Some(vtable) = payload.vtable.take() else { return };
        let bytes = RefMut::map(payload, |payload| &mut payload.bytes);
        // SAFETY: by invariant 1 the bytes hold an owned value of the vtable's type. It is not used
        // again, because `vtable` is now `None`.
        unsafe { (vtable.end_outside)(bytes, result, end) }
    }
}

impl Drop for Payload {
    fn drop(&mut self) {
        self.end(RawResult { done: 0, error: None }, End::Discard, &mut Vec::new());
    }
}
