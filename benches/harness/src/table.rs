//! Tables in Markdown, with columns of equal width so that a terminal shows them well, too.

use std::fmt;

/// A table of figures.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Table {
    /// The title of the table: the heading of the first column.
    pub title: String,
    /// The headings of all columns but the first, which has the names of the rows.
    pub columns: Vec<String>,
    /// A name and what the columns have.
    pub rows: Vec<(String, Vec<String>)>,
    /// The columns that the page of results draws as bars.
    pub bars: Vec<usize>,
    /// Each row has a scale of its own there.
    pub scaled_by_row: bool,
}

impl Table {
    /// Returns a table without rows.
    pub fn new<'a>(
        title: impl Into<String>,
        columns: impl IntoIterator<Item = &'a (impl ToString + ?Sized + 'a)>,
    ) -> Self {
        let columns = columns.into_iter().map(ToString::to_string).collect();
        Self { title: title.into(), columns, ..Self::default() }
    }

    /// Adds a row; columns at its end may be missing.
    pub fn row(&mut self, name: impl Into<String>, cells: impl IntoIterator<Item = String>) {
        self.rows.push((name.into(), cells.into_iter().collect()));
    }
}

/// Formats a figure of a table. What is not there or not finite was not measured: `none`.
pub fn number(value: Option<f64>, decimals: usize) -> String {
    value
        .filter(|value| value.is_finite())
        .map_or("none".into(), |value| format!("{value:.decimals$}"))
}

impl fmt::Display for Table {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let width = |text: &str| text.chars().count();
        let names = self.rows.iter().map(|(name, _)| width(name));
        let first = names.chain([width(&self.title)]).max().unwrap_or(0);
        let cell = |row: &(String, Vec<String>), at: usize| row.1.get(at).cloned();
        let widths: Vec<usize> = (0..self.columns.len())
            .map(|at| {
                let cells = self.rows.iter().filter_map(|row| cell(row, at));
                let widths = cells.map(|cell| width(&cell));
                widths.chain([width(&self.columns[at]), 2]).max().unwrap_or(2)
            })
            .collect();
        let line = |f: &mut fmt::Formatter<'_>, name: &str, cells: &[String]| {
            write!(f, "| {name:<first$} |")?;
            for (at, width) in widths.iter().enumerate() {
                write!(f, " {:>width$} |", cells.get(at).map_or("", String::as_str))?;
            }
            writeln!(f)
        };
        writeln!(f)?;
        line(f, &self.title, &self.columns)?;
        write!(f, "|{}|", "-".repeat(first + 2))?;
        widths.iter().try_for_each(|width| write!(f, "{}:|", "-".repeat(width + 1)))?;
        writeln!(f)?;
        self.rows.iter().try_for_each(|(name, cells)| line(f, name, cells))?;
        if !self.bars.is_empty() {
            let columns: Vec<_> = self.bars.iter().map(ToString::to_string).collect();
            let scale = if self.scaled_by_row { "by-row " } else { "" };
            writeln!(f, "\n<!-- bars {scale}{} -->", columns.join(" "))?;
        }
        writeln!(f)
    }
}
