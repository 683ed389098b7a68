//! Planted bugs, one of which a model run may switch on to see that it is caught.

/// True if the planted bug `name` is the one that `OFFLOCK_MUTANT` names.
///
/// Always false, and free, outside the model-checking builds. The first time it is true it says
/// so on standard error, so that whoever demands a failure can tell it from one of another cause.
#[cfg(not(any(offlock_loom, offlock_shuttle)))]
#[inline(always)]
pub const fn mutant(_name: &str) -> bool {
    false
}

/// True if the planted bug `name` is the one that `OFFLOCK_MUTANT` names.
///
/// The first time it is true it says so on standard error, so that whoever demands a failure can
/// tell it from one of another cause.
#[cfg(any(offlock_loom, offlock_shuttle))]
pub fn mutant(name: &str) -> bool {
    use std::sync::{Once, OnceLock};

    static PLANTED: OnceLock<Option<String>> = OnceLock::new();
    static SAID: Once = Once::new();

    let planted = PLANTED.get_or_init(|| std::env::var("OFFLOCK_MUTANT").ok());
    let hit = planted.as_deref() == Some(name);
    if hit || planted.as_deref() == Some(super::planted::CONTROL) {
        // Not `eprintln`: the test harness would capture it, and an abort would lose it.
        SAID.call_once(|| {
            use std::io::Write;
            let said = writeln!(std::io::stderr(), "planted mutant reached: {name}");
            said.expect("standard error is open");
            abort_on_panic();
        });
    }
    hit
}

/// The first panic is what was asked for: to unwind through what the bug left could go on for ever.
///
/// loom ends its threads by panics too, when all went well. They have no message.
#[cfg(any(offlock_loom, offlock_shuttle))]
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
