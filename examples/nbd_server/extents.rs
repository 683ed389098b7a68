//! Which parts of an image are holes: BLOCK_STATUS.
//!
//! ```text
//!  BLOCK_STATUS ─► thread: what is dirty ─► the image; where are its holes? ─► worker ─► reply
//! ```
//!
//! The file system knows the holes, and may have to read its map from the disk, or wait for who writes to
//! the file, before it tells: so a thread asks, one for each worker, which is started by the first
//! request. It tells of what the image is, so what the cache has and the image has not goes to the image
//! first; if that fails, everything counts as data.
//!
//! A reply describes no more than [`MOST`] extents, which the protocol allows: who wants to know the rest
//! asks again where they end.

use std::fs::File;
use std::io;
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, Sender};
use std::task::Waker;
use std::thread::JoinHandle;

use aio_reap::AlignedBuf;
use nbd_protocol::wire::state;
use nbd_protocol::{ALLOCATION_ID, Extent, NbdError, ReplyHeader, Request};
use radix_ctx::CtxRef;
use rustix::fs::SeekFrom;
use rustix::io::Errno;
use tracing::{debug, warn};

use crate::contexts::Connection;
use crate::counters::Counters;
use crate::export::ExportTable;
use crate::operation::Step;

/// Extents of one reply: two system calls for each pair of them, and as many as fit the smallest buffer.
const MOST: usize = 512;
/// How large the buffer of a request has to be.
pub(crate) const ROOM: usize = MOST * Extent::SIZE;

/// A worker's requests that the thread has.
pub(crate) struct Maps {
    exports: Arc<ExportTable>,
    waker: Waker,
    sender: Sender<Done>,
    done: Receiver<Done>,
    /// Asked and not answered.
    waiting: usize,
    thread: Option<(Sender<Job>, JoinHandle<()>)>,
}

/// What the thread found.
struct Done {
    conn: CtxRef<Connection>,
    request: Request,
    result: io::Result<Vec<Extent>>,
    buf: AlignedBuf,
}

/// What the thread is to look at. Dropped, it is answered with an error: whatever becomes of the thread,
/// no request is forgotten.
struct Job {
    exports: Arc<ExportTable>,
    export: usize,
    one: bool,
    sender: Sender<Done>,
    waker: Waker,
    asked: Option<(CtxRef<Connection>, Request, AlignedBuf)>,
}

impl Job {
    fn run(mut self) {
        let Some((conn, Request { offset, len, .. }, _)) = &self.asked else { return };
        if CtxRef::is_removed(conn) {
            return; // nobody hears of it
        }
        let (table, most) = (&self.exports, if self.one { 1 } else { MOST });
        let export = table.get(self.export);
        let (offset, len) = (*offset, *len);
        let end = offset + u64::from(len); // within the export, `Request::check` saw to it
        let result = match table.settle(export.file, offset..end) {
            Ok(()) => {
                let unit = export.info.min_block.max(1).into();
                extents(&table.files[export.file], offset, end, unit, most)
            }
            Err(error) => {
                debug!(%error, "the cache cannot be written back: holes are not told");
                Ok(vec![Extent { len, flags: 0 }])
            }
        };
        self.answer(result);
    }

    fn answer(&mut self, result: io::Result<Vec<Extent>>) {
        let Some((conn, request, buf)) = self.asked.take() else { return };
        if self.sender.send(Done { conn, request, result, buf }).is_ok() {
            self.waker.wake_by_ref();
        }
    }
}

impl Drop for Job {
    fn drop(&mut self) {
        self.answer(Err(io::Error::from_raw_os_error(libc::EIO)));
    }
}

impl Maps {
    /// The waker is called when [`pop`](Self::pop) should be.
    pub(crate) fn new(exports: &Arc<ExportTable>, waker: &Waker) -> Self {
        let (sender, done) = mpsc::channel();
        let (exports, waker) = (Arc::clone(exports), waker.clone());
        Self { exports, waker, sender, done, waiting: 0, thread: None }
    }

    /// Requests that [`pop`](Self::pop) has yet to return.
    pub(crate) fn len(&self) -> usize {
        self.waiting
    }

