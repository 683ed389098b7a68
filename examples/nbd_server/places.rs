//! Places that images share, and how many of them may be one image's.
//!
//! An image whose device hangs keeps the places of what was asked of it. So an image has no more than a
//! fixed number of times what it leaves to others, its share: with a share of 8 the first that hangs leaves a
//! ninth, and the next a ninth of that.

/// So many places, as numbers.
#[derive(Debug)]
pub(crate) struct Places {
    count: usize,
    share: usize,
    taken: usize,
    /// By file.
    held: Box<[usize]>,
}

impl Places {
    /// For so many files.
    pub(crate) fn new(count: usize, share: usize, files: usize) -> Self {
        Self { count, share, taken: 0, held: vec![0; files].into() }
    }

    /// Files that have places, and how many.
    pub(crate) fn held(&self) -> impl Iterator<Item = (usize, usize)> {
        self.held.iter().copied().enumerate().filter(|&(_, held)| held > 0)
    }

    /// Whether that file may have one more.
    pub(crate) fn may(&self, file: usize) -> bool {
        self.may_with(self.held[file], self.count.saturating_sub(self.taken))
    }

    pub(crate) fn take(&mut self, file: usize) {
        self.held[file] += 1;
        self.taken += 1;
    }

    pub(crate) fn leave(&mut self, file: usize) {
        self.held[file] -= 1;
        self.taken -= 1;
    }

    /// Returns whether one more request may wait for a place: at most `most` hold or await one, `waiting` already
    /// wait, and the file stays within its share. `its` returns the file, and how many of its requests wait.
    pub(crate) fn has_room(
        &self,
        most: usize,
        waiting: usize,
        its: impl FnOnce() -> (usize, usize),
    ) -> bool {
        let used = self.taken + waiting;
        let left = most.saturating_sub(used);
        if left > used {
            return true; // whichever images have them
        }
        let (file, waiting) = its();
        self.may_with(self.held[file] + waiting, left)
    }

    fn may_with(&self, has: usize, left: usize) -> bool {
        left > 0 && has < self.share * left
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SHARE: usize = 8;

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
        let mut places = Places::new(128, SHARE, 3);
        assert_eq!([0, 1, 2, 0].map(|file| taken(&mut places, file)), [114, 13, 1, 0]);
        (0..114).for_each(|_| places.leave(0));
        assert_eq!([2, 1, 0].map(|file| taken(&mut places, file) > 0), [true; 3]);
        for depth in 1..=SHARE {
            let mut places = Places::new(depth, SHARE, 1);
            assert_eq!(taken(&mut places, 0), depth, "where there are few, all");
        }
    }

    #[test]
    fn room_is_left_to_others() {
        let mut places = Places::new(4, SHARE, 2);
        (0..4).for_each(|_| places.take(0));
        let most = (0..64).find(|&waiting| !places.has_room(64, waiting, || (0, waiting)));
        let most = most.expect("a limit");
        assert!((32..60).contains(&most), "{most}");
        assert!(places.has_room(64, most, || (1, 0)) && !places.has_room(64, 60, || (1, 0)));
    }
}
