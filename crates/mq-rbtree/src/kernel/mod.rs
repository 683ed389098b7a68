//! The kernel's own POSIX message queue, for what needs it: other processes, or a comparison.
//!
//! ```text
//!  KernelQueue --+-- blocking     a descriptor whose calls wait, until a deadline of CLOCK_REALTIME
//!                +-- nonblocking  the same queue, opened with O_NONBLOCK: EAGAIN instead
//! ```

mod limits;
mod notify;
mod open_error;
mod sys;

use std::ffi::CString;
use std::io;
use std::mem;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::ptr;
use std::time::{Duration, Instant, SystemTime};

use percpu::sync::native::atomic::{AtomicU64, Ordering};

pub use self::open_error::{Exceeded, OpenError};
use self::sys::{errno, uninterrupted};
use crate::deadline::{Deadline, Wait};
use crate::error::{NotifyError, ReceiveError, SendError, SendRefused};
use crate::posix::{Attributes, Callback, MessageQueue};

/// A POSIX message queue of the kernel (`mq_overview(7)`).
///
/// It is used through [`MessageQueue`]; each operation is a system call. Interrupted calls are made
/// again. Two descriptors, closed on `exec`.
///
/// What the kernel does in its own way:
///
/// - A waiting thread is served by the priority of its thread, then first come, first served; the urgency
///   of a [`Wait`] says nothing.
/// - It knows deadlines of the system's clock only. A monotonic one is converted, and once more if
///   that was too early; if the clock is set back meanwhile, it comes later by that much.
/// - A received message has the capacity of the longest possible one.
/// - A registration to be notified is of the process. It ends when the process closes *any*
///   descriptor of the queue: also when another `KernelQueue` of the same name is dropped.
///
/// ```
/// use mq_rbtree::{Attributes, KernelQueue, MessageQueue, Wait};
///
/// let queue = KernelQueue::new(Attributes { max_messages: 4, max_message_bytes: 16 })?;
/// queue.send_with(b"later".to_vec(), 1, Wait::NO)?;
/// queue.send_with(b"first".to_vec(), 2, Wait::NO)?;
/// assert_eq!(queue.receive_with(Wait::NO)?, (b"first".to_vec(), 2));
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct KernelQueue {
    blocking: OwnedFd,
    nonblocking: OwnedFd,
    attributes: Attributes,
}

impl KernelQueue {
    /// Makes a queue without a name: nobody else can open it, and it ends with its descriptors.
    ///
    /// # Errors
    ///
    /// [`OpenError`]: which limit of the system was reached, if it was one.
    pub fn new(attributes: Attributes) -> Result<Self, OpenError> {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        loop {
            // Ordering: Relaxed; only the numbers must differ.
            let number = NEXT.fetch_add(1, Ordering::Relaxed);
            let name = format!("/mq-rbtree.{}.{number}", std::process::id());
            match Self::create(&name, attributes) {
                // Left by a process of that id that was killed here, or made by one of another
                // container.
                Err(OpenError::Exists) => {}
                made => {
                    if made.is_ok() {
                        Self::unlink(&name)?;
                    }
                    return made;
                }
            }
        }
    }

    /// Makes a queue with a name, for processes of this user: `/` and up to 255 bytes without a
    /// `/`.
    ///
    /// It stays after this, with its messages, until [`unlink`](Self::unlink).
    ///
    /// # Errors
    ///
    /// [`OpenError::Exists`], or another [`OpenError`].
    pub fn create(name: &str, attributes: Attributes) -> Result<Self, OpenError> {
        if attributes.max_messages == 0 || attributes.max_message_bytes == 0 {
            return Err(OpenError::NoRoom);
        }
        let path = checked_name(name)?;
        let blocking =
            create(&path, attributes).map_err(|errno| OpenError::of_create(errno, attributes))?;
        Self::with_nonblocking(blocking, &path).map_err(|errno| {
            // SAFETY: the name ends in NUL and outlives the call.
            unsafe { libc::mq_unlink(path.as_ptr()) };
            OpenError::of_open(errno) // the limits of queues have let it pass
        })
    }

    /// Opens a queue that somebody has made.
    ///
    /// # Errors
    ///
    /// [`OpenError::NotFound`], or another [`OpenError`].
    pub fn open(name: &str) -> Result<Self, OpenError> {
        let path = checked_name(name)?;
        let blocking = open(&path, 0).map_err(OpenError::of_open)?;
        Self::with_nonblocking(blocking, &path).map_err(OpenError::of_open)
    }

