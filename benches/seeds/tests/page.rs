//! The page parses, has its plots and its claims, and refers to nothing outside itself.

#[path = "../page.rs"]
mod page;
#[path = "../plot.rs"]
mod plot;

use harness::{Chapter, Claim, Header, Plot, Series, Table};
use roxmltree::{Document, Node, ParsingOptions};

use self::page::Page;

const SVG: &str = "http://www.w3.org/2000/svg";

fn chapter(of: &str, lines: bool) -> Chapter {
    let mut table = Table::new("ns < µs & co", ["a", "\"b\""]);
    table.row("first", ["1".to_string(), "2".to_string()]);
    table.row("second", []);
    let plot = |logarithmic, values: [f64; 3]| Plot {
        title: "times".into(),
        unit: "ns".into(),
        lines,
        logarithmic,
        places: ["one", "two", "three"].map(String::from).into(),
        series: vec![Series::published("x", [1.0, 2.0]), Series::measured("x", values)],
    };
    Chapter {
        command: String::new(),
        of: of.into(),
        title: "don't <script>alert(1)</script>".into(),
        about: "before & after\u{1}".into(),
        claims: vec![
            Claim::new("it holds", 1, Some(1.0), 1, |_| true).remark("all <of> it"),
            Claim::new("it does not", 1, Some(2.0), 1, |_| false).remark("because"),
            Claim::new("it is open", 1, None, 1, |_| true),
        ],
        tables: vec![table],
        plots: vec![plot(false, [1.0, 2.0, f64::NAN]), plot(true, [0.1, 2e6, 7.0])],
    }
}

fn page_of(chapters: &[Chapter], missing: &[String]) -> String {
    let header = Header::take("seeds");
    Page { title: "Seeds & more", lead: "A <lead>.", header: &header, chapters, missing }
        .to_string()
}

fn parse(text: &str) -> Document<'_> {
    let options = ParsingOptions { allow_dtd: true, ..ParsingOptions::default() };
    Document::parse_with_options(text, options).unwrap_or_else(|error| panic!("{error}"))
}

fn text(node: Node<'_, '_>) -> String {
    node.descendants().filter(Node::is_text).filter_map(|node| node.text()).collect()
}

fn count(document: &Document<'_>, name: &str) -> usize {
    document.descendants().filter(|node| node.tag_name().name() == name).count()
}

#[test]
fn the_page_parses_and_has_every_plot_table_and_claim() {
    let chapters = [chapter("one", false), chapter("one", true), chapter("two", false)];
    let page = page_of(&chapters, &["the disk: there is none".into()]);
    let document = parse(&page);
    let svgs = document.descendants().filter(|node| node.has_tag_name((SVG, "svg"))).count();
    assert_eq!(svgs, 6);
    assert_eq!(count(&document, "caption"), 3);
    assert_eq!(count(&document, "script"), 0);
    let headings = document.descendants().filter(|node| node.tag_name().name() == "h2");
    let headings: Vec<String> = headings.map(text).collect();
    assert_eq!(headings[2..], ["one", "two"], "a crate's chapters are under one heading");
    let classes =
        |class| document.descendants().filter(move |node| node.attribute("class") == Some(class));
    assert_eq!(
        (classes("yes").count(), classes("no").count(), classes("unknown").count()),
        (6, 6, 6),
        "each claim at a glance and in its chapter"
    );
    let summary: Vec<String> = classes("summary").map(text).collect();
    assert_eq!(summary.len(), 3);
    assert_eq!(
        summary[0],
        "one: don't <script>alert(1)</script>: 1 of 3 effects hold, 1 not measured. it holds: 1.0; published 1."
    );
    let items: Vec<String> =
        document.descendants().filter(|node| node.tag_name().name() == "li").map(text).collect();
    assert_eq!(items.len(), 7, "what does not hold or was not measured, in words: {items:?}");
    assert!(items[0].contains("Measured 2.0, published 1. because"), "{items:?}");
    assert!(items[1].contains("Not measured; published 1."), "{items:?}");
    assert_eq!(items[6], "the disk: there is none");
    let said: Vec<String> = classes("said").map(text).collect();
    assert_eq!(said.len(), 9, "{said:?}");
    assert_eq!(said[0].trim(), "reproduced: it holds; measured 1.0, published 1. all <of> it");
    assert_eq!(said[2].trim(), "not measured: it is open; published 1.");
}

#[test]
fn the_page_refers_to_nothing_outside_itself() {
    let page = page_of(&[chapter("one", false), chapter("two", true)], &[]);
    let document = parse(&page);
    for node in document.descendants() {
        for attribute in node.attributes() {
            let (name, value) = (attribute.name(), attribute.value());
            assert!(!matches!(name, "src" | "srcset" | "data" | "action"), "{name}={value}");
            let found = |id| document.descendants().any(|node| node.attribute("id") == Some(id));
            assert!(name != "href" || value.strip_prefix('#').is_some_and(found), "{name}={value}");
            assert!(!value.contains("url("), "{name}={value}");
        }
        let linked = ["link", "img", "iframe", "script", "object", "image", "use"];
        assert!(!linked.contains(&node.tag_name().name()), "{:?}", node.tag_name());
    }
    let styles = document.descendants().filter(|node| node.tag_name().name() == "style");
    let styles: String = styles.map(text).collect();
    assert!(styles.contains("prefers-color-scheme: dark"));
    assert!(!styles.contains("url(") && !styles.contains("@import"));
}

#[test]
fn a_plot_of_nothing_is_said_to_be_none() {
    let mut empty = chapter("one", false);
    for series in empty.plots.iter_mut().flat_map(|plot| &mut plot.series) {
        series.values.fill(None);
    }
    let page = page_of(&[empty], &[]);
    assert_eq!(count(&parse(&page), "svg"), 0);
    assert!(page.contains("times: not measured"));
}

#[test]
fn where_all_is_as_published_the_page_says_so() {
    let mut all = chapter("one", false);
    all.claims.truncate(1);
    let nothing = "<p>Nothing: all was measured, and is as published.</p>";
    assert!(page_of(std::slice::from_ref(&all), &[]).contains(nothing));
    let missing = page_of(&[all], &["two: it has measured nothing".into()]);
    assert!(
        !missing.contains(nothing) && missing.contains("<li>two: it has measured nothing</li>")
    );
}
