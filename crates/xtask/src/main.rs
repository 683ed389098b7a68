//! The commands that build, check and measure this workspace: `cargo xtask --help`.

mod binaries;
mod cfg;
mod ci;
mod error;
mod examples;
mod layers;
mod litmus;
mod mutants;
mod parts;
mod process;
mod readme;
mod size;
mod soak;
mod tools;
mod workspace;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

use self::error::Result;
use self::parts::models::{self, Checker};
use self::parts::{benches, fallbacks, fuzz, lint, stress};
use self::workspace::Workspace;

/// The commands that build, check and measure this workspace.
#[derive(Parser)]
#[command(name = "xtask", bin_name = "cargo xtask", disable_help_subcommand = true)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Everything a change must pass, or some parts of it
    Ci {
        /// The parts, in this order; all if none is named
        parts: Vec<String>,
        /// Print the names of the parts
        #[arg(long)]
        list: bool,
    },
    /// The models of all libraries, or of some, under loom and shuttle
    Models {
        /// The libraries, such as `percpu`
        crates: Vec<String>,
        /// With one checker only
        #[arg(long)]
        checker: Option<Checker>,
        /// Arguments of the test programs, such as a part of a model's name
        #[arg(last = true)]
        tests: Vec<String>,
    },
    /// The planted mutants, each of which a model must catch; or mutants at random
    Mutants {
        /// The libraries, such as `percpu`
        crates: Vec<String>,
        /// Plants this number of mutants at random in each library, and prints the share caught
        #[arg(long, value_name = "NUMBER")]
        random: Option<usize>,
        /// Instead, the patches in `tests/mutants` of the crates
        #[arg(long, conflicts_with = "random")]
        patches: bool,
        /// Instead, each ordering and fence without a label: prints which of them no model needs
        #[arg(long, conflicts_with_all = ["random", "patches"])]
        unlabelled: bool,
        /// The same mutants again
        #[arg(long, requires = "random")]
        seed: Option<u64>,
    },
    /// The litmus tests, and each with its orderings and fences weakened one at a time
    Litmus {
        /// The tests, such as `rcu-pin`; all if none is named
        tests: Vec<String>,
        /// Write the expected verdicts instead of comparing them
        #[arg(long)]
        bless: bool,
    },
    /// The stress tests of all libraries and of the server, or of some libraries
    Stress {
        /// The libraries, such as `percpu`
        crates: Vec<String>,
        /// For each test
        #[arg(long, default_value_t = stress::SECONDS)]
        seconds: u32,
    },
    /// The fuzz targets, as many at a time as there are CPUs
    Fuzz {
        /// The targets; all if none is named
        targets: Vec<String>,
        /// For each target
        // Not 0, which libFuzzer takes as no limit.
        #[arg(long, default_value_t = fuzz::SECONDS, value_parser = clap::value_parser!(u32).range(1..))]
        seconds: u32,
        /// Print the names of the targets
        #[arg(long)]
        list: bool,
    },
    /// Tests of memory handling under AddressSanitizer
    Asan,
    /// The tests without rseq, without its code, and without membarrier
    Fallbacks,
    /// The full counts: hours. Goes on past a failure
    Soak {
        /// The steps with one of these in their name; all if none is given
        steps: Vec<String>,
        /// Print the steps
        #[arg(long)]
        list: bool,
        /// Multiplies every count: 0.01 tries the steps with a hundredth of each
        #[arg(long, default_value_t = 1.0)]
        scale: f64,
    },
    /// Format, clippy and documentation
    Lint,
    /// Licences, bans and sources of the dependencies
    Deny,
    /// Every bench
    Benches {
        /// As short as it goes: each builds, runs and ends, no more
        #[arg(long)]
        smoke: bool,
    },
    /// The import cycles among the modules of each crate and of the server
    Layers {
        /// The crates, such as `percpu` or `nbd-server`; all if none is named
        crates: Vec<String>,
        /// Fail if there is a cycle
        #[arg(long)]
        check: bool,
    },
    /// Lines, files and public functions of each crate, beside those of the last version
    Size,
    /// The share of the public types of each library that have an example in their documentation
    Examples {
        /// The libraries, such as `percpu`; all if none is named
        crates: Vec<String>,
        /// Fail if a type has none
        #[arg(long)]
        check: bool,
    },
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    match run(arguments.command) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            let message = error.to_string();
            if !message.is_empty() {
                eprintln!("error: {message}");
            }
            ExitCode::from(u8::try_from(error.status()).unwrap_or(1).max(1))
        }
    }
}

fn run(command: Command) -> Result<()> {
    process::handle_signals().map_err(|error| error::Error::io("signals", error))?;
    let ws = Workspace::open()?;
    match command {
        Command::Ci { list: true, .. } => {
            ci::list();
            Ok(())
        }
        Command::Ci { parts, list: false } => ci::run(&ws, &parts),
        Command::Models { crates, checker, tests } => {
            let checkers = checker.map_or(Checker::ALL.to_vec(), |checker| vec![checker]);
            let selection =
                models::Selection { crates: ws.select(&crates)?, checkers, filter: tests };
            models::run(&ws, &selection)
        }
        Command::Mutants { crates, patches: true, .. } => mutants::patches::run(&ws, &crates),
        Command::Mutants { crates, random: Some(count), seed, .. } => {
            let seed = seed.unwrap_or_else(|| fastrand::u64(..1_000_000));
            mutants::run(&ws, &ws.select(&crates)?, mutants::Choice::Random(count), seed)
        }
        Command::Mutants { crates, unlabelled: true, .. } => {
            mutants::run(&ws, &ws.select(&crates)?, mutants::Choice::Unlabelled, 0)
        }
        Command::Mutants { crates, .. } => {
            let selection = models::Selection {
                crates: ws.select(&crates)?,
                checkers: Checker::ALL.to_vec(),
                filter: vec!["mutants::".to_string()],
            };
            models::run(&ws, &selection)
        }
        Command::Litmus { tests, bless } => litmus::run(&ws, &tests, bless),
        Command::Stress { crates, seconds } if crates.is_empty() => stress::all(&ws, seconds),
        Command::Stress { crates, seconds } => stress::some(&ws, &ws.select(&crates)?, seconds),
        Command::Fuzz { list: true, .. } => {
            fuzz::list(&ws)?.iter().for_each(|target| println!("{target}"));
            Ok(())
        }
        Command::Fuzz { targets, seconds, list: false } => fuzz::targets(&ws, &targets, seconds),
        Command::Asan => fuzz::sanitized(&ws),
        Command::Fallbacks => fallbacks::run(&ws),
        Command::Soak { steps, list, scale } => soak::run(&ws, &steps, scale, list),
        Command::Lint => lint::lint(&ws),
        Command::Deny => lint::deny(&ws),
        Command::Benches { smoke: true } => benches::smoke(&ws),
        Command::Benches { smoke: false } => benches::full(&ws),
        Command::Layers { crates, check } => layers::run(&ws, &crates, check),
        Command::Size => size::run(&ws),
        Command::Examples { crates, check } => examples::run(&ws, &crates, check),
    }
}
