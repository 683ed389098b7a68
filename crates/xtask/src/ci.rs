//! The parts of a CI run: their order, their minutes, and the summary.

use std::fmt::Write as _;
use std::time::{Duration, Instant};

use crate::ahead::{Ahead, Job};
use crate::error::{Error, Result};
use crate::parts::{adopt, benches, fallbacks, fuzz, lint, models, stress, tests};
use crate::tools;
use crate::workspace::Workspace;

/// One part.
struct Part {
    name: &'static str,
    run: fn(&Workspace, &Ahead) -> Result<()>,
}

/// All parts, in the order in which they run: what fails fast and often comes first; `fallbacks`
/// uses the build of `tests`; `fuzz` and what follows has been built beside the parts before it.
const PARTS: [Part; 11] = [
    Part { name: "tools", run: |ws, _| tools::install(ws) },
    Part { name: "lint", run: |ws, _| lint::lint(ws) },
    Part { name: "tests", run: |ws, _| tests::tests(ws) },
    Part { name: "adopt", run: |ws, _| adopt::run(ws) },
    Part { name: "fallbacks", run: fallbacks::run },
    Part { name: "models", run: all_models },
    Part { name: "stress", run: |ws, ahead| stress::all(ws, ahead, stress::SECONDS) },
    Part { name: "fuzz", run: fuzz::all },
    Part { name: "deny", run: |ws, _| lint::deny(ws) },
    Part { name: "benches", run: benches::smoke },
    Part { name: "demo", run: demo },
];

/// The builds that are done beside earlier parts, in the order of the parts.
fn jobs(chosen: &[&Part]) -> Vec<Job> {
    let demo = Job { part: "demo", name: "demo", folder: "release", build: tests::build_demo };
    let all = models::JOBS.into_iter().chain(stress::JOBS).chain(fuzz::JOBS).chain(benches::JOBS);
    let mut jobs: Vec<Job> = all.chain([demo]).collect();
    jobs.retain(|job| chosen.iter().any(|part| part.name == job.part));
    jobs
}

fn all_models(ws: &Workspace, ahead: &Ahead) -> Result<()> {
    let crates = ws.libraries()?;
    let checkers = models::Checker::ALL.to_vec();
    models::run(ws, ahead, &models::Selection { crates, checkers, filter: Vec::new() })
}

fn demo(ws: &Workspace, ahead: &Ahead) -> Result<()> {
    {
        let _held = ahead.take_over("demo");
        tests::build_demo(ws)?;
    }
    tests::demo(ws)
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
    let ahead = Ahead::new(jobs(&chosen));
    let began = Instant::now();
    let mut report = Report::default();
    let mut outcome = Ok(());
    for part in &chosen {
        println!("\n=== {}", part.name);
        let part_began = Instant::now();
        outcome = (part.run)(ws, &ahead);
        if let Err(error) = &outcome {
            eprintln!("error: {error}");
            report.failure = Some((part.name, error.status()));
            break;
        }
        report.minutes.push((part.name, part_began.elapsed()));
    }
    drop(ahead); // ends a build that no part has come to
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
    fn only_builds_of_chosen_parts_are_done_ahead() {
        let jobs_of = |names: &[&str]| {
            let names: Vec<String> = names.iter().map(ToString::to_string).collect();
            jobs(&select(&names).unwrap()).iter().map(|job| job.name).collect::<Vec<_>>()
        };
        assert_eq!(jobs_of(&["tests", "fallbacks"]), [""; 0]);
        assert_eq!(jobs_of(&["demo", "fuzz"]), ["fuzz", "asan", "demo"]);
        let all = jobs_of(&[]);
        assert_eq!(all, ["loom", "shuttle", "stress", "fuzz", "asan", "benches", "demo"]);
        // Each is of a part that exists.
        assert!(jobs(&select(&[]).unwrap()).iter().all(|job| select(&[job.part.into()]).is_ok()));
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
