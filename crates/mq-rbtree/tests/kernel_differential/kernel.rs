//! The kernel's own queue, through libc.

use std::ffi::CString;
use std::io;
use std::mem;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::process;
use std::time::{Duration, SystemTime};

use super::side::{How, LONG, Message, PosixQueue, SHORT};

/// A POSIX message queue whose name is gone already.
pub(crate) struct KernelQueue {
    blocking: OwnedFd,
    /// The same queue, opened with `O_NONBLOCK`.
    nonblocking: OwnedFd,
    message_bytes: usize,
    /// The socket of the last notification that was registered.
    registered: Option<OwnedFd>,
}

impl KernelQueue {
    pub(crate) fn new(max_messages: usize, message_bytes: usize) -> Self {
        let name = CString::new(format!("/mq-rbtree.{}", process::id())).unwrap();
        // SAFETY: all zero is a valid `mq_attr`, a structure of plain numbers.
        let mut limits: libc::mq_attr = unsafe { mem::zeroed() };
        limits.mq_maxmsg = max_messages.try_into().unwrap();
        limits.mq_msgsize = message_bytes.try_into().unwrap();
        let open = |flags| {
            let flags = libc::O_RDWR | libc::O_CREAT | flags;
            // SAFETY: the name and the limits outlive the call.
            let fd = unsafe { libc::mq_open(name.as_ptr(), flags, 0o600, &raw const limits) };
            checked(fd >= 0).unwrap();
            // SAFETY: the call above returned this descriptor, and nothing else owns it.
            unsafe { OwnedFd::from_raw_fd(fd) }
        };
        let (blocking, nonblocking) = (open(libc::O_EXCL), open(libc::O_NONBLOCK));
        // SAFETY: the name outlives the call.
        checked(unsafe { libc::mq_unlink(name.as_ptr()) } == 0).unwrap();
        Self { blocking, nonblocking, message_bytes, registered: None }
    }

    /// Returns the descriptor and the deadline of a call.
    fn wait(&self, how: How, would_wait: bool) -> (i32, Option<libc::timespec>) {
        let end = match how.now_or(would_wait) {
            How::Now => return (self.nonblocking.as_raw_fd(), None),
            How::Patient => return (self.blocking.as_raw_fd(), None),
            How::Past { .. } => libc::timespec { tv_sec: 0, tv_nsec: 0 },
            How::Short { .. } => after(SHORT),
            How::Long => after(LONG),
            How::Timespec { seconds, nanoseconds } => {
                libc::timespec { tv_sec: seconds, tv_nsec: nanoseconds }
            }
        };
        (self.blocking.as_raw_fd(), Some(end))
    }

    /// Sets or removes the registration of this process.
    fn set_notify(&self, event: *const libc::sigevent) -> Result<(), i32> {
        let queue = self.blocking.as_raw_fd();
        // The C library's `mq_notify` would make a thread.
        // SAFETY: the event is null, or lives through the call with what it points to.
        checked(unsafe { libc::syscall(libc::SYS_mq_notify, queue, event) } == 0)
    }
}

impl PosixQueue for KernelQueue {
    fn send(&self, message: Vec<u8>, priority: u32, how: How) -> Result<(), (Vec<u8>, i32)> {
        let (queue, end) = self.wait(how, self.is_full());
        let (bytes, len) = (message.as_ptr().cast(), message.len());
        let end = end.as_ref().map_or(std::ptr::null(), std::ptr::from_ref);
        // SAFETY: the message and the deadline outlive the call.
        let sent = unsafe { libc::mq_timedsend(queue, bytes, len, priority, end) } == 0;
        checked(sent).map_err(|errno| (message, errno))
    }

    fn receive(&self, how: How) -> Result<Message, i32> {
        let (queue, end) = self.wait(how, self.len() == 0);
        let (mut message, mut priority) = (vec![0; self.message_bytes], 0);
        let (bytes, len) = (message.as_mut_ptr().cast(), message.len());
        let end = end.as_ref().map_or(std::ptr::null(), std::ptr::from_ref);
        // SAFETY: the buffer has `len` bytes; it, the priority and the deadline outlive the call.
        let received = unsafe { libc::mq_timedreceive(queue, bytes, len, &mut priority, end) };
        checked(received >= 0)?;
        message.truncate(received as usize);
        Ok((message, priority))
    }

    fn len(&self) -> usize {
        self.limits().mq_curmsgs.try_into().unwrap()
    }

    fn is_full(&self) -> bool {
        let limits = self.limits();
        limits.mq_curmsgs == limits.mq_maxmsg
    }

    /// Registers a netlink socket, to which the kernel sends the cookie with another last byte: 1 if a
    /// message came, 2 if the registration was removed.
    fn notify(&mut self) -> Result<(), i32> {
        // SAFETY: `socket` takes three integers.
        let fd = unsafe { libc::socket(libc::AF_NETLINK, libc::SOCK_RAW | libc::SOCK_CLOEXEC, 0) };
        checked(fd >= 0).unwrap();
        // SAFETY: the call above returned this descriptor, and nothing else owns it.
        let socket = unsafe { OwnedFd::from_raw_fd(fd) };
        let mut cookie = [0_u8; 32];
        // SAFETY: all zero is a valid `sigevent`, a structure of plain numbers and pointers.
        let mut event: libc::sigevent = unsafe { mem::zeroed() };
        event.sigev_notify = libc::SIGEV_THREAD;
        event.sigev_signo = fd;
        event.sigev_value.sival_ptr = cookie.as_mut_ptr().cast();
        self.set_notify(&event)?;
        self.registered = Some(socket);
        Ok(())
    }

    fn cancel_notify(&mut self) {
        self.set_notify(std::ptr::null()).unwrap();
        assert!(!self.was_called(), "removed uncalled");
        self.registered = None;
    }

    fn was_called(&mut self) -> bool {
        let Some(socket) = &self.registered else { return false };
        let mut cookie = [0_u8; 32];
        let at = cookie.as_mut_ptr().cast();
        // SAFETY: the kernel writes at most the length of the array.
        let got = unsafe { libc::recv(socket.as_raw_fd(), at, cookie.len(), libc::MSG_DONTWAIT) };
        let called = got == 32 && cookie[31] == 1;
        if called {
            self.registered = None;
        }
        called
    }
}

impl KernelQueue {
    fn limits(&self) -> libc::mq_attr {
        // SAFETY: all zero is a valid `mq_attr`, a structure of plain numbers.
        let mut limits: libc::mq_attr = unsafe { mem::zeroed() };
        // SAFETY: the call writes to a structure of this frame.
        checked(unsafe { libc::mq_getattr(self.blocking.as_raw_fd(), &mut limits) } == 0).unwrap();
        limits
    }
}

fn after(time: Duration) -> libc::timespec {
    let end = SystemTime::now() + time;
    let end = end.duration_since(SystemTime::UNIX_EPOCH).unwrap();
    libc::timespec { tv_sec: end.as_secs() as i64, tv_nsec: end.subsec_nanos().into() }
}

/// Returns the errno of the preceding call if it has failed.
fn checked(done: bool) -> Result<(), i32> {
    if done { Ok(()) } else { Err(io::Error::last_os_error().raw_os_error().unwrap()) }
}