    /// Has the thread look; `Some` is the reply if there can be no thread.
    pub(crate) fn ask(
        &mut self,
        conn: &CtxRef<Connection>,
        export: usize,
        request: Request,
        one: bool,
        buf: AlignedBuf,
    ) -> Option<Step> {
        let thread = match self.thread.take() {
            Some(running) => running,
            None => match start() {
                Ok(started) => started,
                Err(error) => {
                    warn!(%error, "no thread to look for holes");
                    let refused = Step::refuse(&request, true, NbdError::NoMem);
                    return Some(Step { spent: Some(buf), ..refused });
                }
            },
        };
        self.waiting += 1;
        let job = Job {
            exports: Arc::clone(&self.exports),
            export,
            one,
            sender: self.sender.clone(),
            waker: self.waker.clone(),
            asked: Some((conn.clone(), request, buf)),
        };
        if thread.0.send(job).is_ok() {
            self.thread = Some(thread);
        } // else it panicked: this one is answered with an error, and the next finds another thread
        None
    }

    /// The next reply, and whose it is.
    pub(crate) fn pop(&mut self, counters: &mut Counters) -> Option<(CtxRef<Connection>, Step)> {
        if self.waiting == 0 {
            return None;
        }
        let Done { conn, request, result, mut buf } = self.done.try_recv().ok()?;
        self.waiting -= 1;
        let step = match result {
            Ok(extents) => {
                buf.set_len(extents.len() * Extent::SIZE);
                for (extent, bytes) in extents.iter().zip(buf.chunks_exact_mut(Extent::SIZE)) {
                    bytes.copy_from_slice(&extent.encode());
                }
                let count = extents.len() as u32;
                let header = ReplyHeader::block_status(request.cookie, ALLOCATION_ID, count);
                Step { header: Some(header), data: Some(buf), spent: None }
            }
            Err(error) => {
                counters.errors += 1;
                Step { spent: Some(buf), ..Step::refuse(&request, true, NbdError::from(&error)) }
            }
        };
        Some((conn, step))
    }
}

impl Drop for Maps {
    fn drop(&mut self) {
        if let Some((jobs, thread)) = self.thread.take() {
            drop(jobs);
            let _ = thread.join(); // if it panicked, its requests are answered
        }
    }
}

fn start() -> io::Result<(Sender<Job>, JoinHandle<()>)> {
    let (sender, jobs) = mpsc::channel::<Job>();
    let run = move || jobs.into_iter().for_each(Job::run);
    let thread = std::thread::Builder::new().name("extents".into()).spawn(run)?;
    Ok((sender, thread))
}

/// What lies from `start` on, at most to `end` and in at most so many extents. They begin and end at
/// multiples of `unit`, as `start` does, or at `end`; what is a hole in part only is data.
fn extents(file: &File, start: u64, end: u64, unit: u64, most: usize) -> io::Result<Vec<Extent>> {
    let mut found: Vec<Extent> = Vec::new();
    let mut at = start;
    while at < end {
        let (mut hole, mut next) = part(file, at, end)?;
        if hole && next < end {
            next -= next % unit;
            if next <= at {
                (hole, next) = (false, end.min(at + unit));
            }
        } else if !hole {
            next = end.min(next.next_multiple_of(unit));
        }
        let flags = if hole { state::HOLE | state::ZERO } else { 0 };
        let len = (next - at) as u32; // the request's length is one
        let full = found.len() == most;
        match found.last_mut() {
            Some(last) if last.flags == flags => last.len += len,
            _ if full => break,
            _ => found.push(Extent { len, flags }),
        }
        at = next;
    }
    Ok(found)
}

