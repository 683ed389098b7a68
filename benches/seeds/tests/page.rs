//! The page has its plots, tables and claims, and each link leads to a file beside it.

#[path = "../page.rs"]
mod page;
#[path = "../plot.rs"]
mod plot;

use std::fs;

use harness::{Chapter, Claim, Header, Plot, Series, Table};

use self::page::Page;

fn chapter(of: &str, values: [f64; 3]) -> Chapter {
    let mut table = Table::new("ns | µs", ["a", "b"]);
    table.row("first", ["1".to_string(), "2".to_string()]);
    table.row("second", []);
    Chapter {
        command: String::new(),
        of: of.into(),
        title: "don't <script>".into(),
        about: "Before and after.".into(),
        claims: vec![
            Claim::new("it holds", 1, Some(1.0), 1, |_| true).remark("all of it"),
            Claim::new("it does not", 1, Some(2.0), 1, |_| false).remark("because"),
            Claim::new("it is open", 1, None, 1, |_| true),
        ],
        tables: vec![table],
        plots: vec![Plot {
            title: "times".into(),
            unit: "ns".into(),
            places: ["one", "two", "three"].map(String::from).into(),
            series: vec![Series::measured("x", values)],
            ..Plot::default()
        }],
    }
}

#[test]
fn the_page_has_every_plot_table_and_claim() {
    let chapters = [chapter("one", [1.0, 2.0, 3.0]), chapter("two", [f64::NAN; 3])];
    let header = Header::take("seeds");
    let missing = ["the disk: there is none".to_string()];
    let page = Page {
        title: "Seeds",
        lead: "A lead.",
        header: &header,
        chapters: &chapters,
        missing: &missing,
    };
    let folder = tempfile::tempdir().unwrap();
    let text = fs::read_to_string(page.write(folder.path()).unwrap()).unwrap();
    for line in [
        "| one | it holds | 1 | 1.0 | reproduced |",
        "| two | it does not | 1 | 2.0 | not reproduced |",
        "| one | it is open | 1 | none | not measured |",
        "- one: it does not. Measured 2.0, published 1. because",
        "- one: it is open. Not measured; published 1. ",
        "- the disk: there is none",
        "## two",
        "### don't \\<script>",
        "![times](plot-0-0.svg)",
        "times: not measured",
        "| ns \\| µs | a | b |",
        "| second |  |  |",
        "- it holds: all of it",
    ] {
        assert!(text.lines().any(|there| there == line), "{line} in\n{text}");
    }
    let mut files: Vec<_> =
        fs::read_dir(folder.path()).unwrap().map(|file| file.unwrap().file_name()).collect();
    files.sort();
    assert_eq!(files, ["README.md", "plot-0-0.svg"]);
}

#[test]
fn where_all_is_as_published_the_page_says_so() {
    let mut all = chapter("one", [1.0; 3]);
    all.claims.truncate(1);
    let header = Header::take("seeds");
    let page = |missing| {
        let chapters = std::slice::from_ref(&all);
        Page { title: "", lead: "", header: &header, chapters, missing }.to_string()
    };
    let nothing = "Nothing: all was measured, and is as published.";
    assert!(page(&[]).contains(nothing));
    assert!(!page(&["two: it has measured nothing".into()]).contains(nothing));
}
