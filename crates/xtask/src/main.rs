//! The commands that build, check and measure this workspace: `cargo xtask --help`.

mod ci;
mod cross;
mod debian;
mod layers;
mod lint;
mod litmus;
mod mutants;
mod process;
mod results;
mod scale;
mod soak;
mod source;
mod suites;
mod tools;
mod workspace;

use std::path::PathBuf;
use std::process::ExitCode;

use clap::Parser;

use self::process::Result;
use self::workspace::Workspace;

/// The commands that build, check and measure this workspace.
#[derive(Parser)]
#[command(name = "xtask", bin_name = "cargo xtask", disable_help_subcommand = true)]
enum Command {
    /// Everything a change must pass, or some parts of it
    Ci {
        /// The parts; all if none is named
        parts: Vec<String>,
        /// Print the names of the parts
        #[arg(long)]
        list: bool,
    },
    /// The models of all libraries, or of some, under loom and shuttle
    Models {
        /// The libraries, such as `percpu`
        crates: Vec<String>,
        /// With one checker only: loom has every interleaving up to a number of preemptions, weak memory
        /// included; shuttle has random schedules, sequentially consistent
        #[arg(long, value_parser = suites::CHECKERS)]
        checker: Option<String>,
        /// Arguments of the test programs, such as a part of a model's name
        #[arg(last = true)]
        tests: Vec<String>,
    },
    /// The labelled steps, each of which a model must catch; or other mutants
    Mutants {
        /// The libraries, such as `percpu`
        crates: Vec<String>,
        /// Instead, this number of mutants at random in each library, by cargo-mutants
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
        #[arg(long, default_value_t = suites::SECONDS)]
        seconds: u32,
    },
    /// The fuzz targets, as many at a time as there are CPUs
    Fuzz {
        /// The targets; all if none is named
        targets: Vec<String>,
        /// For each target
        // Not 0, which libFuzzer takes as no limit.
        #[arg(long, default_value_t = suites::FUZZ_SECONDS, value_parser = clap::value_parser!(u32).range(1..))]
        seconds: u32,
        /// Print the names of the targets
        #[arg(long)]
        list: bool,
    },
    /// Tests of memory handling under AddressSanitizer
    Asan,
    /// The tests without rseq, without its code, and without membarrier
    Fallbacks,
    /// The tests of the libraries on aarch64, under qemu-user
    Cross {
        /// The libraries, such as `percpu`; all if none is named
        crates: Vec<String>,
    },
    /// The tests and stress tests of the libraries on a kernel of Debian, under qemu-system
    Guest {
        /// aarch64 with the kernel of the Debian release of this machine, or x86_64 with the newest that Debian has
        #[arg(value_parser = cross::GUESTS.map(|guest| guest.name))]
        guest: String,
        /// The libraries, such as `percpu`; all if none is named
        crates: Vec<String>,
        /// For each stress test
        #[arg(long, default_value_t = 4)]
        seconds: u32,
    },
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
        /// Fewer and shorter windows
        #[arg(long, conflicts_with = "smoke")]
        quick: bool,
        /// Write what they print to this page of Markdown, such as `benches/RESULTS.md`
        #[arg(long, value_name = "FILE")]
        results: Option<PathBuf>,
    },
    /// The rows that threads share, at 1, 2, 4, 8 ... and all CPUs, on a page with pictures: `scale.md`
    Scale {
        /// Build nothing: this folder has the programs
        #[arg(long, value_name = "FOLDER")]
        programs: Option<PathBuf>,
    },
    /// The import cycles among the modules of each crate and of the server
    Layers {
        /// The crates, such as `percpu` or `nbd-server`; all if none is named
        crates: Vec<String>,
    },
    /// Lines, files and public functions of each crate, beside those of the last version
    Size,
}

fn main() -> ExitCode {
    match run(Command::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::from(u8::try_from(error.status()).unwrap_or(1).max(1))
        }
    }
}

fn run(command: Command) -> Result<()> {
    if let Command::Scale { programs: Some(programs) } = &command {
        return scale::measure(programs); // there may be no workspace
    }
    let ws = &Workspace::open()?;
    match command {
        Command::Ci { list: true, .. } => {
            ci::list();
            Ok(())
        }
        Command::Ci { parts, list: false } => ci::run(ws, &parts),
        Command::Models { crates, checker, tests } => {
            suites::models(ws, &ws.select(&crates)?, checker.as_deref(), &tests)
        }
        Command::Mutants { crates, patches: true, .. } => mutants::patches(ws, &crates),
        Command::Mutants { crates, random: Some(count), seed, .. } => {
            mutants::random(ws, &ws.select(&crates)?, count, seed)
        }
        Command::Mutants { crates, unlabelled: true, .. } => {
            mutants::unlabelled(ws, &ws.select(&crates)?)
        }
        Command::Mutants { crates, .. } => {
            suites::models(ws, &ws.select(&crates)?, None, &["mutants::".to_string()])
        }
        Command::Litmus { tests, bless } => litmus::run(ws, &tests, bless),
        Command::Stress { crates, seconds } => {
            let crates = if crates.is_empty() { Vec::new() } else { ws.select(&crates)? };
            suites::stress(ws, &crates, seconds)
        }
        Command::Fuzz { list: true, .. } => {
            suites::fuzz_targets(ws).iter().for_each(|target| println!("{target}"));
            Ok(())
        }
        Command::Fuzz { targets, seconds, list: false } => suites::fuzz(ws, &targets, seconds),
        Command::Asan => suites::sanitizer(ws),
        Command::Fallbacks => suites::fallbacks(ws),
        Command::Cross { crates } => cross::cross(ws, &ws.select(&crates)?),
        Command::Guest { guest, crates, seconds } => {
            cross::guest(ws, &ws.select(&crates)?, &guest, seconds)
        }
        Command::Soak { steps, list, scale } => soak::run(ws, &steps, scale, list),
        Command::Lint => lint::lint(ws),
        Command::Deny => ci::deny(ws),
        Command::Benches { smoke, quick, results } => {
            let pace = if quick { Some("--quick") } else { smoke.then_some("--smoke") };
            results::benches(ws, pace, results.as_deref())
        }
        Command::Scale { .. } => scale::measure(&scale::build(ws)?),
        Command::Layers { crates } => layers::run(ws, &crates, false),
        Command::Size => lint::sizes(ws),
    }
}