/// Whether there is a hole at `at`, and where what is there ends, at most at `end`. What the file system
/// does not tell of is data.
fn part(file: &File, at: u64, end: u64) -> io::Result<(bool, u64)> {
    match rustix::fs::seek(file, SeekFrom::Data(at)) {
        Ok(data) if data > at => Ok((true, data.min(end))),
        Ok(_) => match rustix::fs::seek(file, SeekFrom::Hole(at)) {
            Ok(hole) if hole > at => Ok((false, hole.min(end))),
            Ok(_) | Err(Errno::NXIO) => Ok((false, end)), // it changes under us
            Err(error) => Err(error.into()),
        },
        // No data to the end of the file. That should be behind `end`; to read past it is an error.
        Err(Errno::NXIO) => {
            let len = rustix::fs::seek(file, SeekFrom::End(0))?;
            Ok(if len > at { (true, len.min(end)) } else { (false, end) })
        }
        // A block device, or a file system without holes.
        Err(Errno::INVAL | Errno::OPNOTSUPP | Errno::NOSYS | Errno::NOTTY) => Ok((false, end)),
        Err(error) => Err(error.into()),
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::FileExt;

    use super::*;

    const HOLE: u32 = state::HOLE | state::ZERO;
    const MIB: u64 = 1 << 20;

    /// Pages of zeros and of others, by turns of 64 KiB, which no file system makes one of; the first is a
    /// hole. `None` where the file system has no holes.
    fn striped(len: u64) -> Option<File> {
        let file = tempfile::tempfile().unwrap();
        file.set_len(len).unwrap();
        for at in (0..len).step_by(128 << 10).map(|at| at + (64 << 10)) {
            file.write_all_at(&[1; 64 << 10], at).unwrap();
        }
        let hole = extents(&file, 0, 4096, 1, 1).unwrap() == [Extent { len: 4096, flags: HOLE }];
        if !hole {
            println!("no holes here");
        }
        hole.then_some(file)
    }

    fn of(file: &File, start: u64, end: u64, unit: u64, most: usize) -> Vec<(u32, u32)> {
        let found = extents(file, start, end, unit, most).unwrap();
        found.iter().map(|extent| (extent.len, extent.flags)).collect()
    }

    #[test]
    fn holes_and_data_take_turns() {
        let Some(file) = striped(MIB) else { return };
        let turn = 64 << 10;
        let whole = of(&file, 0, MIB, 1, MOST);
        let wanted: Vec<_> = (0..16).map(|nr| (turn, if nr % 2 == 0 { HOLE } else { 0 })).collect();
        assert_eq!(whole, wanted);
        assert_eq!(of(&file, 0, MIB, 1, 3), wanted[..3]);
        assert_eq!(of(&file, 0, MIB, 1, 1), wanted[..1]);
        assert_eq!(of(&file, 1, u64::from(turn) + 1, 1, MOST), [(turn - 1, HOLE), (1, 0)]);
        let last = u64::from(turn) * 15;
        assert_eq!(of(&file, last - 4096, MIB, 1, MOST), [(4096, HOLE), (turn, 0)]);
    }

    #[test]
    fn what_is_a_hole_in_part_is_data() {
        let Some(file) = striped(MIB) else { return };
        let unit = 96 << 10; // no power of two, but so that turns and units differ
        let len = 10 * unit;
        // 0..64 of the first unit are a hole, 64..96 are data; the next is data up to 128, and so on.
        assert_eq!(of(&file, 0, len, unit, MOST), [(len as u32, 0)]);
        assert_eq!(of(&file, 0, len, 32 << 10, 2), [(64 << 10, HOLE), (64 << 10, 0)]);
        // A hole that begins and ends inside a unit, before one that is whole.
        file.set_len(64 << 10).unwrap();
        file.set_len(MIB).unwrap();
        file.write_all_at(&[1], 200 << 10).unwrap();
        let found = of(&file, 0, MIB, 64 << 10, MOST);
        assert_eq!(found, [(192 << 10, HOLE), (64 << 10, 0), (768 << 10, HOLE)]);
    }

    #[test]
    fn the_end_of_a_file_that_shrank_is_no_hole() {
        let Some(file) = striped(MIB) else { return };
        file.set_len(200 << 10).unwrap(); // 128..192 are a hole, then data
        let found = of(&file, 128 << 10, MIB, 1, MOST);
        assert_eq!(found, [(64 << 10, HOLE), ((1024 - 192) << 10, 0)]);
        file.set_len(0).unwrap();
        assert_eq!(of(&file, 0, MIB, 1, MOST), [(1 << 20, 0)]);
        file.set_len(MIB / 2).unwrap();
        let found = of(&file, 0, MIB, 1, MOST);
        assert_eq!(found, [(1 << 19, HOLE), (1 << 19, 0)]);
        assert_eq!(of(&file, 0, MIB, MIB, MOST), [(1 << 20, 0)]);
    }

    #[test]
    fn what_cannot_be_asked_is_data() {
        let zero = File::open("/dev/zero").unwrap(); // a device that does not seek
        assert_eq!(of(&zero, 0, u64::from(u32::MAX), 1, MOST), [(u32::MAX, 0)]);
    }
}
