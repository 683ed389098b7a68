//! The limit of requests per submission: a fixed number, or a number that adapts to the device.
//!
//! For a device that works in the background large batches save system calls. On a device that
//! completes inside the submission the first request of a batch waits for the last one, so small
//! batches are better. The limit doubles or halves after a submission:
//!
//! | the submission | the limit |
//! |---|---|
//! | was full, left requests behind, and less than half of it was complete at the next reap | doubles |
//! | was full, and nothing was in flight after the next reap | halves |
//! | found the kernel without room | halves |

/// The first value and the lower bound of an adaptive limit; a guess from NOP round trips (80 ns a
/// request in batches of 8, 61 to 74 in batches of 32).
const LEAST: usize = 16;

/// The limit of requests in one submission.
pub(crate) struct BatchLimit {
    now: usize,
    least: usize,
    most: usize,
    /// The size of the last submission, and whether the limit cut it. Reset by the next reap.
    last: usize,
    cut: bool,
}

impl BatchLimit {
    pub(crate) fn new(most: usize, adaptive: bool) -> Self {
        let least = if adaptive { most.min(LEAST) } else { most };
        Self { now: least, least, most, last: 0, cut: false }
    }

    #[inline]
    pub(crate) fn get(&self) -> usize {
        self.now
    }

    /// Returns whether the limit can change.
    #[inline]
    fn adapts(&self) -> bool {
        self.least < self.most
    }

    /// Records a submission that took `accepted` requests and left `left` pending.
    #[inline]
    pub(crate) fn submitted(&mut self, accepted: usize, left: usize) {
        if self.adapts() {
            (self.last, self.cut) = (accepted, accepted == self.now && left > 0);
        }
    }

    /// Records that the kernel had no room.
    pub(crate) fn busy(&mut self) {
        self.now = (self.now / 2).max(self.least);
        self.last = 0;
    }

    /// Records the number of completions that a reap found and of requests that it left in flight.
    /// Only the first reap after a submission counts.
    #[inline]
    pub(crate) fn reaped(&mut self, found: usize, in_flight: usize) {
        let last = std::mem::take(&mut self.last);
        if last < self.now {
            // The queue or the ring was the limit.
        } else if in_flight == 0 {
            self.now = (self.now / 2).max(self.least);
        } else if self.cut && found < last / 2 {
            self.now = (self.now * 2).min(self.most);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limit_grows_while_filled_and_shrinks_when_complete_at_once_or_busy() {
        let mut limit = BatchLimit::new(100, true);
        let mut seen = Vec::new();
        for _ in 0..4 {
            seen.push(limit.get());
            limit.submitted(limit.get(), 1);
            limit.reaped(3, 9);
        }
        assert_eq!(seen, [16, 32, 64, 100]);
        // The limit stays if the batch was not full, left nothing behind, or was half complete.
        limit.busy();
        for (accepted, left, found, in_flight) in
            [(50, 0, 0, 60), (10, 0, 10, 0), (50, 1, 25, 25), (0, 1, 80, 0), (40, 5, 80, 3)]
        {
            limit.submitted(accepted, left);
            limit.reaped(found, in_flight);
            limit.reaped(found, 0); // only the first reap counts
            assert_eq!(limit.get(), 50);
        }
        for expected in [25, 16, 16] {
            limit.submitted(limit.get(), 1);
            limit.reaped(limit.get(), 0);
            assert_eq!(limit.get(), expected);
        }
        limit.busy();
        assert_eq!(limit.get(), 16);
    }

    #[test]
    fn fixed_limit_stays() {
        for (mut limit, value) in
            [(BatchLimit::new(100, false), 100), (BatchLimit::new(7, true), 7)]
        {
            limit.submitted(value, 9);
            limit.reaped(value, 0);
            limit.busy();
            assert_eq!(limit.get(), value);
        }
    }
}
