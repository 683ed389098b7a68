//! The arguments of a target bench: `cargo bench --bench nbd -- --quick --only N1`.

use std::env;
use std::path::PathBuf;

/// What the user asked of a bench.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Args {
    /// Fewer and shorter windows: the bench ends within 60 s.
    pub quick: bool,
    /// As few and short ones as there can be: that the bench runs and ends. Its figures say nothing. It is
    /// `quick`, too.
    pub smoke: bool,
    /// Only the rows or groups whose name contains this (`--only NAME`).
    pub only: Option<String>,
    /// The I/O engine to measure (`--backend NAME`), for benches that have one.
    pub backend: Option<String>,
    /// Where to append the chapters of the report (`--hand-on FILE`), beside printing them.
    pub hand_on: Option<PathBuf>,
    /// Where to draw what was measured (`--picture FILE`), for benches that do.
    pub picture: Option<PathBuf>,
    /// Started by `cargo bench`, which passes `--bench`. `cargo test --all-targets` runs benches
    /// too, without it: a bench then has nothing to do.
    pub bench: bool,
    /// Arguments meant for another bench of the same `cargo bench`; they are ignored.
    pub ignored: Vec<String>,
}

impl Args {
    /// Reads the arguments of this process.
    pub fn from_env() -> Self {
        Self::parse(env::args().skip(1))
    }

    /// Reads `args`. Never fails: `cargo bench -- <args>` hands the same arguments to every bench,
    /// so an unknown one may be meant for the next.
    pub fn parse<S: Into<String>>(args: impl IntoIterator<Item = S>) -> Self {
        let mut parsed = Self::default();
        let mut args = args.into_iter().map(Into::into);
        while let Some(arg) = args.next() {
            let (flag, inline) = match arg.split_once('=') {
                Some((flag, value)) => (flag.to_string(), Some(value.to_string())),
                None => (arg.clone(), None),
            };
            match flag.as_str() {
                "--bench" => parsed.bench = true,
                "--quick" => parsed.quick = true,
                "--smoke" => (parsed.quick, parsed.smoke) = (true, true),
                "--only" => parsed.only = inline.or_else(|| args.next()),
                "--backend" => parsed.backend = inline.or_else(|| args.next()),
                "--hand-on" => parsed.hand_on = inline.or_else(|| args.next()).map(PathBuf::from),
                "--picture" => parsed.picture = inline.or_else(|| args.next()).map(PathBuf::from),
                _ => parsed.ignored.push(arg),
            }
        }
        parsed
    }

    /// `--quick` or `--smoke`, where one was given: for another bench.
    pub fn pace(&self) -> Option<&'static str> {
        match self {
            Self { smoke: true, .. } => Some("--smoke"),
            Self { quick: true, .. } => Some("--quick"),
            _ => None,
        }
    }

    /// Whether a row or group called `name` was asked for.
    pub fn wants(&self, name: &str) -> bool {
        self.only.as_deref().is_none_or(|only| name.contains(only))
    }

    /// Whether a family of rows was asked for, whose name is the numbers of its targets and a word or
    /// two: by one of the numbers, as `R1` or `R1.get`, or by a part of the name.
    pub fn wants_family(&self, name: &str) -> bool {
        match self.only.as_deref().and_then(number) {
            Some(number) => name.split(' ').any(|word| word == number), // R1 is no part of R10
            None => self.wants(name),
        }
    }
}

/// The number of a target that `only` begins with: a letter and digits.
fn number(only: &str) -> Option<&str> {
    let digits = only.strip_prefix(|letter: char| letter.is_ascii_uppercase())?;
    let rest = digits.trim_start_matches(|digit: char| digit.is_ascii_digit());
    (rest.len() < digits.len()).then(|| &only[..only.len() - rest.len()])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn flags_of_cargo_and_of_other_benches_are_ignored() {
        let args = Args::parse(["--bench", "--quick", "--save-baseline", "x"]);
        assert!(args.bench && args.quick);
        assert_eq!(args.only, None);
        assert_eq!(args.ignored, ["--save-baseline", "x"]);
    }

    #[test]
    fn a_pace_is_handed_on_as_it_was_given() {
        for pace in [None, Some("--quick"), Some("--smoke")] {
            let args = Args::parse(pace);
            assert_eq!((args.pace(), args.quick), (pace, pace.is_some()));
        }
    }

    #[test]
    fn values_come_after_a_space_or_an_equals_sign() {
        assert_eq!(Args::parse(["--only", "N1"]).only.as_deref(), Some("N1"));
        assert_eq!(Args::parse(["--backend=aio"]).backend.as_deref(), Some("aio"));
        assert_eq!(Args::parse(["--only"]).only, None);
    }

    #[test]
    fn only_selects_by_part_of_a_name() {
        assert!(Args::default().wants("N2.samecpu.tput"));
        assert!(Args::parse(["--only", "N2"]).wants("N2.samecpu.tput"));
        assert!(!Args::parse(["--only", "N1"]).wants("N2.samecpu.tput"));
    }

    #[test]
    fn only_selects_families_by_number_or_by_part_of_a_name() {
        let families = ["R1 R4 get 512", "R7 mix 50/50", "R10 seed", "gate and caches"];
        let asked = |only: &str| {
            let args = Args::parse(["--only", only]);
            families.map(|name| args.wants_family(name))
        };
        assert_eq!(asked("R1"), [true, false, false, false], "it is no part of R10");
        assert_eq!(asked("R4.get_512"), [true, false, false, false]);
        assert_eq!(asked("R10"), [false, false, true, false]);
        assert_eq!(asked("50"), [false, true, false, false]);
        assert_eq!(asked("caches"), [false, false, false, true]);
        assert_eq!(asked("R"), [true, true, true, false]);
        assert_eq!(asked("R2"), [false; 4]);
        assert!(families.iter().all(|name| Args::default().wants_family(name)));
    }
}
