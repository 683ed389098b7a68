//! Checks that `INVARIANTS.md` of each library accounts for every ordering and fence.
//!
//! Its section "What checks each ordering and fence" has a table. The first word or words of a label, up to
//! the colon, stand in its second column. An ordering without a label is counted in one of the other
//! columns: `` `tree.rs` 3 `` are three orderings of `src/tree.rs`. A litmus test stands there by
//! its name.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;

use super::candidates;
use super::sites::Kind;
use crate::workspace::Workspace;

const HEADING: &str = "## What checks each ordering and fence";

/// Returns the cells of the table's rows.
fn table(text: &str) -> Vec<Vec<&str>> {
    let section = text.split_once(HEADING).map_or("", |(_, section)| section);
    let section = section.split("\n## ").next().unwrap_or_default();
    let rows = section.lines().filter_map(|line| line.strip_prefix("| ")?.strip_suffix('|'));
    rows.map(|row| row.split('|').map(str::trim).collect()).collect()
}

/// Returns the number of orderings without a label of each file that a cell counts.
fn counted(cell: &str) -> Vec<(&str, usize)> {
    let parts: Vec<&str> = cell.split('`').collect();
    let numbers = parts.windows(2).skip(1).step_by(2).filter_map(|pair| {
        let digits = pair[1].trim_start().split(|c: char| !c.is_ascii_digit()).next()?;
        Some((pair[0].strip_suffix(".rs").map(|_| pair[0])?, digits.parse().ok()?))
    });
    numbers.collect()
}

/// Returns whether a labelled step is an asymmetric fence.
fn fences(step: &str) -> bool {
    ["light(", "heavy(", "heavy_rseq("].iter().any(|fence| step.contains(fence))
}

#[test]
fn each_ordering_and_fence_is_in_its_crates_table() {
    let ws = Workspace::open().unwrap();
    let mut wrong = Vec::new();
    for package in ws.libraries().unwrap() {
        let text = fs::read_to_string(package.dir.join("INVARIANTS.md")).unwrap();
        let rows = table(&text);
        let mut there = BTreeMap::<String, BTreeSet<usize>>::new();
        let mut labels = BTreeSet::new();
        for (kind, mutants) in candidates(&ws, &package).unwrap() {
            for mutant in mutants {
                let source = fs::read_to_string(&mutant.file).unwrap();
                let whole = &source[mutant.site.whole.clone()];
                let is_ordering = matches!(kind, Kind::Ordering | Kind::Fence);
                if is_ordering && !mutant.site.labelled {
                    let file = mutant.shown.trim_start_matches("src/").to_string();
                    there.entry(file).or_default().insert(mutant.site.bytes.start);
                } else if mutant.site.labelled && (is_ordering || fences(whole)) {
                    let label = whole.split('"').nth(1).unwrap_or_default();
                    labels.insert(label.split(':').next().unwrap_or_default().to_string());
                }
            }
        }
        let there: BTreeMap<&str, usize> =
            there.iter().map(|(file, sites)| (file.as_str(), sites.len())).collect();
        let mut told = BTreeMap::new();
        for (file, count) in rows.iter().flat_map(|row| &row[1..]).flat_map(|cell| counted(cell)) {
            *told.entry(file).or_default() += count;
        }
        if told != there {
            wrong.push(format!("{}: {told:?}, and the sources have {there:?}", package.name));
        }
        let named: BTreeSet<String> =
            rows.iter().flat_map(|row| row[1].split(", ")).map(str::to_string).collect();
        for label in labels.iter().filter(|label| !named.contains(*label)) {
            wrong.push(format!("{}: no row has the label {label}", package.name));
        }
        for row in rows.iter().filter(|row| row.len() == 5) {
            let names = row[3].split('`').skip(1).step_by(2);
            for name in names.filter(|name| !name.ends_with(".rs")) {
                if !ws.root.join(format!("litmus/{name}.litmus")).exists() {
                    wrong.push(format!("{}: no litmus test {name}", package.name));
                }
            }
        }
    }
    assert!(wrong.is_empty(), "\n{}", wrong.join("\n"));
}

#[test]
fn a_row_counts_the_orderings_of_files() {
    let text = format!(
        "{HEADING}\n\n| p | label | model | litmus test | nothing |\n|---|---|---|---|---|\n\
         | q | a, b c | `x.rs` 3: the loads, `y/z.rs` 12 | `l` | |\n\n## Another\n\n| r | |\n"
    );
    let rows = table(&text);
    assert_eq!(rows[1], ["q", "a, b c", "`x.rs` 3: the loads, `y/z.rs` 12", "`l`", ""]);
    assert_eq!(rows.len(), 2);
    assert_eq!(counted(rows[1][2]), [("x.rs", 3), ("y/z.rs", 12)]);
    assert_eq!(counted(rows[1][3]), []);
}
