//! The state that an engine and its remotes share.

use std::os::fd::OwnedFd;

use percpu::sync::{Arc, thread};

use super::mailbox::Mailbox;
use super::sent::SentRequest;
use crate::payload::RawResult;
use crate::sys;

/// The mailbox of an engine, and the means to wake it.
pub(crate) struct Shared {
    pub(super) mailbox: Mailbox<SentRequest, RawResult>,
    /// The engine's kick.
    kick: Arc<OwnedFd>,
    /// The engine's thread, which must not block on itself. No later thread gets the same id. (An
    /// id of [`percpu::sync::thread_id`] is an address and may return.)
    engine_thread: thread::ThreadId,
}

impl Shared {
    pub(super) fn new(slots: usize, kick: Arc<OwnedFd>) -> Arc<Self> {
        Arc::new(Self { mailbox: Mailbox::new(slots), kick, engine_thread: thread::current().id() })
    }

    pub(super) fn notify(&self) {
        sys::signal(&self.kick);
    }

    /// Returns whether the calling thread is the engine's.
    pub(super) fn is_engine_thread(&self) -> bool {
        thread::current().id() == self.engine_thread
    }
}
