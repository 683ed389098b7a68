//! Spare objects: allocate before the lock, keep what was freed.
