//! Batching: a round waits a moment while its clients are busy with earlier replies.
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

/// How long a batch may wait. Measured: 20 to 40 us made no difference.
const LIMIT: Duration = Duration::from_micros(25);
/// A client with this many unread replies is busy for longer than a batch takes. Measured: with
/// four, waiting halved the throughput.
const BUSY: usize = 8;

impl Worker {
    /// Waits while every client of `events` has many replies to read, for [`LIMIT`] at most.
    pub(super) fn fill_batch(&mut self, events: &[epoll::Event]) {
        let mut busy = || !events.is_empty() && events.iter().all(|event| self.is_busy(event));
        if !busy() {
            return;
        }
        let start = Instant::now();
        while start.elapsed() < LIMIT && busy() {
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
        let Conn { socket, out, writes_long, .. } = conn;
        if *writes_long {
            return false; // few of its requests fit into the socket, so no batch grows
        }
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
