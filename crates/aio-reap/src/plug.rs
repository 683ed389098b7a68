//! A guard that holds requests back, so that they are submitted together.

use std::fmt;
use std::mem;

use crate::core::Core;

/// While a plug lives, requests are only queued. The drop of the last one submits and reaps.
///
/// Plugs nest. They also balance if a panic unwinds through them. The next call that turns the
/// engine then submits the queue, so no callback runs during the unwinding.
///
/// ```
/// use aio_reap::Engine;
///
/// # fn main() -> std::io::Result<()> {
/// let engine = Engine::new()?;
/// let plug = engine.plug();
/// let nops: Vec<_> = (0..8).map(|_| engine.nop().submit()).collect::<Result<_, _>>()?;
/// assert_eq!(engine.stats().submissions, 0);
/// drop(plug);
/// assert_eq!(engine.stats().submissions, 1);
/// for nop in nops {
///     nop.wait().0?;
/// }
/// # Ok(())
/// # }
/// ```
#[must_use = "requests are held back only while the plug lives"]
pub struct Plug<'e> {
    core: &'e Core,
}

impl<'e> Plug<'e> {
    pub(crate) fn new(core: &'e Core) -> Self {
        core.plug();
        Self { core }
    }

    /// Ends the plug without a submission. A turn follows.
    pub(crate) fn leave(self) {
        self.core.leave_plug();
        mem::forget(self);
    }
}

impl Drop for Plug<'_> {
    fn drop(&mut self) {
        self.core.unplug();
    }
}

impl fmt::Debug for Plug<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Plug").finish_non_exhaustive()
    }
}
