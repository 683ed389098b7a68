//! A counter that never passes its limit.
