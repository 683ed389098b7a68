//! A timer that signals one thread at a fixed interval.

use std::io;
use std::mem;
use std::ptr;
use std::time::Duration;

/// The timer's signal. Not `SIGALRM`, which ends a child of [`child`](crate::child) that hangs.
pub const SIGNAL: libc::c_int = libc::SIGUSR1;

/// Installs `handler` for [`SIGNAL`] in this process. The handler must be async-signal-safe.
pub fn handle(handler: extern "C" fn(libc::c_int)) {
    // SAFETY: plain data, of which zero is valid.
    let mut action: libc::sigaction = unsafe { mem::zeroed() };
    action.sa_sigaction = handler as usize;
    action.sa_flags = libc::SA_RESTART;
    // SAFETY: `action` is initialised; the caller promises that the handler is async-signal-safe.
    let rc = unsafe { libc::sigaction(SIGNAL, &action, ptr::null_mut()) };
    assert_eq!(rc, 0, "sigaction: {}", io::Error::last_os_error());
}

/// A timer that sends [`SIGNAL`] to the thread that started it, until it is dropped. A signal to
/// the process would be delivered to an idle thread.
pub struct ThreadTimer {
    timer: libc::timer_t,
}

impl ThreadTimer {
    /// Sends a signal every `interval`, which must be shorter than a second. A thread that does not
    /// run for several intervals gets one signal for all of them.
    pub fn start(interval: Duration) -> Self {
        // SAFETY: plain data, of which zero is valid.
        let mut event: libc::sigevent = unsafe { mem::zeroed() };
        event.sigev_notify = libc::SIGEV_THREAD_ID;
        event.sigev_signo = SIGNAL;
        // SAFETY: takes no arguments and touches no memory of ours.
        event.sigev_notify_thread_id = unsafe { libc::gettid() };
        let mut timer = ptr::null_mut();
        // SAFETY: `event` is initialised, and `timer` is a local variable.
        let rc = unsafe { libc::timer_create(libc::CLOCK_MONOTONIC, &mut event, &mut timer) };
        assert_eq!(rc, 0, "timer_create: {}", io::Error::last_os_error());
        let tick = libc::timespec { tv_sec: 0, tv_nsec: interval.subsec_nanos().into() };
        let spec = libc::itimerspec { it_interval: tick, it_value: tick };
        // SAFETY: the timer was just made; a null old value is allowed.
        let rc = unsafe { libc::timer_settime(timer, 0, &spec, ptr::null_mut()) };
        assert_eq!(rc, 0, "timer_settime: {}", io::Error::last_os_error());
        Self { timer }
    }
}

impl Drop for ThreadTimer {
    fn drop(&mut self) {
        // SAFETY: `start` made the timer, and only this drop deletes it.
        unsafe { libc::timer_delete(self.timer) };
    }
}
