//! Builds the plugin and the program, runs every row under QEMU, and prints the table.

use std::collections::HashMap;
use std::env;
use std::error::Error;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use harness::{Args, Table, Targets, profile, target_dir};
use serde_json::Value;

use crate::structures::{STRUCTURES, Structure};

const QEMU: &str = "qemu-x86_64";
const THREADS: [usize; 4] = [1, 2, 8, 64];
/// The number of threads that the targets are about.
const TARGET_THREADS: usize = 64;
/// Per thread. The second half is counted.
const OPERATIONS: usize = 1_000;
const QUICK_OPERATIONS: usize = 200;
const SMOKE_OPERATIONS: usize = 20;

pub(crate) fn run(args: &Args) -> Result<(), Box<dyn Error>> {
    let mut targets = Targets::of("census")?.asked_for_by(args);
    harness::header::print("census");
    println!("# simulated MESI, portable path, not a 64-core run");
    let runs = |name: &str| Command::new(name).arg("--version").output().is_ok();
    let missing = [(QEMU, "qemu-user"), ("cc", "gcc")].into_iter().find(|(name, _)| !runs(name));
    if let Some((name, package)) = missing {
        println!("# not measured: {name} is not installed: apt install {package}");
        if env::var_os("OFFLOCK_REQUIRE_ALL").is_some() {
            return Err(format!("{name} is missing, and OFFLOCK_REQUIRE_ALL is set").into());
        }
    } else {
        measure(args, &mut targets)?;
    }
    print!("{targets}");
    Ok(())
}

fn measure(args: &Args, targets: &mut Targets) -> Result<(), Box<dyn Error>> {
    let folder = target_dir()?.join("cfg-virtual_cpu");
    fs::create_dir_all(&folder)?;
    let plugin = build_plugin(&folder)?;
    let program = build_program(&folder)?;
    let operations = match args {
        Args { smoke: true, .. } => SMOKE_OPERATIONS,
        Args { quick: true, .. } => QUICK_OPERATIONS,
        _ => OPERATIONS,
    };

    let mut worst: HashMap<&str, f64> = HashMap::new();
    let title = format!("transfers of a line per operation, {operations} a thread; threads:");
    let mut table = Table::new(title, &THREADS);
    table.bars = (0..THREADS.len()).collect();
    table.columns.extend(["lines", "operation"].map(String::from));
    for structure in STRUCTURES.iter().filter(|structure| args.wants(structure.name)) {
        let (mut lines, mut cells) = (0.0, Vec::new());
        for threads in THREADS {
            let reading = count(&plugin, &program, structure, threads, operations)?;
            cells.push(format!("{:.3}..{:.3}", reading.low, reading.high));
            lines = reading.lines;
            if let (Some(id), TARGET_THREADS) = (structure.target, threads) {
                let worst = worst.entry(id).or_insert(0.0);
                *worst = reading.low.max(reading.high).max(*worst);
                targets.record(id, Some(*worst))?;
            }
        }
        cells.extend([format!("{lines:.1}"), structure.operation.into()]);
        table.row(structure.name, cells);
    }
    print!("{table}");
    Ok(())
}

/// The result of one run, as the plugin prints it.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Reading {
    /// Distinct lines that an operation touches.
    lines: f64,
    /// Transfers per operation if operations take turns.
    low: f64,
    /// Transfers per operation if single accesses take turns.
    high: f64,
}

impl Reading {
    /// Reads `coherence: threads 8 ops 800 accesses/op 9.0 lines/op 5.0 transfers/op 0.98..1.00`.
    fn parse(line: &str) -> Option<Self> {
        let words: Vec<&str> = line.strip_prefix("coherence: ")?.split_whitespace().collect();
        let after = |name: &str| {
            let at = words.iter().position(|word| *word == name)?;
            words.get(at + 1).copied()
        };
        let (low, high) = after("transfers/op")?.split_once("..")?;
        Some(Self {
            lines: after("lines/op")?.parse().ok()?,
            low: low.parse().ok()?,
            high: high.parse().ok()?,
        })
    }
}

/// The most attempts at a run in which an assertion of the simulator itself fails.
const ATTEMPTS: usize = 8;

/// Part of the message of an assertion of qemu-user 7.2 that fails now and then, the more often the more
/// threads there are, whatever the program does.
const SIMULATOR_FAULT: &str = "rcu_read_unlock: Assertion";

fn count(
    plugin: &Path,
    program: &Path,
    structure: &Structure,
    threads: usize,
    operations: usize,
) -> io::Result<Reading> {
    let mut command = Command::new(QEMU);
    command.arg("-plugin").arg(plugin).arg(program).arg(structure.name);
    command.args([threads.to_string(), operations.to_string()]);
    command.stdin(Stdio::null());
    let mut attempt = 1;
    loop {
        let output = command.output()?;
        let said = String::from_utf8_lossy(&output.stderr);
        let reading = said.lines().find_map(Reading::parse).filter(|_| output.status.success());
        if let Some(reading) = reading {
            if attempt > 1 {
                eprintln!("# {} on {threads} threads: attempt {attempt}", structure.name);
            }
            return Ok(reading);
        }
        if attempt == ATTEMPTS || !said.contains(SIMULATOR_FAULT) {
            let name = structure.name;
            let status = output.status;
            return Err(io::Error::other(format!("{name} on {threads} threads: {status}: {said}")));
        }
        attempt += 1;
    }
}

fn build_plugin(folder: &Path) -> io::Result<PathBuf> {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("coherence.c");
    let plugin = folder.join("coherence.so");
    let mut command = Command::new("cc");
    command.args(["-O2", "-shared", "-fPIC", "-o"]).arg(&plugin).arg(source).arg("-lpthread");
    if !command.status()?.success() {
        return Err(io::Error::other("cc failed on coherence.c"));
    }
    Ok(plugin)
}

/// Builds this very bench with virtual CPUs, in a target folder of its own: the flag is one for all
/// crates, and would rebuild them here.
fn build_program(folder: &Path) -> Result<PathBuf, Box<dyn Error>> {
    let cargo = env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let flags = env::var("RUSTFLAGS").map_or(String::new(), |set| set + " ");
    let mut command = Command::new(cargo);
    command.args(["bench", "--package", "census", "--bench", "census", "--no-run", "--profile"]);
    command.arg(profile());
    command.arg("--message-format=json-render-diagnostics").arg("--target-dir").arg(folder);
    // Virtual CPUs leave what asks for real ones unused: the lints are for the usual build.
    command.env("RUSTFLAGS", flags + "--cfg offlock_virtual_cpu --cap-lints=allow");
    command.current_dir(env!("CARGO_MANIFEST_DIR")).stderr(Stdio::inherit());
    let output = command.output()?;
    if !output.status.success() {
        return Err("cargo bench --bench census --no-run failed".into());
    }
    let messages = String::from_utf8(output.stdout)?;
    let messages = messages.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
    let program = messages
        .filter(|message| message["target"]["name"] == "census")
        .find_map(|message| message["executable"].as_str().map(PathBuf::from));
    program.ok_or_else(|| "cargo names no program".into())
}
