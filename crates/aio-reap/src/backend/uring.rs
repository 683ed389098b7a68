//! io_uring, through the io-uring crate.
//!
//! Set up for one thread that enters the kernel often (`COOP_TASKRUN`, `SINGLE_ISSUER`): a
//! completion does not interrupt user code but is posted when the thread next enters. `TASKRUN_FLAG`
//! tells a peek that something waits for that, so the peek enters and nothing shows up late.

use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::time::Duration;

use io_uring::{IoUring, Probe, opcode, squeue, types};

use super::{Backend, RawCompletion, Stop, Sub, Submitted};
use crate::op::{Kind, Op};

/// `IORING_ENTER_GETEVENTS` (ABI).
const ENTER_GETEVENTS: u32 = 1;

pub(crate) struct Uring {
    ring: IoUring,
    /// Pushed to the submission ring, not yet consumed by the kernel.
    backlog: usize,
}

impl Uring {
    /// A ring for `depth` requests in flight.
    ///
    /// # Errors
    ///
    /// Whatever refuses it: the set-up, an operation the kernel does not know (before 5.6), or the
    /// first enter (a filter may allow the set-up alone).
    pub(crate) fn new(depth: usize) -> io::Result<Self> {
        let mut ring = setup(depth as u32)?;
        let mut probe = Probe::new();
        ring.submitter().register_probe(&mut probe)?;
        let needed = [
            opcode::Read::CODE,
            opcode::Write::CODE,
            opcode::Fsync::CODE,
            opcode::Fallocate::CODE,
            opcode::Fadvise::CODE,
            opcode::Nop::CODE,
        ];
        if !needed.iter().all(|&code| probe.is_supported(code)) {
            return Err(io::Error::from_raw_os_error(libc::EOPNOTSUPP));
        }
        // SAFETY: a no-op refers to nothing.
        unsafe { ring.submission().push(&opcode::Nop::new().build()) }.expect("the ring is empty");
        ring.submit_and_wait(1)?;
        if ring.completion().next().is_none() {
            return Err(io::Error::from_raw_os_error(libc::EIO));
        }
        Ok(Self { ring, backlog: 0 })
    }

    /// Lets the kernel post what it holds back for us, without waiting.
    fn run_task_work(&mut self) {
        // SAFETY: no argument is passed. An error means that nothing was posted, as before.
        let _ = unsafe { self.ring.submitter().enter::<()>(0, 0, ENTER_GETEVENTS, None) };
    }
}

/// Asks for the flags that suit, then for fewer: older kernels know fewer of them.
fn setup(entries: u32) -> io::Result<IoUring> {
    let attempt = IoUring::builder()
        .setup_coop_taskrun() // 5.19, as the next
        .setup_taskrun_flag()
        .setup_single_issuer() // 6.0
        .setup_submit_all() // 5.18
        .build(entries);
    match attempt {
        Err(error) if error.raw_os_error() == Some(libc::EINVAL) => {}
        done => return done,
    }
    let attempt = IoUring::builder()
        .setup_coop_taskrun()
        .setup_taskrun_flag()
        .setup_submit_all()
        .build(entries);
    match attempt {
        Err(error) if error.raw_os_error() == Some(libc::EINVAL) => {
            IoUring::builder().build(entries)
        }
        done => done,
    }
}

fn entry(Sub { user_data, op }: &Sub) -> squeue::Entry {
    let Op { kind, fd, ptr, len, offset, .. } = *op;
    let fd = types::Fd(fd);
    let entry = match kind {
        Kind::Nop => opcode::Nop::new().build(),
        // A transfer's length fits: `Op::rest` cut it to the kernel's limit.
        Kind::Read => opcode::Read::new(fd, ptr, len as u32).offset(offset).build(),
        Kind::Write => opcode::Write::new(fd, ptr, len as u32).offset(offset).build(),
        Kind::Fsync => opcode::Fsync::new(fd).build(),
        Kind::Fdatasync => opcode::Fsync::new(fd).flags(types::FsyncFlags::DATASYNC).build(),
        Kind::Allocate(mode) => {
            opcode::Fallocate::new(fd, len).offset(offset).mode(mode.flags()).build()
        }
        Kind::WillNeed => {
            // The ring's length has 32 bits; advice for less than asked is still good advice.
            let len = len.min(u64::from(u32::MAX)) as libc::off_t;
            opcode::Fadvise::new(fd, len, libc::POSIX_FADV_WILLNEED).offset(offset).build()
        }
    };
    entry.user_data(*user_data)
}

impl Backend for Uring {
    fn submit(&mut self, batch: &[Sub]) -> Submitted {
        let mut queue = self.ring.submission();
        let mut accepted = 0;
        for sub in batch {
            // SAFETY: contract 2 of `backend`: buffer and descriptor live until the completion.
            if unsafe { queue.push(&entry(sub)) }.is_err() {
                break;
            }
            accepted += 1;
        }
        drop(queue); // publishes the tail
        self.backlog += accepted;
        let mut stop = (accepted < batch.len()).then_some(Stop::Busy);
        while self.backlog > 0 {
            match self.ring.submit() {
                // Without SUBMIT_ALL the kernel stops behind a request it refuses (that one has
                // its completion); none consumed at all means no room.
                Ok(0) => {
                    stop = Some(Stop::Busy);
                    break;
                }
                Ok(consumed) => self.backlog -= consumed.min(self.backlog),
                Err(error) if error.raw_os_error() == Some(libc::EINTR) => {}
                // EAGAIN, EBUSY: no room. Nothing else is about a request: each has its own
                // completion. What is in the ring stays there for the next attempt.
                Err(_) => {
                    stop = Some(Stop::Busy);
                    break;
                }
            }
        }
        Submitted { accepted, stop }
    }

    fn reap(&mut self, budget: usize, out: &mut Vec<RawCompletion>) {
        if self.ring.completion().is_empty() && self.ring.submission().taskrun() {
            self.run_task_work();
        }
        out.extend(
            self.ring.completion().take(budget).map(|entry| RawCompletion {
                user_data: entry.user_data(),
                result: entry.result(),
            }),
        );
    }

    fn wait(&mut self, timeout: Option<Duration>) -> io::Result<()> {
        let result = match timeout {
            None => self.ring.submit_and_wait(1).map(drop),
            // EXT_ARG would do with one call, from 5.11 on; a poll does everywhere.
            Some(_) => return super::wait_readable(&[self.ring.as_raw_fd()], timeout),
        };
        self.backlog = self.ring.submission().len();
        match result {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => Ok(()),
            // A submission that found no room; completions are waited for all the same.
            Err(error) if matches!(error.raw_os_error(), Some(libc::EAGAIN | libc::EBUSY)) => {
                super::wait_readable(&[self.ring.as_raw_fd()], timeout)
            }
            other => other,
        }
    }

    fn acknowledge(&mut self) {
        // The ring's descriptor is readable while completions are there; reading them is enough.
    }

    fn wake_fds(&self) -> Vec<RawFd> {
        vec![self.ring.as_raw_fd()]
    }

    fn backlog(&self) -> usize {
        self.backlog
    }
}
