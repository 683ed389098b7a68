//! The errno and the message of each error.

use std::io;

use super::*;

#[test]
fn every_error_has_an_errno_and_a_message() {
    let cpu = CpuId::new(9);
    for (error, errno, message) in [
        (LockError::WouldBlock, libc::EAGAIN, "another thread holds the slot"),
        (
            LockError::Deadlock,
            libc::EDEADLK,
            "this thread holds the slot, or one that must be locked after it",
        ),
        (LockError::NoSuchCpu(cpu), libc::EINVAL, "no slot for cpu 9"),
    ] {
        assert_eq!((error.errno(), error.to_string().as_str()), (errno, message));
        assert_eq!(io::Error::from(error).raw_os_error(), Some(errno));
    }
}
