//! The report: one page of Markdown, and its plots as SVG files beside it.

use std::error::Error;
use std::fmt::{self, Write};
use std::fs;
use std::path::{Path, PathBuf};

use harness::{Chapter, Claim, Header, Table};

use crate::plot::svg;

/// A page, to be written with `Display`.
#[derive(Debug)]
pub(crate) struct Page<'p> {
    pub(crate) title: &'p str,
    /// A sentence or two at the beginning of the page.
    pub(crate) lead: &'p str,
    /// Where and how the chapters were measured.
    pub(crate) header: &'p Header,
    /// In the order of the page; the chapters of one crate follow each other.
    pub(crate) chapters: &'p [Chapter],
    /// What could not be measured at all.
    pub(crate) missing: &'p [String],
}

impl Page<'_> {
    /// Writes the page and its plots to a folder. Returns the path of the page.
    pub(crate) fn write(&self, folder: &Path) -> Result<PathBuf, Box<dyn Error>> {
        fs::create_dir_all(folder)?;
        for (number, chapter) in self.chapters.iter().enumerate() {
            for (at, plot) in chapter.plots.iter().enumerate() {
                if let Ok(drawn) = svg(plot) {
                    fs::write(folder.join(file_name(number, at)), drawn)?;
                }
            }
        }
        // The page appears whole or not at all.
        let (path, new) = (folder.join("README.md"), folder.join("README.md.new"));
        fs::write(&new, self.to_string())?;
        fs::rename(new, &path)?;
        Ok(path)
    }
}

/// The file of a chapter's plot.
fn file_name(chapter: usize, plot: usize) -> String {
    format!("plot-{chapter}-{plot}.svg")
}

/// Text in Markdown: signs that would begin a cell, a tag or a link are escaped.
struct Plain<'t>(&'t str);

impl fmt::Display for Plain<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.chars().try_for_each(|letter| match letter {
            '|' | '<' | '[' | ']' | '*' | '_' | '\\' => write!(f, "\\{letter}"),
            letter if letter.is_control() => f.write_char(' '),
            letter => f.write_char(letter),
        })
    }
}

impl fmt::Display for Page<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { title, lead, header, chapters, missing } = self;
        let Header { cpu, cores, kernel, commit, load, command, locked_add } = header;
        writeln!(f, "# {}\n\n{}\n", Plain(title), Plain(lead))?;
        writeln!(
            f,
            "`{command}`, on {}, {cores} cores, Linux {kernel}, commit {commit}, load {load}, an atomic addition takes {locked_add:.1} ns.\n",
            Plain(cpu)
        )?;
        claims(f, chapters)?;
        differences(f, chapters, missing)?;
        let mut last = None;
        for (number, chapter) in chapters.iter().enumerate() {
            if last != Some(&chapter.of) {
                writeln!(f, "## {}\n", Plain(&chapter.of))?;
            }
            last = Some(&chapter.of);
            write_chapter(f, number, chapter, header)?;
        }
        Ok(())
    }
}

/// Every claim of the page in one table.
fn claims(f: &mut fmt::Formatter<'_>, chapters: &[Chapter]) -> fmt::Result {
    writeln!(
        f,
        "| crate | what was claimed | published | measured | here |\n|---|---|---|---|---|"
    )?;
    for chapter in chapters {
        for claim in &chapter.claims {
            let Claim { what, published, measured, .. } = claim;
            let [of, what, published, measured] =
                [&chapter.of, what, published, measured].map(|text| Plain(text));
            writeln!(f, "| {of} | {what} | {published} | {measured} | {} |", claim.verdict())?;
        }
    }
    writeln!(f)
}

/// What is not as published, and what was not measured.
fn differences(
    f: &mut fmt::Formatter<'_>,
    chapters: &[Chapter],
    missing: &[String],
) -> fmt::Result {
    writeln!(f, "## What did not reproduce, or was not measured\n")?;
    let all_hold = |chapter: &Chapter| chapter.claims.iter().all(|claim| claim.holds == Some(true));
    if missing.is_empty() && chapters.iter().all(all_hold) {
        return writeln!(f, "Nothing: all was measured, and is as published.\n");
    }
    for chapter in chapters {
        for claim in chapter.claims.iter().filter(|claim| claim.holds != Some(true)) {
            let Claim { what, published, measured, holds, remark } = claim;
            write!(f, "- {}: {}. ", Plain(&chapter.of), Plain(what))?;
            match holds {
                None => write!(f, "Not measured; published {}. ", Plain(published))?,
                _ => write!(f, "Measured {}, published {}. ", Plain(measured), Plain(published))?,
            }
            writeln!(f, "{}", Plain(remark))?;
        }
    }
    missing.iter().try_for_each(|what| writeln!(f, "- {}", Plain(what)))?;
    writeln!(f)
}

fn write_chapter(
    f: &mut fmt::Formatter<'_>,
    number: usize,
    chapter: &Chapter,
    header: &Header,
) -> fmt::Result {
    let Chapter { title, about, command, plots, tables, claims, .. } = chapter;
    let command = if command.is_empty() { &header.command } else { command };
    writeln!(f, "### {}\n\n{} `{command}`\n", Plain(title), Plain(about))?;
    for (at, plot) in plots.iter().enumerate() {
        match svg(plot) {
            Ok(_) => writeln!(f, "![{}]({})\n", Plain(&plot.title), file_name(number, at))?,
            Err(_) => writeln!(f, "{}: not measured\n", Plain(&plot.title))?,
        }
    }
    tables.iter().try_for_each(|table| write_table(f, table))?;
    for claim in claims.iter().filter(|claim| !claim.remark.is_empty()) {
        writeln!(f, "- {}: {}", Plain(&claim.what), Plain(&claim.remark))?;
    }
    writeln!(f)
}

fn write_table(f: &mut fmt::Formatter<'_>, table: &Table) -> fmt::Result {
    let Table { title, columns, rows } = table;
    write!(f, "| {} |", Plain(title))?;
    columns.iter().try_for_each(|column| write!(f, " {} |", Plain(column)))?;
    writeln!(f, "\n|---|{}", "---|".repeat(columns.len()))?;
    for (name, cells) in rows {
        write!(f, "| {} |", Plain(name))?;
        for at in 0..columns.len() {
            write!(f, " {} |", Plain(cells.get(at).map_or("", String::as_str)))?;
        }
        writeln!(f)?;
    }
    writeln!(f)
}
