//! The full counts, by hand: hours, not minutes.
//!
//! Goes on past a failure and ends with a summary. Each step has its own log.

mod counted;
mod steps;

use std::fmt::Write as _;
use std::fs::{self, File};
use std::sync::Arc;
use std::time::Instant;

use self::counted::counted;
use self::steps::{Step, steps};
use crate::error::{Error, Result};
use crate::parts::fuzz;
use crate::process::interrupted;
use crate::workspace::Workspace;

/// The lines of a failed step's log that are shown.
const SHOWN: usize = 30;

/// Prints or runs the steps that have one of `names` in their name, or all if no name is given.
pub(crate) fn run(ws: &Workspace, names: &[String], scale: f64, only_list: bool) -> Result<()> {
    if !(scale.is_finite() && scale > 0.0) {
        return Err(Error::with_status("the scale must be a number above 0", 2));
    }
    let crates = ws.libraries()?;
    let mut chosen = steps(&crates, &fuzz::list(ws)?, scale);
    chosen.retain(|step| is_chosen(&step.name, names));
    if chosen.is_empty() {
        return Err(Error::new(format!("no step has '{}' in its name", names.join(" "))));
    }
    if only_list {
        for step in &chosen {
            println!("{:<28} {}", step.name, step.asked);
        }
        return Ok(());
    }
    soak(ws, &chosen)
}

fn is_chosen(step: &str, names: &[String]) -> bool {
    names.is_empty() || names.iter().any(|name| step.contains(name.as_str()))
}

fn soak(ws: &Workspace, steps: &[Step]) -> Result<()> {
    let logs = ws.target.join("soak");
    fs::create_dir_all(&logs).map_err(|error| Error::io(logs.display(), error))?;
    let began = Instant::now();
    let (mut summary, mut failed) = (String::new(), 0);
    for step in steps {
        println!("{:>6} s  {:<28} {}", began.elapsed().as_secs(), step.name, step.asked);
        let step_began = Instant::now();
        let path = logs.join(format!("{}.log", step.name));
        let log = File::create(&path).map_err(|error| Error::io(path.display(), error))?;
        let outcome = step.run(ws, &Arc::new(log));
        if let (Err(error), Some(_)) = (&outcome, interrupted()) {
            return Err(Error::with_status(error.to_string(), error.status()));
        }
        let said = String::from_utf8_lossy(&fs::read(&path).unwrap_or_default()).into_owned();
        let counts = counted(&said);
        // A step that has run no test has failed, too.
        let ok = outcome.is_ok() && !counts.is_empty();
        if !ok {
            failed += 1;
            show_end(&said);
            if let Err(error) = outcome {
                println!("error: {error}");
            }
        }
        let _ = writeln!(
            summary,
            "{:<28} {:<6} {:>6} s   {}: {}",
            step.name,
            if ok { "ok" } else { "FAILED" },
            step_began.elapsed().as_secs(),
            step.asked,
            if counts.is_empty() { "nothing ran" } else { &counts }
        );
    }
    println!("\n{summary}logs: {}", logs.display());
    let minutes = began.elapsed().as_secs() / 60;
    if failed > 0 {
        return Err(Error::new(format!(
            "FAILED: {failed} steps, see above, after {minutes} minutes"
        )));
    }
    println!("OK: {} steps in {minutes} minutes", steps.len());
    Ok(())
}

fn show_end(log: &str) {
    let lines: Vec<&str> = log.lines().collect();
    for line in &lines[lines.len().saturating_sub(SHOWN)..] {
        println!("{line}");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_step_is_chosen_by_a_part_of_its_name() {
        let names = ["tearings".to_string(), "model".to_string()];
        assert!(is_chosen("nbd-tearings", &names));
        assert!(is_chosen("aio-reap-model", &names));
        assert!(!is_chosen("nbd-load", &names));
        assert!(is_chosen("nbd-load", &[]));
    }
}
