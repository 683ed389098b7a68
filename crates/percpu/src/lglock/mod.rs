//! Locks that are cheap on their own CPU, and one over all.
