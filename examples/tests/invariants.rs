//! Each crate's `INVARIANTS.md` and its tests name the same numbers.
//!
//! A row is `| number | statement | tool | paths |`; a path is in backticks, relative to the crate,
//! and may end in `::function`. A test of invariant 7 is a function `inv07_...` or
//! `stress_inv07_...` under `#[test]`, or a litmus test with a line `(* invariants: CRATE 7 *)`.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

/// One row of an `INVARIANTS.md`.
struct Row {
    number: u32,
    /// File, and the function if the row names it.
    tests: Vec<(String, Option<String>)>,
}

/// Says what is wrong with the crate in `dir`; nothing if all is well.
fn problems(dir: &Path) -> Vec<String> {
    let mut wrong = Vec::new();
    let rows = match fs::read_to_string(dir.join("INVARIANTS.md")) {
        Ok(text) => rows(&text, &mut wrong),
        Err(error) => {
            wrong.push(format!("INVARIANTS.md: {error}"));
            Vec::new()
        }
    };

    let mut numbers = BTreeSet::new();
    for row in &rows {
        if !numbers.insert(row.number) {
            wrong.push(format!("invariant {} is listed twice", row.number));
        }
        for (file, function) in &row.tests {
            let text = fs::read_to_string(dir.join(file)).unwrap_or_default();
            if file.ends_with(".litmus") {
                if !litmus_numbers(dir, &text).contains(&row.number) {
                    wrong.push(format!("invariant {}: {file} does not name it", row.number));
                }
                continue;
            }
            let found = tests(&text).into_iter().any(|(number, name)| {
                number == row.number && function.as_ref().is_none_or(|function| *function == name)
            });
            if !found {
                let what = function.clone().unwrap_or(format!("inv{:02}_...", row.number));
                wrong.push(format!("invariant {}: no test {what} in {file}", row.number));
            }
        }
    }

    for file in ["src", "tests"].iter().flat_map(|part| rust_files(&dir.join(part))) {
        let text = fs::read_to_string(&file).unwrap();
        for (number, name) in tests(&text) {
            let listed = rows.iter().any(|row| {
                row.number == number && row.tests.iter().any(|(path, _)| dir.join(path) == file)
            });
            if !listed {
                let file = file.strip_prefix(dir).unwrap().display();
                wrong.push(format!("{name} in {file} is in no row for invariant {number}"));
            }
        }
    }
    for file in litmus_files(&dir.join(LITMUS)) {
        let path = format!("{LITMUS}/{file}");
        let text = fs::read_to_string(dir.join(&path)).unwrap();
        for number in litmus_numbers(dir, &text) {
            let paths = |row: &Row| row.tests.iter().any(|(there, _)| *there == path);
            if !rows.iter().any(|row| row.number == number && paths(row)) {
                wrong.push(format!("{path} is in no row for invariant {number}"));
            }
        }
    }
    wrong
}

/// The folder of the litmus tests, from a crate's.
const LITMUS: &str = "../../litmus";

/// The names of the litmus tests in `dir`, sorted; none if there is no such directory.
fn litmus_files(dir: &Path) -> BTreeSet<String> {
    let entries = fs::read_dir(dir).into_iter().flatten().flatten();
    let names = entries.map(|entry| entry.file_name().to_string_lossy().into_owned());
    names.filter(|name| name.ends_with(".litmus")).collect()
}

/// The invariants of the crate in `dir` that a litmus test names: of `percpu`, 3 and 13 in
/// `(* invariants: percpu 3, 13 *)`.
fn litmus_numbers(dir: &Path, text: &str) -> Vec<u32> {
    let prefix = format!("(* invariants: {} ", dir.file_name().unwrap().to_string_lossy());
    let numbers = text.lines().filter_map(|line| line.strip_prefix(&prefix)?.strip_suffix(" *)"));
    numbers.flat_map(|numbers| numbers.split(", ")).map(|number| number.parse().unwrap()).collect()
}

