//! Requests of a library that waits on the engine of its caller.
//!
//! A cache whose `get` blocks until a read completes has to turn the engine of the calling thread,
//! because only that thread reaps. An ordinary wait would run callbacks and wake tasks of the program
//! inside `get`, where the program does not expect them. An *inner turn* reaps all completions, but
//! delivers only those of *inner requests*, which the library makes. All other deliveries are *held*
//! until the next ordinary turn of the thread.
//!
//! | held by an inner turn | not held |
//! |---|---|
//! | callbacks of other requests, also of other threads | the entry in a [`CompletionQueue`](crate::CompletionQueue): it is there at once, and the next ordinary turn counts it |
//! | wake-ups of [`Operation`](crate::Operation)s and futures that wait for a slot | [`cancel_at`](crate::Request::cancel_at), which cancels in time |
//! | drops of buffers without an owner | the submission of what is pending, behind a [`Plug`](crate::Plug) too |
//!
//! A held completion keeps its slot. Where no slot is left, an inner request is refused with
//! [`SubmitError::Full`](crate::SubmitError::Full), and the library has to do its work without the
//! engine: to wait for a slot could take for ever, because only an ordinary turn frees one.

use std::future::Future;
use std::io;
use std::pin::pin;
use std::task::Context;

use percpu::sync::Arc;

use crate::drive;
use crate::engine::Engine;
use crate::error::RequestError;
use crate::reply::Reply;
use crate::request::{Request, Submitted};
use crate::request_id::RequestId;
use crate::slab::CompletionTarget;
use crate::turn::{Scope, Turn};
use crate::waker::BlockOnWaker;

impl<'e, B: 'static, T: Reply<B>> Request<'e, B, T> {
    /// Submits the request like [`callback`](Self::callback), as an inner request: a library can wait
    /// for it by [`Engine::block_on_inner`] and run no other callback meanwhile. The submission itself
    /// delivers inner requests only. Ordinary turns deliver `done` too, before other callbacks.
    ///
    /// # Errors
    ///
    /// Those of [`callback`](Self::callback). [`SubmitError::Full`](crate::SubmitError::Full) may be
    /// due to completions that inner turns have held, so do not wait for a slot in an inner turn.
    pub fn inner_callback(
        self,
        done: impl FnOnce(Result<T, RequestError>, B) + 'static,
    ) -> Submitted<'e, B, T, RequestId> {
        self.callback_to(CompletionTarget::Inner, Scope::Inner, done)
    }
}

impl Engine {
    /// Runs a future on this thread like [`block_on`](Self::block_on), but delivers only completions
    /// of [inner requests](Request::inner_callback), for a library whose caller has the engine. All
    /// other deliveries are held until the next ordinary turn: of [`turn`](Self::turn),
    /// [`wait`](Self::wait) or [`block_on`](Self::block_on), or of a submission that reaps. The
    /// engine's [descriptor](std::os::fd::AsFd) becomes readable for them when the call returns.
    ///
    /// It may be called inside a callback, and inside `block_on` of this engine. The future must not
    /// depend on a held delivery: it would wait for ever.
    ///
    /// # Errors
    ///
    /// Those of [`wait`](Self::wait). The future is then dropped.
    ///
    /// ```
    /// use std::cell::{Cell, RefCell};
    /// use std::future::poll_fn;
    /// use std::rc::Rc;
    /// use std::task::{Poll, Waker};
    /// use aio_reap::Engine;
    ///
    /// /// A library that reads a block, and blocks until it is there.
    /// fn load(engine: &Engine, file: &aio_reap::File) -> std::io::Result<Vec<u8>> {
    ///     let state = Rc::new((Cell::new(None), RefCell::new(None::<Waker>)));
    ///     let to = Rc::clone(&state);
    ///     engine.read(file, vec![0; 5], 0).inner_callback(move |result, buf| {
    ///         to.0.set(Some(result.map(|_| buf)));
    ///         to.1.take().into_iter().for_each(Waker::wake);
    ///     })?;
    ///     let loaded = engine.block_on_inner(poll_fn(|context| match state.0.take() {
    ///         Some(loaded) => Poll::Ready(loaded),
    ///         None => {
    ///             state.1.replace(Some(context.waker().clone()));
    ///             Poll::Pending
    ///         }
    ///     }))?;
    ///     Ok(loaded?)
    /// }
    ///
    /// # fn main() -> std::io::Result<()> {
    /// let engine = Engine::new()?;
    /// let file = engine.attach(tempfile::tempfile()?)?;
    /// engine.write(&file, "block", 0).submit()?.wait().0?;
    /// let ran = Rc::new(Cell::new(false));
    /// let done = Rc::clone(&ran);
    /// let plug = engine.plug();
    /// engine.nop().callback(move |_, ()| done.set(true))?;
    /// assert_eq!(load(&engine, &file)?, b"block");
    /// assert!(!ran.get()); // the program's callback waits for the program's turn
    /// drop(plug);
    /// engine.drain()?;
    /// assert!(ran.get());
    /// # Ok(())
    /// # }
    /// ```
    pub fn block_on_inner<F: Future>(&self, future: F) -> io::Result<F::Output> {
        let core = self.core();
        let waker = BlockOnWaker::new(Arc::clone(core.wake_fd.shared_kick()));
        let handle = BlockOnWaker::handle(&waker);
        let mut context = Context::from_waker(&handle);
        let mut future = pin!(future);
        drive::block_on(
            &waker.woken,
            || future.as_mut().poll(&mut context),
            || core.wait_inner(&waker).map(drop),
        )
    }

    /// Turns the engine once like [`turn`](Self::turn), but delivers only completions of [inner
    /// requests](Request::inner_callback). Never blocks.
    ///
    /// [`Turn::pending`] contains the completions that are held.
    ///
    /// ```
    /// use aio_reap::Engine;
    ///
    /// # fn main() -> std::io::Result<()> {
    /// let engine = Engine::new()?;
    /// let plug = engine.plug();
    /// engine.nop().callback(|_, ()| println!("in an ordinary turn"))?;
    /// engine.nop().inner_callback(|_, ()| println!("also in an inner turn"))?;
    /// while engine.turn_inner().delivered == 0 {}
    /// assert_eq!(engine.turn_inner().delivered, 0);
    /// drop(plug);
    /// engine.drain()?;
    /// assert_eq!(engine.stats().completed, 2);
    /// # Ok(())
    /// # }
    /// ```
    pub fn turn_inner(&self) -> Turn {
        self.core().turn(Scope::Inner)
    }
}
