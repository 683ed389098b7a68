//! What is drawn: every figure once, and nothing that was not measured.

#[path = "../plot.rs"]
mod plot;

use harness::{Plot, Series};

use self::plot::{color, svg};

fn of(logarithmic: bool, values: [f64; 2]) -> Plot {
    Plot {
        unit: "ns".into(),
        logarithmic,
        places: vec!["here".into(), "there & <elsewhere>".into()],
        series: vec![Series::published("a", values), Series::measured("a", values)],
        ..Plot::default()
    }
}

fn count(plot: &Plot, element: &str) -> usize {
    svg(plot).unwrap().matches(&format!("<{element} ")).count()
}

#[test]
fn every_value_has_its_bar_and_what_was_not_measured_has_none() {
    for logarithmic in [false, true] {
        // A background, a mark of each series in the legend, and the bars.
        assert_eq!(count(&of(logarithmic, [3.0, 40_000.0]), "rect"), 3 + 4);
        assert_eq!(count(&of(logarithmic, [3.0, f64::NAN]), "rect"), 3 + 2);
        assert_eq!(count(&of(logarithmic, [0.5, 0.5]), "rect"), 3 + 4);
    }
    assert!(svg(&of(false, [f64::NAN; 2])).is_err());
}

/// A logarithm of none is none: it stands at the bottom, and its figure says what it is.
#[test]
fn none_is_said_to_be_none_where_equal_ratios_are_equally_long() {
    let text = svg(&of(true, [0.0, 40_000.0])).unwrap();
    assert_eq!(text.lines().filter(|line| line.trim() == "0").count(), 2, "{text}");
}

#[test]
fn lines_join_the_values() {
    let lines = Plot { lines: true, ..of(false, [1.0, 2.0]) };
    assert!(count(&lines, "polyline") >= 2);
    assert_eq!(count(&lines, "circle"), 2, "what was measured");
}

#[test]
fn what_was_published_is_a_lighter_shade_of_its_partner() {
    let plot = of(false, [1.0, 2.0]);
    let (published, measured) = (color(&plot, 0), color(&plot, 1));
    assert_eq!((published.0, published.1, published.2), (measured.0, measured.1, measured.2));
    assert!(published.3 < measured.3);
}
