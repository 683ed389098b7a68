//! The name of a request in an engine.

use crate::slab::Index;

/// The name of a request that was submitted with a callback or to a queue, for
/// [`Engine::cancel`](crate::Engine::cancel). No later request of the engine has it (until its slot
/// was used 2^32 times).
///
/// ```
/// use std::time::Duration;
/// use aio_reap::Engine;
///
/// # fn main() -> std::io::Result<()> {
/// let engine = Engine::new()?;
/// let plug = engine.plug(); // the request stays in the engine
/// let id = engine.nop().callback(|result, ()| {
///     assert_eq!(result.unwrap_err().raw_os_error(), Some(libc::ECANCELED));
/// })?;
/// assert!(engine.cancel(id));
/// drop(plug);
/// engine.drain()?;
/// assert!(!engine.cancel(id)); // it has completed
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct RequestId(pub(crate) u64);

impl RequestId {
    /// Returns the slot of the request.
    pub(crate) fn index(self) -> Index {
        self.0 as Index
    }
}
