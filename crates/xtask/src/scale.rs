//! `cargo xtask scale`: the rows that threads share, at 1, 2, 4, 8 ... and all CPUs of a machine.
//!
//! A machine with many CPUs may have no toolchain and no network. So the command builds one program for each
//! bench, without link-time optimisation, and puts them into `target/scale` with itself. That folder is all
//! that another machine needs: `./xtask scale --programs .` measures there.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::thread::available_parallelism;
use std::time::Duration;
use std::{env, fs};

use crate::process::{At, Cmd, Result, folder, write};
use crate::results::bars;
use crate::workspace::{Workspace, program};

/// The benches, and those of their families of rows that take `--threads`.
const ROWS: [(&str, &[&str]); 5] = [
    ("percpu", &["P2", "P3", "P5 pin"]),
    ("radix_ctx", &["get 512"]),
    ("percpu_list", &["L2"]),
    ("mq_rbtree", &["M4"]),
    ("bufcache", &["B1 B2 B3 hot", "hit 64k"]),
];

/// The time limit of one family of rows. Each takes seconds; a busy machine needs longer.
const PATIENCE: Duration = Duration::from_secs(120);

/// Builds the programs. Returns their folder.
pub(crate) fn build(ws: &Workspace) -> Result<PathBuf> {
    let cargo = ws.cargo("bench --workspace --profile stress --no-run"); // as `benches --smoke` builds them
    let built = cargo.words("--message-format=json-render-diagnostics").output()?;
    let folder = ws.target.join("scale");
    self::folder(&folder)?;
    let own = env::current_exe().and_then(|own| fs::copy(own, folder.join("xtask")));
    own.at(&folder)?;
    for line in built.lines().filter(|line| line.contains("\"kind\":[\"bench\"]")) {
        let Some((name, program)) = program(line) else { continue };
        if ROWS.iter().any(|(bench, _)| *bench == name) {
            let copy = ws.cmd("strip").arg("-o").arg(folder.join(name)).arg(program);
            copy.run()?;
        }
    }
    Ok(folder)
}

/// Measures with the programs of a folder, prints the tables, and writes them to a page with pictures.
pub(crate) fn measure(programs: &Path, page: &Path) -> Result<()> {
    let cpus = available_parallelism().map_or(1, usize::from);
    let mut threads: Vec<usize> = (0..).map(|bit| 1 << bit).take_while(|n| *n < cpus).collect();
    threads.push(cpus);
    let list = threads.iter().map(usize::to_string).collect::<Vec<_>>().join(",");
    let mut text = format!(
        "# Up to {cpus} CPUs\n\nWritten by `cargo xtask scale`. Millions of operations per second.\n"
    );
    let mut pictures = 0;
    for (bench, families) in ROWS {
        let _ = writeln!(text, "\n## {bench}\n");
        for (nr, family) in families.iter().enumerate() {
            let program = Cmd::new(programs.join(bench)).words("--bench --quick --threads");
            let printed = program.arg(&list).args(["--only", family]).limit(PATIENCE).output()?;
            if nr == 0 {
                let header = printed.lines().take_while(|line| !line.is_empty());
                header.for_each(|line| {
                    writeln!(text, "{}  ", line.trim_start_matches("# ")).unwrap()
                });
            }
            for table in tables(&printed, &threads) {
                pictures += 1;
                let (picture, folder) = (format!("{pictures}.svg"), page.with_extension(""));
                let cells: Vec<Vec<&str>> =
                    table.iter().map(|row| row.iter().map(String::as_str).collect()).collect();
                let columns: Vec<usize> = (0..threads.len()).collect();
                write(folder.join(&picture), bars(&cells, &columns, false))?;
                let folder = folder.file_name().unwrap_or_default().to_string_lossy();
                table.iter().for_each(|row| writeln!(text, "| {} |", row.join(" | ")).unwrap());
                let _ = writeln!(text, "\n![The table as bars]({folder}/{picture})\n");
            }
        }
    }
    print!("{text}");
    write(page, text)
}

/// Returns the tables of a bench with the throughput of each of its rows by number of threads: a line of
/// headings, one that separates it, and a line for each row that was measured with the most threads.
fn tables(printed: &str, threads: &[usize]) -> Vec<Vec<Vec<String>>> {
    let (mut tables, mut column) = (Vec::<(String, Vec<(String, Vec<String>)>)>::new(), None);
    for line in printed.lines() {
        let cells: Vec<&str> = line.trim_matches('|').split('|').map(str::trim).collect();
        if !line.starts_with('|') {
            column = None;
        } else if let Some(at) = cells.iter().position(|cell| *cell == "Mop/s") {
            column = Some(at);
            tables.push((cells[0].into(), Vec::new()));
        } else if let (Some(at), Some((name, number)), Some((_, rows))) =
            (column, cells[0].rsplit_once('/'), tables.last_mut())
        {
            let Some(place) = threads.iter().position(|n| n.to_string() == number) else {
                continue;
            };
            if !rows.iter().any(|(row, _)| row == name) {
                rows.push((name.into(), vec![String::new(); threads.len()]));
            }
            let row = rows.iter_mut().find(|(row, _)| row == name);
            row.expect("it is there").1[place] = cells[at].into();
        }
    }
    let with_several = |(title, rows): (String, Vec<(String, Vec<String>)>)| {
        let heading = [title].into_iter().chain(threads.iter().map(usize::to_string)).collect();
        let rule = vec!["---".into(); threads.len() + 1];
        let rows =
            rows.into_iter().filter(|(_, cells)| cells.last().is_some_and(|most| !most.is_empty()));
        let rows = rows.map(|(name, cells)| [vec![name], cells].concat());
        [heading, rule].into_iter().chain(rows).collect::<Vec<Vec<String>>>()
    };
    let tables = tables.into_iter().map(with_several);
    tables.filter(|table| table.len() > 2).collect()
}
