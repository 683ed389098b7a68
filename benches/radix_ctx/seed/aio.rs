//! Linux AIO by its system calls, one request at a time: what the measured program did.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;

/// Bytes of a request.
pub(super) const BLOCK: usize = 1024;

/// A context of the kernel's with room for one request, by the number that it goes under.
///
/// It is left to the end of the process. There all of them end together; destroyed one by one, each
/// waits for a grace period of the kernel, and 512 take 16 s.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(transparent)]
pub(crate) struct Handle(libc::c_ulong);

/// `struct iocb` of the kernel's interface, in the byte order of the machines that we run on.
#[repr(C)]
#[derive(Default)]
struct Iocb {
    data: u64,
    key: u32,
    rw_flags: u32,
    opcode: u16,
    priority: i16,
    fd: u32,
    buf: u64,
    bytes: u64,
    offset: i64,
    reserved: u64,
    flags: u32,
    resfd: u32,
}

const _: () = assert!(size_of::<Iocb>() == 64 && cfg!(target_endian = "little"));

/// `struct io_event`.
#[repr(C)]
#[derive(Default)]
struct Event {
    data: u64,
    iocb: u64,
    res: i64,
    res2: i64,
}

const READ: u16 = 0;
const WRITE: u16 = 1;

/// A request on its way: the block, and what the kernel reads of it.
pub(super) struct Request {
    iocb: Box<Iocb>,
    /// Only the kernel looks at it.
    _block: Box<[u8; BLOCK]>,
}

impl Request {
    /// Transfers blocks of `file` to and from memory of its own.
    pub(super) fn new(file: &File) -> Self {
        let mut block = Box::new([7; BLOCK]);
        let iocb = Iocb {
            fd: file.as_raw_fd() as u32,
            buf: block.as_mut_ptr() as u64,
            bytes: BLOCK as u64,
            ..Iocb::default()
        };
        Self { iocb: Box::new(iocb), _block: block }
    }

    /// The next one reads, or else writes, the block at `offset`.
    pub(super) fn aim(&mut self, read: bool, offset: usize) {
        self.iocb.opcode = if read { READ } else { WRITE };
        self.iocb.offset = offset as i64;
    }
}

impl Handle {
    /// Makes a context.
    pub(super) fn setup() -> io::Result<Self> {
        let mut handle: libc::c_ulong = 0;
        // SAFETY: the kernel writes the handle, which is ours, before it returns.
        let rc = unsafe { libc::syscall(libc::SYS_io_setup, 1, &raw mut handle) };
        if rc == 0 { Ok(Self(handle)) } else { Err(io::Error::last_os_error()) }
    }
}

/// Hands the request to the kernel.
pub(super) fn submit(handle: Handle, request: &mut Request) {
    let mut list = [&raw mut *request.iocb];
    // SAFETY: the kernel reads the list and the iocb in the call; the block that the iocb names is
    // on the heap and lives until `reap`, which every submission here is followed by.
    let rc = unsafe { libc::syscall(libc::SYS_io_submit, handle.0, 1, list.as_mut_ptr()) };
    assert_eq!(rc, 1, "io_submit: {}", io::Error::last_os_error());
}

/// Waits until the request is done.
pub(super) fn reap(handle: Handle) {
    let mut event = Event::default();
    let none = std::ptr::null_mut::<libc::timespec>();
    // SAFETY: the kernel writes one event, to memory of ours, before it returns; no time limit.
    let rc = unsafe { libc::syscall(libc::SYS_io_getevents, handle.0, 1, 1, &raw mut event, none) };
    assert_eq!(rc, 1, "io_getevents: {}", io::Error::last_os_error());
    assert_eq!(event.res, BLOCK as i64, "a request failed");
}

/// A file of that many bytes in memory, all of them written.
pub(super) fn file_in_memory(bytes: usize) -> io::Result<File> {
    let mut file = tempfile::tempfile_in("/dev/shm")?;
    let mut zeros = io::Read::take(io::repeat(0), bytes as u64);
    io::copy(&mut zeros, &mut file)?;
    Ok(file)
}
