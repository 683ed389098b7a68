//! io_uring, through the io-uring crate.
//!
//! The ring is set up for one thread that enters the kernel often (`COOP_TASKRUN`,
//! `SINGLE_ISSUER`): a completion does not interrupt user code but is posted when the thread next
//! enters the kernel. `TASKRUN_FLAG` shows that completions wait to be posted. A peek that sees it
//! enters the kernel, so no completion appears late.

use std::mem::ManuallyDrop;
use std::os::fd::{AsRawFd, RawFd};
use std::ptr::NonNull;
use std::time::Duration;
use std::{io, mem};

use io_uring::cqueue::CompletionQueue;
use io_uring::squeue::{self, PushError, SubmissionQueue};
use io_uring::{EnterFlags, IoUring, Submitter, opcode, types};

use super::Backend;
use crate::completion_state::CompletionState;
use crate::op::{Kind, MAX_TRANSFER, Memory, Op, RawCompletion, STATX_MASK, Stop, Sub, Submitted};
use crate::slab::Batch;

/// The user data of cancellations. No slot has it, because indices are below 2^24.
const CANCELLATION: u64 = u64::MAX;

/// The backend on io_uring.
pub(crate) struct Uring {
    /// Enters the ring, by a number that the kernel keeps for this thread if one of its 16 is free
    /// (Linux 5.18): a descriptor would be looked up each time.
    submitter: Submitter<'static>,
    /// The producer's side of the submission ring. The staged entries are those that it has not
    /// published: the kernel does not know them, and a new `queue` starts before them. It is not
    /// dropped, because that would publish them.
    queue: ManuallyDrop<SubmissionQueue<'static>>,
    ring: Ring,
    /// The requests in the submission ring that the kernel has not consumed.
    backlog: usize,
    /// The cancellations in the submission ring, before the backlog, that the kernel has not
    /// consumed, and all cancellations that have not completed. The completion ring has room for
    /// `max_cancels` beside the requests.
    cancels_queued: usize,
    cancels: usize,
    max_cancels: usize,
}

/// An io_uring at a fixed address, which other fields of [`Uring`] refer to. It is only used by shared
/// references.
struct Ring(NonNull<IoUring>);

impl Ring {
    fn new(ring: IoUring) -> Self {
        Self(NonNull::from(Box::leak(Box::new(ring))))
    }

    /// # Safety
    ///
    /// The result is not used after `self` is dropped.
    unsafe fn get(&self) -> &'static IoUring {
        // SAFETY: the ring was leaked, and by the contract of this function outlives the uses of the
        // result.
        unsafe { self.0.as_ref() }
    }

    /// # Safety
    ///
    /// The result is not used after the next call, nor after `self` is dropped.
    unsafe fn queue(&self) -> ManuallyDrop<SubmissionQueue<'static>> {
        // SAFETY: by the contract of this function the queue is not used after the drop of `self`.
        let ring = unsafe { self.get() };
        // SAFETY: by the contract of this function an older queue is not used again.
        ManuallyDrop::new(unsafe { ring.submission_shared() })
    }

    /// Returns the consumer's side of the completion ring.
    #[inline]
    fn completion(&mut self) -> CompletionQueue<'_> {
        // SAFETY: the result borrows `self`.
        let ring = unsafe { self.get() };
        // SAFETY: the borrow is mutable, so the result is the only one.
        unsafe { ring.completion_shared() }
    }

    fn fd(&self) -> RawFd {
        // SAFETY: the result is used here only.
        unsafe { self.get() }.as_raw_fd()
    }
}

impl Drop for Ring {
    fn drop(&mut self) {
        // SAFETY: the address is that of a leaked box, and this is its only drop.
        drop(unsafe { Box::from_raw(self.0.as_ptr()) });
    }
}

impl Drop for Uring {
    /// Frees the number of the ring, because the kernel keeps the ring until then.
    fn drop(&mut self) {
        let _ = self.submitter.unregister_ring_fd(); // an error if it has none
    }
}

