//! Labelled protocol steps, which a model run can weaken.
//!
//! A test weakens each step and checks that its model then fails.
//!
//! | | normal build | model build, if `OFFLOCK_MUTANT` names the label |
//! |---|---|---|
//! | `fence!(SeqCst, "label")` | `fence(Ordering::SeqCst)` | nothing |
//! | `order!(Release, "label")` | `Ordering::Release` | `Ordering::Relaxed` |
//! | `step!("label", statement)` | `statement` | nothing |
//! | `check!("label", condition)` | `condition` | `true`; the condition is evaluated first |
//!
//! A label describes the protocol step, for example `"publish: the entry is built"`. The list of
//! planted bugs of a crate pairs each label with a model that fails when the step is weakened. In a
//! normal build [`is_planted`](super::is_planted) is the constant `false`.

/// A fence that a model run can skip: `fence!(SeqCst, "label")`.
#[doc(hidden)]
#[macro_export]
macro_rules! offlock_fence {
    ($order:ident, $label:literal) => {
        if !$crate::is_planted($label) {
            $crate::atomic::fence($crate::atomic::Ordering::$order);
        }
    };
}

/// A memory ordering that a model run can weaken to `Relaxed`: `order!(Release, "label")`.
#[doc(hidden)]
#[macro_export]
macro_rules! offlock_order {
    ($order:ident, $label:literal) => {
        if $crate::is_planted($label) {
            $crate::atomic::Ordering::Relaxed
        } else {
            $crate::atomic::Ordering::$order
        }
    };
}

/// A statement that a model run can skip: `step!("label", statement)`.
#[doc(hidden)]
#[macro_export]
macro_rules! offlock_step {
    ($label:literal, $step:expr $(,)?) => {
        if !$crate::is_planted($label) {
            $step;
        }
    };
}

/// A condition that a model run can read as `true`: `check!("label", condition)`.
#[doc(hidden)]
#[macro_export]
macro_rules! offlock_check {
    // Not `||`, because a run must reach the label even if the condition is true.
    ($label:literal, $condition:expr $(,)?) => {{ $condition | $crate::is_planted($label) }};
}

pub use crate::{
    offlock_check as check, offlock_fence as fence, offlock_order as order, offlock_step as step,
};

#[cfg(all(test, not(offlock_model)))]
mod tests;
