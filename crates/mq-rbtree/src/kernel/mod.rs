//! The kernel's own POSIX message queue, for communication between processes and for comparisons.
//!
//! ```text
//!  KernelQueue --+-- blocking     a descriptor whose calls wait, until a deadline of CLOCK_REALTIME
//!                +-- nonblocking  the same queue, opened with O_NONBLOCK: EAGAIN instead
//! ```

mod limits;
mod notify;
mod open_error;
mod sys;

use std::fmt::{self, Write};
use std::io;
use std::mem;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::ptr;
use std::time::{Duration, Instant, SystemTime};

use percpu::sync::native::atomic::{AtomicU64, Ordering};

pub use self::open_error::OpenError;
use self::sys::{into_fd, result, uninterrupted};
use crate::deadline::{Deadline, Wait};
use crate::error::{NotifyError, ReceiveError, SendError, SendRefused};
use crate::posix::{Attributes, Callback, MessageQueue};

/// A POSIX message queue of the kernel (`mq_overview(7)`). Needs the feature `kernel`.
///
/// Its operations are those of [`MessageQueue`], and each is a system call. A call that a signal
/// interrupts is repeated, unless its [`Wait`] is interruptible. After a handler with `SA_RESTART`
/// the kernel repeats it in any case, also with a deadline. The queue uses two descriptors, closed
/// on `exec`.
///
/// It differs from [`Queue`](crate::Queue):
///
/// - Waiting threads are served by their scheduling priority, then in the order of arrival. The
///   urgency of a [`Wait`] is ignored.
/// - The kernel has deadlines of the system clock only. A monotonic deadline is converted, and
///   converted again if the wait ended too early. If the clock is set back during a wait, the wait
///   ends later by that much.
/// - A received message has the capacity of the longest possible one.
/// - A notification is registered for the process. It ends when the process closes *any* descriptor
///   of the queue, also when another `KernelQueue` of the same name is dropped.
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
    /// Creates a queue without a name. No other process can open it, and it ends with its
    /// descriptors.
    ///
    /// # Errors
    ///
    /// [`OpenError`] names the limit of the system that was reached, if it was one.
    pub fn new(attributes: Attributes) -> Result<Self, OpenError> {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        loop {
            // Ordering: Relaxed; only the numbers must differ.
            let number = NEXT.fetch_add(1, Ordering::Relaxed);
            let mut name = Name::new();
            write!(name, "/mq-rbtree.{}.{number}", std::process::id())
                .map_err(|_| OpenError::BadName)?;
            match Self::create_named(&name, attributes) {
                // The name is left from a killed process of this id, or belongs to a process of
                // another container.
                Err(OpenError::Exists) => {}
                made => {
                    if made.is_ok() {
                        name.unlink()?;
                    }
                    return made;
                }
            }
        }
    }

    /// Creates a queue with a name, for processes of this user, whatever the umask. The name is `/` and 1
    /// to 255 bytes without a `/`.
    ///
    /// The queue and its messages exist until [`unlink`](Self::unlink).
    ///
    /// # Errors
    ///
    /// [`OpenError::Exists`], or another [`OpenError`].
    pub fn create(name: &str, attributes: Attributes) -> Result<Self, OpenError> {
        Self::create_named(&Name::checked(name)?, attributes)
    }

    fn create_named(path: &Name, attributes: Attributes) -> Result<Self, OpenError> {
        if attributes.max_messages == 0 || attributes.max_message_bytes == 0 {
            return Err(OpenError::NoRoom);
        }
        let blocking =
            create(path, attributes).map_err(|errno| OpenError::of_create(errno, attributes))?;
        let made = set_mode(&blocking).and_then(|()| Self::with_nonblocking(blocking, path));
        made.map_err(|errno| {
            let _unlinked = path.unlink();
            OpenError::of_open(errno) // the creation has passed the limits of queues
        })
    }

    /// Opens an existing queue.
    ///
    /// # Errors
    ///
    /// [`OpenError::NotFound`], or another [`OpenError`].
    pub fn open(name: &str) -> Result<Self, OpenError> {
        let path = Name::checked(name)?;
        let blocking = open(&path, 0).map_err(OpenError::of_open)?;
        Self::with_nonblocking(blocking, &path).map_err(OpenError::of_open)
    }

    /// Removes the name of a queue. Processes that have the queue open continue to use it, and it
    /// ends with the last of them.
    ///
    /// # Errors
    ///
    /// [`OpenError::NotFound`], or another [`OpenError`].
    pub fn unlink(name: &str) -> Result<(), OpenError> {
        Name::checked(name)?.unlink()
    }

    /// Opens the second descriptor.
    fn with_nonblocking(mut blocking: OwnedFd, path: &Name) -> Result<Self, i32> {
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
            // The queue was unlinked and another one made in its place.
            blocking = open(path, 0)?;
        }
    }

    /// Calls `call` with the descriptor and the deadline that `wait` requires.
    fn transfer(
        &self,
        wait: Wait,
        mut call: impl FnMut(libc::mqd_t, *const libc::timespec) -> isize,
    ) -> Result<usize, i32> {
        let (nonblocking, blocking) = (self.nonblocking.as_raw_fd(), self.blocking.as_raw_fd());
        let mut call = |queue, end| match wait.is_interruptible() {
            true => result(call(queue, end)),
            false => uninterrupted(|| call(queue, end)),
        };
        if wait.is_no() {
            return call(nonblocking, ptr::null());
        }
        let Some(deadline) = wait.deadline() else {
            return call(blocking, ptr::null());
        };
        loop {
            let end = timespec(deadline);
            match call(blocking, &raw const end) {
                // The two clocks have drifted apart since the conversion.
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
            // SAFETY: `bytes` and `len` describe `message`; `end` is null, or points to a
            // `timespec` that outlives the call.
            unsafe { libc::mq_timedsend(queue, bytes, len, priority, end) as isize }
        });
        sent.map(drop).map_err(|errno| SendError {
            value: message,
            reason: match errno {
                libc::EAGAIN => SendRefused::Full,
                libc::ETIMEDOUT => SendRefused::Timeout,
                libc::EINTR => SendRefused::Interrupted,
                libc::EMSGSIZE => SendRefused::TooLong {
                    limit: self.attributes.max_message_bytes.try_into().unwrap_or(u32::MAX),
                },
                libc::EINVAL => SendRefused::BadPriority { priority }, // the `timespec` is valid
                libc::ENOMEM => SendRefused::NoMemory,
                _ => SendRefused::System(errno),
            },
        })
    }

    fn receive_with(&self, wait: Wait) -> Result<(Vec<u8>, u32), ReceiveError> {
        let (mut message, mut priority) = (Vec::<u8>::new(), 0);
        let len = self.attributes.max_message_bytes;
        // The memory is allocated before the receive, so that no message is lost.
        message.try_reserve_exact(len).map_err(|_| ReceiveError::NoMemory)?;
        let received = self.transfer(wait, |queue, end| {
            let bytes = message.as_mut_ptr().cast();
            // SAFETY: `bytes` has room for `len` bytes, `priority` is a local variable, and `end`
            // is null or points to a `timespec` that outlives the call.
            unsafe { libc::mq_timedreceive(queue, bytes, len, &mut priority, end) }
        });
        let len = received.map_err(|errno| match errno {
            libc::EAGAIN => ReceiveError::Empty,
            libc::ETIMEDOUT => ReceiveError::Timeout,
            libc::EINTR => ReceiveError::Interrupted,
            libc::ENOMEM => ReceiveError::NoMemory,
            _ => ReceiveError::System(errno),
        })?;
        // SAFETY: the kernel has written `len` bytes, and not more than the room it was given.
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

    /// The callback is dropped by its thread soon afterwards.
    fn cancel_notify(&self) {
        notify::cancel(self.as_fd());
    }
}

