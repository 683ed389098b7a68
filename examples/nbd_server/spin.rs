//! Looking again for a moment before going to sleep.
//!
//! A client that works through a queue of requests answers within microseconds; putting the
//! thread to sleep and waking it takes longer than that. So the worker looks again for a short
//! while, as long as that pays: every look in vain doubles how many sleeps pass before the next
//! one, and a success halves it. A client on the same CPU cannot run while we look, which is how a
//! server on one CPU soon stops looking.

use std::time::{Duration, Instant};

/// How long to look: what waking a client on another CPU of a virtual machine took when measured,
/// and as much again for it to answer.
const LIMIT: Duration = Duration::from_micros(100);
/// Most sleeps between two looks; a guess that makes looks in vain cost less than a per mille.
const MOST_SKIPPED: u32 = 1024;

/// Decides whether to look, and learns from it.
#[derive(Debug, Default)]
pub(crate) struct Spinner {
    /// Sleeps until the next look.
    skip: u32,
    /// Sleeps to skip after the next look in vain.
    penalty: u32,
}

impl Spinner {
    /// Calls `look` until it finds something or the time is over; `None` to go to sleep.
    pub(crate) fn spin<T, E>(
        &mut self,
        mut look: impl FnMut() -> Result<Option<T>, E>,
    ) -> Result<Option<T>, E> {
        if self.skip > 0 {
            self.skip -= 1;
            return Ok(None);
        }
        // What is there at once says nothing about looking longer.
        let first = look()?;
        if first.is_some() {
            return Ok(first);
        }
        let start = Instant::now();
        loop {
            if let Some(found) = look()? {
                self.penalty /= 2;
                return Ok(Some(found));
            }
            if start.elapsed() >= LIMIT {
                self.penalty = (self.penalty * 2).clamp(1, MOST_SKIPPED);
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

    /// Looks made before something is found, or until the spinner gives up.
    fn looks(spinner: &mut Spinner, found_at: u32) -> u32 {
        let mut looks = 0;
        let found = spinner.spin(|| {
            looks += 1;
            Ok::<_, ()>((looks == found_at).then_some(()))
        });
        assert_eq!(found.unwrap().is_some(), looks == found_at);
        looks
    }

    #[test]
    fn looking_in_vain_gets_rare_and_success_brings_it_back() {
        const NEVER: u32 = u32::MAX;
        let mut spinner = Spinner::default();
        assert_eq!(looks(&mut spinner, 2), 2);
        let spun = (0..10_000).filter(|_| looks(&mut spinner, NEVER) > 0).count();
        assert!((10..30).contains(&spun), "{spun}");
        // Something that was there at once changes nothing.
        while looks(&mut spinner, 1) == 0 {}
        assert!(looks(&mut spinner, NEVER) > 0 && looks(&mut spinner, 2) == 0);
        while looks(&mut spinner, 2) == 0 {}
        for _ in 0..100 {
            assert_eq!(looks(&mut spinner, 2), 2);
        }
        assert!(looks(&mut spinner, NEVER) > 0 && looks(&mut spinner, 1) == 0);
        assert_eq!(looks(&mut spinner, 2), 2, "a single look in vain costs one sleep");
    }
}
