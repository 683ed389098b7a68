//! The arguments of a target bench: `cargo bench --bench nbd -- --quick --only N1`.

use std::env;

use clap::builder::RangedU64ValueParser;
use clap::{CommandFactory, FromArgMatches, Parser};

/// The arguments of a bench.
#[derive(Debug, Clone, Default, PartialEq, Eq, Parser)]
#[command(no_binary_name = true)]
pub struct Args {
    /// Fewer and shorter windows: the bench ends within 60 s
    #[arg(long)]
    pub quick: bool,
    /// As little as shows that the bench runs and ends; its figures say nothing. Implies `--quick`
    #[arg(long)]
    pub smoke: bool,
    /// Only the rows or groups whose name contains this
    #[arg(long, value_name = "NAME")]
    pub only: Option<String>,
    /// The numbers of threads of the rows that scale, beside 1 and 2
    #[arg(long, value_name = "N,N", value_delimiter = ',',
        value_parser = RangedU64ValueParser::<usize>::new().range(1..))]
    threads: Vec<usize>,
    /// Started by `cargo bench`, which passes `--bench`. `cargo test --all-targets` runs benches
    /// too, without it: a bench then has nothing to do.
    #[arg(long, hide = true)]
    pub bench: bool,
}

impl Args {
    /// Reads the arguments of this process; none if it is not to measure, as under `cargo test`. `source` is
    /// the source of the bench's `main.rs`, whose module documentation is the help.
    ///
    /// Prints the help and ends the process if it is asked for. Ends the process with status 2 if
    /// an argument is refused.
    pub fn of_bench(name: &str, source: &str) -> Option<Self> {
        let args: Vec<String> = env::args().skip(1).collect();
        if !args.iter().any(|arg| arg == "--bench") {
            println!("{name}: measures only under `cargo bench`"); // the arguments are those of tests
            return None;
        }
        Some(Self::parse(source, args).unwrap_or_else(|refused| refused.exit()))
    }

    /// Reads `args`.
    pub fn parse<S: Into<String>>(
        source: &str,
        args: impl IntoIterator<Item = S>,
    ) -> Result<Self, clap::Error> {
        let mut command = Self::command().about(documentation(source));
        let args = args.into_iter().map(Into::into);
        let matches = command.try_get_matches_from_mut(args)?;
        let mut args = Self::from_arg_matches(&matches)?;
        args.quick |= args.smoke;
        Ok(args)
    }

    /// The numbers of threads of the rows that scale: 1, 2, and those that were asked for.
    pub fn threads(&self) -> Vec<usize> {
        let mut all = [&[1, 2], &self.threads[..]].concat();
        all.sort_unstable();
        all.dedup();
        all
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

/// The module documentation at the beginning of a source file, without its fences and links.
fn documentation(source: &str) -> String {
    let lines = source.lines().map_while(|line| line.strip_prefix("//!"));
    let lines = lines.map(|line| line.strip_prefix(' ').unwrap_or(line));
    let lines = lines.filter(|line| !line.starts_with("```")).flat_map(|line| [line, "\n"]);
    lines.collect::<String>().replace("[`", "`").replace("`]", "`")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_selects_families_by_number_or_by_part_of_a_name() {
        let families = ["R1 R4 get 512", "R7 mix 50/50", "R10 seed", "gate and caches"];
        let asked = |only: &str| {
            let args = Args::parse("", ["--only", only]).unwrap();
            families.map(|name| args.wants_family(name))
        };
        assert_eq!(asked("R1"), [true, false, false, false], "it is no part of R10");
        assert_eq!(asked("R4.get_512"), [true, false, false, false]);
        assert_eq!(asked("50"), [false, true, false, false]);
        assert_eq!(asked("R"), [true, true, true, false]);
        assert_eq!(asked("R2"), [false; 4]);
        assert!(families.iter().all(|name| Args::default().wants_family(name)));
    }
}
