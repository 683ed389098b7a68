//! The ring of sampled hits: the thread that hits against the one that drains.

use std::sync::Arc;

use offlock_sync::thread;

use super::world::thoroughly;
use crate::policy::Samples;

/// A planted bug, and the model that must fail for it.
pub(super) const MUTANTS: &[(&str, &str)] = &[
    ("add: the tag is written", "samples::inv27_tags_arrive_in_order_and_once"),
    ("drain: the tag is written", "samples::inv27_tags_arrive_in_order_and_once"),
    ("drain: the tag was read", "samples::inv27_tags_arrive_in_order_and_once"),
    ("add: the tag there was read", "samples::inv27_tags_arrive_in_order_and_once"),
];

/// Of those, what only a checker of weak memory can see.
pub(super) const LOOM_ONLY: &[&str] = &[
    "add: the tag is written",
    "drain: the tag is written",
    "drain: the tag was read",
    "add: the tag there was read",
];

/// Three tags through a ring of two: what does not fit is lost, and nothing else.
#[test]
fn inv27_tags_arrive_in_order_and_once() {
    thoroughly(|| {
        let samples = Arc::new(Samples::new(2, 2).unwrap());
        let hits = thread::spawn({
            let samples = Arc::clone(&samples);
            move || (1..=3).for_each(|tag| samples.add(0, tag))
        });
        let mut tags = Vec::new();
        (0..2).for_each(|_| samples.drain(|tag| tags.push(tag)));
        hits.join().unwrap();
        samples.drain(|tag| tags.push(tag));
        assert!(tags.is_sorted_by(|a, b| a < b), "{tags:?}");
        assert!(tags.starts_with(&[1, 2]) && tags.len() <= 3, "{tags:?}");
    });
}
