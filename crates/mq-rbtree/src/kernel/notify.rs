//! Notifications of the kernel that a queue is no longer empty.
//!
//! The kernel can send a signal, or a message to a netlink socket, on which C libraries base
//! `SIGEV_THREAD`. This module uses the socket, and one thread for each registration, which ends
//! with it:
//!
//! ```text
//!  register            the kernel                            the thread
//!  creates a socket                                          waits for the lock
//!  registers it        sends 32 bytes to the socket, once:
//!  unlocks             a send came, or it was removed   ->   reads them, calls or not, exits
//! ```
//!
//! A registration is removed by `cancel`, and when the process closes a descriptor of the queue. So
//! no thread is left behind.

use std::mem;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};
use std::ptr;

use percpu::sync::{Arc, Mutex, thread};

use super::sys::{into_fd, result, uninterrupted};
use crate::error::{NotifyError, NotifyRefused};
use crate::posix::Callback;

/// The length of the kernel's message: bytes that were registered, with the last one replaced. ABI.
const COOKIE: usize = 32;
/// The value of the last byte if a message came. ABI.
const WOKEN: u8 = 1;

pub(super) fn register(
    queue: BorrowedFd<'_>,
    callback: Callback,
) -> Result<(), NotifyError<Callback>> {
    let refuse = |callback, errno| {
        let reason = match errno {
            libc::EBUSY => NotifyRefused::Busy,
            libc::ENOMEM => NotifyRefused::NoMemory,
            _ => NotifyRefused::System(errno),
        };
        Err(NotifyError { callback, reason })
    };
    let socket = match socket() {
        Ok(socket) => socket,
        Err(errno) => return refuse(callback, errno),
    };
    // The thread is started first, so that a failure to start it is reported before the
    // registration.
    let pending = Arc::new(Mutex::new(None::<(OwnedFd, Callback)>));
    let of_thread = Arc::clone(&pending);
    let mut held = pending.lock();
    let started = thread::Builder::new().name("mq-notify".to_owned()).spawn(move || {
        let pending = of_thread.lock().take();
        if let Some((socket, callback)) = pending {
            if wait_for_message(&socket) {
                drop(socket);
                callback();
            }
        }
    });
    if let Err(error) = started {
        return refuse(callback, error.raw_os_error().unwrap_or(libc::EAGAIN));
    }
    if let Err(errno) = register_socket(queue, &socket) {
        return refuse(callback, errno);
    }
    *held = Some((socket, callback));
    Ok(())
}

pub(super) fn cancel(queue: BorrowedFd<'_>) {
    let nothing = ptr::null::<libc::sigevent>();
    // A null event removes the registration of this process, if there is one.
    // SAFETY: the descriptor is open, and the null pointer is not read.
    unsafe { libc::syscall(libc::SYS_mq_notify, queue.as_raw_fd(), nothing) };
}

fn socket() -> Result<OwnedFd, i32> {
    // SAFETY: `socket` takes three integers.
    into_fd(unsafe { libc::socket(libc::AF_NETLINK, libc::SOCK_RAW | libc::SOCK_CLOEXEC, 0) })
}

/// Registers the socket by a plain system call: the C library's `mq_notify` would create a socket
/// of its own.
fn register_socket(queue: BorrowedFd<'_>, socket: &OwnedFd) -> Result<(), i32> {
    let mut cookie = [0_u8; COOKIE];
    // SAFETY: all zero is a valid `sigevent`, a structure of plain numbers and pointers.
    let mut event: libc::sigevent = unsafe { mem::zeroed() };
    event.sigev_notify = libc::SIGEV_THREAD;
    event.sigev_signo = socket.as_raw_fd();
    event.sigev_value.sival_ptr = cookie.as_mut_ptr().cast();
    // SAFETY: the kernel reads the event and the cookie during the call.
    result(unsafe { libc::syscall(libc::SYS_mq_notify, queue.as_raw_fd(), &raw const event) })?;
    Ok(())
}

/// Waits for the kernel's message. Returns false if the registration was removed.
fn wait_for_message(socket: &OwnedFd) -> bool {
    let mut cookie = [0_u8; COOKIE];
    let received = uninterrupted(|| {
        // SAFETY: the kernel writes at most the length of the array.
        unsafe { libc::recv(socket.as_raw_fd(), cookie.as_mut_ptr().cast(), COOKIE, 0) }
    });
    received == Ok(COOKIE) && cookie[COOKIE - 1] == WOKEN
}
