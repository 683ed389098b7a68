//! One page that needs nothing but itself: chapters, with their plots drawn, in one file.
//!
//! It is HTML, and well-formed XML as well, so that a test can parse all of it.

use std::fmt::{self, Write};

use harness::{Chapter, Claim, Header, Plot, Table};

use crate::plot::{color, svg};

const STYLE: &str = include_str!("page.css");

/// A page, to be written with `Display`.
#[derive(Debug)]
pub(crate) struct Page<'p> {
    /// What the page is called.
    pub(crate) title: &'p str,
    /// A sentence or two at its beginning.
    pub(crate) lead: &'p str,
    /// Where and how it was measured.
    pub(crate) header: &'p Header,
    /// In the order of the page; those of one crate follow each other.
    pub(crate) chapters: &'p [Chapter],
    /// What could not be measured at all.
    pub(crate) missing: &'p [String],
}

/// Text between tags, or in an attribute.
struct Escaped<'t>(&'t str);

impl fmt::Display for Escaped<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.chars().try_for_each(|letter| match letter {
            '&' => f.write_str("&amp;"),
            '<' => f.write_str("&lt;"),
            '>' => f.write_str("&gt;"),
            '"' => f.write_str("&quot;"),
            // What XML has no place for.
            '\0'..='\u{8}' | '\u{b}'..='\u{c}' | '\u{e}'..='\u{1f}' => f.write_char('\u{fffd}'),
            letter => f.write_char(letter),
        })
    }
}

impl fmt::Display for Page<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { title, lead, header, chapters, missing } = self;
        let (title, lead) = (Escaped(title), Escaped(lead));
        writeln!(f, "<!DOCTYPE html>")?;
        writeln!(f, "<html lang=\"en\" xmlns=\"http://www.w3.org/1999/xhtml\"><head>")?;
        writeln!(f, "<meta charset=\"utf-8\"/><title>{title}</title>")?;
        writeln!(f, "<meta name=\"viewport\" content=\"width=device-width, initial-scale=1\"/>")?;
        writeln!(f, "<style>\n{STYLE}</style></head><body>")?;
        writeln!(f, "<h1>{title}</h1>\n<p>{lead}</p>")?;
        summary(f, chapters)?;
        machine(f, header)?;
        claims(f, chapters)?;
        differences(f, chapters, missing)?;
        let mut last = None;
        for (number, chapter) in chapters.iter().enumerate() {
            if last != Some(&chapter.of) {
                writeln!(f, "<h2 id=\"{0}\">{0}</h2>", Escaped(&chapter.of))?;
            }
            last = Some(&chapter.of);
            write_chapter(f, number, chapter, header)?;
        }
        writeln!(f, "</body></html>")
    }
}

/// One line for each chapter with claims: how many of them hold, and the first that was measured.
fn summary(f: &mut fmt::Formatter<'_>, chapters: &[Chapter]) -> fmt::Result {
    for (number, chapter) in chapters.iter().enumerate() {
        let Chapter { claims, .. } = chapter;
        if claims.is_empty() {
            continue;
        }
        let count = |holds| claims.iter().filter(|claim| claim.holds == holds).count();
        let (hold, all, open) = (count(Some(true)), claims.len(), count(None));
        let linked = Linked(number, chapter);
        write!(f, "<p class=\"summary\">{linked}: {hold} of {all} effects hold")?;
        if open > 0 {
            write!(f, ", {open} not measured")?;
        }
        if let Some(first) = claims.iter().find(|claim| claim.holds.is_some()) {
            let Claim { what, published, measured, .. } = first;
            let (what, measured) = (Escaped(what), Escaped(measured));
            write!(f, ". {what}: {measured}")?;
            if published != "none" {
                write!(f, "; published {}", Escaped(published))?;
            }
        }
        writeln!(f, ".</p>")?;
    }
    Ok(())
}

fn machine(f: &mut fmt::Formatter<'_>, header: &Header) -> fmt::Result {
    let Header { cpu, cores, kernel, commit, load, command } = header;
    let cores = format!("{cpu}, {cores} cores");
    writeln!(f, "<dl>")?;
    for (name, value) in [
        ("machine", &cores),
        ("kernel", kernel),
        ("commit", commit),
        ("load", load),
        ("command", command),
    ] {
        writeln!(f, "<dt>{name}</dt><dd>{}</dd>", Escaped(value))?;
    }
    writeln!(f, "</dl>")
}

/// Every claim of the page in one table, under the chapter that it is of.
fn claims(f: &mut fmt::Formatter<'_>, chapters: &[Chapter]) -> fmt::Result {
    writeln!(f, "<h2>At a glance</h2>\n<div class=\"wide\"><table class=\"claims\">")?;
    writeln!(f, "<tr><th>what was claimed</th>")?;
    writeln!(f, "<th>published</th><th>measured</th><th>here</th></tr>")?;
    for (number, chapter) in chapters.iter().enumerate() {
        if chapter.claims.is_empty() {
            continue;
        }
        writeln!(f, "<tr><th colspan=\"4\">{}</th></tr>", Linked(number, chapter))?;
        for claim in &chapter.claims {
            let Claim { what, published, measured, holds, .. } = claim;
            let (class, verdict) = (class(*holds), Escaped(claim.verdict()));
            writeln!(
                f,
                "<tr><td>{}</td><td data-label=\"published\">{}</td>\
                 <td data-label=\"measured\">{}</td><td class=\"{class}\">{verdict}</td></tr>",
                Escaped(what),
                Escaped(published),
                Escaped(measured),
            )?;
        }
    }
    writeln!(f, "</table></div>")
}

