//! The outcome of a request, and the payloads of the future and the callback front end.

use std::marker::PhantomData;

use crate::error::RequestError;
use crate::held_buf::HeldBuf;
use crate::payload::{DeferredDrop, Deliver, RawResult};
use crate::reply::Reply;

/// The outcome of a request: the result (by default the number of bytes transferred) or the error,
/// and the buffer.
pub type Outcome<B, T = usize> = (Result<T, RequestError>, B);

/// The payload of a request that an [`Operation`](crate::Operation) collects: only the buffer.
pub(crate) struct Owned<B, T = usize> {
    buf: HeldBuf<B>,
    result: PhantomData<fn() -> T>,
}

impl<B: 'static, T: Reply<B>> Deliver for Owned<B, T> {
    /// Drops the buffer and the result. Only a request whose operation was dropped is delivered
    /// this way.
    fn deliver(self, result: RawResult) -> Option<DeferredDrop> {
        self.abandon(result);
        None
    }

    fn abandon(self, result: RawResult) {
        drop(self.outcome(result));
    }
}

impl<B, T> Owned<B, T> {
    pub(crate) fn new(buf: HeldBuf<B>) -> Self {
        Self { buf, result: PhantomData }
    }
}

impl<B, T: Reply<B>> Owned<B, T> {
    /// Makes the outcome of the request, which has completed with `result`.
    pub(crate) fn outcome(self, result: RawResult) -> Outcome<B, T> {
        let mut buf = self.buf.into_inner();
        // SAFETY: the payload of a request is used with its result once, because this consumes it.
        let result = unsafe { T::from_kernel(result.to_result(), &mut buf) };
        (result, buf)
    }
}

/// The payload of a request with a callback: the buffer and the callback.
pub(crate) struct Callback<B, F, T = usize> {
    owned: Owned<B, T>,
    done: F,
}

impl<B, F, T> Callback<B, F, T> {
    pub(crate) fn new(buf: HeldBuf<B>, done: F) -> Self {
        Self { owned: Owned::new(buf), done }
    }
}

impl<B, F, T> Deliver for Callback<B, F, T>
where
    B: 'static,
    F: FnOnce(Result<T, RequestError>, B) + 'static,
    T: Reply<B>,
{
    fn deliver(self, result: RawResult) -> Option<DeferredDrop> {
        let (result, buf) = self.owned.outcome(result);
        (self.done)(result, buf);
        None
    }

    fn abandon(self, result: RawResult) {
        self.owned.abandon(result);
    }
}
