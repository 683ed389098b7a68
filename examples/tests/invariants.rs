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

/// The check itself, on crates made for it.
mod the_check {
    use super::*;

    const HEAD: &str = "# Invariants\n\n| # | statement | tool | test |\n|---|---|---|---|\n";

    /// Returns the problems of a crate with this table and this `tests/it.rs`.
    fn verdict(table: &str, source: &str) -> Vec<String> {
        verdict_with(table, source, &[])
    }

    /// Returns the problems of a crate with litmus tests: their names and texts.
    fn verdict_with(table: &str, source: &str, litmus: &[(&str, &str)]) -> Vec<String> {
        let root = tempfile::tempdir().unwrap();
        let dir = root.path().join("crates/it");
        fs::create_dir_all(dir.join("tests")).unwrap();
        fs::write(dir.join("INVARIANTS.md"), format!("{HEAD}{table}")).unwrap();
        fs::write(dir.join("tests/it.rs"), source).unwrap();
        fs::create_dir(root.path().join("litmus")).unwrap();
        for (name, text) in litmus {
            fs::write(root.path().join("litmus").join(name), text).unwrap();
        }
        problems(&dir)
    }

    #[test]
    fn a_row_and_its_litmus_test_name_each_other() {
        let row = "| 7 | x | H | `../../litmus/a.litmus` |\n";
        let named = [("a.litmus", "C a\n(* invariants: it 7 *)\n")];
        assert_eq!(verdict_with(row, "", &named), [""; 0]);
        let wrong = ["invariant 7: ../../litmus/a.litmus does not name it"];
        assert_eq!(verdict_with(row, "", &[]), wrong);
        assert_eq!(verdict_with(row, "", &[("a.litmus", "(* invariants: other 7 *)\n")]), wrong);
        let two = [("a.litmus", "(* invariants: it 7, 8 *)\n")];
        assert_eq!(
            verdict_with(row, "", &two),
            ["../../litmus/a.litmus is in no row for invariant 8"]
        );
    }

    #[test]
    fn accepts_rows_with_their_tests() {
        let table = "| 1 | a < b | P | `tests/it.rs` |\n\
                     | 4 | |a - b| <= c | P, S | `tests/it.rs::stress_inv04_far`, `tests/it.rs` |\n";
        let source = "    #[test]\n    #[ignore = \"slow\"]\n    fn stress_inv04_far() {}\n\
                      /// Doc; with {\n#[test]\n#[cfg_attr(\n a,\n b\n)]\nfn inv01_near(x in 0..9) {}\n\
                      fn inv09_helper() {}\n";
        assert_eq!(verdict(table, source), [""; 0]);
    }

    #[test]
    fn rejects_a_number_without_a_test() {
        let row = "| 7 | x | P | `tests/it.rs` |\n";
        for source in [
            "",
            "#[test]\nfn inv08_other() {}\n",
            "fn inv07_not_under_test() {}\n",
            "// #[test]\n// fn inv07_commented_out() {}\n",
            "#[test]\nfn other() {}\nfn inv07_after_a_test() {}\n",
            "#[test]\nfn inv7_one_digit() {}\n",
        ] {
            let wrong = verdict(row, source);
            assert!(wrong.contains(&"invariant 7: no test inv07_... in tests/it.rs".into()));
        }
        let elsewhere = "| 7 | x | P | `tests/elsewhere.rs` |\n";
        let wrong = verdict(elsewhere, "#[test]\nfn inv07_here() {}\n");
        assert_eq!(wrong.len(), 2, "the path is wrong, and the test is not listed: {wrong:?}");
        let named = "| 7 | x | P | `tests/it.rs::inv07_gone` |\n";
        let wrong = verdict(named, "#[test]\nfn inv07_here() {}\n");
        assert_eq!(wrong, ["invariant 7: no test inv07_gone in tests/it.rs"]);
    }

    #[test]
    fn rejects_a_test_without_a_row() {
        let row = "| 1 | x | P | `tests/it.rs` |\n";
        let source = "#[test]\nfn inv01_a() {}\n#[test]\nfn inv02_b() {}\n";
        assert_eq!(verdict(row, source), ["inv02_b in tests/it.rs is in no row for invariant 2"]);
    }

    #[test]
    fn rejects_a_bad_table() {
        let source = "#[test]\nfn inv01_a() {}\n";
        let one = "| 1 | x | P | `tests/it.rs` |\n";
        assert_eq!(verdict(&one.repeat(2), source), ["invariant 1 is listed twice"]);
        assert!(verdict("", "").contains(&"INVARIANTS.md lists no invariant".into()));
        assert!(!verdict("| 1 | x | P | tests/it.rs |\n", source).is_empty(), "no backticks");
        assert!(!verdict("| 1 | x | `tests/it.rs` |\n", source).is_empty(), "no tool");
        assert!(!verdict("| 1 | | P | `tests/it.rs` |\n", source).is_empty(), "no statement");
        assert!(!verdict(&format!("{one}| 2a | x | P | `y` |\n"), source).is_empty(), "2a");
        let empty = tempfile::tempdir().unwrap();
        assert!(problems(empty.path())[0].starts_with("INVARIANTS.md: "), "no file");
    }
}
