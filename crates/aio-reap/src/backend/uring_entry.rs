//! Requests as entries of io_uring's submission ring.

use std::mem;

use io_uring::squeue::{self, PushError, SubmissionQueue};
use io_uring::{opcode, types};

use crate::op::{Kind, MAX_TRANSFER, Memory, Op};
use crate::raw::Sub;
use crate::slab::Batch;
use crate::statx::STATX_MASK;

/// Builds, in registers, the entry of a no-op or a plain transfer, the most frequent requests, of which
/// `done` bytes were moved before. Returns `None` for any other request.
#[inline(always)]
fn plain_entry(user_data: u64, op: &Op, done: u64) -> Option<squeue::Entry> {
    let Op { kind, memory, fd, ptr, len, offset, .. } = *op;
    let opcode = match kind {
        Kind::Nop => opcode::Nop::CODE,
        Kind::Read => opcode::Read::CODE,
        Kind::Write => opcode::Write::CODE,
        _ => return None,
    };
    if memory != Memory::PLAIN {
        return None;
    }
    let [a, b, c, d] = fd.to_ne_bytes();
    // The fields of `struct io_uring_sqe` (ABI): opcode, flags, ioprio, fd; off; addr; len,
    // rw_flags.
    let first = u64::from_ne_bytes([opcode, 0, 0, 0, a, b, c, d]);
    let len = (len - done).min(MAX_TRANSFER as u64);
    let [a, b, c, d] = (len as u32).to_ne_bytes();
    let third = u64::from_ne_bytes([a, b, c, d, 0, 0, 0, 0]);
    let addr = ptr.expose_provenance() as u64 + done;
    let words = [first, offset.wrapping_add(done), addr, third, user_data, 0, 0, 0];
    // SAFETY: an `Entry` is 64 bytes of numbers with the kernel's layout, for which every value is
    // valid.
    Some(unsafe { mem::transmute::<[u64; 8], squeue::Entry>(words) })
}

fn entry(Sub { user_data, op }: Sub) -> squeue::Entry {
    let Op { kind, memory, fd, ptr, len, offset, .. } = op;
    let fd = types::Fd(fd);
    let entry = match kind {
        Kind::Nop => opcode::Nop::new().build(),
        // The length of a transfer fits in 32 bits: `Op::rest` cut it to the kernel's limit.
        Kind::Read => match memory.vector_count() {
            None => opcode::Read::new(fd, ptr, len as u32).offset(offset).build(),
            Some(count) => opcode::Readv::new(fd, ptr.cast(), count.into()).offset(offset).build(),
        },
        Kind::Write => match memory.vector_count() {
            None => opcode::Write::new(fd, ptr, len as u32).offset(offset).build(),
            Some(count) => opcode::Writev::new(fd, ptr.cast(), count.into()).offset(offset).build(),
        },
        Kind::Fsync => opcode::Fsync::new(fd).build(),
        Kind::Fdatasync => opcode::Fsync::new(fd).flags(types::FsyncFlags::DATASYNC).build(),
        Kind::Reserve | Kind::PunchHole | Kind::ZeroRange => {
            let flags = kind.fallocate_flags().unwrap_or(0);
            opcode::Fallocate::new(fd, len).offset(offset).mode(flags).build()
        }
        Kind::WillNeed => {
            // The length in the entry has 32 bits. Advice for a shorter range is still useful.
            let len = len.min(u64::from(u32::MAX)) as libc::off_t;
            opcode::Fadvise::new(fd, len, libc::POSIX_FADV_WILLNEED).offset(offset).build()
        }
        Kind::Open => opcode::OpenAt::new(fd, ptr.cast_const().cast())
            .flags(op.flags())
            .mode(op.mode())
            .build(),
        Kind::Statx => {
            let result = op.stat_address().cast::<types::statx>();
            opcode::Statx::new(fd, ptr.cast_const().cast(), result)
                .flags(op.flags())
                .mask(STATX_MASK)
                .build()
        }
        Kind::Close => opcode::Close::new(fd).build(),
    };
    entry.user_data(user_data)
}

/// Pushes as many requests as the ring has room for. Returns their number.
pub(super) fn push_all(queue: &mut SubmissionQueue<'_>, mut batch: Batch<'_>) -> usize {
    let mut pushed = 0;
    while let Some((user_data, slot)) = batch.next_slot() {
        if push(queue, user_data, &slot.op, slot.result.done).is_err() {
            break;
        }
        pushed += 1;
    }
    pushed
}

/// Pushes the entry of a request. Each kind of entry has its own push, because an entry that came
/// from either path would be passed on the stack.
#[inline(always)]
pub(super) fn push(
    queue: &mut SubmissionQueue<'_>,
    user_data: u64,
    op: &Op,
    done: u64,
) -> Result<(), PushError> {
    match plain_entry(user_data, op, done) {
        // SAFETY: by contract 2 of `backend` the buffer and the descriptor are valid until the
        // completion.
        Some(entry) => unsafe { queue.push(&entry) },
        None => push_other(queue, Sub { user_data, op: op.rest(done) }),
    }
}

#[inline(never)]
fn push_other(queue: &mut SubmissionQueue<'_>, request: Sub) -> Result<(), PushError> {
    // SAFETY: by contract 2 of `backend` the buffer and the descriptor are valid until the
    // completion.
    unsafe { queue.push(&entry(request)) }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Compares with the entry that the io-uring crate builds for the same request.
    #[test]
    fn entries_of_transfers_are_those_of_the_crate() {
        let mut bytes = [0u8; 100];
        for kind in [Kind::Nop, Kind::Read, Kind::Write] {
            for fd in [0, 7, i32::MAX] {
                let mut op = Op { kind, fd, ..Op::NOP };
                if kind != Kind::Nop {
                    (op.ptr, op.len, op.offset) = (bytes.as_mut_ptr(), 100, 1 << 40 | 5);
                }
                let sub = Sub { user_data: 0x0123_4567_89ab_cdef, op };
                let done = if kind == Kind::Nop { 0 } else { 37 };
                let sub = Sub { op: op.rest(done), ..sub };
                let words = |entry| {
                    // SAFETY: an `Entry` is 64 bytes of numbers, all of them initialised.
                    unsafe { mem::transmute::<squeue::Entry, [u64; 8]>(entry) }
                };
                let (ours, theirs) =
                    (words(plain_entry(sub.user_data, &op, done).unwrap()), words(entry(sub)));
                let compared = if kind == Kind::Nop { 0xffff_ffff } else { u64::MAX };
                assert_eq!(ours[0] & compared & !0xff00, theirs[0] & compared & !0xff00);
                assert_eq!(ours[1..], theirs[1..], "{kind:?} {fd}");
                assert!(kind == Kind::Nop || ours[0] == theirs[0]);
            }
        }
    }
}