/// The table's rows; whatever starts like one and is none goes to `wrong`.
fn rows(text: &str, wrong: &mut Vec<String>) -> Vec<Row> {
    let mut rows = Vec::new();
    for line in text.lines().map(str::trim) {
        let Some(line) = line.strip_prefix('|') else { continue };
        let cells: Vec<&str> = line.trim_end_matches('|').split('|').map(str::trim).collect();
        if !cells[0].starts_with(|c: char| c.is_ascii_digit()) {
            continue; // the header and the line under it
        }
        // A statement may hold bars of its own, so the other cells are counted from the ends.
        let (Ok(number), true) = (cells[0].parse(), cells.len() >= 4) else {
            wrong.push(format!("not a row of number, statement, tool and test: |{line}"));
            continue;
        };
        let (statement, ends) = cells[1..].split_at(cells.len() - 3);
        if statement.concat().is_empty() || ends[0].is_empty() {
            wrong.push(format!("invariant {number} has no statement or no tool"));
        }
        let in_backticks = ends[1].split('`').skip(1).step_by(2);
        let tests: Vec<_> = in_backticks
            .map(|path| match path.split_once("::") {
                Some((file, function)) => (file.to_string(), Some(function.to_string())),
                None => (path.to_string(), None),
            })
            .collect();
        if tests.is_empty() {
            wrong.push(format!("invariant {number} names no test"));
        }
        rows.push(Row { number, tests });
    }
    if rows.is_empty() {
        wrong.push("INVARIANTS.md lists no invariant".to_string());
    }
    rows
}

/// The tests of invariants in a source file: number and name.
fn tests(text: &str) -> Vec<(u32, String)> {
    let mut found = Vec::new();
    let mut under_test = false;
    for line in text.lines().map(str::trim) {
        if line.starts_with("#[test]") {
            under_test = true;
        } else if let Some(rest) = line.strip_prefix("fn ") {
            let name: String =
                rest.chars().take_while(|c| c.is_alphanumeric() || *c == '_').collect();
            if let (true, Some(number)) = (under_test, number_of(&name)) {
                found.push((number, name));
            }
            under_test = false;
        } else if !line.starts_with("//") && line.ends_with(['{', '}', ';']) {
            under_test = false; // neither an attribute nor a doc comment, nor the middle of one
        }
    }
    found
}

/// 7 for `inv07_...` and `stress_inv07_...`.
fn number_of(name: &str) -> Option<u32> {
    let name = name.strip_prefix("stress_").unwrap_or(name);
    let (digits, _) = name.strip_prefix("inv")?.split_once('_')?;
    (digits.len() >= 2 && digits.bytes().all(|b| b.is_ascii_digit()))
        .then(|| digits.parse().ok())?
}

/// Every `.rs` file below `dir`; none if there is no such directory.
fn rust_files(dir: &Path) -> Vec<PathBuf> {
    let mut files = Vec::new();
    for entry in fs::read_dir(dir).into_iter().flatten() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            files.extend(rust_files(&path));
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            files.push(path);
        }
    }
    files
}

#[test]
fn every_invariant_of_the_workspace_has_its_test() {
    let crates = Path::new(env!("CARGO_MANIFEST_DIR")).join("../crates");
    let mut dirs: Vec<PathBuf> =
        fs::read_dir(crates).unwrap().map(|entry| entry.unwrap().path()).collect();
    dirs.retain(|dir| {
        // A crate that is not published is for our own tests, and promises nothing.
        let manifest = fs::read_to_string(dir.join("Cargo.toml"));
        manifest.is_ok_and(|manifest| !manifest.lines().any(|line| line == "publish = false"))
    });
    assert!(!dirs.is_empty());
    let wrong: Vec<String> = dirs
        .iter()
        .flat_map(|dir| {
            let name = dir.file_name().unwrap().to_string_lossy().into_owned();
            problems(dir).into_iter().map(move |problem| format!("{name}: {problem}"))
        })
        .collect();
    assert!(wrong.is_empty(), "\n{}", wrong.join("\n"));
}

