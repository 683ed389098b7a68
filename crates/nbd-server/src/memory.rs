//! Payload buffers of a worker, with limits for the worker and for each connection.
//!
//! Each worker has its own part of the server's memory and shares none. A connection that reaches
//! its own limit, or the worker's, is not read from until replies have left. Large requests and
//! small ones have a budget each, half of the worker's memory, and every connection has a small
//! reserve, so that large clients do not stop others. Freed memory goes to the connection that has
//! waited longest.
//!
//! The system may have less memory than these limits allow (`ulimit -v`, a container). If it has no
//! memory for a buffer, the buffer's request fails, and the server continues.

use std::sync::OnceLock;

use aio_reap::AlignedBuf;

/// Alignment of every payload, enough for any `O_DIRECT` file.
pub(crate) const ALIGN: usize = 4096;
/// Most free bytes that a worker keeps for reuse.
const KEEP: usize = 32 << 20;
/// Smallest and largest class, as powers of two: 4 KiB to 32 MiB.
const SMALLEST: u32 = 12;
const CLASSES: usize = 14;

/// Least memory of a worker: each budget is enough for the largest request.
pub(crate) const LEAST: usize = 2 * LARGEST;
/// The size of the largest buffer.
pub(crate) const LARGEST: usize = 32 << 20;
/// Longest small request. `qemu-img convert` requests this much at a time.
const SMALL: usize = 2 << 20;
/// The memory of a worker divided by the most memory of a connection. A connection may always hold
/// one request.
const SHARE: usize = 4;
/// Memory that a connection may use even if others have used up the rest: a queue of 4 KiB
/// requests.
pub(crate) const RESERVE: usize = 256 << 10;

/// Bytes that the system must have left after the allocation of a buffer. Many small allocations (a
/// place in a queue, a context) would end the process if they failed, so no buffer takes the last
/// memory from them.
const HEADROOM: usize = 1 << 20;
/// Longest write of zeros, for a file system that cannot make zeros itself.
pub(crate) const ZEROS: usize = 1 << 20;
/// Most zeros written for one request in this way: the longest range of a compact header. An
/// extended header's length could keep the disk, and a thread of the cache, busy for days.
pub(crate) const MOST_ZEROS: u64 = u32::MAX as u64;

/// Returns [`ZEROS`] zero bytes, shared by all requests. `None` if there is no memory for them.
pub(crate) fn zeros() -> Option<&'static [u8]> {
    static ZERO: OnceLock<AlignedBuf> = OnceLock::new();
    if let Some(zeros) = ZERO.get() {
        return Some(zeros);
    }
    let zeros = AlignedBuf::try_zeroed(ZEROS, ALIGN)?;
    Some(ZERO.get_or_init(|| zeros))
}

/// The free buffers of a worker, and its budgets.
#[derive(Debug)]
pub(crate) struct BufferPool {
    free: [Vec<AlignedBuf>; CLASSES],
    free_bytes: usize,
    small: Budget,
    large: Budget,
}

#[derive(Debug)]
struct Budget {
    used: usize,
    limit: usize,
    /// A connection was refused memory of this budget. No connection gets more than its reserve
    /// until the next [`forget_refusals`](BufferPool::forget_refusals).
    awaited: bool,
}

/// The bytes of buffers that a connection holds.
#[derive(Debug, Default)]
pub(crate) struct Account {
    bytes: usize,
}

/// The limit for which a connection's next request waits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Limit {
    /// The connection's own limits: replies must leave, or requests end.
    Connection,
    /// Other connections hold the worker's memory or its places for requests.
    Worker,
}

impl BufferPool {
    pub(crate) fn new(limit: usize) -> Self {
        let budget = || Budget { used: 0, limit: limit.max(LEAST) / 2, awaited: false };
        let free = std::array::from_fn(|_| Vec::new());
        Self { free, free_bytes: 0, small: budget(), large: budget() }
    }

    /// Returns the bytes of buffers in use.
    #[cfg(test)]
    pub(crate) fn used(&self) -> usize {
        self.small.used + self.large.used
    }

    /// Lets refused connections try again, in the order in which they wait.
    pub(crate) fn forget_refusals(&mut self) {
        (self.small.awaited, self.large.awaited) = (false, false);
    }

    fn budget(&mut self, size: usize) -> &mut Budget {
        if size <= SMALL { &mut self.small } else { &mut self.large }
    }

    /// Returns a buffer of `len` bytes, and charges the connection's account. `None` if the system has no
    /// memory for it now.
    ///
    /// The buffer has the content that an earlier request left in it.
    pub(crate) fn acquire(
        &mut self,
        len: usize,
        account: &mut Account,
    ) -> Result<Option<AlignedBuf>, Limit> {
        let class = class_of(len);
        let size = size_of(class);
        let held = account.bytes + size;
        let budget = self.budget(size);
        if held > RESERVE {
            if account.bytes > 0 && held > (2 * budget.limit / SHARE).max(LARGEST) {
                return Err(Limit::Connection);
            }
            if budget.awaited || budget.used + size > budget.limit {
                budget.awaited = true;
                return Err(Limit::Worker);
            }
        }
        let kept = self.free[class].pop().inspect(|_| self.free_bytes -= size);
        let buf = kept.or_else(|| allocate(size)).or_else(|| {
            self.free_all();
            allocate(size)
        });
        let Some(mut buf) = buf else { return Ok(None) };
        self.budget(size).used += size;
        account.bytes += size;
        buf.set_len(len);
        Ok(Some(buf))
    }

