//! The lines above every table: where and how it was measured.

use std::env;
use std::fmt;
use std::fs;
use std::hint::black_box;
use std::path::Path;
use std::process::Command;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use crate::cpu::allowed_cpus;

/// Below this price of an atomic addition, in nanoseconds, rows of one thread against locks and `Arc` are near or above
/// their bounds, which are for other hosts. Measured: 2 to 3 on Zen 3, 5 and more elsewhere.
const CHEAP: f64 = 4.0;

/// CPU, cores, kernel, commit, load and command of this run.
#[derive(Debug, Clone, PartialEq)]
pub struct Header {
    /// The model name in `/proc/cpuinfo`.
    pub cpu: String,
    /// CPUs that this process may use.
    pub cores: usize,
    /// The kernel's release.
    pub kernel: String,
    /// The commit, with a `+` if files differ from it.
    pub commit: String,
    /// The load averages of 1, 5 and 15 minutes when the header was taken.
    pub load: String,
    /// The command line after the program.
    pub command: String,
    /// Nanoseconds of an atomic addition to a word that no other CPU uses.
    pub locked_add: f64,
}

impl Header {
    /// Looks around. What cannot be found out reads `unknown`. `bench` is the name of the bench.
    pub fn take(bench: &str) -> Self {
        let unknown = || "unknown".to_string();
        let read = |path: &str| fs::read_to_string(path).ok();
        let args: Vec<String> = env::args().skip(1).filter(|arg| arg != "--bench").collect();
        let command = format!("cargo bench --bench {bench} -- {}", args.join(" "));
        Self {
            cpu: read("/proc/cpuinfo").as_deref().and_then(cpu_model).unwrap_or_else(unknown),
            cores: allowed_cpus().len(),
            // What follows the numbers names a build.
            kernel: read("/proc/sys/kernel/osrelease")
                .as_deref()
                .and_then(|release| release.trim().split('-').next())
                .map_or_else(unknown, str::to_string),
            commit: commit().unwrap_or_else(unknown),
            load: read("/proc/loadavg").as_deref().map_or_else(unknown, load),
            command: command.trim_end_matches([' ', '-']).to_string(),
            locked_add: price(),
        }
    }
}

/// The kind of host: `cheap` if a locked instruction is, or `dear`.
pub(crate) fn host_kind() -> &'static str {
    if price() < CHEAP { "cheap" } else { "dear" }
}

/// Nanoseconds of an atomic addition, measured once in a process: with the header, before all rows.
fn price() -> f64 {
    static PRICE: OnceLock<f64> = OnceLock::new();
    *PRICE.get_or_init(locked_add)
}

/// Returns the least time of an atomic addition in several short windows.
fn locked_add() -> f64 {
    const ADDS: u64 = 100_000;
    let word = AtomicU64::new(0);
    let window = || {
        let begun = Instant::now();
        // Ordering: Relaxed; the word carries nothing.
        for _ in 0..ADDS {
            black_box(&word).fetch_add(1, Ordering::Relaxed);
        }
        begun.elapsed().as_nanos() as f64 / ADDS as f64
    };
    (0..16).map(|_| window()).fold(f64::INFINITY, f64::min)
}

fn cpu_model(cpuinfo: &str) -> Option<String> {
    let line = cpuinfo.lines().find(|line| line.starts_with("model name"))?;
    Some(line.split_once(':')?.1.trim().to_string())
}

fn load(loadavg: &str) -> String {
    loadavg.split_whitespace().take(3).collect::<Vec<_>>().join(" ")
}

fn commit() -> Option<String> {
    // A bench that is started by hand has no such variable: the folder that it was built in.
    let here =
        env::var_os("CARGO_MANIFEST_DIR").unwrap_or_else(|| env!("CARGO_MANIFEST_DIR").into());
    let git = |args: &[&str]| {
        let output =
            Command::new("git").arg("-C").arg(Path::new(&here)).args(args).output().ok()?;
        let text = String::from_utf8(output.stdout).ok()?;
        output.status.success().then(|| text.trim().to_string())
    };
    let commit = git(&["rev-parse", "--short", "HEAD"])?;
    let changed = git(&["status", "--porcelain", "--untracked-files=no"])?;
    Some(if changed.is_empty() { commit } else { commit + "+" })
}

impl fmt::Display for Header {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { cpu, cores, kernel, commit, load, command, locked_add } = self;
        let kind = host_kind();
        writeln!(f, "# {command}")?;
        writeln!(f, "# {cpu}, {cores} cores; Linux {kernel}; commit {commit}; load {load}")?;
        writeln!(
            f,
            "# locked instructions are {kind} here: an atomic addition takes {locked_add:.1} ns"
        )
    }
}
