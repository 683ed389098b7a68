//! Folds, and the kill of many counts.

use crate::PercpuRef;
use crate::sync::atomic::{AtomicU64, Ordering};
use crate::sync::{Arc, thread};

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
