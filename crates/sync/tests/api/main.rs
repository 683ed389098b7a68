//! The futex, the locks and the waits of a normal build.
#![cfg(not(offlock_model))]

mod futex;
mod thread_waker;
mod wait_set;
mod word_lock;
