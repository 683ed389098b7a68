//! The parts of a CI run: their order, their minutes, and the summary.

use std::fmt::Write as _;
use std::time::{Duration, Instant};

use crate::error::{Error, Result};
use crate::parts::{adopt, benches, fallbacks, fuzz, lint, models, stress, tests};
use crate::tools;
use crate::workspace::Workspace;

/// One part.
struct Part {
    name: &'static str,
    run: fn(&Workspace) -> Result<()>,
}

/// All parts, in the order in which they run: what fails fast and often comes first; `fallbacks`
/// uses the build of `tests`.
const PARTS: [Part; 12] = [
    Part { name: "tools", run: tools::install },
    Part { name: "lint", run: lint::lint },
    Part { name: "tests", run: tests::tests },
    Part { name: "adopt", run: adopt::run },
    Part { name: "fallbacks", run: fallbacks::run },
    Part { name: "objects", run: tests::objects },
    Part { name: "models", run: all_models },
    Part { name: "stress", run: |ws| stress::all(ws, stress::SECONDS) },
    Part { name: "fuzz", run: fuzz::all },
    Part { name: "deny", run: lint::deny },
    Part { name: "benches", run: benches::smoke },
    Part { name: "demo", run: tests::demo },
];

fn all_models(ws: &Workspace) -> Result<()> {
    let crates = ws.libraries()?;
    let checkers = models::Checker::ALL.to_vec();
    models::run(ws, &models::Selection { crates, checkers, filter: Vec::new() })
}

/// Prints the names of the parts.
pub(crate) fn list() {
    for part in &PARTS {
        println!("{}", part.name);
    }
}

/// Runs these parts in the order given, or all if none is named.
pub(crate) fn run(ws: &Workspace, names: &[String]) -> Result<()> {
    let chosen = select(names)?;
    let began = Instant::now();
    let mut report = Report::default();
    let mut outcome = Ok(());
    for part in &chosen {
        println!("\n=== {}", part.name);
        let part_began = Instant::now();
        outcome = (part.run)(ws);
        if let Err(error) = &outcome {
            eprintln!("error: {error}");
            report.failure = Some((part.name, error.status()));
            break;
        }
        report.minutes.push((part.name, part_began.elapsed()));
    }
    print!("{}", report.text(began.elapsed()));
    // The summary ends with the failure.
    outcome.map_err(|error| Error::with_status("", error.status()))
}

fn select(names: &[String]) -> Result<Vec<&'static Part>> {
    if names.is_empty() {
        return Ok(PARTS.iter().collect());
    }
    let find = |name: &String| {
        PARTS
            .iter()
            .find(|part| part.name == name)
            .ok_or_else(|| Error::with_status(format!("no part is called {name}; see --list"), 2))
    };
    names.iter().map(find).collect()
}

/// What the end of a run says.
#[derive(Default)]
struct Report {
    /// The parts that passed.
    minutes: Vec<(&'static str, Duration)>,
    /// The part that failed, and its exit status.
    failure: Option<(&'static str, i32)>,
}

impl Report {
    fn text(&self, total: Duration) -> String {
        let mut text = format!("\n{:<12} minutes\n", "part");
        for (name, time) in &self.minutes {
            let _ = writeln!(text, "{name:<12} {:>7}", minutes(*time));
        }
        let total = minutes(total);
        let _ = match self.failure {
            None => {
                writeln!(text, "OK: all {} parts passed in {total} minutes", self.minutes.len())
            }
            Some((part, status)) => writeln!(
                text,
                "FAILED in part '{part}' after {total} minutes (exit status {status})"
            ),
        };
        text
    }
}

fn minutes(time: Duration) -> String {
    format!("{:.1}", time.as_secs_f64() / 60.0)
}

#[cfg(test)]
mod unit_tests {
    use super::*;

    fn names(parts: &[&Part]) -> Vec<&'static str> {
        parts.iter().map(|part| part.name).collect()
    }

    #[test]
    fn parts_are_selected_by_name_in_the_order_given() {
        assert_eq!(select(&[]).unwrap().len(), PARTS.len());
        let chosen = select(&["demo".to_string(), "lint".to_string()]).unwrap();
        assert_eq!(names(&chosen), ["demo", "lint"]);
        let Err(error) = select(&["lint".to_string(), "lynt".to_string()]) else { panic!() };
        assert_eq!(error.to_string(), "no part is called lynt; see --list");
        assert_eq!(error.status(), 2);
    }

    #[test]
    fn the_summary_has_the_minutes_and_the_verdict() {
        let mut report = Report::default();
        report.minutes.push(("tools", Duration::from_secs(3)));
        report.minutes.push(("lint", Duration::from_secs(150)));
        let total = Duration::from_secs(200);
        let table = "\npart         minutes\ntools            0.1\nlint             2.5\n";
        let ok = format!("{table}OK: all 2 parts passed in 3.3 minutes\n");
        assert_eq!(report.text(total), ok);
        report.failure = Some(("tests", 101));
        let failed = "FAILED in part 'tests' after 3.3 minutes (exit status 101)\n";
        assert_eq!(report.text(total), format!("{table}{failed}"));
    }
}
