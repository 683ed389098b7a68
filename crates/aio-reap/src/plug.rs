//! Holding requests back so that they go to the kernel together.

use crate::core::Core;

/// While it lives, requests are only queued; the last one to drop submits and reaps.
///
/// Plugs nest. They balance also when a panic unwinds through them; the queue is then submitted
/// by the next call that turns the engine, so that no callback runs during the unwinding.
#[must_use = "requests are held back only while the plug lives"]
pub struct Plug<'e> {
    core: &'e Core,
}

impl<'e> Plug<'e> {
    pub(crate) fn new(core: &'e Core) -> Self {
        core.plug();
        Self { core }
    }
}

impl Drop for Plug<'_> {
    fn drop(&mut self) {
        self.core.unplug();
    }
}
