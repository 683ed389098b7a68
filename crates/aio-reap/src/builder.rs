//! The builder, which chooses limits and a backend.

use std::io;

use crate::backend::{
    Device, aio::Aio, external::External, external::Staging, threads::Threads, uring::Uring,
};
use crate::core::ReapMode;
use crate::engine::Engine;
use crate::error::{BackendKind, Fallback, StartError};
use crate::state::{Limits, State};

/// The largest `depth`: io_uring's largest ring (ABI).
const MAX_DEPTH: usize = 32_768;

/// A builder of engines, from [`Engine::builder`].
///
/// ```
/// use aio_reap::Engine;
///
/// # fn main() -> std::io::Result<()> {
/// let engine = Engine::builder()
///     .depth(32) // in flight
///     .capacity(256) // in flight or waiting; one more is refused
///     .max_batch(16) // in one system call
///     .build()?;
/// engine.nop().submit()?.wait().0?;
/// assert_eq!(engine.stats().completed, 1);
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
#[must_use = "a builder does nothing until it builds"]
pub struct EngineBuilder {
    backend: Option<BackendKind>,
    depth: usize,
    capacity: Option<usize>,
    remote_capacity: Option<usize>,
    max_batch: Option<usize>,
    adaptive: bool,
    reap_budget: Option<usize>,
    threads: usize,
    reap_mode: ReapMode,
}

impl Engine {
    /// Starts an engine with the default limits on the best backend that the system allows.
    ///
    /// # Errors
    ///
    /// Those of [`EngineBuilder::build`].
    pub fn new() -> Result<Self, StartError> {
        Self::builder().build()
    }

    /// Makes a builder, which chooses limits and a backend.
    pub fn builder() -> EngineBuilder {
        EngineBuilder::default()
    }
}

impl Default for EngineBuilder {
    fn default() -> Self {
        Self {
            backend: None,
            depth: 128,
            capacity: None,
            remote_capacity: None,
            max_batch: None,
            adaptive: false,
            reap_budget: None,
            threads: 4,
            reap_mode: ReapMode::default(),
        }
    }
}

impl EngineBuilder {
    /// Forces one backend. By default io_uring, Linux AIO and threads are tried in this order, and
    /// [`Engine::fallbacks`] returns the refused ones.
    pub fn backend(mut self, backend: BackendKind) -> Self {
        self.backend = Some(backend);
        self
    }

    /// Sets the maximum number of requests in flight: 1 to 32,768; 128 by default.
    pub fn depth(mut self, depth: usize) -> Self {
        self.depth = depth;
        self
    }

    /// Sets the maximum number of requests in the engine, in flight or waiting: at least `depth`;
    /// four times `depth` by default. One more is refused with
    /// [`SubmitError::Full`](crate::SubmitError::Full).
    pub fn capacity(mut self, capacity: usize) -> Self {
        self.capacity = Some(capacity);
        self
    }

    /// Sets the maximum number of calls of other threads that wait for a turn
    /// ([`Remote`](crate::Remote)); `capacity` by default. One more is refused with
    /// [`SubmitError::Full`](crate::SubmitError::Full).
    pub fn remote_capacity(mut self, remote_capacity: usize) -> Self {
        self.remote_capacity = Some(remote_capacity);
        self
    }

    /// Sets the maximum number of requests in one submission; `depth` by default.
    pub fn max_batch(mut self, max_batch: usize) -> Self {
        self.max_batch = Some(max_batch);
        self
    }

    /// Makes the limit of submissions adapt to the device, from 16 (or
    /// [`max_batch`](Self::max_batch), if that is less) to `max_batch`.
    ///
    /// It doubles after a submission that was full, left requests behind, and was less than half
    /// complete at the next reap: such a device works in the background, and larger batches save
    /// system calls. It halves if nothing was in flight at that reap, because the first request of
    /// the batch then waited for the last one, and if the kernel had no room. Off by default: the
    /// limit is `max_batch`.
    pub fn adaptive_batch(mut self, adaptive: bool) -> Self {
        self.adaptive = adaptive;
        self
    }

