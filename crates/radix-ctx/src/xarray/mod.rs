//! Entries by the caller's own indices.
