//! One window driven by fio, the load generator that everyone has.

use std::fs::{self, File};
use std::io;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use serde_json::Value;

use crate::process::Process;

/// The time that fio may take beyond its run time: it starts, connects and reports.
const GRACE: Duration = Duration::from_secs(15);

/// The operations of one direction in a window, of all jobs together: reads, writes, or both counted together.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct FioSide {
    /// Operations per second.
    pub iops: f64,
    /// 99th percentile of the completion latency; none with `--gtod_reduce=1`, with which fio reads no clock for it.
    pub p99: Option<Duration>,
    /// CPU time of the jobs as a part of their run time: 1 if none of them ever waited.
    pub busy: f64,
}

/// The results of fio in a window that reads, writes, or does both.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct FioMix {
    /// The reads, if there were any.
    pub reads: Option<FioSide>,
    /// The writes, if there were any.
    pub writes: Option<FioSide>,
    /// Every operation, with `--unified_rw_reporting=1`: then the other two are `None`.
    pub all: Option<FioSide>,
}

impl FioMix {
    /// Runs fio on `cpu` for `runtime` with `args` (engine, pattern, depth, jobs); `scratch` is a
    /// directory for its report. Arguments from a second `--name` on describe jobs that run beside the
    /// first, which alone is reported if the second has `--new_group`.
    pub fn measure<S: AsRef<str>>(
        cpu: usize,
        runtime: Duration,
        scratch: &Path,
        args: impl IntoIterator<Item = S>,
    ) -> io::Result<Self> {
        Self::parse(&report(cpu, runtime, scratch, args)?)
    }

    /// Operations per second of both directions.
    pub fn iops(&self) -> f64 {
        [self.reads, self.writes, self.all].iter().flatten().map(|side| side.iops).sum()
    }

    fn parse(report: &str) -> io::Result<Self> {
        let job = job(report)?;
        let percent = |name: &str| job[name].as_f64().ok_or_else(|| bad(&format!("no {name}")));
        let busy = (percent("usr_cpu")? + percent("sys_cpu")?) / 100.0;
        let side = |name: &str| {
            let side = &job[name];
            let iops = side["iops"].as_f64().filter(|iops| *iops > 0.0)?;
            let p99 = side["clat_ns"]["percentile"]["99.000000"].as_f64();
            let p99 = p99.map(|nanos| Duration::from_secs_f64(nanos / 1e9));
            Some(FioSide { iops, p99, busy })
        };
        let mix = Self { reads: side("read"), writes: side("write"), all: side("mixed") };
        if mix.iops() > 0.0 { Ok(mix) } else { Err(bad("no operation")) }
    }
}

fn report<S: AsRef<str>>(
    cpu: usize,
    runtime: Duration,
    scratch: &Path,
    args: impl IntoIterator<Item = S>,
) -> io::Result<String> {
    let (report, errors) = (scratch.join("fio.json"), scratch.join("fio.err"));
    let mut command = Command::new("fio");
    command.args(["--name=window", "--time_based", "--group_reporting"]);
    command.args(["--norandommap", "--randrepeat=0", "--output-format=json"]);
    command.arg(format!("--runtime={}ms", runtime.as_millis()));
    for arg in args {
        command.arg(arg.as_ref());
    }
    command.stdin(Stdio::null());
    command.stdout(File::create(&report)?);
    command.stderr(File::create(&errors)?);
    let status = Process::spawn(&mut command, cpu)?.wait(runtime + GRACE)?;
    if !status.success() {
        let said = fs::read_to_string(&errors)?;
        let said = said.lines().next().unwrap_or("no message");
        return Err(io::Error::other(format!("fio: {status}: {said}")));
    }
    fs::read_to_string(&report)
}

/// All jobs of a JSON report. The nbd engine writes lines of its own before it.
fn job(report: &str) -> io::Result<Value> {
    let start = report.find('{').ok_or_else(|| bad("no report"))?;
    let mut report: Value =
        serde_json::from_str(&report[start..]).map_err(|error| bad(&error.to_string()))?;
    let job = report["jobs"][0].take();
    if job["error"].as_u64() != Some(0) {
        return Err(bad(&format!("error {}", job["error"])));
    }
    Ok(job)
}

fn bad(what: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, format!("fio: {what}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    const REPORT: &str = r#"fio: connected to NBD server
        {"fio version": "fio-3.33", "jobs": [{"error": 0, "read": {
            "iops": 1234.5, "clat_ns": {"percentile": {"99.000000": 98000}}},
            "write": {"iops": 0.0}, "usr_cpu": 42.5, "sys_cpu": 50.0}]}"#;

    #[test]
    fn a_report_has_the_directions_that_did_something() {
        let mix = FioMix::parse(REPORT).unwrap();
        let p99 = Some(Duration::from_micros(98));
        let reads = FioSide { iops: 1234.5, p99, busy: 0.925 };
        assert_eq!(mix, FioMix { reads: Some(reads), writes: None, all: None });
        let planted =
            [("\"error\": 0", "\"error\": 111"), ("1234.5", "0.0"), ("42.5", "null"), ("{", "")];
        for (from, to) in planted {
            let error = FioMix::parse(&REPORT.replace(from, to)).unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::InvalidData, "{from} -> {to}");
        }
    }
}