    /// Sets the maximum number of completions in one reap, so that one call cannot deliver for
    /// ever; `depth` by default.
    pub fn reap_budget(mut self, reap_budget: usize) -> Self {
        self.reap_budget = Some(reap_budget);
        self
    }

    /// Sets the reap mode; [`ReapMode::AfterSubmit`] by default.
    pub fn reap_mode(mut self, mode: ReapMode) -> Self {
        self.reap_mode = mode;
        self
    }

    /// Sets the maximum number of threads of the pool, if the backend has one; 4 by default. A
    /// thread starts when it is needed.
    pub fn threads(mut self, threads: usize) -> Self {
        self.threads = threads;
        self
    }

    /// Starts an engine, which belongs to the calling thread.
    ///
    /// # Errors
    ///
    /// [`StartError`] if a limit is out of range, or if every tried backend was refused.
    pub fn build(self) -> Result<Engine, StartError> {
        let limits = self.limits()?;
        let tried: &[BackendKind] = match &self.backend {
            Some(forced) => &[*forced],
            None => &[BackendKind::Uring, BackendKind::Aio, BackendKind::Threads],
        };
        let mut fallbacks = Vec::new();
        for &kind in tried {
            match self.start(kind, limits.depth) {
                Ok(backend) => {
                    return self.finish(State::new(backend, limits), kind, fallbacks);
                }
                Err(reason) => fallbacks.push(Fallback { backend: kind, reason }),
            }
        }
        Err(StartError::Refused(fallbacks))
    }

    /// Starts an engine on a device of a test.
    ///
    /// # Errors
    ///
    /// Those of [`build`](Self::build). The error of `start` is that of a refused backend.
    #[doc(hidden)]
    pub fn build_external(
        self,
        start: impl FnOnce() -> io::Result<Box<dyn External>>,
    ) -> Result<Engine, StartError> {
        let limits = self.limits()?;
        let kind = BackendKind::External;
        let device = start()
            .map_err(|reason| StartError::Refused(vec![Fallback { backend: kind, reason }]))?;
        self.finish(State::new(Device::External(Staging::new(device)), limits), kind, Vec::new())
    }

    fn finish(
        self,
        state: State,
        kind: BackendKind,
        fallbacks: Vec<Fallback>,
    ) -> Result<Engine, StartError> {
        let engine = Engine::from_parts(state, kind, fallbacks).map_err(StartError::Descriptors)?;
        engine.set_reap_mode(self.reap_mode);
        Ok(engine)
    }

    fn limits(&self) -> Result<Limits, StartError> {
        let between = |name, value, least, most| {
            if (least..=most).contains(&value) {
                Ok(value)
            } else {
                Err(StartError::Limit { name, value, least, most })
            }
        };
        let within = |name, value, most| between(name, value, 1, most);
        let depth = within("depth", self.depth, MAX_DEPTH)?;
        let capacity = self.capacity.unwrap_or(depth * 4);
        within("threads", self.threads, 1024)?;
        Ok(Limits {
            depth,
            capacity: between("capacity", capacity, depth, 1 << 24)?,
            remote: within("remote_capacity", self.remote_capacity.unwrap_or(capacity), 1 << 24)?,
            max_batch: within("max_batch", self.max_batch.unwrap_or(depth), MAX_DEPTH)?,
            adaptive: self.adaptive,
            reap_budget: within("reap_budget", self.reap_budget.unwrap_or(depth), MAX_DEPTH)?,
        })
    }

    fn start(&self, kind: BackendKind, depth: usize) -> io::Result<Device> {
        Ok(match kind {
            BackendKind::Uring => Device::Uring(Uring::new(depth)?),
            BackendKind::Aio => Device::Aio(Aio::new(self.threads, depth)?),
            BackendKind::Threads => Device::Threads(Threads::new(self.threads, depth)?),
            // It is started by `build_external`.
            BackendKind::External => return Err(io::Error::from_raw_os_error(libc::EOPNOTSUPP)),
        })
    }
}
