//! The file with the expected verdicts of a test: one line for each program.

use std::fs;
use std::path::Path;

use super::herd::Verdict;
use super::program::Program;
use crate::error::{Error, Result};

/// A verdict and the program that it is about.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Line(String);

impl Line {
    pub(super) fn new((program, verdict): (&Program, &Verdict)) -> Line {
        Line(format!("{:<10} {}", verdict.to_string(), program.what))
    }
}

pub(super) fn write(path: &Path, lines: &[Line]) -> Result<()> {
    fs::write(path, text(lines)).map_err(|error| Error::io(path.display(), error))
}

/// Compares the file with the verdicts.
pub(super) fn compare(path: &Path, lines: &[Line]) -> Result<()> {
    let there = fs::read_to_string(path).map_err(|error| Error::io(path.display(), error))?;
    let wrong = differences(&there, lines);
    if wrong.is_empty() {
        return Ok(());
    }
    Err(Error::new(format!("{}:\n  {}", path.display(), wrong.join("\n  "))))
}

fn text(lines: &[Line]) -> String {
    lines.iter().map(|line| format!("{}\n", line.0)).collect()
}

fn differences(there: &str, lines: &[Line]) -> Vec<String> {
    let expected: Vec<&str> = there.lines().collect();
    let missing = expected.iter().filter(|line| !lines.iter().any(|found| found.0 == **line));
    let new = lines.iter().filter(|line| !expected.contains(&line.0.as_str()));
    let missing = missing.map(|line| format!("expected: {line}"));
    missing.chain(new.map(|line| format!("found:    {}", line.0))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_line_that_differs_is_told() {
        let lines =
            ["never      as written", "race       P0: a"].map(|line| Line(line.to_string()));
        assert_eq!(differences(&text(&lines), &lines), [""; 0]);
        assert_eq!(
            differences("never      as written\nrace       P0: b\n", &lines),
            ["expected: race       P0: b", "found:    race       P0: a"]
        );
        assert_eq!(differences("", &lines).len(), 2);
    }
}
