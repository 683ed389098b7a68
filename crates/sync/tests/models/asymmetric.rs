//! The asymmetric fences: the store-buffer litmus test, and a hand-shake that stands on it.

use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};

use offlock_sync::asymmetric::{heavy, light};
use offlock_sync::atomic::{AtomicBool, AtomicU64, AtomicUsize};
use offlock_sync::virtual_fence::both_strategies;
use offlock_sync::{Arc, beside, step};

use super::thoroughly;

/// Runs a model with each strategy.
fn model(f: impl Fn() + Send + Sync + Copy + 'static) {
    thoroughly(|| both_strategies(|| offlock_sync::model(f)));
}

/// Each of two threads stores to its place, runs its fence, and loads the other's place: both loads cannot miss.
fn one_of_two_sees_the_other(fence_there: fn()) {
    model(move || {
        let flags = Arc::new([AtomicBool::new(false), AtomicBool::new(false)]);
        let side = |flags: &[AtomicBool; 2], me: usize, fence: fn()| {
            // Ordering: Relaxed, both; the fences are under test.
            flags[me].store(true, Relaxed);
            fence();
            flags[1 - me].load(Relaxed)
        };
        let there = beside(&flags, move |flags| side(flags, 1, fence_there));
        let seen_here = side(&flags, 0, heavy);
        assert!(seen_here | there.join().unwrap(), "both stores were still in a buffer");
    });
}

/// Fails without `heavy`.
#[test]
fn inv19_one_of_two_sees_the_other() {
    one_of_two_sees_the_other(light);
}

#[test]
fn inv19_two_heavy_sides_see_one_another() {
    one_of_two_sees_the_other(heavy);
}

/// What reclamation stands on: the writer takes a payload away and destroys it if it sees no
/// reader; a reader that got in either is seen, or finds the payload gone.
#[test]
fn inv19_a_reader_is_seen_or_sees_the_new_payload() {
    model(|| {
        let payloads = [AtomicU64::new(7), AtomicU64::new(7)];
        let shared = Arc::new((AtomicUsize::new(0), AtomicBool::new(false), payloads));
        let reader = beside(&shared, |(current, active, payloads)| {
            active.store(true, Relaxed);
            step!("read: before the index", light());
            // Ordering: Acquire pairs with the writer's Release store of the index.
            let index = current.load(Acquire);
            assert_eq!(payloads[index].load(Relaxed), 7, "it was destroyed under us");
            // Ordering: Release pairs with the writer's Acquire; it carries the read above.
            active.store(false, Release);
        });
        let (current, active, payloads) = &*shared;
        current.store(1, Release);
        heavy();
        // Ordering: Acquire pairs with the reader's Release.
        if !active.load(Acquire) {
            payloads[0].store(0, Relaxed);
        }
        reader.join().unwrap();
    });
}
