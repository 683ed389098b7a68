//! Busy polling: before a worker sleeps, it polls for events a moment longer, if that was
//! successful lately.
//!
//! A client that works through a queue of requests answers within microseconds, which is less than
//! it takes to put the thread to sleep and wake it. Each failed poll doubles the number of sleeps
//! until the next poll, and each success halves it. A client on the same CPU cannot run while the
//! worker polls, so a server on one CPU soon stops polling.

use std::time::{Duration, Instant};

/// How long to poll: the measured time to wake a client on another CPU of a virtual machine, and as
/// much again for its answer.
const LIMIT: Duration = Duration::from_micros(100);
/// Most sleeps between two busy polls. A guess: failed polls then cost less than a thousandth of
/// the time.
const MAX_SKIPPED: u32 = 1024;

/// Decides before each sleep whether to poll.
#[derive(Debug, Default)]
pub(crate) struct BusyPoll {
    /// Sleeps until the next busy poll.
    skip: u32,
    /// Sleeps to skip after the next failed poll.
    penalty: u32,
}

impl BusyPoll {
    /// Calls `poll` until it finds something or the time is over. Returns `None` if the caller
    /// should sleep.
    pub(crate) fn run<T, E>(
        &mut self,
        mut poll: impl FnMut() -> Result<Option<T>, E>,
    ) -> Result<Option<T>, E> {
        if self.skip > 0 {
            self.skip -= 1;
            return Ok(None);
        }
        // An event that is ready at once does not show that longer polling pays.
        let first = poll()?;
        if first.is_some() {
            return Ok(first);
        }
        let start = Instant::now();
        loop {
            if let Some(found) = poll()? {
                self.penalty /= 2;
                return Ok(Some(found));
            }
            if start.elapsed() >= LIMIT {
                self.penalty = (self.penalty * 2).clamp(1, MAX_SKIPPED);
                self.skip = self.penalty;
                return Ok(None);
            }
            std::hint::spin_loop();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the number of polls until something is found or the time is over.
    fn polls(busy_poll: &mut BusyPoll, found_at: u32) -> u32 {
        let mut polls = 0;
        let found = busy_poll.run(|| {
            polls += 1;
            Ok::<_, ()>((polls == found_at).then_some(()))
        });
        assert_eq!(found.unwrap().is_some(), polls == found_at);
        polls
    }

    #[test]
    fn polls_in_vain_become_rare_and_success_brings_them_back() {
        const NEVER: u32 = u32::MAX;
        let mut busy_poll = BusyPoll::default();
        assert_eq!(polls(&mut busy_poll, 2), 2);
        let spun = (0..10_000).filter(|_| polls(&mut busy_poll, NEVER) > 0).count();
        assert!((10..30).contains(&spun), "{spun}");
        // An event that is ready at once changes nothing.
        while polls(&mut busy_poll, 1) == 0 {}
        assert!(polls(&mut busy_poll, NEVER) > 0 && polls(&mut busy_poll, 2) == 0);
        while polls(&mut busy_poll, 2) == 0 {}
        for _ in 0..100 {
            assert_eq!(polls(&mut busy_poll, 2), 2);
        }
        assert!(polls(&mut busy_poll, NEVER) > 0 && polls(&mut busy_poll, 1) == 0);
        assert_eq!(polls(&mut busy_poll, 2), 2, "a single poll in vain costs one sleep");
    }
}