    /// Returns whether the system has `bytes` bytes for the replies of a handshake. They may use
    /// half of [`HEADROOM`], so that a client can negotiate while buffers hold all other memory.
    pub(crate) fn has_room_for_handshake(&mut self, bytes: usize) -> bool {
        let bytes = bytes + HEADROOM / 2;
        has_room(bytes) || {
            self.free_all();
            has_room(bytes)
        }
    }

    /// Returns all free buffers to the system.
    fn free_all(&mut self) {
        self.free.iter_mut().for_each(Vec::clear);
        self.free_bytes = 0;
    }

    /// Takes back a buffer. `account` is `None` if its connection is closed.
    pub(crate) fn release(&mut self, buf: AlignedBuf, account: Option<&mut Account>) {
        let size = buf.capacity();
        self.budget(size).used -= size;
        if let Some(account) = account {
            account.bytes -= size;
        }
        let free = &mut self.free[class_of(size)];
        if self.free_bytes + size <= KEEP && free.try_reserve(1).is_ok() {
            self.free_bytes += size;
            free.push(buf);
        }
    }
}

/// Allocates a buffer, if the system then has [`HEADROOM`] left.
fn allocate(size: usize) -> Option<AlignedBuf> {
    AlignedBuf::try_zeroed(size, ALIGN).filter(|_| has_room(HEADROOM))
}

/// Reserves `more` bytes. Returns whether the system has the memory and, for more than a page,
/// [`HEADROOM`] in addition.
pub(crate) fn reserve(bytes: &mut Vec<u8>, more: usize) -> bool {
    bytes.capacity() - bytes.len() >= more
        || bytes.try_reserve(more).is_ok() && (more <= ALIGN || has_room(HEADROOM))
}

/// Returns whether the system has `bytes` more bytes for this process now.
fn has_room(bytes: usize) -> bool {
    let (access, kind) =
        (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
    // SAFETY: the kernel chooses the address, so the mapping replaces no other one.
    let probe = unsafe { libc::mmap(std::ptr::null_mut(), bytes, access, kind, -1, 0) };
    // SAFETY: the mapping was made above and has this length, and no reference points into it.
    probe != libc::MAP_FAILED && unsafe { libc::munmap(probe, bytes) } == 0
}

fn class_of(len: usize) -> usize {
    let bits = usize::BITS - len.saturating_sub(1).leading_zeros();
    (bits.max(SMALLEST) - SMALLEST) as usize
}

fn size_of(class: usize) -> usize {
    1 << (class + SMALLEST as usize)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn classes_are_powers_of_two() {
        for (len, size) in [(0, 4096), (1, 4096), (4096, 4096), (4097, 8192), (32 << 20, 32 << 20)]
        {
            assert_eq!(size_of(class_of(len)), size, "{len}");
        }
        assert_eq!(class_of(32 << 20), CLASSES - 1);
    }

    #[test]
    fn limits_hold_and_the_reserve_is_always_there() {
        let mut memory = BufferPool::new(0);
        let (mut hog, mut other) = (Account::default(), Account::default());
        let held = memory.acquire(32 << 20, &mut hog).unwrap().unwrap();
        assert_eq!(memory.acquire(4096, &mut hog).unwrap_err(), Limit::Connection);
        // The budget of small requests is untouched.
        assert_eq!(memory.acquire(3 << 20, &mut other).unwrap_err(), Limit::Worker);
        let small: Vec<_> =
            (0..16).map(|_| memory.acquire(2 << 20, &mut other).unwrap().unwrap()).collect();
        let mut third = Account::default();
        assert_eq!(memory.acquire(1 << 20, &mut third).unwrap_err(), Limit::Worker);
        let queue: Vec<_> =
            (0..64).map(|_| memory.acquire(4096, &mut third).unwrap().unwrap()).collect();
        assert_eq!(memory.acquire(4096, &mut third).unwrap_err(), Limit::Worker);
        for buf in queue {
            memory.release(buf, Some(&mut third));
        }
        for buf in small {
            memory.release(buf, Some(&mut other));
        }
        memory.release(held, None);
        assert_eq!((memory.small.used, memory.large.used), (0, 0));
        assert_eq!((third.bytes, other.bytes), (0, 0));
        assert!(memory.free_bytes <= KEEP);
        assert_eq!(memory.acquire(100, &mut third).unwrap().unwrap().len(), 100);
    }

    #[test]
    fn awaited_memory_is_kept_for_the_waiting_connection() {
        let mut memory = BufferPool::new(0);
        let (mut hog, mut account) = (Account::default(), Account::default());
        let held = memory.acquire(32 << 20, &mut hog).unwrap().unwrap();
        assert_eq!(memory.acquire(32 << 20, &mut account).unwrap_err(), Limit::Worker);
        memory.release(held, Some(&mut hog));
        assert_eq!(memory.acquire(3 << 20, &mut hog).unwrap_err(), Limit::Worker);
        memory.forget_refusals();
        assert!(memory.acquire(32 << 20, &mut account).unwrap().is_some());
    }
}
