//! The parameters of a simulated device.

/// A device, the costs of calls, and the faults. Times are virtual nanoseconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Model {
    /// The number of requests that the device works on at a time, at least one. Other requests wait
    /// in the order of their arrival.
    pub servers: usize,
    /// The time of one server for a request, without its bytes.
    pub service: Service,
    /// The additional time for each byte of a transfer, in picoseconds (10^-12 s).
    pub picos_per_byte: u64,
    /// The time that calls take on the calling thread.
    pub costs: Costs,
    /// The faults.
    pub faults: Faults,
    /// The number of requests in a million that complete inside the submission, which then takes
    /// their service time.
    pub inline: u32,
    /// Whether data moves. If so, a request performs its system call on its file when it is reaped,
    /// which takes no virtual time. If not, buffers keep their bytes and transfers are full.
    pub moves_data: bool,
}

/// The time of a server for one request. Times are virtual nanoseconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Service {
    /// Every request takes this time.
    Fixed(u64),
    /// An exponential distribution with this mean.
    Exponential(u64),
    /// Alternating runs of fast and of slow requests. The times are exponentially distributed.
    Bursty {
        /// The mean time in a fast run.
        fast: u64,
        /// The mean time in a slow run.
        slow: u64,
        /// The mean length of a run in requests. It is geometrically distributed and at least 1.
        run: u32,
    },
}

impl Service {
    /// Returns the mean over many requests, in nanoseconds.
    pub fn mean(self) -> u64 {
        match self {
            Self::Fixed(time) | Self::Exponential(time) => time,
            Self::Bursty { fast, slow, .. } => fast.midpoint(slow),
        }
    }
}

/// The time that calls take on the calling thread, in virtual nanoseconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Costs {
    /// A submission, independent of the number of its requests (the system call).
    pub submission: u64,
    /// Each request of a submission. The device has the first request of a batch while the thread
    /// prepares the next.
    pub request: u64,
    /// A peek for completions in user memory.
    pub peek: u64,
    /// Each completion that a peek finds.
    pub completion: u64,
    /// A poll for readiness and the clearing of the eventfd (one turn of an event loop).
    pub poll: u64,
    /// The wake-up when a completion ends a sleep.
    pub wake: u64,
}

/// The probabilities of faults, per million: 0 is never, 1,000,000 is always.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Faults {
    /// Submissions in a million that find no room (EAGAIN).
    pub busy: u32,
    /// Submissions in a million that are taken in part. Each part has the same probability.
    pub partial: u32,
    /// Submissions in a million that are refused (EIO) at one of their requests. Each request has
    /// the same probability.
    pub refused: u32,
    /// Requests in a million that complete with EIO.
    pub failed: u32,
    /// Requests in a million that complete with EINTR or EAGAIN, which the engine retries.
    pub again: u32,
    /// Transfers of more than a byte in a million that end early. Each length has the same
    /// probability; on a direct file, each whole number of blocks.
    pub short: u32,
}

impl Default for Model {
    /// Returns a model of 32 servers with exponentially distributed times of 80 us: 400,000
    /// requests per second, no faults.
    fn default() -> Self {
        Self {
            servers: 32,
            service: Service::Exponential(80_000),
            picos_per_byte: 0,
            costs: Costs::default(),
            faults: Faults::default(),
            inline: 0,
            moves_data: false,
        }
    }
}

impl Default for Costs {
    /// Returns round numbers near the costs of Linux on current machines.
    fn default() -> Self {
        Self { submission: 300, request: 700, peek: 20, completion: 50, poll: 600, wake: 4_000 }
    }
}
