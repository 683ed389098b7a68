//! Each recipe is a page beside its program, and quotes the program word for word.

use std::fs;
use std::path::{Path, PathBuf};

/// The most lines of a page.
const PAGE: usize = 60;

fn recipes() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("recipes")
}

/// The files of this kind, by their names without the extension, sorted.
fn stems(extension: &str) -> Vec<String> {
    let paths = fs::read_dir(recipes()).unwrap().map(|entry| entry.unwrap().path());
    let of_kind = paths.filter(|path| path.extension().is_some_and(|it| it == extension));
    let mut stems: Vec<_> =
        of_kind.map(|path| path.file_stem().unwrap().to_str().unwrap().to_string()).collect();
    stems.sort();
    stems
}

/// The lines of each block of Rust in a page, without their indentation.
fn quotes(page: &str) -> Vec<Vec<&str>> {
    page.split("```rust\n")
        .skip(1)
        .map(|rest| rest.split("```").next().unwrap().lines().map(str::trim).collect())
        .collect()
}

/// The quotes of `page` that `program` does not have.
fn missing(page: &str, program: &str) -> Vec<String> {
    let lines: Vec<&str> = program.lines().map(str::trim).collect();
    let is_missing =
        |quote: &Vec<&str>| quote.is_empty() || !lines.windows(quote.len()).any(|at| at == *quote);
    quotes(page).into_iter().filter(is_missing).map(|quote| quote.join("\n")).collect()
}

#[test]
fn each_page_quotes_the_program_beside_it() {
    assert_eq!(stems("md"), stems("rs"));
    let index = fs::read_to_string(recipes().join("../README.md")).unwrap();
    for name in stems("md") {
        let read = |kind| fs::read_to_string(recipes().join(&name).with_extension(kind)).unwrap();
        let (page, program) = (read("md"), read("rs"));
        assert!(page.lines().count() <= PAGE, "{name}.md is longer than {PAGE} lines");
        assert!(quotes(&page).len() >= 2, "{name}.md quotes nothing");
        assert_eq!(missing(&page, &program), [""; 0], "{name}.md quotes what is not in {name}.rs");
        assert!(page.contains(&format!("]({name}.rs)")), "{name}.md does not name its program");
        assert!(program.contains(&format!("`{name}.md`")), "{name}.rs does not name its page");
        assert!(index.contains(&format!("](recipes/{name}.md)")), "README.md does not list {name}");
    }
}

#[test]
fn a_quote_that_the_program_does_not_have_is_found() {
    let program = "fn main() {\n    let a = 1;\n    let b = 2;\n}\n";
    assert_eq!(missing("```rust\nlet a = 1;\nlet b = 2;\n```\n", program), [""; 0]);
    assert_eq!(
        missing("```rust\nlet b = 2;\nlet a = 1;\n```\n", program),
        ["let b = 2;\nlet a = 1;"]
    );
    assert_eq!(missing("```rust\nlet a = 1\n```\n", program), ["let a = 1"]);
}
