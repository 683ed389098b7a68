//! The handle through which other threads use an engine.

use std::fmt;
use std::rc::Rc;

use offlock_sync::Arc;

use crate::calls::{CallQueue, Responder, Response, response};
use crate::core::{Call, Core};
use crate::engine::Engine;
use crate::error::SubmitError;

/// A handle through which other threads run closures on an engine's thread, from
/// [`Engine::remote`].
///
/// Clones are cheap. A call waits in a queue until the next turn of the engine, which runs it with
/// the engine: there it makes requests, cancels others by their ids, and so on. The thread that makes
/// the queue non-empty wakes the engine, so a burst of calls costs one wake-up, and the requests of a
/// turn's calls are one batch. Results come back through any channel, or by [`ask`](Self::ask).
///
/// Calls of one thread run in their order. A call may wait for the engine only as a callback may. If a
/// call panics, the panic unwinds to the call that turns the engine, and the next turn runs the other
/// calls. [`Engine::shutdown`], and the drop of the engine, run the queued calls first. An engine that
/// is dropped by a panic drops them.
///
/// ```
/// use aio_reap::{Engine, Remote};
/// use std::{sync::mpsc, thread};
///
/// # fn main() -> std::io::Result<()> {
/// let (to_main, from_engine) = mpsc::channel::<Remote>();
/// let server = thread::spawn(move || {
///     let engine = Engine::new()?;
///     to_main.send(engine.remote()).unwrap();
///     engine.serve() // until the last remote is dropped
/// });
/// let remote = from_engine.recv().unwrap();
/// let (to_main, results) = mpsc::channel();
/// remote.call(move |engine| {
///     let file = engine.attach(std::fs::File::open("/dev/zero").unwrap()).unwrap();
///     let done = move |read, buf: Vec<u8>| _ = to_main.send((read, buf));
///     _ = engine.read(&file, vec![1; 512], 0).callback(done); // if it is refused, `recv` fails
/// })?;
/// let (read, buf) = results.recv().expect("the engine has a slot");
/// assert_eq!((read?, buf), (512, vec![0; 512]));
/// drop(remote);
/// server.join().unwrap()
/// # }
/// ```
pub struct Remote {
    queue: Arc<CallQueue<Call>>,
}

impl Engine {
    /// Makes a handle through which other threads run closures with this engine.
    ///
    /// A turn runs them. A call makes the engine's [descriptor](std::os::fd::AsFd) readable and ends the sleep of
    /// [`wait`](Self::wait), [`block_on`](Self::block_on) and [`serve`](Self::serve). The first call
    /// of this function allocates the queue; after that, each sleep of the engine takes one more
    /// system call. After the shutdown of the engine the remote refuses every call.
    pub fn remote(&self) -> Remote {
        Remote::new(self.core().call_queue())
    }
}

impl Remote {
    pub(crate) fn new(queue: &Arc<CallQueue<Call>>) -> Self {
        queue.add_sender();
        Self { queue: Arc::clone(queue) }
    }

    /// Runs `call` on the engine's thread, in the engine's next turn. Never blocks. Allocates once.
    ///
    /// # Errors
    ///
    /// [`SubmitError`] returns the call: `Full` if [`capacity`](crate::EngineBuilder::capacity) calls
    /// wait for a turn, `Closed` after the shutdown of the engine.
    pub fn call<F>(&self, call: F) -> Result<(), SubmitError<F>>
    where
        F: FnOnce(&Engine) + Send + 'static,
    {
        self.queue.send(call, |call| Box::new(move |core: &Rc<Core>| call(&Engine::borrowed(core))))
    }

    /// Runs `call` like [`call`](Self::call). Returns a future that resolves to the value which the
    /// call, or a callback that it makes, passes to a [`Responder`], which has an example.
    ///
    /// # Errors
    ///
    /// Those of [`call`](Self::call).
    pub fn ask<T, F>(&self, call: F) -> Result<Response<T>, SubmitError<F>>
    where
        T: Send + 'static,
        F: FnOnce(&Engine, Responder<T>) + Send + 'static,
    {
        let (responder, response) = response();
        let boxed =
            |call: F| -> Call { Box::new(move |core| call(&Engine::borrowed(core), responder)) };
        self.queue.send(call, boxed).map(|()| response)
    }
}

impl Clone for Remote {
    fn clone(&self) -> Self {
        Self::new(&self.queue)
    }
}

impl Drop for Remote {
    /// The drop of the last remote ends [`Engine::serve`](crate::Engine::serve).
    fn drop(&mut self) {
        self.queue.drop_sender();
    }
}

impl fmt::Debug for Remote {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (calls, capacity) = self.queue.len_and_capacity();
        f.debug_struct("Remote").field("calls", &calls).field("capacity", &capacity).finish()
    }
}
