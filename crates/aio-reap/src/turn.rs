//! The report of one turn of an engine.

/// What a call that turned the engine found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Turn {
    /// Completions delivered by this call.
    pub delivered: usize,
    /// Requests the engine still holds that the kernel is not working on: not handed over yet,
    /// or complete and not delivered yet.
    pub pending: usize,
    /// Requests the kernel is working on.
    pub in_flight: usize,
}

impl Turn {
    /// Nothing left to do.
    pub fn is_idle(&self) -> bool {
        self.pending == 0 && self.in_flight == 0
    }
}
