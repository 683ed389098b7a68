//! What a lock section has beside the state.

use super::config::Config;
use super::deferred::Deferred;
use crate::core::{Levels, Preload};

/// The limits of the queue, memory that was allocated before the lock, and actions deferred until after
/// the unlock.
///
/// It is declared before the lock's guard, so that an unwind drops it after the unlock: the drop runs
/// the actions, and frees the memory that was not used.
pub(crate) struct Section<'q, T, L: Levels> {
    pub(crate) config: &'q Config<L>,
    pub(crate) deferred: Deferred,
    pub(crate) preload: Preload<T, L>,
}
