//! How many requests one submission takes: a fixed number, or one that follows the device.
//!
//! A device that works in the background is best fed in large batches: each saves system calls.
//! One that completes inside the submission makes the first request of a batch wait for the last,
//! so there the batch shrinks. The rule doubles and halves, by one look per submission:
//!
//! | the submission | the limit |
//! |---|---|
//! | was full, left requests behind, and less than half of it was complete right after | doubles |
//! | was full, and nothing was in flight any more right after | halves |
//! | found the kernel without room | halves |

/// Where an adaptive limit starts and what it never falls below; a guess from NOP round trips
/// (80 ns a request in batches of 8, 61 to 74 in batches of 32).
const LEAST: usize = 16;

pub(crate) struct BatchLimit {
    now: usize,
    least: usize,
    most: usize,
    /// Size of the last submission, and whether the limit cut it; until a reap has looked at it.
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

    /// Whether the limit ever changes.
    #[inline]
    fn adapts(&self) -> bool {
        self.least < self.most
    }

    /// `accepted` requests were submitted; `left` are still pending.
    #[inline]
    pub(crate) fn submitted(&mut self, accepted: usize, left: usize) {
        if self.adapts() {
            (self.last, self.cut) = (accepted, accepted == self.now && left > 0);
        }
    }

    /// The kernel had no room.
    pub(crate) fn busy(&mut self) {
        self.now = (self.now / 2).max(self.least);
        self.last = 0;
    }

    /// The reap after a submission found this many completions, and left so many in flight.
    #[inline]
    pub(crate) fn reaped(&mut self, found: usize, in_flight: usize) {
        let last = std::mem::take(&mut self.last);
        if last < self.now {
            // Not the limit, but the queue or the ring decided.
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
        // Not full, or nothing left: no reason to change. Half complete: neither.
        limit.busy();
        for (accepted, left, found, in_flight) in
            [(50, 0, 0, 60), (10, 0, 10, 0), (50, 1, 25, 25), (0, 1, 80, 0), (40, 5, 80, 3)]
        {
            limit.submitted(accepted, left);
            limit.reaped(found, in_flight);
            limit.reaped(found, 0); // only the first look counts
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
