//! Checked wrappers of the system calls that several modules need.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::time::Duration;

/// Converts the return value of a system call. Negative values become the error in `errno`.
pub(crate) fn check(ret: libc::c_long) -> io::Result<i64> {
    if ret < 0 { Err(io::Error::last_os_error()) } else { Ok(ret) }
}

/// Takes ownership of a descriptor that a system call returned.
fn owned(fd: libc::c_int) -> io::Result<OwnedFd> {
    let fd = check(fd.into())? as RawFd;
    // SAFETY: the kernel has just returned this descriptor, so it has no other owner.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Makes a non-blocking eventfd.
pub(crate) fn eventfd() -> io::Result<OwnedFd> {
    // SAFETY: the call takes no pointer.
    owned(unsafe { libc::eventfd(0, libc::EFD_CLOEXEC | libc::EFD_NONBLOCK) })
}

/// Makes a non-blocking timerfd on the monotonic clock.
pub(crate) fn timerfd() -> io::Result<OwnedFd> {
    let flags = libc::TFD_CLOEXEC | libc::TFD_NONBLOCK;
    // SAFETY: the call takes no pointer.
    owned(unsafe { libc::timerfd_create(libc::CLOCK_MONOTONIC, flags) })
}

/// Makes an epoll descriptor.
pub(crate) fn epoll() -> io::Result<OwnedFd> {
    // SAFETY: the call takes no pointer.
    owned(unsafe { libc::epoll_create1(libc::EPOLL_CLOEXEC) })
}

/// Makes `epoll` readable whenever `fd` is.
pub(crate) fn epoll_add(epoll: &OwnedFd, fd: RawFd) -> io::Result<()> {
    let mut event = libc::epoll_event { events: libc::EPOLLIN as u32, u64: fd as u64 };
    // SAFETY: `event` is a valid epoll_event for the length of the call.
    let ret =
        unsafe { libc::epoll_ctl(epoll.as_raw_fd(), libc::EPOLL_CTL_ADD, fd, &raw mut event) };
    check(ret.into()).map(drop)
}

/// Adds one to an eventfd. This fails only if the count is at its limit; the eventfd is readable
/// then.
pub(crate) fn signal(eventfd: &OwnedFd) {
    let one = 1u64;
    // SAFETY: reads eight bytes from `one`.
    unsafe { libc::write(eventfd.as_raw_fd(), (&raw const one).cast(), 8) };
}

/// Empties an eventfd. Has no effect on an empty one.
pub(crate) fn drain(fd: &OwnedFd) {
    let mut count = 0u64;
    // SAFETY: writes at most eight bytes to `count`; the descriptor is non-blocking.
    unsafe { libc::read(fd.as_raw_fd(), (&raw mut count).cast(), 8) };
}

/// Makes a timerfd expire once, `after` from now (at least one nanosecond), or never. Clears its
/// expiration.
pub(crate) fn set_timer(timer: &OwnedFd, after: Option<Duration>) -> io::Result<()> {
    let after = after.map_or(Duration::ZERO, |after| after.max(Duration::from_nanos(1)));
    let spec = libc::itimerspec {
        it_interval: libc::timespec { tv_sec: 0, tv_nsec: 0 },
        it_value: timespec(after),
    };
    // SAFETY: `spec` outlives the call; a null old value is allowed.
    let ret = unsafe {
        libc::timerfd_settime(timer.as_raw_fd(), 0, &raw const spec, std::ptr::null_mut())
    };
    check(ret.into()).map(drop)
}

/// Converts a duration. A number of seconds that does not fit becomes the largest.
pub(crate) fn timespec(duration: Duration) -> libc::timespec {
    libc::timespec {
        tv_sec: duration.as_secs().try_into().unwrap_or(i64::MAX),
        tv_nsec: duration.subsec_nanos().into(),
    }
}

/// Calls `statx` by its number, because older versions of musl have no such function.
///
/// # Safety
///
/// The path is valid and ends with a zero byte, and the 256 bytes at `result` may be written.
pub(crate) unsafe fn statx(
    fd: RawFd,
    path: *const libc::c_char,
    flags: i32,
    mask: u32,
    result: *mut u8,
) -> libc::c_long {
    // SAFETY: by the contract of this function.
    unsafe { libc::syscall(libc::SYS_statx, fd, path, flags, mask, result) }
}

/// Returns the alignment of the memory and of the offset that `statx` reports for `O_DIRECT`. Both
/// are zero if the kernel (before 6.1) or the file system does not report it.
pub(crate) fn direct_alignment(fd: BorrowedFd<'_>) -> io::Result<(u32, u32)> {
    // `struct statx` as 32-bit words, of which two are read.
    const WORDS: usize = 64;
    const MEMORY: usize = 38; // stx_dio_mem_align, byte 152
    const OFFSET: usize = 39; // stx_dio_offset_align
    let mut stat = [0_u32; WORDS];
    // SAFETY: an empty path with AT_EMPTY_PATH names the descriptor; the kernel stores 256 bytes.
    let ret = unsafe {
        let (flags, mask) = (libc::AT_EMPTY_PATH, libc::STATX_DIOALIGN);
        statx(fd.as_raw_fd(), c"".as_ptr(), flags, mask, stat.as_mut_ptr().cast())
    };
    check(ret).map(|_| (stat[MEMORY], stat[OFFSET]))
}

/// Waits until one of `fds` is readable. Returns `Ok(false)` if the time is over or a signal
/// arrived; callers check again anyway.
pub(crate) fn poll_readable(fds: &[RawFd], timeout: Option<Duration>) -> io::Result<bool> {
    let mut polled = [libc::pollfd { fd: -1, events: libc::POLLIN, revents: 0 }; 3];
    assert!(fds.len() <= polled.len());
    for (slot, &fd) in polled.iter_mut().zip(fds) {
        slot.fd = fd;
    }
    let spec = timeout.map(timespec);
    let spec = spec.as_ref().map_or(std::ptr::null(), std::ptr::from_ref);
    let count = fds.len() as libc::nfds_t;
    // SAFETY: `polled` has at least `count` entries; `spec` is null or lives in this frame; without
    // a mask the thread's own stays.
    let ret = unsafe { libc::ppoll(polled.as_mut_ptr(), count, spec, std::ptr::null()) };
    match check(ret.into()) {
        Err(error) if error.kind() == io::ErrorKind::Interrupted => Ok(false),
        done => done.map(|ready| ready > 0),
    }
}
