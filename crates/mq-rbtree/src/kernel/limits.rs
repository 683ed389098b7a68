//! The current limits of the kernel's queues.

use std::fs;
use std::mem;

use crate::event::EventNotifier;
use crate::posix::Attributes;

/// The most messages of a queue, which no setting raises: ABI (`mq_overview(7)`, since Linux 3.5).
pub(super) const HARD_MESSAGES: u64 = 65_536;
/// The most bytes of a message, which no setting raises: ABI.
pub(super) const HARD_MESSAGE_BYTES: u64 = 16 << 20;

/// Returns a number under `/proc/sys/fs/mqueue`, of this IPC namespace.
pub(super) fn setting(name: &str) -> Option<u64> {
    fs::read_to_string(format!("/proc/sys/fs/mqueue/{name}")).ok()?.trim().parse().ok()
}

/// Returns the current soft limit of the process.
pub(super) fn rlimit(resource: i32) -> Option<u64> {
    // SAFETY: all zero is a valid `rlimit`, a structure of plain numbers.
    let mut limit: libc::rlimit = unsafe { mem::zeroed() };
    // The type of the resource differs between C libraries.
    // SAFETY: `getrlimit` writes to a structure of this frame.
    let given = unsafe { libc::getrlimit(resource as _, &mut limit) } == 0;
    given.then_some(limit.rlim_cur)
}

/// Returns the bytes that the kernel charges for a queue, empty or not: `getrlimit(2)`, with the
/// sizes of a 64-bit kernel.
pub(super) fn charge(of: Attributes) -> u64 {
    const MESSAGE: u64 = 48;
    const TREE_NODE: u64 = 48;
    const PRIORITIES: u64 = 32_768;
    let (messages, bytes) = (of.max_messages as u64, of.max_message_bytes as u64);
    let each = bytes.saturating_add(MESSAGE);
    messages.saturating_mul(each).saturating_add(messages.min(PRIORITIES) * TREE_NODE)
}

/// Returns whether the process can open no more descriptors of any kind.
pub(super) fn out_of_descriptors() -> bool {
    EventNotifier::try_new().is_err_and(|error| error.raw_os_error() == Some(libc::EMFILE))
}
