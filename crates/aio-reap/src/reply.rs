//! The typed results of requests.

use crate::error::RequestError;

/// A result that a request on a `B` may have: the type `T` of [`Request`](crate::Request),
/// [`Operation`](crate::Operation) and [`Outcome`](crate::Outcome).
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
