//! The builder, which chooses limits and a backend.

use std::io;

use crate::backend::{
    aio::Aio, device::Device, external::External, external::Staging, threads::Pool, uring::Uring,
};
use crate::core::{Core, ReapMode};
use crate::engine::Engine;
use crate::error::{BackendKind, Fallback, StartError};
use crate::state::State;
use crate::wake_fd::WakeFd;

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
        let reap_mode = ReapMode::default();
        EngineBuilder { backend: None, depth: 128, capacity: None, threads: 4, reap_mode }
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
    /// four times `depth` by default. As many calls of other threads may wait for a turn
    /// ([`Remote`](crate::Remote)). One more is refused with
    /// [`SubmitError::Full`](crate::SubmitError::Full).
    pub fn capacity(mut self, capacity: usize) -> Self {
        self.capacity = Some(capacity);
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
        let (depth, capacity) = self.limits()?;
        let tried: &[BackendKind] = match &self.backend {
            Some(forced) => &[*forced],
            None => &[BackendKind::Uring, BackendKind::Aio, BackendKind::Threads],
        };
        let mut fallbacks = Vec::new();
        for &kind in tried {
            match self.start(kind, depth) {
                Ok(backend) => {
                    return self.finish(State::new(backend, depth, capacity), kind, fallbacks);
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
        let (depth, capacity) = self.limits()?;
        let kind = BackendKind::External;
        let device = start()
            .map_err(|reason| StartError::Refused(vec![Fallback { backend: kind, reason }]))?;
        let backend = Device::Other(Box::new(Staging::new(device)));
        self.finish(State::new(backend, depth, capacity), kind, Vec::new())
    }

    fn finish(
        self,
        state: State,
        kind: BackendKind,
        fallbacks: Vec<Fallback>,
    ) -> Result<Engine, StartError> {
        let wake_fd = WakeFd::new(state.backend.wake_fds()).map_err(StartError::Descriptors)?;
        Ok(Engine::owner(Core::new(state, wake_fd, kind, fallbacks, self.reap_mode)))
    }

    /// Returns the depth and the capacity.
    fn limits(&self) -> Result<(usize, usize), StartError> {
        let between = |name, value, least, most| {
            if (least..=most).contains(&value) {
                Ok(value)
            } else {
                Err(StartError::Limit { name, value, least, most })
            }
        };
        let depth = between("depth", self.depth, 1, MAX_DEPTH)?;
        let capacity = self.capacity.unwrap_or(depth * 4);
        between("threads", self.threads, 1, 1024)?;
        Ok((depth, between("capacity", capacity, depth, 1 << 24)?))
    }

    fn start(&self, kind: BackendKind, depth: usize) -> io::Result<Device> {
        Ok(match kind {
            BackendKind::Uring => Device::Uring(Uring::new(depth)?),
            BackendKind::Aio => Device::Other(Box::new(Aio::new(self.threads, depth)?)),
            BackendKind::Threads => {
                let mut pool = Pool::new(self.threads, depth)?;
                pool.start_worker()?; // so that a system without threads fails now
                Device::Other(Box::new(pool))
            }
            // It is started by `build_external`.
            BackendKind::External => return Err(io::Error::from_raw_os_error(libc::EOPNOTSUPP)),
        })
    }
}
