//! Planted bugs that need code of their own. A model run may switch one of them on.

/// Returns whether `OFFLOCK_MUTANT` names the planted bug `name`.
///
/// Always false, at no cost, except in the builds for model checkers.
#[cfg(not(any(offlock_loom, offlock_shuttle)))]
#[inline(always)]
pub const fn mutant(_name: &str) -> bool {
    false
}

/// Returns whether `OFFLOCK_MUTANT` names the planted bug `name`.
#[cfg(any(offlock_loom, offlock_shuttle))]
pub fn mutant(name: &str) -> bool {
    super::label::is_planted(name)
}
