//! Payload buffers and the limits on them.
//!
//! Each worker has its part of the server's memory, so nothing here is shared. A connection that
//! reaches its own limit, or finds the worker's used up, is not read from until replies leave.

use aio_reap::AlignedBuf;

/// Alignment of every payload, enough for any `O_DIRECT` file.
pub(crate) const ALIGN: usize = 4096;
/// Free bytes a worker keeps for reuse; a guess.
const KEEP: usize = 32 << 20;
/// Smallest and largest class, as powers of two: 4 KiB to 32 MiB.
const SMALLEST: u32 = 12;
const CLASSES: usize = 14;

/// Bytes one connection may have in flight; two of the largest requests.
pub(crate) const PER_CONNECTION: usize = 64 << 20;
/// What a connection with nothing in flight gets even if others have used up the rest, so that
/// clients with small requests go on beside hogs.
const RESERVE: usize = 256 << 10;

/// A worker's buffers.
#[derive(Debug)]
pub(crate) struct Memory {
    free: [Vec<AlignedBuf>; CLASSES],
    free_bytes: usize,
    used: usize,
    limit: usize,
}

/// What a connection owes: bytes of buffers it holds.
#[derive(Debug, Default)]
pub(crate) struct Account {
    bytes: usize,
}

impl Memory {
    pub(crate) fn new(limit: usize) -> Self {
        Self {
            free: std::array::from_fn(|_| Vec::new()),
            free_bytes: 0,
            used: 0,
            limit: limit.max(PER_CONNECTION),
        }
    }

    /// A buffer of `len` bytes on the connection's account; `None` when a limit is reached.
    ///
    /// It holds whatever an earlier request left there.
    pub(crate) fn take(&mut self, len: usize, account: &mut Account) -> Option<AlignedBuf> {
        let class = class_of(len);
        let size = size_of(class);
        let within = account.bytes + size <= PER_CONNECTION && self.used + size <= self.limit;
        let reserve = account.bytes == 0 && size <= RESERVE;
        if !within && !reserve {
            return None;
        }
        account.bytes += size;
        self.used += size;
        let mut buf = match self.free[class].pop() {
            Some(buf) => {
                self.free_bytes -= size;
                buf
            }
            None => AlignedBuf::zeroed(size, ALIGN),
        };
        buf.set_len(len);
        Some(buf)
    }

    /// Takes a buffer back; `account` is `None` when its connection is gone.
    pub(crate) fn give(&mut self, buf: AlignedBuf, account: Option<&mut Account>) {
        let size = buf.capacity();
        self.used -= size;
        if let Some(account) = account {
            account.bytes -= size;
        }
        if self.free_bytes + size <= KEEP {
            self.free_bytes += size;
            self.free[class_of(size)].push(buf);
        }
    }

    /// Whether connections that could not get a buffer may be stuck because others hold them.
    pub(crate) fn is_tight(&self) -> bool {
        self.used * 2 > self.limit
    }
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
        let mut memory = Memory::new(0);
        let (mut hog, mut small) = (Account::default(), Account::default());
        let held: Vec<_> =
            std::iter::from_fn(|| memory.take(32 << 20, &mut hog)).take(10).collect();
        assert_eq!(held.len(), 2);
        assert!(memory.is_tight());
        assert!(memory.take(1 << 20, &mut small).is_none());
        let buf = memory.take(4096, &mut small).unwrap();
        assert!(memory.take(4096, &mut small).is_none());
        memory.give(buf, Some(&mut small));
        for buf in held {
            memory.give(buf, None);
        }
        assert_eq!((memory.used, small.bytes), (0, 0));
        assert!(memory.free_bytes <= KEEP);
        assert_eq!(memory.take(100, &mut small).unwrap().len(), 100);
    }
}
