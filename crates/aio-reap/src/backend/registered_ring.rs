//! Enters an io_uring by a number that the kernel keeps for this thread, if it can.
//!
//! If a call names a ring by its descriptor, the kernel looks up the file and takes and drops a
//! reference each time. A registered ring (Linux 5.18) costs none of this.

use std::io;
use std::os::fd::RawFd;
use std::ptr;

use crate::sys;

// Kernel ABI (include/uapi/linux/io_uring.h).
pub(crate) const ENTER_GETEVENTS: u32 = 1;
const ENTER_REGISTERED_RING: u32 = 1 << 4;
const REGISTER_RING_FDS: u32 = 20;
const UNREGISTER_RING_FDS: u32 = 21;

/// `struct io_uring_rsrc_update`. An `offset` of all ones requests any free number.
#[repr(C)]
struct RingUpdate {
    offset: u32,
    resv: u32,
    data: u64,
}

/// An io_uring's descriptor and its registered number. It belongs to the thread that made it, like
/// the ring.
pub(crate) struct RegisteredRing {
    ring: RawFd,
    number: Option<u32>,
}

impl RegisteredRing {
    /// Registers the ring if the kernel can do it and one of the thread's 16 numbers is free.
    ///
    /// # Safety
    ///
    /// `ring` is an io_uring's descriptor, and stays open as long as the result lives.
    pub(crate) unsafe fn new(ring: RawFd) -> Self {
        let mut update = RingUpdate { offset: u32::MAX, resv: 0, data: ring as u64 };
        // SAFETY: `ring` is an io_uring's descriptor, and the operation takes one update, into
        // which the kernel stores the number.
        let done = unsafe { register(ring, REGISTER_RING_FDS, &mut update) };
        Self { ring, number: (done == Ok(1)).then_some(update.offset) }
    }

    /// Submits up to `count` entries and waits for `wanted` completions (with [`ENTER_GETEVENTS`]).
    /// Returns how many entries the kernel consumed.
    #[inline]
    pub(crate) fn enter(&self, count: u32, wanted: u32, flags: u32) -> io::Result<usize> {
        let (ring, flags) = match self.number {
            Some(number) => (number as RawFd, flags | ENTER_REGISTERED_RING),
            None => (self.ring, flags),
        };
        let none = ptr::null::<libc::c_void>();
        // SAFETY: by the contract of `new` the ring is open. The last two arguments are empty. The
        // code that pushed the entries ensured that what they name stays valid.
        let ret = unsafe {
            libc::syscall(libc::SYS_io_uring_enter, ring, count, wanted, flags, none, 0usize)
        };
        sys::check(ret).map(|consumed| consumed as usize)
    }
}

impl Drop for RegisteredRing {
    fn drop(&mut self) {
        if let Some(offset) = self.number {
            let mut update = RingUpdate { offset, resv: 0, data: 0 };
            // SAFETY: by the contract of `new` the ring is still open, and the operation takes one
            // update. After an error the number is freed when the thread ends.
            let _ = unsafe { register(self.ring, UNREGISTER_RING_FDS, &mut update) };
        }
    }
}

/// # Safety
///
/// `ring` is an io_uring's descriptor, and `operation` takes one update.
unsafe fn register(ring: RawFd, operation: u32, update: &mut RingUpdate) -> Result<i64, i32> {
    let update = ptr::from_mut(update);
    // SAFETY: by the contract of this function the operation takes one update, and `update` lives
    // until the call returns.
    let ret = unsafe { libc::syscall(libc::SYS_io_uring_register, ring, operation, update, 1) };
    sys::check(ret).map_err(|error| error.raw_os_error().unwrap_or(libc::EIO))
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsRawFd;

    use io_uring::{IoUring, opcode};

    use super::*;

    /// Every ring works if there are more rings than numbers, and dropped rings free their numbers.
    #[test]
    fn rings_without_a_number_are_entered_all_the_same() {
        let Ok(first) = IoUring::new(2) else { return };
        drop(first);
        for _ in 0..3 {
            let mut rings: Vec<_> = (0..18).map(|_| IoUring::new(2).unwrap()).collect();
            let mut numbers = 0;
            let registered: Vec<_> = rings
                .iter()
                // SAFETY: `registered` is dropped before the rings.
                .map(|ring| unsafe { RegisteredRing::new(ring.as_raw_fd()) })
                .inspect(|registered| numbers += usize::from(registered.number.is_some()))
                .collect();
            assert!(numbers == 0 || numbers == 16, "{numbers} registered");
            for (ring, registered) in rings.iter_mut().zip(&registered) {
                // SAFETY: a no-op refers to no memory or descriptor.
                unsafe { ring.submission().push(&opcode::Nop::new().build()) }.unwrap();
                assert_eq!(registered.enter(1, 1, ENTER_GETEVENTS).unwrap(), 1);
                assert_eq!(ring.completion().next().unwrap().result(), 0);
            }
            drop(registered);
        }
    }
}
