//! The planted bug that a model run switches on.

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
