//! Short waits that save longer ones: a worker polls before it sleeps, and fills a batch.
//!
//! # Busy polling
//!
//! Before a worker sleeps, it polls for events a moment longer, if that was successful lately: for
//! the rows N1, N2.twocpus and N3 of the bench, in which the client is on another CPU.
//!
//! A client that works through a queue of requests answers within microseconds, which is less than
//! it takes to put the thread to sleep and wake it. Each failed poll doubles the number of sleeps
//! until the next poll, and each success halves it. A client on the same CPU cannot run while the
//! worker polls, so a server on one CPU soon stops polling.
//!
//! # Batching
//!
//! A round waits a moment while its clients are busy with earlier replies.
//!
//! A client that has many replies to read loses nothing if its next requests wait. The requests
//! that it sends in that time join the batch: one submission and one send serve more of them, and
//! the two CPUs do not contend for the socket. The wait ends before the client would have to wait
//! for the server.

use std::os::fd::AsRawFd;
use std::time::{Duration, Instant};

use radix_ctx::Id;
use rustix::event::epoll;
use socket2::Socket;

use super::Worker;
use crate::conn::Conn;

/// How long to poll: the measured time to wake a client on another CPU of a virtual machine, and as
/// much again for its answer.
const LIMIT: Duration = Duration::from_micros(100);
/// Most sleeps between two busy polls. A guess: failed polls then cost less than a thousandth of
/// the time.
const MAX_SKIPPED: u32 = 1024;

/// Decides before each sleep whether to poll.
#[derive(Debug, Default)]
pub(super) struct BusyPoll {
    /// Sleeps until the next busy poll.
    skip: u32,
    /// Sleeps to skip after the next failed poll.
    penalty: u32,
}

impl BusyPoll {
    /// Calls `poll` until it finds something or the time is over. Returns `None` if the caller
    /// should sleep.
    pub(super) fn run<T, E>(
        &mut self,
        mut poll: impl FnMut() -> Result<Option<T>, E>,
    ) -> Result<Option<T>, E> {
        if self.skip > 0 {
            self.skip -= 1;
            return Ok(None);
        }
        // An event that is ready at once does not show that longer polling pays.
        let first = poll()?;
        if first.is_some() {
            return Ok(first);
        }
        let start = Instant::now();
        loop {
            if let Some(found) = poll()? {
                self.penalty /= 2;
                return Ok(Some(found));
            }
            if start.elapsed() >= LIMIT {
                self.penalty = (self.penalty * 2).clamp(1, MAX_SKIPPED);
                self.skip = self.penalty;
                return Ok(None);
            }
            std::hint::spin_loop();
        }
    }
}

/// How long a batch may wait. Measured: 20 to 40 us made no difference.
const BATCH: Duration = Duration::from_micros(25);
/// A client with this many unread replies is busy for longer than a batch takes. Measured: with
/// four, waiting halved the throughput.
const BUSY: usize = 8;

impl Worker {
    /// Waits while every client of `events` has many replies to read, for [`BATCH`] at most.
    pub(super) fn fill_batch(&mut self, events: &[epoll::Event]) {
        let mut busy = || !events.is_empty() && events.iter().all(|event| self.is_busy(event));
        if !busy() {
            return;
        }
        let start = Instant::now();
        while start.elapsed() < BATCH && busy() {
            std::thread::yield_now(); // the client may need this CPU to read
        }
    }

    fn is_busy(&mut self, event: &epoll::Event) -> bool {
        let (data, flags) = (event.data, event.flags); // the struct is packed
        if flags != epoll::EventFlags::IN {
            return false;
        }
        let slot = Id::from_bits(data.u64()).and_then(|id| self.slot_of(id));
        let Some(conn) = slot.and_then(|slot| self.conns.open.get_mut(slot)) else { return false };
        if conn.writes_long() {
            return false; // few of its requests fit into the socket, so no batch grows
        }
        let Conn { socket, out, .. } = conn;
        // Asks the kernel only if the bytes sent since the last answer may be enough, not for each
        // request of a client that waits for its reply before the next.
        let many = BUSY * out.reply_cost;
        if out.unread >= many {
            out.unread = unread(socket);
        }
        out.unread >= many
    }
}

/// Returns the bytes that the other end of a Unix socket has not read, with the kernel's overhead.
/// On TCP: the bytes that the other end's kernel has not acknowledged.
pub(super) fn unread(socket: &Socket) -> usize {
    let mut unread: libc::c_int = 0;
    // SAFETY: TIOCOUTQ stores one int, and keeps no pointer to it.
    let ret = unsafe { libc::ioctl(socket.as_raw_fd(), libc::TIOCOUTQ, &raw mut unread) };
    if ret == 0 { unread.max(0) as usize } else { 0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the number of polls until something is found or the time is over.
    fn polls(busy_poll: &mut BusyPoll, found_at: u32) -> u32 {
        let mut polls = 0;
        let found = busy_poll.run(|| {
            polls += 1;
            Ok::<_, ()>((polls == found_at).then_some(()))
        });
        assert_eq!(found.unwrap().is_some(), polls == found_at);
        polls
    }

    #[test]
    fn polls_in_vain_become_rare_and_success_brings_them_back() {
        const NEVER: u32 = u32::MAX;
        let mut busy_poll = BusyPoll::default();
        assert_eq!(polls(&mut busy_poll, 2), 2);
        let spun = (0..10_000).filter(|_| polls(&mut busy_poll, NEVER) > 0).count();
        assert!((10..30).contains(&spun), "{spun}");
        // An event that is ready at once changes nothing.
        while polls(&mut busy_poll, 1) == 0 {}
        assert!(polls(&mut busy_poll, NEVER) > 0 && polls(&mut busy_poll, 2) == 0);
        while polls(&mut busy_poll, 2) == 0 {}
        for _ in 0..100 {
            assert_eq!(polls(&mut busy_poll, 2), 2);
        }
        assert!(polls(&mut busy_poll, NEVER) > 0 && polls(&mut busy_poll, 1) == 0);
        assert_eq!(polls(&mut busy_poll, 2), 2, "a single poll in vain costs one sleep");
    }
}
