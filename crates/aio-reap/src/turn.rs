//! The report of one turn of an engine.

/// The report of a call that turned the engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Turn {
    /// The number of completions that the call delivered.
    pub delivered: usize,
    /// The number of requests in the engine that are not in flight: not submitted, or complete and
    /// not delivered.
    pub pending: usize,
    /// The number of requests in flight.
    pub in_flight: usize,
}

impl Turn {
    /// Returns whether the engine has no request.
    pub fn is_idle(&self) -> bool {
        self.pending == 0 && self.in_flight == 0
    }
}
