//! A reference count that bounces no cache line until it is killed.
