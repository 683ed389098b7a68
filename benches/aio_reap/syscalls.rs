//! System calls of a thread, counted by the kernel at its trace point.

use std::fs::{self, File};
use std::io::{self, Read};
use std::os::fd::{FromRawFd, RawFd};

/// `struct perf_event_attr` in its first version (ABI).
#[repr(C)]
#[derive(Default)]
struct Attr {
    kind: u32,
    size: u32,
    config: u64,
    sample_period: u64,
    sample_type: u64,
    read_format: u64,
    flags: u64,
    wakeup_events: u32,
    bp_type: u32,
    config1: u64,
}

const _: () = assert!(size_of::<Attr>() == 64); // PERF_ATTR_SIZE_VER0

/// `PERF_TYPE_TRACEPOINT` (ABI).
const TRACEPOINT: u32 = 2;

/// Counts the system calls of the thread that made it.
pub(crate) struct SystemCalls(File);

impl SystemCalls {
    /// Only root can count them.
    pub(crate) fn start() -> io::Result<Self> {
        let id = "/sys/kernel/tracing/events/raw_syscalls/sys_enter/id";
        let id = fs::read_to_string(id)?;
        let config = id.trim().parse().map_err(io::Error::other)?;
        let size = size_of::<Attr>() as u32;
        let attr = Attr { kind: TRACEPOINT, size, config, ..Attr::default() };
        let (this_thread, any_cpu, no_group, flags) = (0, -1, -1, 0);
        // SAFETY: `attr` lives through the call, and says its size.
        let fd = unsafe {
            libc::syscall(
                libc::SYS_perf_event_open,
                &raw const attr,
                this_thread,
                any_cpu,
                no_group,
                flags,
            )
        };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the descriptor was just opened, and nothing else owns it.
        Ok(Self(unsafe { File::from_raw_fd(fd as RawFd) }))
    }

    /// Returns the number of calls so far, this one included.
    pub(crate) fn count(&mut self) -> io::Result<u64> {
        let mut count = [0; 8];
        self.0.read_exact(&mut count)?;
        Ok(u64::from_ne_bytes(count))
    }
}
