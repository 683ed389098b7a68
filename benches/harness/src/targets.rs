//! The recorded targets, and the line that each of them ends in.
//!
//! ```text
//! TARGET N1.nbdkit.tput measured 1.632 bound >=1.2 holds rounds 31 min 1.402 max 1.711 host dear
//! TARGET N3.qemu_native.tput measured none bound >=1.0 short
//! ```
//!
//! `min` and `max` are the ends of the ratios of the rounds; a figure without rounds has neither.
//! `host` says whether locked instructions are cheap there: a row may hold on one kind of host only.
//!
//! What was not measured does not hold; but in a run of some rows (`--only`) it is named on a line of its own.

use std::fmt;

use toml::Table;

use crate::args::Args;
use crate::header::host_kind;
use crate::stats::Ratio;

/// The entries of sections of `targets.toml`, and what was measured for them.
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
    measured: Option<Ratio>,
}

#[derive(Debug, Clone, Copy, PartialEq)]
enum Bound {
    AtMost(f64),
    AtLeast(f64),
}

impl Bound {
    fn parse(text: &str) -> Option<Self> {
        let number =
            text.get(2..)?.trim().parse().ok().filter(|number: &f64| number.is_finite())?;
        match &text[..2] {
            "<=" => Some(Self::AtMost(number)),
            ">=" => Some(Self::AtLeast(number)),
            _ => None,
        }
    }

    fn holds(self, value: f64) -> bool {
        match self {
            Self::AtMost(bound) => value <= bound,
            Self::AtLeast(bound) => value >= bound,
        }
    }
}

impl Targets {
    /// The section of one bench.
    pub fn of(section: &str) -> Result<Self, String> {
        Self::parse(include_str!("../../targets.toml"), section)
    }

    /// Reads the section of one bench from the text of `targets.toml`.
    pub fn parse(toml: &str, section: &str) -> Result<Self, String> {
        let file: Table = toml.parse().map_err(|error| format!("targets are not TOML: {error}"))?;
        let table = file.get(section).and_then(|value| value.as_table());
        let table = table.ok_or_else(|| format!("targets have no section [{section}]"))?;
        let entry = |(id, value): (&String, &toml::Value)| {
            let bound = value.as_str().and_then(|text| Some((text, Bound::parse(text)?)));
            let (text, bound) = bound
                .ok_or_else(|| format!("target {id}: the bound is not <=NUMBER or >=NUMBER"))?;
            let (id, text) = (id.clone(), text.to_string());
            Ok(Entry { id, text, bound, measured: None })
        };
        Ok(Self { entries: table.iter().map(entry).collect::<Result<_, String>>()?, some: false })
    }

    /// Adds the entries of other sections.
    #[must_use]
    pub fn and(mut self, other: Self) -> Self {
        self.entries.extend(other.entries);
        self
    }

    /// Leaves the targets out that a run with `--only` has not measured.
    #[must_use]
    pub fn asked_for_by(self, args: &Args) -> Self {
        Self { some: args.only.is_some(), ..self }
    }

    /// Records what was measured for `id`: a figure, or the ratios of some rounds. `None`, infinity and NaN mean:
    /// not measured.
    pub fn record(&mut self, id: &str, measured: Option<impl Into<Ratio>>) -> Result<(), String> {
        let entry = self.entries.iter_mut().find(|entry| entry.id == id);
        let entry = entry.ok_or_else(|| format!("target {id} is not in the bench's section"))?;
        entry.measured = measured.map(Into::into).filter(|ratio| ratio.median.is_finite());
        Ok(())
    }

    /// Leaves the targets out whose names begin like this: another run of the bench prints them.
    pub fn leave_out(&mut self, start: &str) {
        self.entries.retain(|entry| !entry.id.starts_with(start));
    }
}

impl Entry {
    fn holds(&self) -> bool {
        self.measured.is_some_and(|ratio| self.bound.holds(ratio.median))
    }

    /// Four digits, or all of them where rounding would make the line contradict its own verdict.
    fn number(&self) -> String {
        let Some(Ratio { median: value, .. }) = self.measured else {
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
            let Entry { id, text, measured, .. } = entry;
            write!(f, "TARGET {id} measured {} bound {text} {verdict}", entry.number())?;
            match measured {
                Some(Ratio { rounds: 0, .. }) => writeln!(f, " host {}", host_kind())?,
                Some(Ratio { least, greatest, rounds, .. }) => {
                    write!(f, " rounds {rounds} min {least:.3} max {greatest:.3}")?;
                    writeln!(f, " host {}", host_kind())?;
                }
                None => writeln!(f)?,
            }
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

    fn mine() -> Targets {
        Targets::parse(FILE, "mine").unwrap()
    }

    #[test]
    fn a_run_of_some_rows_names_the_others() {
        let mut targets = mine();
        targets.record("M2.time", Some(0.8)).unwrap();
        let args = Args::parse("", ["--only", "M2"]).unwrap();
        let printed = targets.clone().asked_for_by(&args).to_string();
        let wanted = "# targets not measured: M1.sum.tput, M3.allocs.n\n\
             TARGET M2.time measured 0.8000 bound <=0.75 short host ";
        assert!(printed.starts_with(wanted), "{printed}");
        assert_eq!(targets.asked_for_by(&Args::default()).to_string().matches("short").count(), 3);
    }

    #[test]
    fn a_bound_holds_on_its_edge_and_rounding_never_contradicts_the_verdict() {
        for (id, measured, printed) in [
            ("M1.sum.tput", 1.8, "1.800 bound >=1.8 holds"),
            ("M1.sum.tput", 1.79996, "1.79996 bound >=1.8 short"),
            ("M2.time", 0.750_001, "0.750001 bound <=0.75 short"),
        ] {
            let mut targets = mine();
            targets.record(id, Some(measured)).unwrap();
            assert!(targets.to_string().contains(&format!("TARGET {id} measured {printed}")));
        }
    }
}
