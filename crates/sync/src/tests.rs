//! The facade of a normal build: locks, cells and `free`.

use super::quarantine::{Watched, free};
use super::*;

#[test]
fn locks_are_const_and_wait_borrows_the_guard() {
    static STATE: Mutex<u32> = Mutex::new(0);
    static CHANGED: Condvar = Condvar::new();

    let mut state = STATE.lock();
    assert!(STATE.try_lock().is_none());
    let other = thread::spawn(|| {
        *STATE.lock() = 1;
        CHANGED.notify_one();
    });
    while *state == 0 {
        CHANGED.wait(&mut state);
    }
    *state += 1;
    drop(state);
    other.join().unwrap();
    assert_eq!(*STATE.try_lock().unwrap(), 2);
}

#[test]
fn a_cell_gives_its_content_to_both_closures() {
    let cell = cell::UnsafeCell::new(7);
    // SAFETY: only this thread has the cell, and the pointer is not kept.
    cell.with_mut(|value| unsafe { *value += 1 });
    // SAFETY: only this thread has the cell, and the pointer is not kept.
    assert_eq!(cell.with(|value| unsafe { *value }), 8);
    assert_eq!(cell.into_inner(), 8);
}

#[test]
fn free_drops_the_value_at_once() {
    let value = Arc::new(());
    let mut node = Box::new(Watched::new(Some(Arc::clone(&value))));
    assert!(node.is_some());
    assert_eq!(Arc::strong_count(&value), 2);
    free(std::mem::replace(&mut node, Box::new(Watched::new(None))));
    assert_eq!(Arc::strong_count(&value), 1);
}
