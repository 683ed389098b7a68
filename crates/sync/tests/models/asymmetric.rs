//! The asymmetric fences: the store-buffer litmus test, and a hand-shake that stands on it.

use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};

use offlock_sync::asymmetric::{heavy, light};
use offlock_sync::atomic::{AtomicBool, AtomicU64, AtomicUsize};
use offlock_sync::virtual_fence::both_strategies;
use offlock_sync::{Arc, step, thread};

use super::thoroughly;

/// A planted bug, and the model that must fail for it.
pub(super) const MUTANTS: &[(&str, &str)] = &[
    ("heavy: a full fence", "asymmetric::inv19_one_of_two_sees_the_other"),
    ("heavy: a full fence", "asymmetric::inv19_a_reader_is_seen_or_sees_the_new_payload"),
    ("read: before the index", "asymmetric::inv19_a_reader_is_seen_or_sees_the_new_payload"),
];

/// Of these, what only loom can see: shuttle is sequentially consistent, fences or not.
pub(super) const LOOM_ONLY: &[&str] = &["heavy: a full fence", "read: before the index"];

/// Runs a model with each strategy.
fn model(f: impl Fn() + Send + Sync + Copy + 'static) {
    thoroughly(|| both_strategies(|| offlock_sync::model(f)));
}

/// Each stores to its place and loads the other's: both loads cannot miss. Fails without `heavy`.
#[test]
fn inv19_one_of_two_sees_the_other() {
    model(|| {
        let flags = Arc::new((AtomicBool::new(false), AtomicBool::new(false)));
        let frequent = thread::spawn({
            let flags = Arc::clone(&flags);
            move || {
                // Ordering: Relaxed, as all four; the fences are under test.
                flags.0.store(true, Relaxed);
                light();
                flags.1.load(Relaxed)
            }
        });
        flags.1.store(true, Relaxed);
        heavy();
        let seen_here = flags.0.load(Relaxed);
        let seen_there = frequent.join().unwrap();
        assert!(seen_here || seen_there, "both stores were still in a buffer");
    });
}

/// Two `heavy` order each other as well.
#[test]
fn inv19_two_heavy_sides_see_one_another() {
    model(|| {
        let flags = Arc::new((AtomicBool::new(false), AtomicBool::new(false)));
        let other = thread::spawn({
            let flags = Arc::clone(&flags);
            move || {
                flags.0.store(true, Relaxed);
                heavy();
                flags.1.load(Relaxed)
            }
        });
        flags.1.store(true, Relaxed);
        heavy();
        let seen_here = flags.0.load(Relaxed);
        assert!(seen_here | other.join().unwrap());
    });
}

/// What reclamation stands on: the writer takes a payload away and destroys it if it sees no
/// reader; a reader that got in either is seen, or finds the payload gone.
#[test]
fn inv19_a_reader_is_seen_or_sees_the_new_payload() {
    model(|| {
        let current = Arc::new(AtomicUsize::new(0));
        let active = Arc::new(AtomicBool::new(false));
        let payloads = Arc::new([AtomicU64::new(7), AtomicU64::new(7)]);
        let reader = thread::spawn({
            let (current, active) = (Arc::clone(&current), Arc::clone(&active));
            let payloads = Arc::clone(&payloads);
            move || {
                active.store(true, Relaxed);
                step!("read: before the index", light());
                // Ordering: Acquire pairs with the writer's Release store of the index.
                let index = current.load(Acquire);
                assert_eq!(payloads[index].load(Relaxed), 7, "it was destroyed under us");
                // Ordering: Release pairs with the writer's Acquire; it carries the read above.
                active.store(false, Release);
            }
        });
        current.store(1, Release);
        heavy();
        // Ordering: Acquire pairs with the reader's Release.
        if !active.load(Acquire) {
            payloads[0].store(0, Relaxed);
        }
        reader.join().unwrap();
    });
}
