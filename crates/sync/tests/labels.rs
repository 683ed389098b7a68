//! The labelled steps in a normal build, where each macro expands to the plain operation.
#![cfg(not(offlock_model))]

use offlock_sync::atomic::{AtomicU32, Ordering, fence as plain_fence};
use offlock_sync::{check, fence, order, step};

/// The macros expand to constants, so they neither call a function nor read the environment.
#[test]
fn an_ordering_and_a_condition_are_constants() {
    const ORDER: Ordering = order!(Release, "publish: the entry is built");
    const HOLDS: bool = check!("evict: no pins", 1 > 2);
    assert_eq!((ORDER, HOLDS), (Ordering::Release, false));
    assert_eq!(order!(AcqRel, "put: the last use"), Ordering::AcqRel);
}

/// The `fence` macro has the name of the function, and can be imported beside it.
#[test]
fn a_fence_is_a_fence() {
    plain_fence(Ordering::SeqCst);
    fence!(SeqCst, "evict: before the scan");
    let unit: () = fence!(Acquire, "put: after the last");
    assert_eq!(unit, ());
}

#[test]
fn a_step_runs_once() {
    let count = AtomicU32::new(0);
    step!("count: add", count.fetch_add(1, Ordering::Relaxed));
    let mut sum = 1;
    step!("count: add to the sum", sum += count.load(order!(Relaxed, "count: read")));
    assert_eq!((count.into_inner(), sum), (1, 2));
}

#[test]
fn a_step_may_leave_the_function() {
    fn returns_early() -> u32 {
        step!("give up", return 1);
        2
    }
    assert_eq!(returns_early(), 1);
}

#[test]
fn a_condition_is_evaluated_once_and_keeps_its_value() {
    let mut evaluated = 0;
    let mut holds = |value| {
        evaluated += 1;
        value
    };
    assert!(check!("table: a free slot", holds(true)));
    assert!(!check!("table: two free slots", holds(true) && 1 > 2));
    if check!("table: no slot is left", holds(false)) {
        panic!("a normal build does not read the condition as true");
    }
    assert_eq!(evaluated, 3);
}
