//! The chapter of a bench in the page of results: claims, tables and plots.
//!
//! A bench prints it, and with `--hand-on FILE` appends it to a file, a line each: the bench `seeds` makes
//! a page of them.

use std::fmt;
use std::fs::OpenOptions;
use std::io::{self, Write};
use std::path::Path;

use serde::{Deserialize, Serialize};

/// One chapter of the report.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Chapter {
    /// The crate, or what else it is about.
    pub of: String,
    /// What it is called: the subject of a published change.
    pub title: String,
    /// What is compared: what is built here before and after, and how they differ.
    pub about: String,
    /// The command that measures it; empty if the page's command does.
    #[serde(default)]
    pub command: String,
    /// What was published, and whether it is so here.
    pub claims: Vec<Claim>,
    /// The figures.
    pub tables: Vec<Table>,
    /// The same to look at.
    pub plots: Vec<Plot>,
}

/// A published effect.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Claim {
    /// What is claimed.
    pub what: String,
    /// The published figure; `none` where there is none.
    pub published: String,
    /// The one measured here.
    pub measured: String,
    /// Whether the effect is there; `None` where it was not measured.
    pub holds: Option<bool>,
    /// Why it is not, or what else a reader has to know.
    pub remark: String,
}

impl Claim {
    /// A claim about a number, which holds if `is` says so.
    pub fn new(
        what: &str,
        published: impl fmt::Display,
        measured: Option<f64>,
        decimals: usize,
        is: impl FnOnce(f64) -> bool,
    ) -> Self {
        let measured = measured.filter(|value| value.is_finite());
        Self {
            what: what.into(),
            published: published.to_string(),
            measured: number(measured, decimals),
            holds: measured.map(is),
            remark: String::new(),
        }
    }

    /// With a remark.
    pub fn remark(mut self, remark: impl Into<String>) -> Self {
        self.remark = remark.into();
        self
    }

    /// The same in a word or two.
    pub fn verdict(&self) -> &'static str {
        match (self.holds, self.published.as_str()) {
            (Some(true), "none") => "holds",
            (Some(false), "none") => "does not hold",
            (Some(true), _) => "reproduced",
            (Some(false), _) => "not reproduced",
            (None, _) => "not measured",
        }
    }
}

/// A table of figures.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Table {
    /// What it shows.
    pub title: String,
    /// Of all columns but the first, which has the names of the rows.
    pub columns: Vec<String>,
    /// A name and what the columns have.
    pub rows: Vec<(String, Vec<String>)>,
}

impl Table {
    /// One without rows.
    pub fn new<'a>(
        title: impl Into<String>,
        columns: impl IntoIterator<Item = &'a (impl ToString + ?Sized + 'a)>,
    ) -> Self {
        let columns = columns.into_iter().map(ToString::to_string).collect();
        Self { title: title.into(), columns, rows: Vec::new() }
    }

    /// Adds a row; columns at its end may be missing.
    pub fn row(&mut self, name: impl Into<String>, cells: impl IntoIterator<Item = String>) {
        self.rows.push((name.into(), cells.into_iter().collect()));
    }
}

/// Figures of several series at the same places.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Plot {
    /// What it shows.
    pub title: String,
    /// What its axis says.
    pub unit: String,
    /// Whether what lies between the places is of interest: lines, or else bars.
    pub lines: bool,
    /// Whether equal ratios are equally long.
    pub logarithmic: bool,
    /// The names of the places.
    pub places: Vec<String>,
    /// What was measured at each.
    pub series: Vec<Series>,
}

/// One series of a [`Plot`].
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Series {
    /// What it is of.
    pub name: String,
    /// Whether the figures were published, not measured here.
    pub published: bool,
    /// By place.
    pub values: Vec<Option<f64>>,
}

impl Series {
    /// Measured here; what is not finite was not measured.
    pub fn measured(name: impl Into<String>, values: impl IntoIterator<Item = f64>) -> Self {
        let finite = |value: f64| Some(value).filter(|value| value.is_finite());
        let values = values.into_iter().map(finite).collect();
        Self { name: name.into(), published: false, values }
    }

    /// Published.
    pub fn published(name: impl Into<String>, values: impl IntoIterator<Item = f64>) -> Self {
        Self { published: true, ..Self::measured(format!("{}, published", name.into()), values) }
    }
}

