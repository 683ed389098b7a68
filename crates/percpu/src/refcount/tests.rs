//! fork at a bad moment, and what the fold leaves behind.

use crate::error::Forked;
use crate::fork::{adopt, child::in_child};
use crate::sync::atomic::{AtomicU64, Ordering};
use crate::sync::{Arc, thread};
use crate::{KillError, PercpuRef, ReinitRefused, ResurrectError};

fn counting() -> (PercpuRef, Arc<AtomicU64>) {
    let released = Arc::new(AtomicU64::new(0));
    let count = Arc::clone(&released);
    let refs = PercpuRef::new(move || {
        count.fetch_add(1, Ordering::Relaxed);
    });
    (refs.unwrap(), released)
}

#[test]
fn inv15_a_fork_child_ends_its_copy_alone() {
    let (refs, released) = counting();
    let reference = refs.try_get().unwrap();
    assert!(in_child(|| {
        let more = refs.try_get_live().is_some();
        let killed = refs.kill().is_ok() && refs.try_get_live().is_none() && !refs.is_zero();
        // SAFETY: the child's copy of `reference`, which its `_exit` never drops.
        unsafe { PercpuRef::put(&refs) };
        more && killed && refs.is_zero() && released.load(Ordering::Relaxed) == 1
    }));
    assert!(!refs.is_dying(), "the parent goes on");
    drop(reference);
    refs.kill().unwrap();
    assert_eq!(released.load(Ordering::Relaxed), 1);
}

/// As if another thread had been switching at the fork: the lock is held in the child, for ever.
#[test]
fn inv15_what_needs_a_lock_that_the_fork_left_behind_is_refused() {
    let (refs, _) = counting();
    let held = refs.cold.switch.lock();
    assert!(in_child(|| {
        let forked = Forked::new();
        refs.kill() == Err(KillError::Forked(forked))
            && refs.resurrect() == Err(ResurrectError::Forked(forked))
            && refs.switch_to_atomic() == Err(forked)
            && refs.switch_to_percpu() == Err(forked)
            && refs.reinit(|| ()).unwrap_err().why() == ReinitRefused::Forked(forked)
            && refs.try_get().is_some()
            && refs.try_get_live().is_some()
    }));
    drop(held);
    assert!(in_child(|| {
        adopt();
        refs.kill().is_ok() && refs.is_zero()
    }));
}

/// The words of sections are not set back: what they hold is folded once.
#[test]
fn inv09_a_second_fold_counts_the_difference_only() {
    let (refs, released) = counting();
    for _ in 0..5 {
        for _ in 0..3 {
            refs.try_get().unwrap().leak(); // here
        }
        thread::scope(|scope| {
            scope.spawn(|| refs.try_get_live().unwrap().leak());
        });
        refs.switch_to_atomic().unwrap();
        assert_eq!(refs.cold.atomic.load(Ordering::Relaxed), 5 * super::ONE);
        refs.switch_to_percpu().unwrap();
        for _ in 0..4 {
            // SAFETY: one of the four leaked above.
            unsafe { PercpuRef::put(&refs) };
        }
    }
    refs.kill().unwrap();
    assert_eq!(released.load(Ordering::Relaxed), 1);
}
