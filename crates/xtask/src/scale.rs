//! `cargo xtask scale`: the rows that threads share, at 1, 2, 4, 8 ... and all CPUs of a machine.
//!
//! A machine with many CPUs may have no toolchain and no network. So the command builds one program for each
//! bench, without link-time optimisation, and puts them into `target/scale` with itself. That folder is all
//! that another machine needs: `./xtask scale --programs .` measures there.

use std::path::{Path, PathBuf};
use std::thread::available_parallelism;
use std::time::Duration;
use std::{env, fs};

use crate::process::{At, Cmd, Result, folder};
use crate::results::write_page;
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

/// Measures with the programs of a folder, and writes the page.
pub(crate) fn measure(programs: &Path) -> Result<()> {
    let cpus = available_parallelism().map_or(1, usize::from);
    let threads = (0..).map(|bit| 1 << bit).take_while(|n| *n < cpus).chain([cpus]);
    let list = threads.map(|n| n.to_string()).collect::<Vec<_>>().join(",");
    let mut printed = String::new();
    for (bench, families) in ROWS {
        printed += &format!("\n## {bench}\n\n");
        for family in families {
            let program = Cmd::new(programs.join(bench)).words("--bench --quick --threads");
            let program = program.arg(&list).args(["--only", family]).limit(PATIENCE);
            printed += &program.output()?;
        }
    }
    print!("{printed}");
    let intro = format!("# Up to {cpus} CPUs\n\nWritten by `cargo xtask scale`.");
    write_page(Path::new("scale.md"), &intro, &printed)
}
