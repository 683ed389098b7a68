//! What an engine and the threads with a remote share.

use std::os::fd::OwnedFd;

use percpu::sync::{Arc, thread};

use super::letter::Letter;
use super::mailbox::Mailbox;
use crate::cargo::Verdict;
use crate::sys;

/// What an engine and its remotes share.
pub(crate) struct Hub {
    pub(super) mailbox: Mailbox<Letter, Verdict>,
    /// The engine's kick.
    bell: Arc<OwnedFd>,
    /// The engine's thread, which must not block on itself. No later thread gets the same id, unlike
    /// that of [`percpu::sync::thread_id`], which is an address.
    home: thread::ThreadId,
}

impl Hub {
    pub(super) fn new(places: usize, bell: Arc<OwnedFd>) -> Arc<Self> {
        Arc::new(Self { mailbox: Mailbox::new(places), bell, home: thread::current().id() })
    }

    pub(super) fn ring(&self) {
        sys::signal(&self.bell);
    }

    /// Whether this is the engine's thread.
    pub(super) fn is_home(&self) -> bool {
        thread::current().id() == self.home
    }
}