    /// Takes a queue's name away: who has it open goes on with it, and it ends with the last.
    ///
    /// # Errors
    ///
    /// [`OpenError::NotFound`], or another [`OpenError`].
    pub fn unlink(name: &str) -> Result<(), OpenError> {
        let path = checked_name(name)?;
        // SAFETY: the name ends in NUL and outlives the call.
        match unsafe { libc::mq_unlink(path.as_ptr()) } {
            0 => Ok(()),
            _ => Err(OpenError::of_open(errno())),
        }
    }

    /// Opens the second descriptor.
    fn with_nonblocking(mut blocking: OwnedFd, path: &CString) -> Result<Self, i32> {
        loop {
            let nonblocking = open(path, libc::O_NONBLOCK)?;
            if identity(&blocking)? == identity(&nonblocking)? {
                let attributes = attributes(&blocking)?;
                return Ok(Self {
                    attributes: Attributes {
                        max_messages: attributes.mq_maxmsg.try_into().unwrap_or(0),
                        max_message_bytes: attributes.mq_msgsize.try_into().unwrap_or(0),
                    },
                    blocking,
                    nonblocking,
                });
            }
            // Somebody has unlinked it and made another in its place.
            blocking = open(path, 0)?;
        }
    }

    /// Makes `call` with the descriptor that waits as `wait` says, and a deadline.
    fn transfer(
        &self,
        wait: Wait,
        mut call: impl FnMut(libc::mqd_t, *const libc::timespec) -> isize,
    ) -> Result<usize, i32> {
        let (nonblocking, blocking) = (self.nonblocking.as_raw_fd(), self.blocking.as_raw_fd());
        if wait.is_no() {
            return uninterrupted(|| call(nonblocking, ptr::null()));
        }
        let Some(deadline) = wait.deadline() else {
            return uninterrupted(|| call(blocking, ptr::null()));
        };
        loop {
            let end = timespec(deadline);
            match uninterrupted(|| call(blocking, &raw const end)) {
                // The clocks have come apart since.
                Err(libc::ETIMEDOUT) if !deadline.is_over() => {}
                done => return done,
            }
        }
    }
}

impl MessageQueue for KernelQueue {
    fn send_with(
        &self,
        message: Vec<u8>,
        priority: u32,
        wait: Wait,
    ) -> Result<(), SendError<Vec<u8>>> {
        let (bytes, len) = (message.as_ptr().cast(), message.len());
        let sent = self.transfer(wait, |queue, end| {
            // SAFETY: `bytes` and `len` are those of `message`; `end` is null or the caller's.
            unsafe { libc::mq_timedsend(queue, bytes, len, priority, end) as isize }
        });
        sent.map(drop).map_err(|errno| SendError {
            value: message,
            reason: match errno {
                libc::EAGAIN => SendRefused::Full,
                libc::ETIMEDOUT => SendRefused::Timeout,
                libc::EMSGSIZE => SendRefused::TooLong,
                libc::EINVAL => SendRefused::BadPriority, // the time is a valid one
                libc::ENOMEM => SendRefused::NoMemory,
                _ => SendRefused::System(errno),
            },
        })
    }

    fn receive_with(&self, wait: Wait) -> Result<(Vec<u8>, u32), ReceiveError> {
        let (mut message, mut priority) = (Vec::<u8>::new(), 0);
        let len = self.attributes.max_message_bytes;
        // Before it is received, so that it is not lost.
        message.try_reserve_exact(len).map_err(|_| ReceiveError::NoMemory)?;
        let received = self.transfer(wait, |queue, end| {
            let bytes = message.as_mut_ptr().cast();
            // SAFETY: `bytes` has room for `len`, `priority` is ours, `end` null or the caller's.
            unsafe { libc::mq_timedreceive(queue, bytes, len, &mut priority, end) }
        });
        let len = received.map_err(|errno| match errno {
            libc::EAGAIN => ReceiveError::Empty,
            libc::ETIMEDOUT => ReceiveError::Timeout,
            libc::ENOMEM => ReceiveError::NoMemory,
            _ => ReceiveError::System(errno),
        })?;
        // SAFETY: the kernel has written `len` bytes, no more than it was told there is room for.
        unsafe { message.set_len(len) };
        Ok((message, priority))
    }

    fn len(&self) -> io::Result<usize> {
        let attributes = attributes(&self.blocking).map_err(io::Error::from_raw_os_error)?;
        Ok(attributes.mq_curmsgs.try_into().unwrap_or(0))
    }

