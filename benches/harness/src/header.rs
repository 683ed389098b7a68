//! The lines above every table: where and how it was measured.

use std::env;
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

/// Prints command, CPU, cores, kernel, commit and load of this run of `bench`. What cannot be found out reads
/// `unknown`.
pub fn print(bench: &str) {
    let read = |path: &str| fs::read_to_string(path).unwrap_or_default();
    let known = |text: Option<String>| text.unwrap_or_else(|| "unknown".to_string());
    let args: Vec<String> = env::args().skip(1).filter(|arg| arg != "--bench").collect();
    let command = format!("cargo bench --bench {bench} -- {}", args.join(" "));
    println!("# {}", command.trim_end_matches([' ', '-']));
    let info = read("/proc/cpuinfo");
    let cpu = info.lines().find_map(|line| line.strip_prefix("model name")?.split_once(": "));
    let cpu = known(cpu.map(|(_, name)| name.to_string()));
    // What follows the numbers names a build.
    let kernel = read("/proc/sys/kernel/osrelease");
    let kernel = kernel.trim().split('-').next().unwrap_or_default();
    let load = read("/proc/loadavg");
    let load = load.split_whitespace().take(3).collect::<Vec<_>>().join(" ");
    let (cores, commit) = (allowed_cpus().len(), known(commit()));
    println!("# {cpu}, {cores} cores; Linux {kernel}; commit {commit}; load {load}");
    let (kind, price) = (host_kind(), price());
    println!("# locked instructions are {kind} here: an atomic addition takes {price:.1} ns");
}

/// Prints the versions of programs that a bench starts.
pub fn programs(names: &[&str]) {
    let version = |name: &&str| {
        let said = Command::new(name).arg("--version").output().ok()?.stdout;
        Some(String::from_utf8_lossy(&said).lines().next()?.to_string())
    };
    println!("# {}", names.iter().filter_map(version).collect::<Vec<_>>().join("; "));
}

/// The kind of host: `cheap` if a locked instruction is, or `dear`.
pub(crate) fn host_kind() -> &'static str {
    if price() < CHEAP { "cheap" } else { "dear" }
}

/// Nanoseconds of an atomic addition to a word that no other CPU uses: the least of several short windows,
/// measured once in a process, before all rows.
fn price() -> f64 {
    const ADDS: u64 = 100_000;
    static PRICE: OnceLock<f64> = OnceLock::new();
    let word = AtomicU64::new(0);
    let window = || {
        let begun = Instant::now();
        // Ordering: Relaxed; the word carries nothing.
        for _ in 0..ADDS {
            black_box(&word).fetch_add(1, Ordering::Relaxed);
        }
        begun.elapsed().as_nanos() as f64 / ADDS as f64
    };
    *PRICE.get_or_init(|| (0..16).map(|_| window()).fold(f64::INFINITY, f64::min))
}

/// The commit, with a `+` if files differ from it.
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
