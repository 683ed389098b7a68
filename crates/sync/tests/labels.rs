//! The labelled steps in a normal build, where each macro expands to the plain operation.
#![cfg(not(offlock_model))]

use offlock_sync::atomic::{Ordering, fence as plain_fence};
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

/// A step runs once, and may leave the function.
#[test]
fn a_step_is_the_statement_itself() {
    fn count(count: &mut u32) -> u32 {
        step!("count: add", *count += 1);
        step!("give up", return *count);
        0
    }
    assert_eq!((count(&mut 0), count(&mut 4)), (1, 5));
}

/// A condition is evaluated once, and keeps its value.
#[test]
fn a_condition_is_the_expression_itself() {
    let mut evaluated = 0;
    let mut holds = |value| {
        evaluated += 1;
        value
    };
    assert!(check!("table: a free slot", holds(true)));
    assert!(!check!("table: no slot is left", holds(false) || 1 > 2));
    assert_eq!(evaluated, 2);
}
