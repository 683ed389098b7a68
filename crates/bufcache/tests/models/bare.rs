//! Slots against their scan, with nothing around them.

use std::sync::Arc;

use bufcache::bare::Bare;
use percpu::sync::{model, thread};

/// A planted bug, and the model that must fail for it.
pub(super) const MUTANTS: &[(&str, &str)] = &[
    ("hit-without-a-fence", "bare::inv06_a_slot_against_a_scan"),
    ("scan-without-a-fence", "bare::inv06_a_slot_against_a_scan"),
    ("slot-clear-relaxed", "bare::inv06_a_slot_against_a_scan"),
    ("slot-scan-relaxed", "bare::inv06_a_slot_against_a_scan"),
    ("bury-without-a-first-look-at-pins", "bare::inv06_a_pin_becomes_a_slot"),
];

/// Of those, what only a checker of weak memory can see.
pub(super) const LOOM_ONLY: &[&str] =
    &["hit-without-a-fence", "scan-without-a-fence", "slot-clear-relaxed", "slot-scan-relaxed"];

/// At least one of the two sees the other.
#[test]
fn inv06_a_slot_against_a_scan() {
    model(|| {
        let bare = Arc::new(Bare::new());
        let reads = thread::spawn({
            let bare = Arc::clone(&bare);
            move || assert!([None, Some(7)].contains(&bare.read()))
        });
        let evicted = bare.evict();
        reads.join().unwrap();
        assert!(!evicted || bare.read().is_none());
    });
}

/// Who looks at pins and slots finds one of the two.
#[test]
fn inv06_a_pin_becomes_a_slot() {
    model(|| {
        let bare = Arc::new(Bare::new());
        bare.pin();
        let wakes = thread::spawn({
            let bare = Arc::clone(&bare);
            move || assert_eq!(bare.wake(), 7)
        });
        bare.bury();
        wakes.join().unwrap();
    });
}
