//! An operation of the device, from its submission to its end.

use std::io;
use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;

use bufcache::{DeviceRange, DeviceSync, DeviceWrite, Load};
use nbd_protocol::Extent;

use super::journal::Content;

/// Called with the result, on the device's thread.
pub(super) type Done<T> = Box<dyn FnOnce(io::Result<T>) + Send>;

/// The buffer of a read. Dropping it fails the read.
pub(super) trait ReadBuf: Send {
    fn bytes(&mut self) -> &mut [u8];

    /// Ends the read.
    fn finish(self: Box<Self>, result: io::Result<()>);
}

/// An operation. Dropping it fails it, so that no caller waits forever.
pub(super) struct Operation {
    pub(super) kind: Kind,
    pub(super) offset: u64,
    pub(super) len: u64,
    /// Bytes at its start that requests have transferred already.
    pub(super) done: u64,
    /// A merged request with this operation has failed, so it is sent in a request of its own.
    pub(super) alone: bool,
    /// Set when a connection is lost with the operation in flight. The operation is not sent again
    /// after this time.
    pub(super) deadline: Option<Instant>,
    pub(super) target: Target,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Read,
    Write { durable: bool },
    Zeros { no_hole: bool },
    Flush,
    Status,
}

impl Kind {
    pub(super) fn is_change(self) -> bool {
        matches!(self, Self::Write { .. } | Self::Zeros { .. })
    }
}

/// The caller's data, and what is notified of the end.
pub(super) enum Target {
    Load(Load),
    Buffer(Box<dyn ReadBuf>),
    Write(DeviceWrite),
    Bytes(Arc<[u8]>, Done<()>),
    Range(DeviceRange),
    Sync(DeviceSync),
    Unit(Done<()>),
    Extents(Vec<Extent>, Done<Vec<Extent>>),
    /// A change of the journal that is sent again.
    Replay(Content),
    /// A flush that the device starts by itself, because the journal is half full.
    Own,
    /// A read that the device makes to test a connection.
    Probe,
}

impl Operation {
    pub(super) fn new(kind: Kind, range: Range<u64>, target: Target) -> Self {
        let (offset, len) = (range.start, range.end - range.start);
        Self { kind, offset, len, done: 0, alone: false, deadline: None, target }
    }

    pub(super) fn range(&self) -> Range<u64> {
        self.offset..self.offset + self.len
    }

    /// The offset of the first byte that has not been transferred.
    pub(super) fn next(&self) -> u64 {
        self.offset + self.done
    }

    /// Returns whether `other`, of which no part was sent, may follow this operation in the same
    /// request.
    pub(super) fn continues_with(&self, other: &Self) -> bool {
        let flushes = self.kind == Kind::Flush && other.kind == Kind::Flush;
        let transfers = matches!(self.kind, Kind::Read | Kind::Write { .. })
            && self.kind == other.kind
            && self.offset + self.len == other.offset
            && other.done == 0;
        (flushes || transfers) && !self.alone && !other.alone
    }

    /// Copies into the read's buffer the part of `bytes`, which start at `offset` of the device,
    /// that belongs to it.
    pub(super) fn fill(&mut self, offset: u64, bytes: &[u8]) {
        let range = self.range();
        let (from, to) = (offset.max(range.start), (offset + bytes.len() as u64).min(range.end));
        if from >= to {
            return;
        }
        let bytes = &bytes[(from - offset) as usize..(to - offset) as usize];
        let at = (from - range.start) as usize;
        let into = match &mut self.target {
            Target::Load(load) => &mut load[..],
            Target::Buffer(buf) => buf.bytes(),
            _ => return,
        };
        into[at..][..bytes.len()].copy_from_slice(bytes);
    }

    /// Appends the range `part` of the operation's data to `out`.
    pub(super) fn payload(&self, part: Range<u64>, out: &mut Vec<u8>) {
        let part = part.start as usize..part.end as usize;
        match &self.target {
            Target::Write(write) => {
                let mut at = 0;
                for bytes in write.parts() {
                    let end = at + bytes.len();
                    let (from, to) = (part.start.max(at), part.end.min(end));
                    if from < to {
                        out.extend_from_slice(&bytes[from - at..to - at]);
                    }
                    at = end;
                }
            }
            Target::Bytes(bytes, _) => out.extend_from_slice(&bytes[part]),
            Target::Replay(Content::Bytes(bytes, range)) => {
                out.extend_from_slice(&bytes[range.clone()][part]);
            }
            _ => {}
        }
    }

    /// Returns the content to add to the journal. `None` if the operation changes nothing or comes
    /// from the journal.
    pub(super) fn content(&self) -> Option<Content> {
        match (&self.target, self.kind) {
            (Target::Replay(_), _) => None,
            (Target::Bytes(bytes, _), _) => Some(Content::Bytes(Arc::clone(bytes), 0..bytes.len())),
            (_, Kind::Write { .. }) => {
                let mut bytes = Vec::with_capacity(self.len as usize);
                self.payload(0..self.len, &mut bytes);
                let len = bytes.len();
                Some(Content::Bytes(bytes.into(), 0..len))
            }
            (_, Kind::Zeros { no_hole }) => Some(Content::Zeros { no_hole }),
            _ => None,
        }
    }

    /// Ends the operation with success or an errno.
    pub(super) fn finish(self, result: Result<(), i32>) {
        let len = self.len as usize;
        let result = result.map_err(io::Error::from_raw_os_error);
        match self.target {
            Target::Load(load) => load.finish(result.map(|()| len)),
            Target::Buffer(buf) => buf.finish(result),
            Target::Write(write) => write.finish(result),
            Target::Range(range) => range.finish(result),
            Target::Sync(sync) => sync.finish(result),
            Target::Bytes(_, done) | Target::Unit(done) => done(result),
            Target::Extents(extents, done) => done(result.map(|()| extents)),
            Target::Replay(_) | Target::Own | Target::Probe => {}
        }
    }
}
