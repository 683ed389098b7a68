//! The figures of the first page are those of the crates' pages, to the digit.

use std::fs;
use std::path::Path;

/// The numbers of a text that may be figures: those with digits, points and commas only.
fn numbers(text: &str) -> Vec<&str> {
    let words = text.split(|c: char| !(c.is_ascii_digit() || c == '.' || c == ','));
    words.map(|word| word.trim_matches(['.', ','])).filter(|word| !word.is_empty()).collect()
}

/// The rows of the tables of a page.
fn rows(page: &str) -> impl Iterator<Item = &str> {
    page.lines().filter(|line| line.starts_with('|'))
}

#[test]
fn the_first_page_has_the_figures_of_the_crates_pages() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let read = |path: &str| fs::read_to_string(root.join(path)).unwrap();
    let mut found = 0;
    for row in rows(&read("README.md")) {
        let Some((_, rest)) = row.split_once("](crates/") else { continue };
        let name = rest.split(')').next().unwrap();
        let figure = row.trim_end_matches([' ', '|']).rsplit('|').next().unwrap();
        let page = read(&format!("crates/{name}/README.md"));
        let measured: Vec<&str> = rows(&page).flat_map(numbers).collect();
        for number in numbers(figure) {
            assert!(measured.contains(&number), "{number} is in no table of {name}: {figure}");
            found += 1;
        }
    }
    assert!(found > 12, "only {found} figures are in the table of the crates");
}
