//! The completions that one turn of an engine delivers, and its report.

/// The completions that a turn delivers. It reaps all in any case.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Scope {
    Nothing,
    /// Those of inner requests; see [`inner`](crate::inner).
    Inner,
    All,
}

/// The report of a call that turned the engine.
///
/// ```
/// use aio_reap::Engine;
///
/// # fn main() -> std::io::Result<()> {
/// let engine = Engine::new()?;
/// let nop = engine.nop().submit()?;
/// let mut turn = engine.turn();
/// while !turn.is_idle() {
///     turn = engine.wait(None)?; // here an event loop waits for the engine's descriptor
/// }
/// assert_eq!((turn.pending, turn.in_flight, nop.is_done()), (0, 0, true));
/// # Ok(())
/// # }
/// ```
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