/// Returns the blocking descriptor, for `poll` and similar calls: readable while there is a
/// message, writable while there is room.
impl AsFd for KernelQueue {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.blocking.as_fd()
    }
}

/// A name as a C string. It is not allocated, so that a queue can be made and unlinked without memory.
struct Name {
    /// A slash, the name, and NUL.
    bytes: [u8; LONGEST_NAME + 2],
    len: usize,
}

const LONGEST_NAME: usize = libc::NAME_MAX as usize;

impl Name {
    fn new() -> Self {
        Self { bytes: [0; LONGEST_NAME + 2], len: 0 }
    }

    /// Copies the name, if it is a valid one.
    fn checked(name: &str) -> Result<Self, OpenError> {
        let mut copy = Self::new();
        match name.strip_prefix('/') {
            None | Some("" | "." | "..") => Err(OpenError::BadName),
            Some(rest) if rest.contains(['/', '\0']) => Err(OpenError::BadName),
            Some(_) => copy.write_str(name).map_err(|_| OpenError::BadName),
        }?;
        Ok(copy)
    }

    fn as_ptr(&self) -> *const libc::c_char {
        self.bytes.as_ptr().cast()
    }

    fn unlink(&self) -> Result<(), OpenError> {
        // SAFETY: the name ends in NUL and outlives the call.
        result(unsafe { libc::mq_unlink(self.as_ptr()) }).map_err(OpenError::of_open)?;
        Ok(())
    }
}

