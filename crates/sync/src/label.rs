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
//! normal build [`is_planted`] is the constant `false`.

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

/// Returns whether `OFFLOCK_MUTANT` names this label: always false in a normal build.
#[cfg(not(offlock_model))]
#[inline(always)]
#[must_use]
pub const fn is_planted(_label: &str) -> bool {
    false
}

/// Returns whether `OFFLOCK_MUTANT` names this label.
///
/// The first call with that label writes a line to standard error, and so does the first call of a
/// run with the label `control`. The test that expects the failure can then tell the planted bug from
/// another cause.
#[cfg(offlock_model)]
#[must_use]
pub fn is_planted(label: &str) -> bool {
    use std::sync::{Once, OnceLock};

    static PLANTED: OnceLock<Option<String>> = OnceLock::new();
    static SAID: Once = Once::new();

    let planted = PLANTED.get_or_init(|| std::env::var("OFFLOCK_MUTANT").ok());
    let hit = planted.as_deref() == Some(label);
    if hit || planted.as_deref() == Some("control") {
        // Not `eprintln`: the test harness would capture it, and an abort would lose it.
        SAID.call_once(|| {
            use std::io::Write;
            let said = writeln!(std::io::stderr(), "planted mutant reached: {label}");
            said.expect("standard error is open");
            abort_on_panic();
        });
    }
    hit
}

/// Installs a panic hook that aborts on the first panic with a message, because unwinding through
/// the state that the bug left may never end.
///
/// loom also ends its threads by panics after a run without a failure. These have no message.
#[cfg(offlock_model)]
fn abort_on_panic() {
    let report = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |info| {
        report(info);
        let payload = info.payload();
        if payload.is::<&str>() || payload.is::<String>() {
            std::process::abort();
        }
    }));
}
