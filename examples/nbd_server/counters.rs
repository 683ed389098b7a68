//! The counters of a worker's requests.

/// The first failures, which are all logged.
const LOGGED: u64 = 64;

/// Whether the failure with that number is logged: fewer and fewer are, because the log of a dead
/// disk must not fill another one.
pub(crate) fn is_logged(count: u64) -> bool {
    count <= LOGGED || count.is_power_of_two()
}

/// Requests and bytes of a worker since it started.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Counters {
    pub(crate) reads: u64,
    pub(crate) read_bytes: u64,
    /// Reads that were answered from memory.
    pub(crate) hits: u64,
    pub(crate) writes: u64,
    pub(crate) written_bytes: u64,
    pub(crate) flushes: u64,
    pub(crate) other: u64,
    pub(crate) errors: u64,
    /// Of those, the image's own.
    pub(crate) failures: u64,
    /// Requests that ended after their connection.
    pub(crate) closed: u64,
}
