//! The dirty buffers of one device, in the order in which they became dirty.
//!
//! The links are in the headers of the frames, so a buffer becomes dirty without an allocation. A
//! frame is put on a list before its entry says `DIRTY`, and taken off before `DIRTY` is cleared or
//! when the block is invalidated. The links are accessed only under the lock of the list.
//!
//! A list may have as many frames as the cache. A [`Walk`] visits them in pieces, and the lock is
//! released between these. Each insertion has a serial number that no insertion into any list
//! repeats, so a walk detects that the frame it stands at was taken off meanwhile.

use crate::frames::{Frame, Frames, NIL};

/// Frames of one piece of a walk. A guess: a few microseconds if no header is in a CPU cache.
const PIECE: usize = if cfg!(offlock_model) { 1 } else { 64 };

/// A doubly linked list of frames.
#[derive(Debug)]
pub(crate) struct DirtyList {
    first: u32,
    last: u32,
    len: usize,
    /// The last serial number. The upper 16 bits are the number of the device, so that the numbers
    /// of two lists differ. The other 48 last for nine years at a million insertions per second.
    number: u64,
}

/// The position of a walk over a list, which visits the frames that are on the list from its begin
/// until their turn.
#[derive(Debug)]
pub(crate) struct Walk {
    /// The frame visited last, and its serial number.
    at: (u32, u64),
    /// The largest serial number visited. A walk that restarts at the oldest frame skips up to
    /// here.
    seen: u64,
    /// The largest serial number at the begin of the walk.
    end: u64,
    is_over: bool,
}

impl Walk {
    pub(crate) fn is_over(&self) -> bool {
        self.is_over
    }

    /// Ends the walk.
    pub(crate) fn stop(&mut self) {
        self.is_over = true;
    }
}

impl DirtyList {
    /// Returns the empty list of the device with that number.
    pub(crate) fn new(id: u16) -> Self {
        Self { first: NIL, last: NIL, len: 0, number: u64::from(id) << 48 }
    }

    pub(crate) fn len(&self) -> usize {
        self.len
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Inserts a frame that is on no list, as the newest.
    pub(crate) fn push(&mut self, frames: &Frames, frame: Frame) {
        let links = frames.header(frame).links();
        debug_assert!(links.number() == 0);
        self.number += 1;
        links.set(NIL, self.first);
        links.set_number(self.number);
        match self.first {
            NIL => self.last = frame.0,
            first => frames.header(Frame(first)).links().set_previous(frame.0),
        }
        self.first = frame.0;
        self.len += 1;
    }

    /// Removes a frame. Returns whether it was on the list.
    pub(crate) fn remove(&mut self, frames: &Frames, frame: Frame) -> bool {
        let links = frames.header(frame).links();
        if links.number() == 0 {
            return false;
        }
        let (previous, next) = (links.previous(), links.next());
        match previous {
            NIL => self.first = next,
            previous => frames.header(Frame(previous)).links().set_next(next),
        }
        match next {
            NIL => self.last = previous,
            next => frames.header(Frame(next)).links().set_previous(previous),
        }
        links.set_number(0);
        self.len -= 1;
        true
    }

    /// Returns the oldest frame.
    pub(crate) fn last(&self) -> Option<Frame> {
        (self.last != NIL).then_some(Frame(self.last))
    }

    /// Returns a walk over the frames that are on the list now, the oldest first.
    pub(crate) fn walk(&self) -> Walk {
        Walk { at: (NIL, 0), seen: 0, end: self.number, is_over: false }
    }

    /// Returns the next frames of a walk. A piece may be empty before the walk is over.
    pub(crate) fn piece<'l>(
        &'l self,
        frames: &'l Frames,
        walk: &'l mut Walk,
    ) -> impl Iterator<Item = Frame> + 'l {
        (0..PIECE).map_while(move |_| self.step(frames, walk)).flatten()
    }

    /// Moves the walk by one frame. Returns `None` at the end, `Some(None)` for a frame visited
    /// before.
    fn step(&self, frames: &Frames, walk: &mut Walk) -> Option<Option<Frame>> {
        let (at, number) = walk.at;
        let stays = at != NIL && frames.header(Frame(at)).links().number() == number;
        let next = match stays {
            true => frames.header(Frame(at)).links().previous(),
            false => self.last,
        };
        let number = match next {
            NIL => u64::MAX,
            next => frames.header(Frame(next)).links().number(),
        };
        if walk.is_over || number > walk.end {
            walk.is_over = true;
            return None;
        }
        walk.at = (next, number);
        let is_new = number > walk.seen;
        walk.seen = walk.seen.max(number);
        Some(is_new.then_some(Frame(next)))
    }
}

#[cfg(all(test, not(offlock_model)))]
mod tests {
    use super::*;

    /// Random changes between the pieces: each frame that was there and stays is seen once, in
    /// order, and none that came later.
    #[test]
    fn a_walk_in_pieces_sees_what_was_there_and_stays() {
        const ALL: u32 = 300;
        let frames = Frames::new(ALL as usize, 9).unwrap();
        let mut state = 1_u64;
        let mut random = |below: usize| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            (state >> 33) as usize % below
        };
        for round in 0..20 {
            let mut lists = [DirtyList::new(1), DirtyList::new(2)];
            let mut on = [const { Vec::new() }; 2];
            for frame in (0..ALL).map(Frame) {
                let list = usize::from(random(8) == 0);
                lists[list].push(&frames, frame);
                on[list].push(frame);
            }
            let (before, mut gone) = (on[0].clone(), Vec::new());
            let (mut walk, mut seen) = (lists[0].walk(), Vec::new());
            while !walk.is_over() {
                seen.extend(lists[0].piece(&frames, &mut walk));
                for _ in 0..round {
                    // Off, and perhaps on again, here or there; often where the walk stands.
                    let from = random(2);
                    let last =
                        seen.last().and_then(|last| on[from].iter().position(|on| on == last));
                    let Some(at) = last.or((!on[from].is_empty()).then(|| random(on[from].len())))
                    else {
                        continue;
                    };
                    let frame = on[from].remove(at);
                    assert!(lists[from].remove(&frames, frame));
                    assert!(!lists[from].remove(&frames, frame));
                    gone.push(frame);
                    let to = random(3);
                    if to < 2 {
                        lists[to].push(&frames, frame);
                        on[to].push(frame);
                    }
                }
            }
            assert!(seen.iter().all(|frame| before.contains(frame)), "one that came later");
            let mut left = before.iter();
            assert!(seen.iter().all(|frame| left.any(|other| other == frame)), "not in order");
            let stayed = before.iter().filter(|frame| !gone.contains(frame));
            assert!(stayed.into_iter().all(|frame| seen.contains(frame)), "overlooked");
            for (list, on) in lists.iter_mut().zip(&on) {
                assert_eq!(list.len(), on.len());
                on.iter().for_each(|frame| assert!(list.remove(&frames, *frame)));
            }
        }
    }
}
