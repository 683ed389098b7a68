//! The kernel's own queue, through libc.

use std::ffi::CString;
use std::fs;
use std::io;
use std::mem;
use std::process;
use std::ptr;
use std::sync::Once;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::queue::Queue;

/// A POSIX message queue without a name, for messages of 8 bytes.
pub(crate) struct Kernel(libc::mqd_t);

impl Kernel {
    /// The most messages of a queue that an unprivileged process may make, by default.
    const USUAL: usize = 10;

    /// Opens one and removes its name.
    fn open(most: usize) -> io::Result<Self> {
        static OPENED: AtomicU64 = AtomicU64::new(0);
        // Ordering: Relaxed; a number.
        let number = OPENED.fetch_add(1, Ordering::Relaxed);
        let name = CString::new(format!("/mq_rbtree-{}-{number}", process::id()))?;
        // SAFETY: an `mq_attr` is an array of integers, for which all-zero bytes are a value.
        let mut limits: libc::mq_attr = unsafe { mem::zeroed() };
        limits.mq_maxmsg = most.try_into().map_err(io::Error::other)?;
        limits.mq_msgsize = 8;
        let flags = libc::O_RDWR | libc::O_CREAT | libc::O_EXCL;
        // SAFETY: a string and limits that live through the call.
        let queue = unsafe { libc::mq_open(name.as_ptr(), flags, 0o600, &raw mut limits) };
        if queue < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: a string that lives through the call.
        unsafe { libc::mq_unlink(name.as_ptr()) };
        Ok(Self(queue))
    }

    /// Returns the number of messages that a queue can hold here, up to `most`: `most` if the calling thread can have
    /// an IPC namespace of its own, which the threads that it starts later share.
    pub(crate) fn room(most: usize) -> usize {
        static RAISED: Once = Once::new();
        RAISED.call_once(|| {
            // SAFETY: has no preconditions. Where it is refused the usual limit stays.
            if unsafe { libc::unshare(libc::CLONE_NEWIPC) } == 0 {
                let _usual_if_refused = fs::write("/proc/sys/fs/mqueue/msg_max", "4096");
            }
        });
        if Self::open(most).is_ok() { most } else { most.min(Self::USUAL) }
    }
}

impl Queue for Kernel {
    const NAME: &'static str = "the kernel's queue";

    fn new(most: usize) -> Self {
        Self::open(Self::room(most)).expect("a kernel with message queues")
    }

    #[inline(always)]
    fn send(&self, message: u64, priority: u32) {
        let bytes = message.to_ne_bytes();
        // SAFETY: the queue is open, and the bytes live through the call.
        let sent = unsafe { libc::mq_send(self.0, bytes.as_ptr().cast(), bytes.len(), priority) };
        assert_eq!(sent, 0, "{}", io::Error::last_os_error());
    }

    #[inline(always)]
    fn receive(&self) -> u64 {
        let mut bytes = [0; 8];
        let at = bytes.as_mut_ptr().cast();
        // SAFETY: the queue is open, and the buffer is as long as its messages and lives through the
        // call; no priority is asked for.
        let length = unsafe { libc::mq_receive(self.0, at, bytes.len(), ptr::null_mut()) };
        assert_eq!(length, 8, "{}", io::Error::last_os_error());
        u64::from_ne_bytes(bytes)
    }
}

impl Drop for Kernel {
    fn drop(&mut self) {
        // SAFETY: open, and closed once.
        unsafe { libc::mq_close(self.0) };
    }
}
