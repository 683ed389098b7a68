//! Folds, and the kill of many counts.

use std::panic::{AssertUnwindSafe, catch_unwind};

use crate::fence;
use crate::sync::atomic::{AtomicU64, Ordering};
use crate::sync::{Arc, thread};
use crate::{KillError, PercpuRef};

fn counting() -> (PercpuRef, Arc<AtomicU64>) {
    let released = Arc::new(AtomicU64::new(0));
    let count = Arc::clone(&released);
    let refs = PercpuRef::new(move || {
        count.fetch_add(1, Ordering::Relaxed);
    });
    (refs.unwrap(), released)
}

/// A fold leaves the words of sections unchanged, and the next fold counts only the difference.
#[test]
fn inv09_a_second_fold_counts_the_difference_only() {
    let (refs, released) = counting();
    for _ in 0..5 {
        for _ in 0..3 {
            refs.try_get().unwrap().leak(); // on this thread
        }
        thread::scope(|scope| {
            scope.spawn(|| refs.try_get().unwrap().leak());
        });
        refs.switch_to_atomic();
        assert_eq!(refs.cold.atomic.load(Ordering::Relaxed), 5 * super::percpu_ref::ONE);
        refs.switch_to_percpu();
        for _ in 0..4 {
            // SAFETY: one of the four leaked above.
            unsafe { PercpuRef::put(&refs) };
        }
    }
    refs.kill().unwrap();
    assert_eq!(released.load(Ordering::Relaxed), 1);
}

#[test]
fn inv10_kill_many_kills_each_count_once_or_refuses_it() {
    let counted: Vec<_> = (0..20).map(|_| counting()).collect();
    let references: Vec<_> = counted.iter().map(|(refs, _)| refs.try_get().unwrap()).collect();
    counted[3].0.kill().unwrap();
    counted[4].0.switch_to_atomic();
    // In reverse order, with two counts listed twice.
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
fn inv11_a_panic_of_one_release_closure_does_not_spare_the_other_counts() {
    let (before, released) = counting();
    let (after, released_after) = counting();
    let panics = PercpuRef::new(|| panic!("from the closure")).unwrap();
    let many = [&before, &panics, &after];
    let kill = || PercpuRef::kill_many(&many, |_, why| panic!("{why}"));
    let panic = catch_unwind(AssertUnwindSafe(kill)).unwrap_err();
    assert_eq!(panic.downcast_ref(), Some(&"from the closure"));
    assert!(many.iter().all(|refs| refs.is_zero()));
    assert_eq!((released.load(Ordering::Relaxed), released_after.load(Ordering::Relaxed)), (1, 1));
}

/// A barrier interrupts the running threads of the process, so a kill of many counts makes only
/// one.
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
