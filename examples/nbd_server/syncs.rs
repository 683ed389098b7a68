//! Syncs of one file that several workers ask the kernel for.
//!
//! ```text
//!  worker A   fdatasync ───────────── fails ─ ─ ─ (not looked at yet) ─ ─ ─► over: lost
//!  worker B        fdatasync ─────────── 0 ─► over: wait for A ─────────────► lost
//! ```
//!
//! The kernel tells of a loss once for each open file, and all workers use the same one: B's sync returns 0
//! although what it was to make durable is lost, for A was told of it. So B, before it answers, waits until
//! every sync that began before its own was over has been looked at. Nobody waits for a sync to begin, so
//! this ends.

use std::task::Waker;

use percpu::sync::Mutex;

/// The syncs of one file.
#[derive(Debug, Default)]
pub(crate) struct Syncs(Mutex<State>);

#[derive(Debug, Default)]
struct State {
    /// One has failed: what was lost is not known, so nothing is called durable any more.
    failed: bool,
    next: u64,
    /// Those that have begun and were not looked at.
    unknown: Vec<u64>,
    wakers: Vec<Waker>,
}

/// What a sync that is over has come to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fate {
    Durable,
    Lost,
    /// Those before this number have to be looked at first.
    After(u64),
}

impl State {
    fn fate(&self, before: u64) -> Fate {
        if self.failed {
            Fate::Lost
        } else if self.unknown.iter().any(|number| *number < before) {
            Fate::After(before)
        } else {
            Fate::Durable
        }
    }
}

impl Syncs {
    /// The number of a sync that the kernel is about to be asked for.
    pub(crate) fn begin(&self) -> u64 {
        let mut state = self.0.lock();
        let number = state.next;
        state.next += 1;
        state.unknown.push(number);
        number
    }

    /// Whoever asked for it looks at what the kernel said, or has not asked after all.
    pub(crate) fn over(&self, number: u64, failed: bool) -> Fate {
        let mut state = self.0.lock();
        state.unknown.retain(|other| *other != number);
        state.failed |= failed;
        let fate = state.fate(state.next);
        let wakers = std::mem::take(&mut state.wakers);
        drop(state);
        wakers.into_iter().for_each(Waker::wake);
        fate
    }

    /// What became of one that had to wait; if it still has to, the waker is called when that may change.
    pub(crate) fn look(&self, before: u64, waker: &Waker) -> Fate {
        let mut state = self.0.lock();
        let fate = state.fate(before);
        if let Fate::After(_) = fate {
            if !state.wakers.iter().any(|known| known.will_wake(waker)) {
                state.wakers.push(waker.clone());
            }
        }
        fate
    }

    /// Whether one has ever failed.
    pub(crate) fn has_failed(&self) -> bool {
        self.0.lock().failed
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::task::Wake;

    use super::*;

    #[derive(Default)]
    struct Calls(AtomicUsize);

    impl Wake for Calls {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, Ordering::Relaxed);
        }
    }

    #[test]
    fn who_hears_nothing_waits_for_who_may_have_heard() {
        let (syncs, calls) = (Syncs::default(), Arc::new(Calls::default()));
        let waker = Waker::from(Arc::clone(&calls));
        let (first, second) = (syncs.begin(), syncs.begin());
        let Fate::After(before) = syncs.over(second, false) else { panic!("the first is unknown") };
        for _ in 0..2 {
            assert_eq!(syncs.look(before, &waker), Fate::After(before));
        }
        assert_eq!(syncs.over(first, true), Fate::Lost);
        assert_eq!(calls.0.load(Ordering::Relaxed), 1);
        assert_eq!(syncs.look(before, &waker), Fate::Lost);
        let third = syncs.begin();
        assert_eq!(syncs.over(third, false), Fate::Lost, "for ever");
        assert!(syncs.has_failed());
    }

    #[test]
    fn nobody_waits_for_what_began_later() {
        let (syncs, waker) = (Syncs::default(), Waker::noop());
        let numbers = [0; 3].map(|_| syncs.begin());
        let Fate::After(before) = syncs.over(numbers[1], false) else { panic!("two are unknown") };
        let later = syncs.begin();
        assert_eq!(syncs.over(numbers[0], false), Fate::After(before + 1));
        assert_eq!(syncs.look(before, waker), Fate::After(before));
        assert_eq!(syncs.over(numbers[2], false), Fate::After(before + 1), "for the later one");
        assert_eq!(syncs.look(before, waker), Fate::Durable);
        assert_eq!(syncs.look(before + 1, waker), Fate::After(before + 1));
        assert_eq!(syncs.over(later, false), Fate::Durable);
        assert_eq!(syncs.look(before + 1, waker), Fate::Durable);
        assert!(!syncs.has_failed());
    }
}
