//! What a simulated device is like, and what it costs to talk to it.

/// A device, what calls on it cost, and what goes wrong. Times are virtual nanoseconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Model {
    /// Requests the device works on at a time, at least one; the others wait, first come, first
    /// served.
    pub servers: usize,
    /// How long one server takes for a request, beside its bytes.
    pub service: Service,
    /// What each byte of a transfer adds to that, in picoseconds (10^-12 s).
    pub picos_per_byte: u64,
    /// What the calling thread's time goes to.
    pub costs: Costs,
    /// What goes wrong.
    pub faults: Faults,
    /// Of a million requests, how many complete inside the submission: it takes as long as they do.
    pub inline: u32,
    /// Whether data really moves: a request then makes its system call on its file when it is
    /// reaped, which takes no virtual time. Else buffers stay as they are and transfers are full.
    pub moves_data: bool,
}

/// How long a server takes for one request. Times are virtual nanoseconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Service {
    /// Always the same time.
    Fixed(u64),
    /// Exponentially distributed with this mean.
    Exponential(u64),
    /// Runs of fast and of slow requests by turns, the time of each exponentially distributed.
    Bursty {
        /// Mean time in a fast run.
        fast: u64,
        /// Mean time in a slow run.
        slow: u64,
        /// Mean length of a run, in requests: geometrically distributed, at least 1.
        run: u32,
    },
}

impl Service {
    /// The mean over many requests, in nanoseconds.
    pub fn mean(self) -> u64 {
        match self {
            Self::Fixed(time) | Self::Exponential(time) => time,
            Self::Bursty { fast, slow, .. } => fast.midpoint(slow),
        }
    }
}

/// What the calling thread's time goes to, in virtual nanoseconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Costs {
    /// A submission, however many requests it takes: the system call.
    pub submission: u64,
    /// Each request of a submission. The device has the first of a batch while the next is made.
    pub request: u64,
    /// A look for completions in user memory.
    pub peek: u64,
    /// Each completion found.
    pub completion: u64,
    /// Asking the kernel for readiness, and answering the eventfd: one turn of an event loop.
    pub poll: u64,
    /// Waking up once a completion ends a sleep.
    pub wake: u64,
}

/// What goes wrong, by chance; 0 is never, 1,000,000 always.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Faults {
    /// Of a million submissions, how many find no room at all (EAGAIN).
    pub busy: u32,
    /// Of a million submissions, how many are taken in part; any part is as likely.
    pub partial: u32,
    /// Of a million submissions, how many are refused (EIO) at one of their requests; any of them
    /// is as likely.
    pub refused: u32,
    /// Of a million requests, how many complete with EIO.
    pub failed: u32,
    /// Of a million requests, how many complete with EINTR or EAGAIN and are to be tried again.
    pub again: u32,
    /// Of a million transfers of more than a byte, how many end early; any part is as likely, on a
    /// direct file any whole number of blocks.
    pub short: u32,
}

impl Default for Model {
    /// 32 servers of 80 us each, exponentially distributed: 400,000 requests a second, no faults.
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
    /// Round numbers near what Linux takes on present machines.
    fn default() -> Self {
        Self { submission: 300, request: 700, peek: 20, completion: 50, poll: 600, wake: 4_000 }
    }
}
