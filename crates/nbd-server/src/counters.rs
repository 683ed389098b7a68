//! The counters of a worker's requests.

/// The number of failures that are all logged.
const LOGGED: u64 = 64;

/// Returns whether the failure with this number is logged. Later failures are logged ever less
/// often, because the log of a dead disk must not fill another one.
pub(crate) fn is_logged(count: u64) -> bool {
    count <= LOGGED || count.is_power_of_two()
}

/// Requests and bytes of a worker since it started.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Counters {
    pub(crate) reads: u64,
    pub(crate) read_bytes: u64,
    /// Reads answered from the cache.
    pub(crate) hits: u64,
    pub(crate) writes: u64,
    pub(crate) written_bytes: u64,
    pub(crate) flushes: u64,
    pub(crate) other: u64,
    pub(crate) errors: u64,
    /// Errors that came from an image.
    pub(crate) failures: u64,
    /// Requests that ended after their connection was closed.
    pub(crate) closed: u64,
}
