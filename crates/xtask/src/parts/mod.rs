//! What is built and checked, one module for each concern. `ci` puts them in order.

use std::fs::{self, File};
use std::io::{self, Write};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use crate::error::{Error, Result};
use crate::process::Cmd;
use crate::workspace::Scratch;

pub(crate) mod adopt;
pub(crate) mod benches;
pub(crate) mod fallbacks;
pub(crate) mod fuzz;
pub(crate) mod lint;
pub(crate) mod models;
pub(crate) mod stress;
pub(crate) mod tests;

/// Runs a command that others run beside, and prints its output once it has ended.
///
/// A failure quotes from the output: what other commands print later may be all that is kept of it.
fn logged(folder: &Scratch, cmd: Cmd, printing: &Mutex<()>) -> Result<()> {
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    // Ordering: Relaxed; the counter makes the names of files differ and publishes nothing.
    let path = folder.path.join(NEXT.fetch_add(1, Ordering::Relaxed).to_string());
    let failed = |error| Error::io(path.display(), error);
    let log = File::create(&path).map_err(failed)?;
    let outcome = cmd.log(Arc::new(log)).run();
    let said = fs::read(&path).map_err(failed)?;
    let _one_at_a_time = printing.lock();
    let _ = io::stdout().write_all(&said);
    outcome.map_err(|error| {
        let quoted = quote(&String::from_utf8_lossy(&said));
        Error::with_status(format!("{error}\n{quoted}"), error.status())
    })
}

/// The command's line, the lines that name a failure each with the line behind it, and the last
/// line: at most twelve.
fn quote(said: &str) -> String {
    let lines: Vec<&str> = said.lines().collect();
    let names = |line: &str| {
        ["panicked at", "ERROR: ", "SUMMARY: ", "Base64: ", "FAILED"]
            .iter()
            .any(|m| line.contains(m))
    };
    let mut chosen: Vec<usize> = lines
        .iter()
        .enumerate()
        .filter(|(_, line)| names(line))
        .flat_map(|(at, _)| [at, at + 1])
        .take(10)
        .chain([0, lines.len().saturating_sub(1)])
        .filter(|at| *at < lines.len())
        .collect();
    chosen.sort_unstable();
    chosen.dedup();
    chosen.iter().map(|at| lines[*at]).collect::<Vec<_>>().join("\n")
}

#[cfg(test)]
mod unit_tests {
    use super::*;

    #[test]
    fn a_failure_quotes_the_command_and_what_failed() {
        let scratch = Scratch::new("quote").unwrap();
        let script = "seq 5; printf 'thread panicked %s a.rs\\n' at; echo reason; seq 50; exit 3";
        let cmd = Cmd::new("sh").arg("-c").arg(script);
        let error = logged(&scratch, cmd, &Mutex::new(())).unwrap_err();
        assert_eq!(error.status(), 3);
        let text = error.to_string();
        let expected = ["sh: exit status: 3", "+ sh -c", "thread panicked at a.rs", "reason", "50"];
        assert_eq!(text.lines().count(), expected.len(), "{text}");
        assert!(text.lines().zip(expected).all(|(line, start)| line.starts_with(start)), "{text}");
        assert_eq!(quote(""), "");
    }
}
