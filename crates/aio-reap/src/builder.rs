//! Choosing limits and a backend.

use std::io;

use crate::backend::scripted::{Script, Scripted};
use crate::backend::sim::{Model, Sim, Simulated};
use crate::backend::{Device, aio::Aio, threads::Threads, uring::Uring};
use crate::engine::Engine;
use crate::reap::ReapMode;
use crate::start::{BackendKind, Fallback, StartError};
use crate::state::{Limits, State};

/// Most requests in flight an engine can be asked for: io_uring's largest ring (ABI).
const MAX_DEPTH: usize = 32_768;

/// Limits and backend of an engine; [`Engine::builder`].
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
    defer_task_run: bool,
    timed: bool,
}

impl Engine {
    /// An engine with the default limits on the best backend the system allows.
    ///
    /// # Errors
    ///
    /// As [`EngineBuilder::build`].
    pub fn new() -> Result<Self, StartError> {
        Self::builder().build()
    }

    /// Chooses limits and backend.
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
            defer_task_run: false,
            timed: false,
        }
    }
}

impl EngineBuilder {
    /// Forces one backend. By default io_uring, Linux AIO and threads are tried in this order,
    /// and [`Engine::fallbacks`] says why one was passed over.
    pub fn backend(mut self, backend: BackendKind) -> Self {
        self.backend = Some(backend);
        self
    }

    /// Most requests in flight in the kernel: 1 to 32,768; 128 by default.
    pub fn depth(mut self, depth: usize) -> Self {
        self.depth = depth;
        self
    }

    /// Most requests the engine holds, in flight and waiting: at least `depth`; by default four
    /// times `depth`. One more is refused with [`SubmitError::Full`](crate::SubmitError::Full).
    pub fn capacity(mut self, capacity: usize) -> Self {
        self.capacity = Some(capacity);
        self
    }

    /// Most requests of other threads that have a place at a time
    /// ([`Remote`](crate::Remote)); as many as `capacity` by default. One more is refused with
    /// [`SubmitError::Full`](crate::SubmitError::Full).
    pub fn remote_capacity(mut self, remote_capacity: usize) -> Self {
        self.remote_capacity = Some(remote_capacity);
        self
    }

    /// Most requests in one submission; `depth` by default.
    pub fn max_batch(mut self, max_batch: usize) -> Self {
        self.max_batch = Some(max_batch);
        self
    }

    /// Lets the size of submissions follow the device, from 16 (or [`max_batch`](Self::max_batch),
    /// if that is less) to `max_batch`.
    ///
    /// It doubles when a submission was full, left requests behind, and less than half of it was
    /// complete right after: such a device works in the background, and each larger batch saves
    /// system calls. It halves when a full submission left nothing in flight right after, for then its
    /// first request has waited for its last, and when the kernel had no room. Off by default:
    /// always `max_batch`.
    pub fn adaptive_batch(mut self, adaptive: bool) -> Self {
        self.adaptive = adaptive;
        self
    }

    /// Most completions taken by one reap, so that one call cannot deliver for ever; `depth` by
    /// default.
    pub fn reap_budget(mut self, reap_budget: usize) -> Self {
        self.reap_budget = Some(reap_budget);
        self
    }

    /// When completions are looked for; right after each submission by default.
    pub fn reap_mode(mut self, mode: ReapMode) -> Self {
        self.reap_mode = mode;
        self
    }

    /// Lets io_uring finish requests only when the engine looks for completions
    /// (`IORING_SETUP_DEFER_TASKRUN`, Linux 6.1): the work comes in batches, but nothing completes
    /// behind the engine's back, and each look is a system call when something waits. Off by
    /// default; without effect on other backends and older kernels.
    pub fn defer_task_run(mut self, defer: bool) -> Self {
        self.defer_task_run = defer;
        self
    }

    /// Most threads of the pool, where one is used; 4 by default. They start when needed.
    pub fn threads(mut self, threads: usize) -> Self {
        self.threads = threads;
        self
    }

    /// Whether to measure how long the kernel takes ([`EngineStats`](crate::EngineStats)): two
    /// clock readings per submission. Off by default.
    pub fn timed(mut self, timed: bool) -> Self {
        self.timed = timed;
        self
    }

    /// Starts an engine. It belongs to the calling thread.
    ///
    /// # Errors
    ///
    /// [`StartError`] when a limit is out of range, or every backend asked for was refused.
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
                Err(error) => fallbacks.push(Fallback { backend: kind, error }),
            }
        }
        Err(StartError::Refused(fallbacks))
    }

    /// Starts an engine on a [scripted](crate::scripted) device.
    ///
    /// # Errors
    ///
    /// As [`build`](Self::build); refused while another engine uses the script.
    pub fn build_scripted(self, script: &Script) -> Result<Engine, StartError> {
        let limits = self.limits()?;
        let device = Scripted::new(script).map_err(|error| {
            StartError::Refused(vec![Fallback { backend: BackendKind::Scripted, error }])
        })?;
        let state = State::new(Device::Scripted(device), limits);
        self.finish(state, BackendKind::Scripted, Vec::new())
    }

    /// Starts an engine on a [simulated](crate::sim) device, beside those that use it already.
    ///
    /// # Errors
    ///
    /// As [`build`](Self::build).
    pub fn build_sim(self, sim: &Sim) -> Result<Engine, StartError> {
        let limits = self.limits()?;
        let device = Simulated::new(sim).map_err(StartError::Descriptors)?;
        let state = State::new(Device::Simulated(device), limits);
        self.finish(state, BackendKind::Simulated, Vec::new())
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
        let within = |name, value, most| {
            if (1..=most).contains(&value) {
                Ok(value)
            } else {
                Err(StartError::Limit { name, most })
            }
        };
        let depth = within("depth", self.depth, MAX_DEPTH)?;
        let capacity = self.capacity.unwrap_or(depth * 4).max(depth);
        within("threads", self.threads, 1024)?;
        Ok(Limits {
            depth,
            capacity: within("capacity", capacity, 1 << 24)?,
            remote: within("remote_capacity", self.remote_capacity.unwrap_or(capacity), 1 << 24)?,
            max_batch: within("max_batch", self.max_batch.unwrap_or(depth), MAX_DEPTH)?,
            adaptive: self.adaptive,
            reap_budget: within("reap_budget", self.reap_budget.unwrap_or(depth), MAX_DEPTH)?,
            timed: self.timed,
        })
    }

    fn start(&self, kind: BackendKind, depth: usize) -> io::Result<Device> {
        Ok(match kind {
            BackendKind::Uring => Device::Uring(Uring::new(depth, self.defer_task_run)?),
            BackendKind::Aio => Device::Aio(Aio::new(self.threads, depth)?),
            BackendKind::Threads => Device::Threads(Threads::new(self.threads, depth)?),
            BackendKind::Scripted => Device::Scripted(Scripted::new(&Script::new())?),
            BackendKind::Simulated => {
                Device::Simulated(Simulated::new(&Sim::new(Model::default(), 0))?)
            }
        })
    }
}
