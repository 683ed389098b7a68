//! The recorded targets, and the line that each of them ends in.
//!
//! ```text
//! TARGET N1.nbdkit.tput measured 1.632 bound >=1.2 holds rounds 31 min 1.402 max 1.711 host dear
//! TARGET N3.qemu_native.tput measured none bound >=1.0 short
//! ```
//!
//! `min` and `max` are the ends of the ratios of the rounds; a figure without rounds has none of the three.
//! `host` says whether locked instructions are cheap there: a row may hold on one kind of host only.
//!
//! What was not measured does not hold; but in a run of some rows (`--only`) it is named on a line of its own.

use std::fmt;
use std::str::FromStr;

use toml::Table;

use crate::args::Args;
use crate::header::host_kind;
use crate::stats::Ratio;

/// The entries of one section of `targets.toml`, and what was measured for them.
#[derive(Debug, Clone)]
pub struct Targets {
    entries: Vec<Entry>,
    /// Only some of the targets are asked for.
    some: bool,
}

#[derive(Debug, Clone)]
struct Entry {
    id: String,
    /// The bound as written in the file.
    text: String,
    bound: Bound,
    measured: Option<f64>,
    /// The spread of the rounds and the kind of host.
    spread: String,
}

/// The measured value of a target: a figure, or the ratios of some rounds.
#[derive(Debug, Clone, Copy)]
pub struct Measured {
    figure: Option<f64>,
    ratio: Option<Ratio>,
}

impl From<Option<f64>> for Measured {
    fn from(figure: Option<f64>) -> Self {
        Self { figure, ratio: None }
    }
}

impl From<Option<Ratio>> for Measured {
    fn from(ratio: Option<Ratio>) -> Self {
        Self { figure: ratio.map(|ratio| ratio.median), ratio }
    }
}

/// The reasons for which targets could not be read or recorded: each is a mistake in the file or in the bench.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum TargetError {
    /// The file is not TOML, with the parser's message.
    Syntax(String),
    /// The file has no such section.
    NoSection(String),
    /// The entry's bound is not a string such as `<=1.5` or `>=2`.
    BadBound(String),
    /// The section has no entry with this id.
    UnknownId(String),
}

impl fmt::Display for TargetError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Syntax(message) => write!(f, "targets are not TOML: {message}"),
            Self::NoSection(name) => write!(f, "targets have no section [{name}]"),
            Self::BadBound(id) => write!(f, "target {id}: the bound is not <=NUMBER or >=NUMBER"),
            Self::UnknownId(id) => write!(f, "target {id} is not in the bench's section"),
        }
    }
}

impl std::error::Error for TargetError {}

#[derive(Debug, Clone, Copy, PartialEq)]
enum Bound {
    AtMost(f64),
    AtLeast(f64),
}

impl Bound {
    fn holds(self, value: f64) -> bool {
        match self {
            Self::AtMost(bound) => value <= bound,
            Self::AtLeast(bound) => value >= bound,
        }
    }
}

impl FromStr for Bound {
    type Err = ();

    fn from_str(text: &str) -> Result<Self, ()> {
        let number =
            |text: &str| text.trim().parse().ok().filter(|n: &f64| n.is_finite()).ok_or(());
        if let Some(rest) = text.strip_prefix("<=") {
            Ok(Self::AtMost(number(rest)?))
        } else if let Some(rest) = text.strip_prefix(">=") {
            Ok(Self::AtLeast(number(rest)?))
        } else {
            Err(())
        }
    }
}

impl Targets {
    /// Reads the section of one bench from the text of `targets.toml`.
    ///
    /// # Errors
    ///
    /// [`TargetError`] but for `UnknownId`.
    pub fn parse(toml: &str, section: &str) -> Result<Self, TargetError> {
        let file: Table = toml.parse().map_err(|error| TargetError::Syntax(format!("{error}")))?;
        let table = file.get(section).and_then(|value| value.as_table());
        let table = table.ok_or_else(|| TargetError::NoSection(section.to_string()))?;
        let entries = table.iter().map(|(id, value)| {
            let text = value.as_str().ok_or_else(|| TargetError::BadBound(id.clone()))?;
            let bound = text.parse().map_err(|()| TargetError::BadBound(id.clone()))?;
            let (id, text) = (id.clone(), text.to_string());
            Ok(Entry { id, text, bound, measured: None, spread: String::new() })
        });
        Ok(Self { entries: entries.collect::<Result<_, _>>()?, some: false })
    }

    /// Leaves the targets out that a run with `--only` has not measured.
    #[must_use]
    pub fn asked_for_by(self, args: &Args) -> Self {
        Self { some: args.only.is_some(), ..self }
    }

    /// Records what was measured for `id`. `None`, infinity and NaN mean: not measured.
    ///
    /// # Errors
    ///
    /// [`TargetError::UnknownId`] if the section has no such entry.
    pub fn record(&mut self, id: &str, measured: impl Into<Measured>) -> Result<(), TargetError> {
        let Measured { figure, ratio } = measured.into();
        let entry = self.entries.iter_mut().find(|entry| entry.id == id);
        let entry = entry.ok_or_else(|| TargetError::UnknownId(id.to_string()))?;
        entry.measured = figure.filter(|value| value.is_finite());
        entry.spread = ratio.map_or(String::new(), |Ratio { least, greatest, rounds, .. }| {
            format!(" rounds {rounds} min {least:.3} max {greatest:.3} host {}", host_kind())
        });
        Ok(())
    }

