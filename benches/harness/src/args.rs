//! The arguments of a target bench: `cargo bench --bench nbd -- --quick --only N1`.

use std::path::PathBuf;
use std::{env, error, fmt, process};

/// The arguments of a bench.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Args {
    /// Fewer and shorter windows: the bench ends within 60 s.
    pub quick: bool,
    /// As few and short windows as possible, to check that the bench runs and ends. The figures mean nothing.
    /// Implies `quick`.
    pub smoke: bool,
    /// Only the rows or groups whose name contains this (`--only NAME`).
    pub only: Option<String>,
    /// The numbers of threads of the rows that scale (`--threads 1,2,4`); 1 and 2 are among them.
    pub threads: Option<Vec<usize>>,
    /// The I/O engine to measure (`--backend NAME`), for benches that have one.
    pub backend: Option<String>,
    /// The file for a picture of the results (`--picture FILE`), for benches that draw one.
    pub picture: Option<PathBuf>,
    /// Started by `cargo bench`, which passes `--bench`. `cargo test --all-targets` runs benches
    /// too, without it: a bench then has nothing to do.
    pub bench: bool,
    /// The user asks for the help of the bench.
    pub help: bool,
}

/// The reasons for which the arguments of a bench are refused.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ArgsError {
    /// The bench has no such argument.
    Unknown(String),
    /// A value must follow this argument.
    NoValue(String),
    /// This is no list of numbers of threads.
    BadNumbers(String),
}

impl fmt::Display for ArgsError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unknown(arg) => write!(f, "this bench has no argument `{arg}`")?,
            Self::NoValue(flag) => write!(f, "a value must follow `{flag}`")?,
            Self::BadNumbers(list) => {
                write!(f, "`--threads` takes numbers above 0, such as 1,2,4; not `{list}`")?;
            }
        }
        f.write_str("; `--help` lists the arguments")
    }
}

impl error::Error for ArgsError {}

/// The arguments of every bench, in the words of its help.
const COMMON: &str = "\
Arguments of every bench:
  --quick      fewer and shorter windows
  --only NAME  only the rows whose name contains NAME
  --threads N,N  numbers of threads of the rows that scale, beside 1 and 2
  --smoke      as little as shows that the bench runs; its figures say nothing
  --help       this text
";

impl Args {
    /// Reads the arguments of this process. `source` is the source of the bench's `main.rs`, whose module
    /// documentation is the help.
    ///
    /// Prints the help and ends the process if it is asked for. Ends the process with status 2 if
    /// an argument is refused.
    pub fn from_env(source: &str) -> Self {
        let mut args: Vec<String> = env::args().skip(1).collect();
        if !args.iter().any(|arg| arg == "--bench") {
            args.clear(); // `cargo test` passes arguments that are meant for tests
        }
        match Self::parse(source, args) {
            Ok(Self { help: true, .. }) => {
                print!("{}\n{COMMON}", documentation(source));
                process::exit(0);
            }
            Ok(args) => args,
            Err(refused) => {
                eprintln!("error: {refused}");
                process::exit(2);
            }
        }
    }

    /// Reads `args`. `--backend` and `--picture` are arguments of the benches whose
    /// documentation, in `source`, names them.
    ///
    /// # Errors
    ///
    /// If the bench has no such argument, or a value is missing or wrong.
    pub fn parse<S: Into<String>>(
        source: &str,
        args: impl IntoIterator<Item = S>,
    ) -> Result<Self, ArgsError> {
        let documentation = documentation(source);
        let mut parsed = Self::default();
        let mut args = args.into_iter().map(Into::into);
        while let Some(arg) = args.next() {
            let (flag, inline) = match arg.split_once('=') {
                Some((flag, value)) => (flag, Some(value.to_string())),
                None => (arg.as_str(), None),
            };
            let mut value = || {
                let next = inline.clone().or_else(|| args.next());
                let value = next.filter(|value| !value.starts_with("--"));
                value.ok_or_else(|| ArgsError::NoValue(flag.into()))
            };
            match flag {
                "--bench" => parsed.bench = true,
                "--quick" => parsed.quick = true,
                "--smoke" => (parsed.quick, parsed.smoke) = (true, true),
                "--help" | "-h" => parsed.help = true,
                "--only" => parsed.only = Some(value()?),
                "--threads" => {
                    let list = value()?;
                    let numbers = list.split(',').map(|n| n.parse().ok().filter(|n| *n > 0));
                    let numbers: Option<Vec<usize>> = numbers.collect();
                    let numbers = numbers.ok_or(ArgsError::BadNumbers(list))?;
                    let mut all = [vec![1, 2], numbers].concat();
                    all.sort_unstable();
                    all.dedup();
                    parsed.threads = Some(all);
                }
                _ if !documentation.contains(flag) => return Err(ArgsError::Unknown(arg)),
                "--backend" => parsed.backend = Some(value()?),
                "--picture" => parsed.picture = Some(value()?.into()),
                _ => return Err(ArgsError::Unknown(arg)),
            }
        }
        Ok(parsed)
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

    const SOURCE: &str =
        "//! Measures [`a`].\n//!\n//! ```text\n//! --picture FILE\n//! ```\n\nuse a;\n//! b";

    fn parse<const N: usize>(args: [&str; N]) -> Args {
        Args::parse(SOURCE, args).unwrap()
    }

    #[test]
    fn only_selects_families_by_number_or_by_part_of_a_name() {
        let families = ["R1 R4 get 512", "R7 mix 50/50", "R10 seed", "gate and caches"];
        let asked = |only: &str| {
            let args = parse(["--only", only]);
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
