//! A signal to one thread, again and again.

use std::io;
use std::mem;
use std::ptr;
use std::time::Duration;

/// Not `SIGALRM`, by which a fork child of a test ends if it hangs.
pub(crate) const SIGNAL: libc::c_int = libc::SIGUSR1;

/// Lets `handler` run for every [`SIGNAL`] to this process. It must be fit for a signal handler.
pub(crate) fn handle(handler: extern "C" fn(libc::c_int)) {
    // SAFETY: plain data, of which zero is valid.
    let mut action: libc::sigaction = unsafe { mem::zeroed() };
    action.sa_sigaction = handler as usize;
    action.sa_flags = libc::SA_RESTART;
    // SAFETY: `action` is initialised; the handler is the caller's affair.
    let rc = unsafe { libc::sigaction(SIGNAL, &action, ptr::null_mut()) };
    assert_eq!(rc, 0, "sigaction: {}", io::Error::last_os_error());
}

/// A timer that signals the thread that made it, for as long as it lives. A signal to the process
/// would go to an idle thread.
pub(crate) struct Alarms {
    timer: libc::timer_t,
}

impl Alarms {
    /// One every `interval`, less than a second. Nominal: a thread that does not run gets one for all
    /// that it missed.
    pub(crate) fn start(interval: Duration) -> Self {
        // SAFETY: plain data, of which zero is valid.
        let mut event: libc::sigevent = unsafe { mem::zeroed() };
        event.sigev_notify = libc::SIGEV_THREAD_ID;
        event.sigev_signo = SIGNAL;
        // SAFETY: takes no arguments and touches no memory of ours.
        event.sigev_notify_thread_id = unsafe { libc::gettid() };
        let mut timer = ptr::null_mut();
        // SAFETY: `event` is initialised, and `timer` is ours to write.
        let rc = unsafe { libc::timer_create(libc::CLOCK_MONOTONIC, &mut event, &mut timer) };
        assert_eq!(rc, 0, "timer_create: {}", io::Error::last_os_error());
        let tick = libc::timespec { tv_sec: 0, tv_nsec: interval.subsec_nanos().into() };
        let spec = libc::itimerspec { it_interval: tick, it_value: tick };
        // SAFETY: the timer just made; the old value is not asked for.
        let rc = unsafe { libc::timer_settime(timer, 0, &spec, ptr::null_mut()) };
        assert_eq!(rc, 0, "timer_settime: {}", io::Error::last_os_error());
        Self { timer }
    }
}

impl Drop for Alarms {
    fn drop(&mut self) {
        // SAFETY: the timer of `start`, once.
        unsafe { libc::timer_delete(self.timer) };
    }
}