/// A chapter's crate and title, as a link to it: its number is its place on the page.
struct Linked<'c>(usize, &'c Chapter);

impl fmt::Display for Linked<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self(number, Chapter { of, title, .. }) = self;
        write!(f, "<a href=\"#chapter-{number}\">{}: {}</a>", Escaped(of), Escaped(title))
    }
}

fn class(holds: Option<bool>) -> &'static str {
    match holds {
        Some(true) => "yes",
        Some(false) => "no",
        None => "unknown",
    }
}

/// What is not as published, in words.
fn differences(
    f: &mut fmt::Formatter<'_>,
    chapters: &[Chapter],
    missing: &[String],
) -> fmt::Result {
    writeln!(f, "<h2>What did not reproduce, or was not measured</h2>")?;
    let all_hold = |chapter: &Chapter| chapter.claims.iter().all(|claim| claim.holds == Some(true));
    if missing.is_empty() && chapters.iter().all(all_hold) {
        return writeln!(f, "<p>Nothing: all was measured, and is as published.</p>");
    }
    writeln!(f, "<ul>")?;
    for (number, chapter) in chapters.iter().enumerate() {
        for claim in chapter.claims.iter().filter(|claim| claim.holds != Some(true)) {
            let Claim { what, published, measured, holds, remark } = claim;
            write!(f, "<li>{}: {}. ", Linked(number, chapter), Escaped(what))?;
            match holds {
                None => write!(f, "Not measured; published {}. ", Escaped(published))?,
                _ => {
                    write!(f, "Measured {}, published {}. ", Escaped(measured), Escaped(published))?
                }
            }
            writeln!(f, "{}</li>", Escaped(remark))?;
        }
    }
    missing.iter().try_for_each(|what| writeln!(f, "<li>{}</li>", Escaped(what)))?;
    writeln!(f, "</ul>")
}

fn write_chapter(
    f: &mut fmt::Formatter<'_>,
    number: usize,
    chapter: &Chapter,
    header: &Header,
) -> fmt::Result {
    let Chapter { title, about, command, plots, tables, claims, .. } = chapter;
    writeln!(f, "<h3 id=\"chapter-{number}\">{}</h3>", Escaped(title))?;
    writeln!(f, "<p>{}</p>", Escaped(about))?;
    let command = if command.is_empty() { &header.command } else { command };
    let origin = format!("{command}, on {}", header.cpu);
    plots.iter().try_for_each(|plot| write_plot(f, plot, &origin))?;
    tables.iter().try_for_each(|table| write_table(f, table))?;
    verdicts(f, claims)
}

/// Each claim of a chapter, and what became of it, in words.
fn verdicts(f: &mut fmt::Formatter<'_>, claims: &[Claim]) -> fmt::Result {
    for claim in claims {
        let Claim { what, published, measured, holds, remark } = claim;
        let (class, verdict) = (class(*holds), Escaped(claim.verdict()));
        write!(f, "<p class=\"said\"><b class=\"{class}\">{verdict}</b>: {}; ", Escaped(what))?;
        match (holds, published.as_str()) {
            (None, _) => write!(f, "published {}. ", Escaped(published))?,
            (_, "none") => write!(f, "measured {}. ", Escaped(measured))?,
            _ => write!(f, "measured {}, published {}. ", Escaped(measured), Escaped(published))?,
        }
        writeln!(f, "{}</p>", Escaped(remark))?;
    }
    Ok(())
}

/// A plot with its unit and its origin: the command and the machine.
fn write_plot(f: &mut fmt::Formatter<'_>, plot: &Plot, origin: &str) -> fmt::Result {
    let Ok(drawn) = svg(plot) else {
        return writeln!(f, "<p class=\"remark\">{}: not measured</p>", Escaped(&plot.title));
    };
    let (title, unit, origin) = (Escaped(&plot.title), Escaped(&plot.unit), Escaped(origin));
    writeln!(f, "<figure><figcaption>{title}")?;
    writeln!(f, "<small>{unit}; <code>{origin}</code></small></figcaption>")?;
    writeln!(f, "<div class=\"wide\">{drawn}</div>")?;
    writeln!(f, "<div class=\"legend\">")?;
    for (at, series) in plot.series.iter().enumerate() {
        let plotters::style::RGBAColor(red, green, blue, alpha) = color(plot, at);
        writeln!(
            f,
            "<span><i style=\"background: rgba({red},{green},{blue},{alpha})\"></i>{}</span>",
            Escaped(&series.name)
        )?;
    }
    writeln!(f, "</div></figure>")
}

fn write_table(f: &mut fmt::Formatter<'_>, table: &Table) -> fmt::Result {
    let Table { title, columns, rows } = table;
    writeln!(f, "<div class=\"wide\"><table><caption>{}</caption>", Escaped(title))?;
    write!(f, "<tr><th></th>")?;
    columns.iter().try_for_each(|column| write!(f, "<th>{}</th>", Escaped(column)))?;
    writeln!(f, "</tr>")?;
    for (name, cells) in rows {
        write!(f, "<tr><th>{}</th>", Escaped(name))?;
        for at in 0..columns.len() {
            let cell = cells.get(at).map_or("", String::as_str);
            write!(f, "<td>{}</td>", Escaped(cell))?;
        }
        writeln!(f, "</tr>")?;
    }
    writeln!(f, "</table></div>")
}
