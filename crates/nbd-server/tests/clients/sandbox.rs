//! A process that the kernel refuses `io_uring_setup`, as container runtimes do by default.

use std::io;

use libc::{sock_filter, sock_fprog};

/// Where the filter's input, `struct seccomp_data`, has the system call's number.
const NUMBER: u32 = 0;

const fn filter(code: u32, on_match: u8, k: u32) -> sock_filter {
    // The numbers of instructions are below 2^16; a jump's `else` is the next instruction.
    sock_filter { code: code as u16, jt: on_match, jf: 0, k }
}

static REFUSE_URING: [sock_filter; 4] = [
    filter(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 0, NUMBER),
    filter(libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K, 1, libc::SYS_io_uring_setup as u32),
    filter(libc::BPF_RET | libc::BPF_K, 0, libc::SECCOMP_RET_ALLOW),
    filter(libc::BPF_RET | libc::BPF_K, 0, libc::SECCOMP_RET_ERRNO | libc::EPERM as u32),
];

/// From now on `io_uring_setup` gives EPERM in this process and what it executes. Makes two system
/// calls, neither allocates nor locks.
pub(crate) fn refuse_uring() -> io::Result<()> {
    // Without this only root could install a filter.
    // SAFETY: this prctl takes plain numbers.
    if unsafe { libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) } != 0 {
        return Err(io::Error::last_os_error());
    }
    let program = sock_fprog {
        len: REFUSE_URING.len() as u16,
        // The kernel copies the program and writes nothing.
        filter: REFUSE_URING.as_ptr().cast_mut(),
    };
    // SAFETY: `program` and the static instructions it points to are whole and outlive the call,
    // which only reads them.
    let ret = unsafe {
        libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, &raw const program, 0, 0)
    };
    if ret != 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}
