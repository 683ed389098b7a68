//! The dirty buffers of one device, in the order in which they became dirty.
//!
//! Linked through the headers of their frames, so a buffer becomes dirty without memory. A frame is on a
//! list from before its entry says `DIRTY` until before it says so no more, or until the block is
//! invalidated: the headers are touched under the lock of the list only.

use crate::frames::{Frame, Frames};

/// No frame has that number.
pub(crate) const NIL: u32 = u32::MAX;
/// The link of a frame that is on no list.
pub(crate) const UNLISTED: u32 = u32::MAX - 1;

#[derive(Debug)]
pub(crate) struct DirtyList {
    first: u32,
    last: u32,
    len: usize,
}

impl DirtyList {
    pub(crate) fn new() -> Self {
        Self { first: NIL, last: NIL, len: 0 }
    }

    pub(crate) fn len(&self) -> usize {
        self.len
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Puts a frame that is on no list in front.
    pub(crate) fn push(&mut self, frames: &Frames, frame: Frame) {
        let links = frames.header(frame).links();
        debug_assert!(links.previous() == UNLISTED);
        links.set(NIL, self.first);
        match self.first {
            NIL => self.last = frame.0,
            first => frames.header(Frame(first)).links().set_previous(frame.0),
        }
        self.first = frame.0;
        self.len += 1;
    }

    /// Takes a frame off; returns whether it was on.
    pub(crate) fn remove(&mut self, frames: &Frames, frame: Frame) -> bool {
        let links = frames.header(frame).links();
        let (previous, next) = (links.previous(), links.next());
        if previous == UNLISTED {
            return false;
        }
        match previous {
            NIL => self.first = next,
            previous => frames.header(Frame(previous)).links().set_next(next),
        }
        match next {
            NIL => self.last = previous,
            next => frames.header(Frame(next)).links().set_previous(previous),
        }
        links.set(UNLISTED, NIL);
        self.len -= 1;
        true
    }

    /// The oldest.
    pub(crate) fn last(&self) -> Option<Frame> {
        (self.last != NIL).then_some(Frame(self.last))
    }

    /// Its frames, the oldest first.
    pub(crate) fn oldest_first<'l>(
        &'l self,
        frames: &'l Frames,
    ) -> impl Iterator<Item = Frame> + 'l {
        let mut at = self.last;
        std::iter::from_fn(move || {
            let frame = (at != NIL).then_some(Frame(at))?;
            at = frames.header(frame).links().previous();
            Some(frame)
        })
    }
}
