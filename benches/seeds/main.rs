//! The five published changes that the crates grew from, before and after, in one run; and what scaling
//! there is to expect beyond this machine.
//!
//! ```text
//! cargo bench --bench seeds                              tables on the terminal: about five minutes
//! cargo bench --bench seeds -- --report target/report    and a page, target/report/README.md, with plots
//! cargo bench --bench seeds -- --quick                   fewer and shorter windows
//! cargo bench --bench seeds -- --only mq_rbtree          benches by part of a name
//! ```
//!
//! Each table is measured by the bench of its crate, which this one builds and runs, so that it is the
//! same as `cargo bench --bench radix_ctx -- --only R10` shows. The benches hand their chapters on in a
//! file; the page is made of these, and says in words what did not reproduce.

mod page;
mod plot;
mod run;

use std::error::Error;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use harness::{Args, Chapter, Header};
use indicatif::{ProgressBar, ProgressStyle};

use crate::page::Page;
use crate::run::{Program, build};

/// A bench, and the part of it that is about the seed; `None` for all of it.
const PARTS: &[(&str, Option<&str>)] = &[
    ("radix_ctx", Some("R10")),
    ("percpu_list", Some("L3")),
    ("aio_reap", Some("A4")),
    ("aio_reap", Some("A5")),
    ("mq_rbtree", Some("M7")),
    ("bufcache", Some("seed")),
    ("census", None),
];

const TITLE: &str = "Five kernel and QEMU patches, in user space";
const LEAD: &str = "Each crate of this workspace grew from one published change. For each of them, what was \
    there before and what came after were built from this workspace, differing in that change only, and \
    measured in one run, on the machine below. Fainter bars and broader lines in the plots are the published figures, of \
    other and larger machines: the direction and the ratio are what can be compared.";

fn main() -> Result<(), Box<dyn Error>> {
    let args = Args::from_env(include_str!("main.rs"));
    if !args.bench {
        println!("seeds: measures only under `cargo bench`");
        return Ok(());
    }
    // Cargo starts a bench in its own package; a relative path is one from the workspace.
    let folder = args.report.as_ref().map(|folder| workspace().join(folder));
    let header = Header::take("seeds");
    print!("{header}");
    let parts: Vec<_> = PARTS.iter().filter(|(bench, _)| args.wants(bench)).collect();
    let bar = ProgressBar::new(parts.len() as u64 + 1);
    bar.set_style(ProgressStyle::with_template("{elapsed_precise} {wide_bar} {pos}/{len} {msg}")?);
    bar.enable_steady_tick(Duration::from_secs(1));
    bar.set_message("building");
    let mut benches: Vec<&str> = parts.iter().map(|(bench, _)| *bench).collect();
    benches.dedup();
    let programs = build(&benches)?;

    let (mut chapters, mut missing) = (Vec::new(), Vec::new());
    for &&(bench, only) in &parts {
        bar.inc(1);
        bar.set_message(bench);
        let program = programs.get(bench).ok_or_else(|| format!("cargo has not built {bench}"))?;
        match measure(program, only, args.pace(), &bar) {
            Ok(more) if more.is_empty() => {
                missing.push(format!("{bench}: it has measured nothing"))
            }
            Ok(mut more) => {
                let only = only.map(|only| format!(" -- --only {only}")).unwrap_or_default();
                let command = format!("cargo bench --bench {bench}{only}");
                more.iter_mut().for_each(|chapter| chapter.command.clone_from(&command));
                chapters.extend(more);
            }
            Err(error) => missing.push(format!("{bench}: {error}")),
        }
    }
    bar.finish_and_clear();
    missing.iter().for_each(|what| println!("# not measured: {what}"));
    if let Some(folder) = folder {
        let page = Page {
            title: TITLE,
            lead: LEAD,
            header: &header,
            chapters: &chapters,
            missing: &missing,
        };
        println!("# {}", page.write(&folder)?.display());
    }
    if missing.is_empty() { Ok(()) } else { Err("not everything could be measured".into()) }
}

/// The chapters of one bench; what it prints appears above the bar.
fn measure(
    program: &Program,
    only: Option<&str>,
    pace: Option<&str>,
    bar: &ProgressBar,
) -> Result<Vec<Chapter>, Box<dyn Error>> {
    let file = tempfile::NamedTempFile::new()?;
    let mut command = program.command();
    command.arg("--hand-on").arg(file.path());
    command.args(only.into_iter().flat_map(|only| ["--only", only]));
    command.args(pace);
    run::lines_of(command, |line| {
        // Most of the bench was not asked for.
        if !(line.starts_with("TARGET ") && line.contains(" measured none ")) {
            bar.suspend(|| println!("{line}"));
        }
    })?;
    Ok(Chapter::all(&fs::read_to_string(file.path())?)?)
}

fn workspace() -> PathBuf {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    here.ancestors().nth(2).unwrap_or(here).to_path_buf()
}
