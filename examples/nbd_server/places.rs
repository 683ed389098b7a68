//! How much a worker takes on, and how much of that may be one image's.
//!
//! An image whose device hangs keeps the places of what was asked of it. So an image has no more than
//! [`SHARE`] times what it leaves to others: the first that hangs leaves a ninth, the next a ninth of that.

/// See above. A guess: one image alone is given all of up to 8 places, and 114 of 128.
const SHARE: usize = 8;

/// How much a worker takes on.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Limits {
    /// Operations in the engine and in hands.
    pub(crate) depth: usize,
    /// Operations in all: those, and those that wait for a place there.
    pub(crate) most: usize,
}

/// The operations in the engine and in hands, as numbers.
#[derive(Debug)]
pub(crate) struct Places {
    limits: Limits,
    taken: usize,
    /// By file.
    held: Box<[usize]>,
}

impl Places {
    pub(crate) fn new(limits: Limits, files: usize) -> Self {
        Self { limits, taken: 0, held: vec![0; files].into() }
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.taken == 0
    }

    /// Whether an operation of that file may have a place.
    pub(crate) fn may(&self, file: usize) -> bool {
        may(self.held[file], self.limits.depth.saturating_sub(self.taken))
    }

    pub(crate) fn take(&mut self, file: usize) {
        self.held[file] += 1;
        self.taken += 1;
    }

    pub(crate) fn leave(&mut self, file: usize) {
        self.held[file] -= 1;
        self.taken -= 1;
    }

    /// Whether there is room for one more request, while so many have no place; `its` says which file's it is,
    /// and how many of those are of its export.
    pub(crate) fn has_room(&self, without: usize, its: impl FnOnce() -> (usize, usize)) -> bool {
        let used = self.taken + without;
        let left = self.limits.most.saturating_sub(used);
        if left > used {
            return true; // whoever has them
        }
        let (file, waiting) = its();
        may(self.held[file] + waiting, left)
    }
}

fn may(has: usize, left: usize) -> bool {
    left > 0 && has < SHARE * left
}

#[cfg(test)]
mod tests {
    use super::*;

    fn taken(places: &mut Places, file: usize) -> usize {
        let mut count = 0;
        while places.may(file) {
            places.take(file);
            count += 1;
        }
        count
    }

    #[test]
    fn an_image_has_no_more_than_it_may_and_leaves_some_to_others() {
        let mut places = Places::new(Limits { depth: 128, most: 1024 }, 3);
        assert_eq!([0, 1, 2, 0].map(|file| taken(&mut places, file)), [114, 13, 1, 0]);
        (0..114).for_each(|_| places.leave(0));
        assert_eq!([2, 1, 0].map(|file| taken(&mut places, file) > 0), [true; 3]);
        for depth in 1..=SHARE {
            let mut places = Places::new(Limits { depth, most: depth }, 1);
            assert_eq!(taken(&mut places, 0), depth, "where there are few, all");
        }
    }

    #[test]
    fn room_is_left_to_others() {
        let mut places = Places::new(Limits { depth: 4, most: 64 }, 2);
        (0..4).for_each(|_| places.take(0));
        let most = (0..64).find(|&waiting| !places.has_room(waiting, || (0, waiting)));
        let most = most.expect("a limit");
        assert!((32..60).contains(&most), "{most}");
        assert!(places.has_room(most, || (1, 0)) && !places.has_room(60, || (1, 0)));
    }
}
