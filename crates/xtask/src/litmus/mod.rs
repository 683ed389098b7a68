//! The litmus tests: small programs in `litmus`, each of which has the accesses and fences of one
//! protocol. herd7 checks every execution that the memory model in `litmus/offlock.cat` allows.
//!
//! ```text
//!  NAME.litmus ── as written ─────────────► never      the bad outcome is in no execution
//!       ├──────── an ordering weakened ───► reachable, or a race
//!       └──────── a fence removed ────────► reachable, or a race
//!  NAME.expected: the verdict of each, beside it
//! ```
//!
//! A test quotes the source lines that it models. A quote that is no longer in the source is an
//! error, so a test cannot silently model code that has changed.

mod expected;
pub(crate) mod herd;
mod program;
mod quotes;

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Mutex;

use self::expected::Line;
use self::herd::{Herd, Verdict};
use self::program::{Kind, Program};
use crate::error::{Error, Result};
use crate::process;
use crate::workspace::Workspace;

/// Checks the tests with these names, or all if no name is given. With `bless`, writes the files
/// of the expected verdicts instead of comparing them.
pub(crate) fn run(ws: &Workspace, names: &[String], bless: bool) -> Result<()> {
    let folder = ws.root.join("litmus");
    let mut tests = files(&folder)?;
    tests.extend(files(&folder.join("model"))?);
    for name in names {
        if !tests.iter().any(|test| stem(test) == *name) {
            return Err(Error::with_status(format!("no litmus test is called {name}"), 2));
        }
    }
    tests.retain(|test| names.is_empty() || names.contains(&stem(test)));
    if tests.is_empty() {
        return Err(Error::new(format!("{} has no litmus test", folder.display())));
    }
    let herd = Herd::find(ws)?;
    let totals = Mutex::new((0, 0));
    process::each(&tests, |test| {
        let variants = check(ws, &herd, test, bless)?;
        println!("{:<32} {variants} weakened variants", stem(test));
        let mut totals = totals.lock().unwrap();
        totals.0 += 1;
        totals.1 += variants;
        Ok(())
    })?;
    let (tests, variants) = *totals.lock().unwrap();
    println!("{tests} litmus tests as expected, and {variants} weakened variants reachable");
    Ok(())
}

/// Checks one test. Returns the number of its weakened variants.
fn check(ws: &Workspace, herd: &Herd, path: &Path, bless: bool) -> Result<usize> {
    let failed = |why: String| Error::new(format!("{}: {why}", path.display()));
    let text = fs::read_to_string(path).map_err(|error| Error::io(path.display(), error))?;
    let of_the_model = path.parent().is_some_and(|folder| folder.ends_with("model"));
    quotes::check(&ws.root, &text, !of_the_model).map_err(failed)?;

    let mut programs = program::variants(&text).map_err(failed)?;
    if of_the_model {
        programs.truncate(1);
    }
    let verdicts = herd.run(&stem(path), &programs)?;
    let lines: Vec<Line> = programs.iter().zip(&verdicts).map(Line::new).collect();

    if !of_the_model {
        let wrong: Vec<String> = programs
            .iter()
            .zip(&verdicts)
            .filter_map(|(program, verdict)| judge(program, *verdict))
            .collect();
        if !wrong.is_empty() {
            return Err(failed(wrong.join("\n  ")));
        }
    }
    let beside = path.with_extension("expected");
    if bless {
        expected::write(&beside, &lines)?;
    } else {
        expected::compare(&beside, &lines)?;
    }
    Ok(programs.iter().filter(|program| program.kind == Kind::Weakened).count())
}

/// Returns what is wrong with the verdict: a program as written must not reach the bad outcome, and
/// a weakened one must.
fn judge(program: &Program, verdict: Verdict) -> Option<String> {
    let what = &program.what;
    match (program.kind, verdict) {
        (Kind::Strong, Verdict::Never) | (Kind::Weakened, Verdict::Reachable | Verdict::Race) => {
            None
        }
        (Kind::Strong, _) => Some(format!("{what}: the bad outcome is {verdict}")),
        (Kind::Weakened, Verdict::Never) => {
            Some(format!("{what}: never reached, so the test does not need what was weakened"))
        }
    }
}

fn files(folder: &Path) -> Result<Vec<PathBuf>> {
    let entries = fs::read_dir(folder).map_err(|error| Error::io(folder.display(), error))?;
    let mut files: Vec<PathBuf> = entries.flatten().map(|entry| entry.path()).collect();
    files.retain(|path| path.extension().is_some_and(|extension| extension == "litmus"));
    files.sort();
    Ok(files)
}

fn stem(path: &Path) -> String {
    path.file_stem().unwrap_or_default().to_string_lossy().into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Where herd7 is not installed, as in CI, a quote goes stale unseen otherwise.
    #[test]
    fn every_quote_is_in_the_sources() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
        let tests = files(&root.join("litmus")).unwrap();
        assert!(!tests.is_empty());
        let stale = tests.iter().filter_map(|test| {
            let text = fs::read_to_string(test).unwrap();
            quotes::check(&root, &text, true).err().map(|why| format!("{}: {why}", stem(test)))
        });
        assert_eq!(stale.collect::<Vec<_>>(), Vec::<String>::new());
    }

    #[test]
    fn a_strong_program_must_not_and_a_weakened_one_must_reach_the_outcome() {
        let judged = |kind, verdict| {
            let program = Program { what: "x".to_string(), kind, text: String::new() };
            judge(&program, verdict).is_none()
        };
        assert!(judged(Kind::Strong, Verdict::Never));
        assert!(!judged(Kind::Strong, Verdict::Race));
        assert!(!judged(Kind::Strong, Verdict::Reachable));
        assert!(!judged(Kind::Weakened, Verdict::Never));
        assert!(judged(Kind::Weakened, Verdict::Race));
        assert!(judged(Kind::Weakened, Verdict::Reachable));
    }
}
