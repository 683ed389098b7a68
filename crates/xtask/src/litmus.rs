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

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use crate::debian::Debian;
use crate::process::{self, Error, Result, read, write};
use crate::workspace::{Workspace, choose, files, is_command, scratch, stem};

/// Checks the tests with these names, or all if no name is given. With `bless`, writes the files
/// of the expected verdicts instead of comparing them.
pub(crate) fn run(ws: &Workspace, names: &[String], bless: bool) -> Result<()> {
    check_all(ws, &herd7(ws)?, names, bless)
}

/// Checks all tests. Where herd7 cannot be installed, says why, and checks none.
pub(crate) fn run_if_installed(ws: &Workspace) -> Result<()> {
    match herd7(ws) {
        Ok(herd) => check_all(ws, &herd, &[], false),
        Err(why) => {
            println!("herd7 is not installed, so no litmus test was checked: {why}");
            Ok(())
        }
    }
}

fn check_all(ws: &Workspace, herd: &Path, names: &[String], bless: bool) -> Result<()> {
    let mut tests = files(&ws.root.join("litmus"), "litmus"); // those in `model` among them
    choose(&mut tests, names, "litmus test", |test, name| stem(test) == name)?;
    let total = AtomicUsize::new(0);
    process::each(&tests, |test| {
        let variants = check(ws, herd, test, bless)?;
        println!("{:<32} {variants} weakened variants", stem(test));
        total.fetch_add(variants, Ordering::Relaxed); // Ordering: Relaxed; it publishes nothing
        Ok(())
    })?;
    let (tests, total) = (tests.len(), total.into_inner());
    println!("{tests} litmus tests as expected, and {total} weakened variants reachable");
    Ok(())
}

/// Returns whether a test is about the memory model, and not about a source.
fn is_of_the_model(test: &Path) -> bool {
    test.parent().is_some_and(|folder| folder.ends_with("model"))
}

/// Checks one test. Returns the number of its weakened variants.
///
/// A program as written must not reach the bad outcome, and a weakened one must.
fn check(ws: &Workspace, herd: &Path, path: &Path, bless: bool) -> Result<usize> {
    let failed = |why: String| Error::new(format!("{}: {why}", path.display()));
    let text = read(path)?;
    let of_the_model = is_of_the_model(path);
    quotes(&ws.root, &text, !of_the_model).map_err(failed)?;
    let mut programs = variants(&text).map_err(failed)?;
    if of_the_model {
        programs.truncate(1);
    }
    let verdicts = verdicts(ws, herd, &stem(path), &programs)?;
    let mut lines = String::new();
    for (program, verdict) in programs.iter().zip(&verdicts) {
        if !of_the_model && program.strong != (*verdict == "never") {
            return Err(failed(format!("{}: the bad outcome is {verdict}", program.what)));
        }
        lines += &format!("{verdict:<10} {}\n", program.what);
    }
    let beside = path.with_extension("expected");
    if bless {
        write(&beside, lines)?;
    } else if read(&beside)? != lines {
        return Err(failed(format!("not as in {}:\n{lines}", beside.display())));
    }
    Ok(programs.iter().filter(|program| !program.strong).count())
}

/// Checks that each source line that a test quotes is in its file. With `wanted`, a test without a quote is
/// an error.
///
/// A line `(* source: FOLDER *)` names a folder of the workspace. A comment `// FILE: CODE` behind a
/// statement quotes code of a file below that folder. White space does not count.
fn quotes(root: &Path, test: &str, wanted: bool) -> std::result::Result<(), String> {
    let dense = |text: &str| text.split_whitespace().collect::<String>();
    let folder =
        |line: &str| Some(root.join(line.strip_prefix("(* source: ")?.strip_suffix(" *)")?));
    let folder = test.lines().find_map(folder);
    let mut count = 0;
    for (line, at) in test.lines().zip(1..) {
        let Some((_, comment)) = line.split_once("// ") else { continue };
        let comment = comment.strip_suffix(" *)").unwrap_or(comment); // in assembly
        let (Some((file, code)), Some(folder)) = (comment.split_once(": "), &folder) else {
            return Err(format!(
                "line {at}: the comment is not `// FILE: CODE`, or the source is missing"
            ));
        };
        let source = read(folder.join(file)).map_err(|error| format!("line {at}: {error}"))?;
        if !dense(&source).contains(&dense(code)) {
            return Err(format!("line {at}: {file} has no code `{code}`"));
        }
        count += 1;
    }
    if wanted && count == 0 { Err("the test quotes no source line".to_string()) } else { Ok(()) }
}

/// One program for herd7.
struct Program {
    /// Names what differs from the test as written.
    what: String,
    /// Whether the bad outcome must be in no execution. Of a weakened program it, or a data race, must be
    /// in one.
    strong: bool,
    text: String,
}

