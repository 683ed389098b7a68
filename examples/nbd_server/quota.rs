//! Quotas of images in a limited number of requests.
//!
//! An image whose device hangs keeps the slots of its requests. So an image never has more than a
//! fixed multiple of the slots that it leaves to others, its share. With a share of 8 the first
//! image that hangs leaves a ninth of the slots, and the next leaves a ninth of that.

/// Counts the requests in flight of each file, and limits them.
#[derive(Debug)]
pub(crate) struct FileQuotas {
    limit: usize,
    share: usize,
    /// Requests in flight of all files.
    total: usize,
    /// By file.
    in_flight: Box<[usize]>,
}

impl FileQuotas {
    /// Quotas of `files` files in `limit` requests.
    pub(crate) fn new(limit: usize, share: usize, files: usize) -> Self {
        Self { limit, share, total: 0, in_flight: vec![0; files].into() }
    }

    /// The files that have requests in flight, and how many.
    pub(crate) fn in_flight(&self) -> impl Iterator<Item = (usize, usize)> {
        self.in_flight.iter().copied().enumerate().filter(|&(_, count)| count > 0)
    }

    /// Returns whether one more request of the file may begin.
    pub(crate) fn allows(&self, file: usize) -> bool {
        self.is_within_share(self.in_flight[file], self.limit.saturating_sub(self.total))
    }

    pub(crate) fn acquire(&mut self, file: usize) {
        self.in_flight[file] += 1;
        self.total += 1;
    }

    pub(crate) fn release(&mut self, file: usize) {
        self.in_flight[file] -= 1;
        self.total -= 1;
    }

    /// Returns whether one more request may queue: at most `limit` are in flight or wait, `waiting`
    /// already wait, and the file stays within its share. `of_file` returns the file, and how many
    /// of its requests wait.
    pub(crate) fn may_queue(
        &self,
        limit: usize,
        waiting: usize,
        of_file: impl FnOnce() -> (usize, usize),
    ) -> bool {
        let used = self.total + waiting;
        let left = limit.saturating_sub(used);
        if left > used {
            return true; // the file's share is no less, even if all of them are the file's
        }
        let (file, waiting) = of_file();
        self.is_within_share(self.in_flight[file] + waiting, left)
    }

    fn is_within_share(&self, used: usize, left: usize) -> bool {
        left > 0 && used < self.share * left
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SHARE: usize = 8;

    fn acquire_all(quotas: &mut FileQuotas, file: usize) -> usize {
        let mut count = 0;
        while quotas.allows(file) {
            quotas.acquire(file);
            count += 1;
        }
        count
    }

    #[test]
    fn an_image_has_no_more_than_its_share_and_leaves_some_to_others() {
        let mut quotas = FileQuotas::new(128, SHARE, 3);
        assert_eq!([0, 1, 2, 0].map(|file| acquire_all(&mut quotas, file)), [114, 13, 1, 0]);
        (0..114).for_each(|_| quotas.release(0));
        assert_eq!([2, 1, 0].map(|file| acquire_all(&mut quotas, file) > 0), [true; 3]);
        for depth in 1..=SHARE {
            let mut quotas = FileQuotas::new(depth, SHARE, 1);
            assert_eq!(acquire_all(&mut quotas, 0), depth, "of few requests, all");
        }
    }

    #[test]
    fn room_in_the_queue_is_left_to_others() {
        let mut quotas = FileQuotas::new(4, SHARE, 2);
        (0..4).for_each(|_| quotas.acquire(0));
        let limit = (0..64).find(|&waiting| !quotas.may_queue(64, waiting, || (0, waiting)));
        let limit = limit.expect("a limit");
        assert!((32..60).contains(&limit), "{limit}");
        assert!(quotas.may_queue(64, limit, || (1, 0)) && !quotas.may_queue(64, 60, || (1, 0)));
    }
}
