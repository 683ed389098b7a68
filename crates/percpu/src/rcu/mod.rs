//! Read-copy-update: readers that never wait, memory that waits for them.