    /// Records what a line printed by another run of the bench says: one that this run started in
    /// other circumstances. The number is the printed one, which rounding has left on its side of
    /// the bound. `Ok(false)` for a line that is no target's.
    ///
    /// # Errors
    ///
    /// [`TargetError::UnknownId`] if the section has no such entry.
    pub fn record_line(&mut self, line: &str) -> Result<bool, TargetError> {
        let words: Vec<&str> = line.split_whitespace().collect();
        let ["TARGET", id, "measured", number, "bound", _, _, ref spread @ ..] = words[..] else {
            return Ok(false);
        };
        self.record(id, number.parse::<f64>().ok())?; // `none` is not a number
        let entry = self.entries.iter_mut().find(|entry| entry.id == id);
        let spread = spread.iter().flat_map(|word| [" ", word]).collect();
        entry.expect("it was recorded").spread = spread;
        Ok(true)
    }
}

impl Entry {
    fn holds(&self) -> bool {
        self.measured.is_some_and(|value| self.bound.holds(value))
    }

    /// Four digits, or all of them where rounding would make the line contradict its own verdict.
    fn number(&self) -> String {
        let Some(value) = self.measured else {
            return "none".to_string();
        };
        let rounded = match value.abs() {
            large if large >= 100.0 => format!("{value:.1}"),
            middle if middle >= 1.0 => format!("{value:.3}"),
            _ => format!("{value:.4}"),
        };
        let kept = rounded.parse().is_ok_and(|n| self.bound.holds(n) == self.bound.holds(value));
        if kept { rounded } else { value.to_string() }
    }
}

/// One line per entry, in the order of the file.
impl fmt::Display for Targets {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let is_left_out = |entry: &&Entry| self.some && entry.measured.is_none();
        let left_out: Vec<_> = self.entries.iter().filter(is_left_out).collect();
        if !left_out.is_empty() {
            let ids: Vec<_> = left_out.iter().map(|entry| entry.id.as_str()).collect();
            writeln!(f, "# targets not measured: {}", ids.join(", "))?;
        }
        for entry in self.entries.iter().filter(|entry| !is_left_out(entry)) {
            let verdict = if entry.holds() { "holds" } else { "short" };
            let Entry { id, text, spread, .. } = entry;
            writeln!(f, "TARGET {id} measured {} bound {text} {verdict}{spread}", entry.number())?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FILE: &str = r#"
        [other]
        "Z9" = "<=1"
        [mine] # a comment
        "M2.time" = "<=0.75"
        "M1.sum.tput" = ">=1.8"
        "M3.allocs.n" = "<=0"
    "#;

    fn lines(records: &[(&str, Option<f64>)]) -> Vec<String> {
        let mut targets = Targets::parse(FILE, "mine").unwrap();
        for (id, measured) in records {
            targets.record(id, *measured).unwrap();
        }
        targets.to_string().lines().map(str::to_string).collect()
    }

    #[test]
    fn a_run_of_some_rows_names_the_others() {
        let mut targets = Targets::parse(FILE, "mine").unwrap();
        targets.record("M2.time", Some(0.8)).unwrap();
        let args = Args::parse("", ["--only", "M2"]).unwrap();
        assert_eq!(
            targets.clone().asked_for_by(&args).to_string(),
            "# targets not measured: M1.sum.tput, M3.allocs.n\n\
             TARGET M2.time measured 0.8000 bound <=0.75 short\n"
        );
        assert_eq!(targets.asked_for_by(&Args::default()).to_string().matches("short").count(), 3);
    }

    #[test]
    fn a_bound_holds_on_its_edge_and_rounding_never_contradicts_the_verdict() {
        assert!(lines(&[("M1.sum.tput", Some(1.8))])[1].ends_with("1.800 bound >=1.8 holds"));
        let just_short = lines(&[("M1.sum.tput", Some(1.79996))]);
        assert_eq!(just_short[1], "TARGET M1.sum.tput measured 1.79996 bound >=1.8 short");
        let just_short = lines(&[("M2.time", Some(0.750_001))]);
        assert_eq!(just_short[0], "TARGET M2.time measured 0.750001 bound <=0.75 short");
    }

    #[test]
    fn what_one_run_prints_another_records() {
        let mut first = Targets::parse(FILE, "mine").unwrap();
        first.record("M1.sum.tput", Ratio::of(&[1.8, 2.0, 3.0])).unwrap();
        let line = first.to_string().lines().nth(1).unwrap().to_string();
        let figures = "TARGET M1.sum.tput measured 2.000 bound >=1.8 holds rounds 3 min 1.800 max 3.000 host ";
        assert!(line.starts_with(figures), "{line}");
        first.record("M3.allocs.n", Some(0.0)).unwrap();
        let printed = first.to_string();
        let mut second = Targets::parse(FILE, "mine").unwrap();
        second.record("M2.time", Some(0.1)).unwrap(); // the first run measured none
        for line in printed.lines() {
            assert_eq!(second.record_line(line), Ok(true), "{line}");
        }
        assert_eq!(second.to_string(), printed);

        for line in ["", "sum/1  1.00", "TARGET M2.time", "# TARGET M2.time measured 1 bound <=1"] {
            assert_eq!(second.record_line(line), Ok(false), "{line}");
        }
        let error = second.record_line("TARGET Z9 measured 1.0 bound <=1 holds");
        assert_eq!(error, Err(TargetError::UnknownId("Z9".to_string())));
        assert_eq!(second.to_string(), printed);
    }
}