/// A figure of a table.
pub fn number(value: Option<f64>, decimals: usize) -> String {
    value
        .filter(|value| value.is_finite())
        .map_or("none".into(), |value| format!("{value:.decimals$}"))
}

impl Chapter {
    /// Appends it to a file, as a line.
    ///
    /// # Errors
    ///
    /// The file's.
    pub fn append_to(&self, file: &Path) -> io::Result<()> {
        let mut line = serde_json::to_string(self)?;
        line.push('\n');
        OpenOptions::new().create(true).append(true).open(file)?.write_all(line.as_bytes())
    }

    /// Those in what such a file has.
    ///
    /// # Errors
    ///
    /// A line that is none.
    pub fn all(lines: &str) -> Result<Vec<Self>, serde_json::Error> {
        lines.lines().map(serde_json::from_str).collect()
    }
}

impl fmt::Display for Chapter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{}: \"{}\"", self.of, self.title)?;
        writeln!(f, "  {}", self.about)?;
        self.tables.iter().try_for_each(|table| write!(f, "{table}"))?;
        for claim in &self.claims {
            let Claim { what, published, measured, remark, .. } = claim;
            writeln!(f, "  {}: {what}: {measured} (published {published})", claim.verdict())?;
            if !remark.is_empty() {
                writeln!(f, "    {remark}")?;
            }
        }
        Ok(())
    }
}

impl fmt::Display for Table {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let width = |text: &str| text.chars().count();
        let first = self.rows.iter().map(|(name, _)| width(name)).max().unwrap_or(0);
        let widths: Vec<usize> = (0..self.columns.len())
            .map(|at| {
                let cells = self.rows.iter().filter_map(|(_, cells)| cells.get(at));
                cells.chain([&self.columns[at]]).map(|cell| width(cell)).max().unwrap_or(0)
            })
            .collect();
        let line = |f: &mut fmt::Formatter<'_>, name: &str, cells: &[String]| {
            let mut text = format!("  {name:<first$}");
            for (cell, width) in cells.iter().zip(&widths) {
                text += &format!("  {cell:>width$}");
            }
            writeln!(f, "{}", text.trim_end())
        };
        writeln!(f, "  {}", self.title)?;
        line(f, "", &self.columns)?;
        self.rows.iter().try_for_each(|(name, cells)| line(f, name, cells))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chapter() -> Chapter {
        let mut table = Table::new("of lookups", ["ns", "published"]);
        table.row("list", [number(Some(12.345), 1), "11".into()]);
        table.row("tree", [number(Some(f64::NAN), 1)]);
        Chapter {
        command: String::new(),
            of: "radix-ctx".into(),
            title: "a tree for a list".into(),
            claims: vec![
                Claim::new("tree / list", 0.68, Some(0.704), 2, |ratio| ratio < 0.8),
                Claim::new("one context", 1.0, Some(1.2), 2, |ratio| ratio < 1.01).remark("slow"),
                Claim::new("on 32 cores", 0.83, None, 2, |_| true),
                Claim::new("a lookup", "none", Some(0.5), 2, |ratio| ratio < 1.0),
            ],
            tables: vec![table],
            ..Chapter::default()
        }
    }

    #[test]
    fn a_chapter_comes_back_from_its_line() {
        let file = std::env::temp_dir().join(format!("chapter-{}", std::process::id()));
        for _ in 0..2 {
            chapter().append_to(&file).unwrap();
        }
        let text = std::fs::read_to_string(&file).unwrap();
        std::fs::remove_file(file).unwrap();
        assert_eq!(Chapter::all(&text).unwrap(), [chapter(), chapter()]);
        assert!(Chapter::all("none").is_err());
    }

    #[test]
    fn a_reader_sees_what_held_and_what_did_not() {
        let text = chapter().to_string();
        assert!(text.contains("  list  12.3         11\n  tree  none\n"), "{text}");
        assert!(text.contains("  reproduced: tree / list: 0.70 (published 0.68)\n"), "{text}");
        assert!(text.contains("  not reproduced: one context: 1.20 (published 1)\n    slow\n"));
        assert!(text.contains("  holds: a lookup: 0.50 (published none)\n"));
        assert!(text.contains("  not measured: on 32 cores: none (published 0.83)\n"));
    }
}
