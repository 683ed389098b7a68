//! fork at a bad moment, and what the fold leaves behind.

use std::panic::{AssertUnwindSafe, catch_unwind};

use crate::error::Forked;
use crate::fence;
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
        let more = refs.try_get().is_some();
        let killed = refs.kill().is_ok() && refs.try_get().is_none() && !refs.is_zero();
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
            && refs.try_get_even_killed().is_some()
            && refs.try_get().is_some()
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
            scope.spawn(|| refs.try_get().unwrap().leak());
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

#[test]
fn inv10_each_of_many_is_killed_once_or_refused() {
    let counted: Vec<_> = (0..20).map(|_| counting()).collect();
    let references: Vec<_> = counted.iter().map(|(refs, _)| refs.try_get().unwrap()).collect();
    counted[3].0.kill().unwrap();
    counted[4].0.switch_to_atomic().unwrap();
    // Backwards, and two of them twice.
    let mut many: Vec<_> = counted.iter().rev().map(|(refs, _)| refs).collect();
    many.extend([&counted[7].0, &counted[3].0]);
    let mut refused = Vec::new();
    let killed = PercpuRef::kill_many(&many, |i, why| refused.push((i, why)));
    let dying = KillError::AlreadyDying;
    assert_eq!((killed, refused), (Ok(19), vec![(16, dying), (20, dying), (21, dying)]));
    for ((refs, released), reference) in counted.iter().zip(references) {
        assert!(
            refs.is_dying() && refs.try_get().is_none() && refs.try_get_even_killed().is_some()
        );
        assert_eq!(released.load(Ordering::Relaxed), 0);
        drop(reference);
        assert_eq!(released.load(Ordering::Relaxed), 1);
    }
    assert_eq!(PercpuRef::kill_many(&[], |_, _| ()), Ok(0));
    assert_eq!(PercpuRef::kill_many(&many, |_, why| assert_eq!(why, dying)), Ok(0));
}

#[test]
fn inv11_a_panic_of_one_release_closure_kills_the_others_all_the_same() {
    let (before, released) = counting();
    let (after, released_after) = counting();
    let angry = PercpuRef::new(|| panic!("from the closure")).unwrap();
    let many = [&before, &angry, &after];
    let kill = || PercpuRef::kill_many(&many, |_, why| panic!("{why}"));
    let panic = catch_unwind(AssertUnwindSafe(kill)).unwrap_err();
    assert_eq!(panic.downcast_ref(), Some(&"from the closure"));
    assert!(many.iter().all(|refs| refs.is_zero()));
    assert_eq!((released.load(Ordering::Relaxed), released_after.load(Ordering::Relaxed)), (1, 1));
}

#[test]
fn inv15_of_many_what_a_fork_left_locked_is_refused() {
    let (free, _) = counting();
    let (busy, _) = counting();
    let held = busy.cold.switch.lock();
    assert!(in_child(|| {
        let mut refused = Vec::new();
        let killed = PercpuRef::kill_many(&[&busy, &free], |i, why| refused.push((i, why)));
        killed == Ok(1)
            && refused == [(0, KillError::Forked(Forked::new()))]
            && free.is_zero()
            && !busy.is_dying()
    }));
    drop(held);
}

/// Killed one by one they cost as many barriers, each of which interrupts whoever runs.
#[test]
fn a_kill_of_many_costs_one_barrier() {
    if !crate::rseq::section::available() {
        return; // no barrier, so nothing to share
    }
    let many: Vec<_> = (0..500).map(|_| counting().0).collect();
    let many: Vec<_> = many.iter().collect();
    let fences = |kill: &dyn Fn()| {
        let before = fence::calls();
        kill();
        fence::calls() - before
    };
    let together = fences(&|| assert_eq!(PercpuRef::kill_many(&many, |_, _| ()), Ok(500)));
    many.iter().for_each(|refs| refs.reinit(|| ()).unwrap());
    let alone = fences(&|| many.iter().for_each(|refs| refs.kill().unwrap()));
    assert_eq!((together, alone), (1, 500));
}
