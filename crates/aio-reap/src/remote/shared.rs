//! What an engine and the threads with a remote share.

use std::os::fd::OwnedFd;

use percpu::sync::{Arc, thread};

use super::mailbox::Mailbox;
use super::sent::SentRequest;
use crate::payload::RawResult;
use crate::sys;

/// What an engine and its remotes share.
pub(crate) struct Shared {
    pub(super) mailbox: Mailbox<SentRequest, RawResult>,
    /// The engine's kick.
    kick: Arc<OwnedFd>,
    /// The engine's thread, which must not block on itself. No later thread gets the same id, unlike
    /// that of [`percpu::sync::thread_id`], which is an address.
    engine_thread: thread::ThreadId,
}

impl Shared {
    pub(super) fn new(slots: usize, kick: Arc<OwnedFd>) -> Arc<Self> {
        Arc::new(Self { mailbox: Mailbox::new(slots), kick, engine_thread: thread::current().id() })
    }

    pub(super) fn notify(&self) {
        sys::signal(&self.kick);
    }

    /// Whether this is the engine's thread.
    pub(super) fn is_engine_thread(&self) -> bool {
        thread::current().id() == self.engine_thread
    }
}
