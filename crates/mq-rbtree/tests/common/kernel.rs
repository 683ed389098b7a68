//! The kernel's own message queue, as a C program uses it.

use std::ffi::CString;
use std::io;
use std::mem;
use std::process;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{Duration, SystemTime};

/// The longest message.
pub(crate) const MESSAGE_BYTES: usize = 16;

/// A queue without a name, which ends with its descriptors.
pub(crate) struct KernelQueue {
    blocking: libc::mqd_t,
    nonblocking: libc::mqd_t,
}

/// The time that an operation waits for.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Patience {
    None,
    Forever,
    /// For so long from now, by the realtime clock.
    For(Duration),
}

impl KernelQueue {
    pub(crate) fn new(max_messages: usize) -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let name = format!("/mq-rbtree.{}.{}", process::id(), NEXT.fetch_add(1, Relaxed));
        let name = CString::new(name).unwrap();
        // SAFETY: all zero is a valid `mq_attr`, a structure of plain numbers.
        let mut attributes: libc::mq_attr = unsafe { mem::zeroed() };
        attributes.mq_maxmsg = max_messages.try_into().unwrap();
        attributes.mq_msgsize = MESSAGE_BYTES.try_into().unwrap();
        let flags = libc::O_RDWR | libc::O_CREAT | libc::O_EXCL;
        // SAFETY: the name ends in NUL; it and the attributes outlive the call.
        let blocking = unsafe { libc::mq_open(name.as_ptr(), flags, 0o600, &raw const attributes) };
        assert!(blocking >= 0, "mq_open: {}", io::Error::last_os_error());
        // SAFETY: the name ends in NUL and outlives the call.
        let nonblocking = unsafe { libc::mq_open(name.as_ptr(), libc::O_RDWR | libc::O_NONBLOCK) };
        assert!(nonblocking >= 0, "mq_open: {}", io::Error::last_os_error());
        // SAFETY: the name ends in NUL and outlives the call.
        assert_eq!(unsafe { libc::mq_unlink(name.as_ptr()) }, 0);
        Self { blocking, nonblocking }
    }

    /// Sends a message, or returns the errno.
    pub(crate) fn send(&self, message: &[u8], priority: u32, wait: Patience) -> Result<(), i32> {
        let (bytes, len) = (message.as_ptr().cast(), message.len());
        self.call(wait, |queue, end| {
            // SAFETY: `bytes` and `len` describe `message`; `end` is null, or points to a time that
            // outlives the call.
            unsafe { libc::mq_timedsend(queue, bytes, len, priority, end) as isize }
        })
        .map(drop)
    }

    /// Receives a message. Returns its length and its priority, or the errno.
    pub(crate) fn receive(
        &self,
        message: &mut [u8; MESSAGE_BYTES],
        wait: Patience,
    ) -> Result<(usize, u32), i32> {
        let (bytes, mut priority) = (message.as_mut_ptr().cast(), 0);
        let len = self.call(wait, |queue, end| {
            // SAFETY: `bytes` has room for the longest message, `priority` is a local variable, and
            // `end` is null or points to a time that outlives the call.
            unsafe { libc::mq_timedreceive(queue, bytes, MESSAGE_BYTES, &mut priority, end) }
        })?;
        Ok((len, priority))
    }

    pub(crate) fn len(&self) -> usize {
        // SAFETY: all zero is a valid `mq_attr`, a structure of plain numbers.
        let mut attributes: libc::mq_attr = unsafe { mem::zeroed() };
        // SAFETY: `mq_getattr` writes to a structure of this frame.
        assert_eq!(unsafe { libc::mq_getattr(self.blocking, &mut attributes) }, 0);
        attributes.mq_curmsgs.try_into().unwrap()
    }

    fn call(
        &self,
        wait: Patience,
        mut call: impl FnMut(libc::mqd_t, *const libc::timespec) -> isize,
    ) -> Result<usize, i32> {
        let end = match wait {
            Patience::For(time) => {
                let since_1970 = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap();
                let end = since_1970 + time;
                let tv_sec = end.as_secs().try_into().unwrap();
                Some(libc::timespec { tv_sec, tv_nsec: end.subsec_nanos().into() })
            }
            Patience::None | Patience::Forever => None,
        };
        let queue = match wait {
            Patience::None => self.nonblocking,
            Patience::Forever | Patience::For(_) => self.blocking,
        };
        let end = end.as_ref().map_or(std::ptr::null(), std::ptr::from_ref);
        call(queue, end).try_into().map_err(|_| errno())
    }
}

impl Drop for KernelQueue {
    fn drop(&mut self) {
        for queue in [self.blocking, self.nonblocking] {
            // SAFETY: the descriptor is open, and is not used any more.
            unsafe { libc::mq_close(queue) };
        }
    }
}

fn errno() -> i32 {
    io::Error::last_os_error().raw_os_error().unwrap()
}
