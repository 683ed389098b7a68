//! The share of the measured CPUs that went to processes outside the measurement.
//!
//! The overlap rule of [`crate::Window`] needs the threads to be ours. For windows between other
//! programs this asks the kernel instead: time that the CPUs were busy, less the time that our
//! processes used.

use std::fs;
use std::io;
use std::time::Instant;

/// A moment from which foreign CPU time is counted.
#[derive(Debug)]
pub struct Foreign {
    cpus: Vec<usize>,
    pids: Vec<u32>,
    start: Instant,
    ticks: i64,
}

impl Foreign {
    /// Starts to count on `cpus`. Time of this process, of the children that it waits for meanwhile
    /// and of the running processes `pids` is ours.
    pub fn start(cpus: &[usize], pids: &[u32]) -> io::Result<Self> {
        let ticks = foreign_ticks(cpus, pids)?;
        Ok(Self { cpus: cpus.to_vec(), pids: pids.to_vec(), start: Instant::now(), ticks })
    }

    /// The part of the time of the CPUs since the start, 0 to 1, that went to others. It counts
    /// ticks of 10 ms: over half a second, some percent more or less mean nothing.
    pub fn share(&self) -> io::Result<f64> {
        // USER_HZ, the unit of these files, is 100 on every architecture of Linux but Alpha.
        let available = self.start.elapsed().as_secs_f64() * 100.0 * self.cpus.len() as f64;
        let ticks = foreign_ticks(&self.cpus, &self.pids)? - self.ticks;
        Ok((ticks as f64 / available).clamp(0.0, 1.0))
    }
}

fn foreign_ticks(cpus: &[usize], pids: &[u32]) -> io::Result<i64> {
    let bad = || io::Error::from(io::ErrorKind::InvalidData);
    let all = fs::read_to_string("/proc/stat")?;
    let mut foreign = 0;
    for cpu in cpus {
        foreign += busy(&all, *cpu).ok_or_else(bad)?;
    }
    let own = fs::read_to_string("/proc/self/stat")?;
    foreign -= used(&own, 4).ok_or_else(bad)?;
    for pid in pids {
        let stat = fs::read_to_string(format!("/proc/{pid}/stat"))?;
        foreign -= used(&stat, 2).ok_or_else(bad)?;
    }
    Ok(foreign)
}

/// user + nice + system + steal of a CPU in `/proc/stat`; interrupts are in none of them.
fn busy(stat: &str, cpu: usize) -> Option<i64> {
    let name = format!("cpu{cpu}");
    let line = stat.lines().find(|line| line.split_whitespace().next() == Some(name.as_str()))?;
    let fields: Vec<i64> = line.split_whitespace().skip(1).flat_map(str::parse).collect();
    Some(fields.get(..3)?.iter().sum::<i64>() + fields.get(7)?)
}

/// The first `fields` of utime, stime, cutime and cstime in a `/proc/<pid>/stat`.
pub(crate) fn used(stat: &str, fields: usize) -> Option<i64> {
    // The name, in parentheses, may hold anything; utime is the 12th field after it.
    let rest = &stat[stat.rfind(')')? + 1..];
    let times: Vec<i64> = rest.split_whitespace().skip(11).flat_map(str::parse).collect();
    Some(times.get(..fields)?.iter().sum())
}