/// Refuses what does not fit, with a NUL behind it.
impl Write for Name {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        let end = self.len + text.len();
        let to = self.bytes[..=LONGEST_NAME].get_mut(self.len..end).ok_or(fmt::Error)?;
        to.copy_from_slice(text.as_bytes());
        self.len = end;
        Ok(())
    }
}

/// The mode of a new queue.
const MODE: libc::mode_t = 0o600;

fn create(path: &Name, wanted: Attributes) -> Result<OwnedFd, i32> {
    const FLAGS: libc::c_int = libc::O_RDWR | libc::O_CREAT | libc::O_EXCL;
    // SAFETY: all zero is a valid `mq_attr`, a structure of plain numbers.
    let mut attributes: libc::mq_attr = unsafe { mem::zeroed() };
    // A value that a `long` cannot hold is above every limit, and so is the one passed here.
    attributes.mq_maxmsg = wanted.max_messages.try_into().unwrap_or(libc::c_long::MAX);
    attributes.mq_msgsize = wanted.max_message_bytes.try_into().unwrap_or(libc::c_long::MAX);
    // SAFETY: the name ends in NUL. With O_CREAT the call takes a mode and attributes. All outlive
    // the call.
    into_fd(unsafe { libc::mq_open(path.as_ptr(), FLAGS, MODE, &raw const attributes) })
}

/// Gives a new queue its whole mode: the umask may have taken from it what the second open needs.
fn set_mode(queue: &OwnedFd) -> Result<(), i32> {
    // SAFETY: `fchmod` takes two integers.
    result(unsafe { libc::fchmod(queue.as_raw_fd(), MODE) })?;
    Ok(())
}

fn open(path: &Name, flags: libc::c_int) -> Result<OwnedFd, i32> {
    // SAFETY: the name ends in NUL and outlives the call. Without O_CREAT the call takes no more
    // arguments.
    into_fd(unsafe { libc::mq_open(path.as_ptr(), libc::O_RDWR | flags) })
}

fn attributes(queue: &OwnedFd) -> Result<libc::mq_attr, i32> {
    // SAFETY: all zero is a valid `mq_attr`, a structure of plain numbers.
    let mut attributes: libc::mq_attr = unsafe { mem::zeroed() };
    // SAFETY: `mq_getattr` writes to a structure of this frame.
    result(unsafe { libc::mq_getattr(queue.as_raw_fd(), &mut attributes) })?;
    Ok(attributes)
}

/// Returns a value that distinguishes the queue from every other existing one.
fn identity(queue: &OwnedFd) -> Result<(libc::dev_t, libc::ino_t), i32> {
    // SAFETY: all zero is a valid `stat`, a structure of plain numbers.
    let mut stat: libc::stat = unsafe { mem::zeroed() };
    // SAFETY: `fstat` writes to a structure of this frame.
    result(unsafe { libc::fstat(queue.as_raw_fd(), &mut stat) })?;
    Ok((stat.st_dev, stat.st_ino))
}

/// Converts a deadline to the system clock, as the kernel requires. A time before 1970 becomes
/// 1970: both are over.
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
