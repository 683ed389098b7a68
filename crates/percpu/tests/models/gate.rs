//! The read-write gate.

/// A planted bug, and the model that must fail for it.
pub(super) const MUTANTS: &[(&str, &str)] = &[];

/// Of these, what only loom can see.
pub(super) const LOOM_ONLY: &[&str] = &[];