impl Uring {
    /// Makes a ring for `depth` requests in flight.
    ///
    /// # Errors
    ///
    /// The error of the set-up or of the first enter (a filter may allow only the set-up), or
    /// `EOPNOTSUPP` if the kernel is older than 5.12: every operation is there from 5.6 on.
    pub(crate) fn new(depth: usize) -> io::Result<Self> {
        let mut ring = set_up(depth as u32)?;
        if !ring.params().is_feature_native_workers() {
            return Err(io::Error::from_raw_os_error(libc::EOPNOTSUPP));
        }
        // SAFETY: a no-op refers to no memory or descriptor.
        unsafe { ring.submission().push(&opcode::Nop::new().build()) }.expect("the ring is empty");
        ring.submit_and_wait(1)?;
        if ring.completion().next().is_none() {
            return Err(io::Error::from_raw_os_error(libc::EIO));
        }
        let max_cancels = (ring.params().cq_entries() as usize).saturating_sub(depth);
        let ring = Ring::new(ring);
        // SAFETY: `Uring` does not use the submitter after the drop of `ring`.
        let mut submitter = unsafe { ring.get() }.submitter();
        let _ = submitter.register_ring_fd(); // after an error the descriptor is used
        // SAFETY: this is the first queue, and `Uring` does not use it after the drop of `ring`.
        let queue = unsafe { ring.queue() };
        Ok(Self { submitter, queue, ring, backlog: 0, cancels_queued: 0, cancels: 0, max_cancels })
    }

    /// See [`Device::stage`](super::device::Device::stage).
    #[inline(always)]
    pub(crate) fn stage_plain(&mut self, user_data: u64, op: &Op) -> bool {
        push(&mut self.queue, user_data, op, 0).is_ok()
    }

    /// Submits the entries of the ring, posts completions that wait, and waits for `wanted` completions
    /// after the kernel has taken every entry.
    #[inline]
    fn enter(&mut self, wanted: u32) -> io::Result<usize> {
        let pull = wanted > 0 || self.queue.taskrun() || self.queue.cq_overflow();
        let flags = if pull { EnterFlags::GETEVENTS.bits() } else { 0 };
        let count = self.cancels_queued + self.backlog; // at most the size of the ring
        self.queue.sync(); // publishes the entries
        // SAFETY: the last argument is empty. The code that pushed the entries ensured that what they
        // name stays valid.
        let consumed =
            unsafe { self.submitter.enter::<libc::sigset_t>(count as u32, wanted, flags, None) };
        self.queue.sync(); // sees the places that the kernel has freed
        consumed
    }

    /// Passes visible completions to `each`, a closure that is inlined here.
    #[inline(always)]
    fn reap_each(&mut self, mut each: impl FnMut(RawCompletion)) -> usize {
        let mut queue = self.ring.completion();
        if queue.is_empty() && self.queue.taskrun() {
            // Makes the kernel post deferred completions, without waiting. After an error it posted
            // none, which is the same as before.
            let flags = EnterFlags::GETEVENTS.bits();
            // SAFETY: no entry is submitted, and the last argument is empty.
            let _ = unsafe { self.submitter.enter::<libc::sigset_t>(0, 0, flags, None) };
            queue.sync();
        }
        let visible = queue.len();
        let mut cancels = 0;
        for entry in queue {
            if entry.user_data() == CANCELLATION {
                cancels += 1; // the completion of its request shows the result
            } else {
                each(RawCompletion { user_data: entry.user_data(), result: entry.result() });
            }
        }
        self.cancels -= cancels;
        visible - cancels
    }