/// The check itself, on a crate without a mistake, and with one mistake at a time in its table, its tests or
/// its litmus test.
#[test]
fn the_check_sees_each_mistake() {
    let table = "| # | statement | tool | test |\n|---|---|---|---|\n\
                 | 1 | a < b | P | `tests/it.rs` |\n\
                 | 4 | |a - b| <= c | P, S | `tests/it.rs::stress_inv04_far`, `tests/it.rs` |\n\
                 | 7 | x | H | `../../litmus/a.litmus` |\n";
    let source = "    #[test]\n    #[ignore = \"slow\"]\n    fn stress_inv04_far() {}\n\
                  /// Doc; with {\n#[test]\n#[cfg_attr(\n a,\n b\n)]\nfn inv01_near(x in 0..9) {}\n\
                  fn inv09_helper() {}\n";
    let litmus = "C a\n(* invariants: it 7 *)\n";
    // Replaces the first `from` in each of the files.
    let verdict = |from: &str, to: &str| {
        let root = tempfile::tempdir().unwrap();
        let dir = root.path().join("crates/it");
        fs::create_dir_all(dir.join("tests")).unwrap();
        fs::create_dir(root.path().join("litmus")).unwrap();
        let write = |path, text: &str| fs::write(path, text.replacen(from, to, 1)).unwrap();
        write(dir.join("INVARIANTS.md"), table);
        write(dir.join("tests/it.rs"), source);
        write(root.path().join("litmus/a.litmus"), litmus);
        problems(&dir)
    };
    assert_eq!(verdict("", ""), [""; 0]);
    let missing = "invariant 1: no test inv01_... in tests/it.rs";
    for (from, to, problem) in [
        ("fn inv01_near", "fn inv08_near", missing),
        ("fn inv01_near", "fn inv1_near", missing),
        ("fn inv01_near", "fn other() {}\nfn inv01_near", missing),
        ("fn inv01_near", "// fn inv01_near", missing),
        ("#[test]\n#[cfg_attr", "#[cfg_attr", missing),
        (
            "| P | `tests/it.rs`",
            "| P | `tests/else.rs`",
            "invariant 1: no test inv01_... in tests/else.rs",
        ),
        (
            "inv04_far() {}",
            "inv04_gone() {}",
            "invariant 4: no test stress_inv04_far in tests/it.rs",
        ),
        (
            "fn inv09",
            "#[test]\nfn inv02",
            "inv02_helper in tests/it.rs is in no row for invariant 2",
        ),
        ("it 7", "other 7", "invariant 7: ../../litmus/a.litmus does not name it"),
        ("a.litmus`", "b.litmus`", "invariant 7: ../../litmus/b.litmus does not name it"),
        ("it 7", "it 7, 8", "../../litmus/a.litmus is in no row for invariant 8"),
        ("| 1 |", "| 4 |", "invariant 4 is listed twice"),
        ("| P | `tests/it.rs`", "| P | tests/it.rs", "invariant 1 names no test"),
        ("a < b | P", "a < b |", "invariant 1 has no statement or no tool"),
        ("a < b | P", "| P", "invariant 1 has no statement or no tool"),
        ("| 1 | a", "| 1a | a", "not a row of number, statement, tool and test: |"),
        (table, "", "INVARIANTS.md lists no invariant"),
    ] {
        let wrong = verdict(from, to);
        let is_seen = wrong.iter().any(|wrong| wrong.starts_with(problem));
        assert!(is_seen, "{to:?} in place of {from:?}: {wrong:?}");
    }
    let empty = tempfile::tempdir().unwrap();
    assert!(problems(empty.path())[0].starts_with("INVARIANTS.md: "), "no file");
}