/// Returns the programs of a test: as written, with full fences, and with one ordering or fence weakened.
///
/// A line ``(* variant NAME: `OLD` -> `NEW`; `OLD` -> `NEW` *)`` in the test makes a weakened program by
/// replacing pieces of text, each of which must be there once.
fn variants(test: &str) -> std::result::Result<Vec<Program>, String> {
    let program = |what: String, strong, text: String| Program { what, strong, text };
    let mut programs = vec![program("as written".to_string(), true, test.to_string())];
    let lines: Vec<&str> = test.lines().collect();
    // Sections run only where membarrier works, so a test with sections has no such program.
    let is_fence = |line: &str| line.starts_with("light();") || line.starts_with("heavy();");
    let has_sections = lines.iter().any(|line| line.trim_start().starts_with("heavy_rseq();"));
    if !has_sections && lines.iter().any(|line| is_fence(line.trim_start())) {
        let full = "atomic_thread_fence(memory_order_seq_cst);";
        let text = lines.iter().map(|line| if is_fence(line.trim_start()) { full } else { *line });
        let text: Vec<&str> = text.collect();
        let what = "light and heavy as full fences".to_string();
        programs.push(program(what, true, text.join("\n") + "\n"));
    }
    let mut thread = "";
    for (number, line) in lines.iter().enumerate() {
        // `P1(atomic_int *x) {`
        match line.split_once('(') {
            Some((name, _)) if line.starts_with('P') => thread = name,
            _ if line.starts_with("exists") => break,
            _ => {}
        }
        if thread.is_empty() {
            continue;
        }
        for (what, weaker) in weakened(line.split("//").next().unwrap_or_default()) {
            let mut changed = lines.clone();
            changed[number] = &weaker;
            let what = format!("{thread}: {what}");
            let before = programs.iter().filter(|program| program.what.starts_with(&what)).count();
            let what = if before == 0 { what } else { format!("{what} ({})", before + 1) };
            programs.push(program(what, false, changed.join("\n") + "\n"));
        }
    }
    for line in &lines {
        let Some(rest) = line.strip_prefix("(* variant ") else { continue };
        programs.push(named(test, line, rest).ok_or_else(|| format!("bad variant: {line}"))?);
    }
    Ok(programs)
}

fn named(test: &str, line: &str, rest: &str) -> Option<Program> {
    let (name, changes) = rest.strip_suffix(" *)")?.split_once(": ")?;
    let mut text = test.replacen(line, "", 1);
    let mut new_texts = Vec::new();
    for (number, change) in changes.split("; `").enumerate() {
        let (old, new) = change.trim_start_matches('`').strip_suffix('`')?.split_once("` -> `")?;
        if old.is_empty() || text.matches(old).count() != 1 {
            return None;
        }
        // First a mark for each, so that two pieces can change places.
        text = text.replacen(old, &format!("\0{number}"), 1);
        new_texts.push(new);
    }
    for (number, new) in new_texts.iter().enumerate() {
        text = text.replacen(&format!("\0{number}"), new, 1);
    }
    Some(Program { what: format!("variant {name}"), strong: false, text })
}

/// Returns each line that is weaker than `line` in one ordering or fence, and what was weakened.
fn weakened(line: &str) -> Vec<(String, String)> {
    let mut found = Vec::new();
    if let Some(call) = line.trim().strip_suffix(';') {
        let weaker = match call {
            "heavy()" => Some("light()"),
            "heavy_rseq()" => Some("heavy()"),
            _ => None,
        };
        let fences = ["light()", "heavy()", "heavy_rseq()", "section()"];
        if fences.contains(&call) || call.starts_with("atomic_thread_fence(") {
            found.push((format!("{call} removed"), String::new()));
        }
        found.extend(weaker.map(|weaker| (format!("{call} -> {weaker}"), format!("{weaker};"))));
    }
    // `load(gate)` of a line with `atomic_load_explicit(gate, ...)`.
    let operation = line.split_once("atomic_").and_then(|(_, call)| call.split_once('('));
    let operation = operation.map_or(String::new(), |(name, arguments)| {
        let name = name.trim_end_matches("_explicit").trim_end_matches("_strong");
        let place = arguments.split_once(',').map(|(place, _)| format!("({place})"));
        format!("{name}{}", place.unwrap_or_default()) // a fence has none
    });
    for (at, _) in line.match_indices("memory_order_") {
        let start = at + "memory_order_".len();
        let order: &str = line[start..].split([')', ',']).next().unwrap_or_default();
        // The second ordering of a compare-exchange is that of a failure.
        let failure = if line[..at].contains("memory_order_") { " on failure" } else { "" };
        let weaker: &[&str] = match order {
            "acquire" | "release" => &["relaxed"],
            "acq_rel" => &["acquire", "release"],
            "seq_cst" if line.contains("atomic_load") => &["acquire"],
            "seq_cst" if line.contains("atomic_store") => &["release"],
            "seq_cst" => &["acq_rel"],
            _ => &[],
        };
        for weaker in weaker {
            let text = format!("{}{weaker}{}", &line[..start], &line[start + order.len()..]);
            found.push((format!("{operation}: {order}{failure} -> {weaker}"), text));
        }
    }
    found
}