    fn submit_then(&mut self, batch: Batch<'_>, wanted: u32) -> Submitted {
        let (staged, offered) = (batch.staged(), batch.staged() + batch.len());
        let accepted = staged + push_all(&mut self.queue, batch);
        self.backlog += accepted;
        let mut stop = (accepted < offered).then_some(Stop::Busy);
        while self.has_unsubmitted() {
            match self.enter(wanted) {
                // Without SUBMIT_ALL the kernel stops after a request that it refuses, which gets a
                // completion. If it consumed none, it has no room.
                Ok(0) => {
                    stop = Some(Stop::Busy);
                    break;
                }
                Ok(consumed) => self.consumed(consumed),
                Err(error) if error.raw_os_error() == Some(libc::EINTR) => {}
                // EAGAIN and EBUSY mean no room. No error is about a request, because each request
                // gets a completion. The entries stay in the ring for the next attempt.
                Err(_) => {
                    stop = Some(Stop::Busy);
                    break;
                }
            }
        }
        Submitted { accepted, stop }
    }

    /// Records that the kernel consumed `count` entries.
    fn consumed(&mut self, count: usize) {
        let cancels = count.min(self.cancels_queued);
        self.cancels_queued -= cancels;
        self.backlog -= (count - cancels).min(self.backlog);
    }
}

/// Sets a ring up with the best set of flags that the kernel accepts. `EINVAL` may mean that it does
/// not know a flag: `SINGLE_ISSUER` is from 6.0 on, `COOP_TASKRUN` and `TASKRUN_FLAG` from 5.19, and
/// `SUBMIT_ALL` from 5.18.
fn set_up(entries: u32) -> io::Result<IoUring> {
    let none = IoUring::builder();
    let mut cooperate = none.clone();
    cooperate.setup_coop_taskrun().setup_taskrun_flag().setup_submit_all();
    let mut single_issuer = cooperate.clone();
    single_issuer.setup_single_issuer();
    for builder in [single_issuer, cooperate] {
        match builder.build(entries) {
            Err(error) if error.raw_os_error() == Some(libc::EINVAL) => {}
            done => return done,
        }
    }
    none.build(entries)
}

impl Backend for Uring {
    fn unstage(&mut self) {
        // SAFETY: the older queue, with its unpublished entries, is not used again.
        self.queue = unsafe { self.ring.queue() };
    }

    fn submit(&mut self, batch: Batch<'_>) -> Submitted {
        self.submit_then(batch, 0)
    }

    fn submit_and_wait(&mut self, batch: Batch<'_>) -> (Submitted, bool) {
        (self.submit_then(batch, 1), true)
    }

    fn reap(&mut self, each: &mut dyn FnMut(RawCompletion)) {
        self.reap_each(each);
    }

    /// Replaces the default, so that the processing of a completion is inlined into the loop.
    fn reap_into(&mut self, completions: &mut CompletionState) -> usize {
        self.reap_each(|completion| completions.complete(completion))
    }

    fn wait(&mut self, timeout: Option<Duration>) -> io::Result<()> {
        if timeout.is_some() {
            return super::wait_readable(&[self.ring.fd()], timeout);
        }
        let result = self.enter(1).map(drop);
        let left = self.queue.len();
        self.consumed((self.cancels_queued + self.backlog).saturating_sub(left));
        match result {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => Ok(()),
            // The submission found no room. The wait for completions goes on.
            Err(error) if matches!(error.raw_os_error(), Some(libc::EAGAIN | libc::EBUSY)) => {
                super::wait_readable(&[self.ring.fd()], None)
            }
            other => other,
        }
    }

    /// Refuses while the kernel has requests in the ring to consume, because the number of consumed
    /// entries would not show which entries they are.
    fn cancel(&mut self, user_data: u64) -> bool {
        if self.backlog > 0 || self.cancels == self.max_cancels {
            return false;
        }
        let entry = opcode::AsyncCancel::new(user_data).build().user_data(CANCELLATION);
        // SAFETY: a cancellation refers only to a number.
        if unsafe { self.queue.push(&entry) }.is_err() {
            return false;
        }
        self.cancels += 1;
        self.cancels_queued += 1;
        // After an error the next submission takes it along.
        if let Ok(consumed) = self.enter(0) {
            self.consumed(consumed);
        }
        true
    }

