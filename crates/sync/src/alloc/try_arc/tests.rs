//! The count, the pointers and the one drop, on real threads.

use std::sync::atomic::AtomicUsize;
use std::thread;

use super::*;

struct CountsDrops<'a>(&'a AtomicUsize);

impl Drop for CountsDrops<'_> {
    fn drop(&mut self) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }
}

#[test]
fn the_last_reference_drops_the_value_once() {
    let drops = AtomicUsize::new(0);
    let shared = TryArc::try_new(CountsDrops(&drops)).unwrap();
    thread::scope(|scope| {
        for _ in 0..4 {
            let mine = shared.clone();
            scope.spawn(move || {
                (0..100).for_each(|_| assert!(TryArc::ptr_eq(&mine.clone(), &mine)))
            });
        }
    });
    assert_eq!((TryArc::references(&shared), drops.load(Ordering::Relaxed)), (1, 0));
    let other = shared.clone();
    assert_eq!(TryArc::references(&shared), 2);
    drop(shared);
    assert_eq!(drops.load(Ordering::Relaxed), 0);
    drop(other);
    assert_eq!(drops.load(Ordering::Relaxed), 1);
}

#[test]
fn a_pointer_keeps_its_reference() {
    let shared = TryArc::try_new(String::from("kept")).unwrap();
    let raw = TryArc::into_raw(shared.clone());
    assert_eq!(TryArc::references(&shared), 2);
    // SAFETY: the pointer of `into_raw`, turned back once.
    let back = unsafe { TryArc::<String>::from_raw(raw) };
    assert!(
        TryArc::ptr_eq(&back, &shared)
            && !TryArc::ptr_eq(&back, &TryArc::try_new(String::new()).unwrap())
    );
    drop(shared);
    assert_eq!((TryArc::references(&back), back.as_str()), (1, "kept"));
}