    fn attributes(&self) -> Attributes {
        self.attributes
    }

    /// The callback runs on a thread of its own, which waits for the notification from now on.
    fn notify(&self, callback: Callback) -> Result<(), NotifyError<Callback>> {
        notify::register(self.as_fd(), callback)
    }

    /// The callback is dropped by its thread, soon.
    fn cancel_notify(&self) {
        notify::cancel(self.as_fd());
    }
}

/// The blocking descriptor: readable while there is a message, writable while there is room, for `poll`
/// and its kin.
impl AsFd for KernelQueue {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.blocking.as_fd()
    }
}

/// The name as C wants it, if it can be one.
fn checked_name(name: &str) -> Result<CString, OpenError> {
    const LONGEST: usize = libc::NAME_MAX as usize;
    match name.strip_prefix('/') {
        None | Some("" | "." | "..") => Err(OpenError::BadName),
        Some(rest) if rest.len() > LONGEST || rest.contains('/') => Err(OpenError::BadName),
        Some(_) => CString::new(name).map_err(|_| OpenError::BadName),
    }
}

fn create(path: &CString, wanted: Attributes) -> Result<OwnedFd, i32> {
    const FLAGS: libc::c_int = libc::O_RDWR | libc::O_CREAT | libc::O_EXCL;
    const MODE: libc::mode_t = 0o600;
    // SAFETY: all zero is a valid `mq_attr`, a structure of plain numbers.
    let mut attributes: libc::mq_attr = unsafe { mem::zeroed() };
    // What a `long` cannot hold is above every limit: the kernel refuses that as well.
    attributes.mq_maxmsg = wanted.max_messages.try_into().unwrap_or(libc::c_long::MAX);
    attributes.mq_msgsize = wanted.max_message_bytes.try_into().unwrap_or(libc::c_long::MAX);
    // SAFETY: the name ends in NUL; with O_CREAT there are a mode and attributes; all outlive the
    // call.
    into_fd(unsafe { libc::mq_open(path.as_ptr(), FLAGS, MODE, &raw const attributes) })
}

fn open(path: &CString, flags: libc::c_int) -> Result<OwnedFd, i32> {
    // SAFETY: the name ends in NUL and outlives the call; without O_CREAT nothing else is read.
    into_fd(unsafe { libc::mq_open(path.as_ptr(), libc::O_RDWR | flags) })
}

/// On Linux a queue is a descriptor, and `mq_close` is `close`.
fn into_fd(queue: libc::mqd_t) -> Result<OwnedFd, i32> {
    if queue < 0 {
        return Err(errno());
    }
    // SAFETY: `mq_open` has just given it, and nobody else has it.
    Ok(unsafe { OwnedFd::from_raw_fd(queue) })
}

fn attributes(queue: &OwnedFd) -> Result<libc::mq_attr, i32> {
    // SAFETY: all zero is a valid `mq_attr`.
    let mut attributes: libc::mq_attr = unsafe { mem::zeroed() };
    // SAFETY: fills in a structure of this frame.
    match unsafe { libc::mq_getattr(queue.as_raw_fd(), &mut attributes) } {
        0 => Ok(attributes),
        _ => Err(errno()),
    }
}

/// Tells a queue from every other that lives.
fn identity(queue: &OwnedFd) -> Result<(libc::dev_t, libc::ino_t), i32> {
    // SAFETY: all zero is a valid `stat`, a structure of plain numbers.
    let mut stat: libc::stat = unsafe { mem::zeroed() };
    // SAFETY: fills in a structure of this frame.
    match unsafe { libc::fstat(queue.as_raw_fd(), &mut stat) } {
        0 => Ok((stat.st_dev, stat.st_ino)),
        _ => Err(errno()),
    }
}

/// A deadline as the kernel takes it: by the system's clock. What was before 1970 is over, as 1970
/// is.
fn timespec(deadline: Deadline) -> libc::timespec {
    let since_1970 = |time: SystemTime| time.duration_since(SystemTime::UNIX_EPOCH);
    let end: Duration = match deadline {
        Deadline::Realtime(end) => since_1970(end).unwrap_or_default(),
        Deadline::Monotonic(end) => {
            let left = end.saturating_duration_since(Instant::now());
            since_1970(SystemTime::now()).unwrap_or_default().saturating_add(left)
        }
    };
    libc::timespec {
        tv_sec: end.as_secs().try_into().unwrap_or(i64::MAX),
        tv_nsec: end.subsec_nanos().into(),
    }
}