    fn has_cancellations(&self) -> bool {
        self.cancels > 0
    }

    /// The ring's descriptor is readable while completions are visible, and needs no clearing.
    fn acknowledge(&mut self) {}

    fn wake_fds(&self) -> Vec<RawFd> {
        vec![self.ring.fd()]
    }

    fn backlog(&self) -> usize {
        self.backlog
    }

    #[inline]
    fn has_unsubmitted(&self) -> bool {
        self.backlog + self.cancels_queued > 0
    }
}

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

/// Builds the entry of a request that is not plain.
fn other_entry(Sub { user_data, op }: Sub) -> squeue::Entry {
    let Op { kind, memory, fd, ptr, len, offset, .. } = op;
    let fd = types::Fd(fd);
    let vectors = memory.vector_count().unwrap_or_default().into();
    let entry = match kind {
        Kind::Nop => opcode::Nop::new().build(),
        Kind::Read => opcode::Readv::new(fd, ptr.cast(), vectors).offset(offset).build(),
        Kind::Write => opcode::Writev::new(fd, ptr.cast(), vectors).offset(offset).build(),
        Kind::Fsync => opcode::Fsync::new(fd).build(),
        Kind::Fdatasync => opcode::Fsync::new(fd).flags(types::FsyncFlags::DATASYNC).build(),
        Kind::Allocate(mode) => {
            opcode::Fallocate::new(fd, len).offset(offset).mode(mode.flags()).build()
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
    unsafe { queue.push(&other_entry(request)) }
}

#[cfg(test)]
mod uring_entry_tests {
    use super::*;

    fn words(entry: squeue::Entry) -> [u64; 8] {
        // SAFETY: an `Entry` is 64 bytes of numbers, all of them initialised.
        unsafe { mem::transmute(entry) }
    }

    /// Compares with the entry that the io-uring crate builds for the same request.
    #[test]
    fn entries_of_transfers_are_those_of_the_crate() {
        let mut bytes = [0u8; 100];
        for kind in [Kind::Read, Kind::Write] {
            for fd in [0, 7, i32::MAX] {
                let (ptr, offset) = (bytes.as_mut_ptr(), 1 << 40 | 5);
                let op = Op { kind, fd, ptr, len: 100, offset, ..Op::NOP };
                let (user_data, rest) = (0x0123_4567_89ab_cdef, op.rest(37));
                let ours = plain_entry(user_data, &op, 37).unwrap();
                let (fd, len) = (types::Fd(fd), rest.len as u32);
                let theirs = match kind {
                    Kind::Read => opcode::Read::new(fd, rest.ptr, len).offset(rest.offset).build(),
                    _ => opcode::Write::new(fd, rest.ptr, len).offset(rest.offset).build(),
                };
                assert_eq!(words(ours), words(theirs.user_data(user_data)), "{kind:?} {fd:?}");
            }
        }
    }

    /// No result shows whether a sync was made, so its entry is compared with the kernel's numbers.
    #[test]
    fn entries_of_syncs_have_the_numbers_of_the_kernel() {
        const IORING_OP_FSYNC: u8 = 3;
        const IORING_FSYNC_DATASYNC: u8 = 1;
        for (kind, flag) in [(Kind::Fsync, 0), (Kind::Fdatasync, IORING_FSYNC_DATASYNC)] {
            let op = Op { kind, fd: i32::from_ne_bytes([7, 1, 2, 3]), ..Op::NOP };
            let first = u64::from_ne_bytes([IORING_OP_FSYNC, 0, 0, 0, 7, 1, 2, 3]);
            let flags = u64::from(flag) << if cfg!(target_endian = "little") { 32 } else { 0 };
            let expected = [first, 0, 0, flags, 5, 0, 0, 0];
            assert_eq!(words(other_entry(Sub { user_data: 5, op })), expected, "{kind:?}");
        }
    }
}
