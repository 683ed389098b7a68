//! `TryArc`: whichever of two threads drops the last reference, it sees what the other has done.

use offlock_sync::alloc::TryArc;
use offlock_sync::cell::UnsafeCell;
use offlock_sync::thread;

use super::model;

pub(super) const MUTANTS: &[(&str, &str)] = &[
    ("reference drop: after its last use", "try_arc::the_last_reference_sees_all_uses"),
    ("reference free: after the uses of the others", "try_arc::the_last_reference_sees_all_uses"),
];

/// shuttle is sequentially consistent.
pub(super) const LOOM_ONLY: &[&str] =
    &["reference drop: after its last use", "reference free: after the uses of the others"];

/// A value that loom sees.
struct Value([UnsafeCell<u32>; 2]);

// SAFETY: each of the two threads uses a cell of its own, and the last reference both.
unsafe impl Sync for Value {}

impl Value {
    fn add(&self, cell: usize) {
        // SAFETY: see `Sync` above.
        self.0[cell].with_mut(|cell| unsafe { *cell += 1 });
    }
}

impl Drop for Value {
    fn drop(&mut self) {
        (0..2).for_each(|cell| self.add(cell));
        // SAFETY: see `Sync` above.
        self.0.iter().for_each(|cell| assert_eq!(cell.with(|cell| unsafe { *cell }), 2));
    }
}

#[test]
fn the_last_reference_sees_all_uses() {
    model(|| {
        let value = TryArc::try_new(Value([UnsafeCell::new(0), UnsafeCell::new(0)])).ok().unwrap();
        let other = value.clone();
        let thread = thread::spawn(move || other.add(0));
        value.add(1);
        drop(value);
        thread.join().unwrap();
    });
}
