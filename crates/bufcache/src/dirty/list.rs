//! The dirty buffers of one device, in the order in which they became dirty.
//!
//! Linked through the headers of their frames, so a buffer becomes dirty without memory. A frame is on a
//! list from before its entry says `DIRTY` until before it says so no more, or until the block is
//! invalidated: the headers are touched under the lock of the list only.
//!
//! A list may have as many frames as the cache. Who looks at all of them does so in pieces ([`Walk`]), and
//! lets the lock go between them. Each frame that is put on a list has a number there that no other ever
//! has, on whatever list; so a walk finds out whether the frame it stands at was taken off meanwhile.

use crate::frames::{Frame, Frames};

/// No frame has that number.
pub(crate) const NIL: u32 = u32::MAX;

/// Frames of one piece of a walk. A guess: a few microseconds, where none of their headers is in a CPU's cache.
const PIECE: usize = if cfg!(any(offlock_loom, offlock_shuttle)) { 1 } else { 64 };

#[derive(Debug)]
pub(crate) struct DirtyList {
    first: u32,
    last: u32,
    len: usize,
    /// The last number that was given: the device's in the upper 16 bits, so that they differ from those of
    /// other lists. The rest is enough for nine years of a million a second.
    number: u64,
}

/// Where a walk over a list stands: all that were on it when it began are looked at, but for those that are
/// taken off before their turn.
#[derive(Debug)]
pub(crate) struct Walk {
    /// A frame, and the number that it had on the list.
    at: (u32, u64),
    /// The last that was looked at: behind it, again, where the walk had to begin anew.
    seen: u64,
    end: u64,
    is_over: bool,
}

impl Walk {
    pub(crate) fn is_over(&self) -> bool {
        self.is_over
    }

    /// Nothing further on is wanted.
    pub(crate) fn stop(&mut self) {
        self.is_over = true;
    }
}

impl DirtyList {
    /// Of the device with that number.
    pub(crate) fn new(id: u16) -> Self {
        Self { first: NIL, last: NIL, len: 0, number: u64::from(id) << 48 }
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

    /// Takes a frame off; returns whether it was on.
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

    /// The oldest.
    pub(crate) fn last(&self) -> Option<Frame> {
        (self.last != NIL).then_some(Frame(self.last))
    }

    /// A walk over those that are on it now, the oldest first.
    pub(crate) fn walk(&self) -> Walk {
        Walk { at: (NIL, 0), seen: 0, end: self.number, is_over: false }
    }

    /// The next few of a walk. There may be none of a piece, and more further on.
    pub(crate) fn piece<'l>(
        &'l self,
        frames: &'l Frames,
        walk: &'l mut Walk,
    ) -> impl Iterator<Item = Frame> + 'l {
        (0..PIECE).map_while(move |_| self.step(frames, walk)).flatten()
    }

    /// One step; `None` at the end, and of what was seen before nothing.
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

#[cfg(all(test, not(any(offlock_loom, offlock_shuttle))))]
mod tests {
    use super::*;

    /// Random changes between the pieces: each frame that was there and stays is seen once, in order, and
    /// none that came later.
    #[test]
    fn a_walk_in_pieces_sees_what_was_there_and_stays() {
        const ALL: u32 = 300;
        let frames = Frames::new(ALL as usize, 9, 9).unwrap();
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