/// Returns herd7's verdict of each program of a test.
fn verdicts(
    ws: &Workspace,
    herd: &Path,
    name: &str,
    programs: &[Program],
) -> Result<Vec<&'static str>> {
    let folder = scratch()?;
    let log = folder.path().join("log");
    let model = ws.root.join("litmus");
    let mut cmd = ws.cmd(herd).dir(folder.path()).limit(Duration::from_secs(120)).log(&log);
    // Assembly has the model of its architecture, which herd7 ships.
    let language = programs[0].text.split(' ').next().unwrap_or_default();
    if language == "C" {
        for (option, file) in [("-bell", "bell"), ("-macros", "def"), ("-model", "cat")] {
            cmd = cmd.arg(option).arg(model.join(format!("offlock.{file}")));
        }
    }
    // Leaves out executions that the axiom `coherence` of the model refuses: ten times faster.
    cmd = cmd.words("-optace true");
    for (number, program) in programs.iter().enumerate() {
        let (_, body) = program.text.split_once('\n').unwrap_or_default();
        write(
            folder.path().join(format!("{number}.litmus")),
            format!("{language} program-{number}\n{body}"),
        )?;
        cmd = cmd.arg(format!("{number}.litmus"));
    }
    let failed =
        |why: String| Error::new(format!("{name}: {why}\n{}", read(&log).unwrap_or_default()));
    let output = cmd.output().map_err(|error| failed(error.to_string()))?;
    let verdict = |(number, program): (usize, &Program)| {
        verdict(&output, number)
            .ok_or_else(|| failed(format!("{}: herd7 gave no verdict", program.what)))
    };
    programs.iter().enumerate().map(verdict).collect()
}

/// Reads the part of herd7's output that is about one program: the bad outcome is in no execution, in one, or
/// two plain accesses race.
fn verdict(output: &str, number: usize) -> Option<&'static str> {
    let (_, rest) = output.split_once(&format!("Test program-{number} "))?;
    let part = rest.split("\nTest ").next()?;
    let observed = part.lines().find_map(|line| line.strip_prefix("Observation "))?;
    if part.lines().any(|line| line == "Flag data-race") {
        return Some("race");
    }
    match observed.split(' ').nth(1)? {
        "Never" => Some("never"),
        "Sometimes" | "Always" => Some("reachable"),
        _ => None,
    }
}

/// Returns the command herd7. Where it is not installed, it is unpacked below the target folder: some seconds and
/// 60 MB of downloads. Debian has it in the package `herdtools7` of unstable alone.
fn herd7(ws: &Workspace) -> Result<PathBuf> {
    if is_command("herd7") {
        return Ok("herd7".into());
    }
    let debian = Debian::open(ws, "amd64", Some("unstable"))?;
    debian.unpack(&debian.files, &["herdtools7"])?;
    let libraries = debian.files.join("usr/share/herdtools7/herd");
    debian.command("herd7", &format!("-set-libdir {}", libraries.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Without this test a quote goes stale unseen where herd7 is not installed, as in CI.
    #[test]
    fn every_quote_is_in_the_sources() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
        let tests = files(&root.join("litmus"), "litmus");
        assert!(!tests.is_empty());
        let stale = tests.iter().filter_map(|test| {
            let text = read(test).unwrap();
            quotes(&root, &text, !is_of_the_model(test))
                .err()
                .map(|why| format!("{}: {why}", stem(test)))
        });
        assert_eq!(stale.collect::<Vec<_>>(), Vec::<String>::new());
        for test in tests.iter().filter(|test| !is_of_the_model(test)) {
            let programs = variants(&read(test).unwrap()).unwrap();
            let names: Vec<&str> = programs.iter().map(|program| &*program.what).collect();
            let expected = read(test.with_extension("expected")).unwrap();
            let expected: Vec<&str> = expected.lines().map(|line| &line[11..]).collect();
            assert_eq!(names, expected, "{}", stem(test));
        }
        let check = |quote: &str| {
            let test = format!("C x\n(* source: crates/xtask/src *)\n  f(); // {quote}\n");
            quotes(&root, &test, true)
        };
        assert_eq!(check("process.rs: pub(crate) fn status( &self )\t-> i32"), Ok(()));
        assert!(
            check("process.rs: pub(crate) fn status(&self) -> i64").unwrap_err().contains("line 3")
        );
        assert!(check("no file").is_err() && quotes(&root, "C x\n", true).is_err());
    }
}
