//! A child process on one CPU that does not outlive the bench.

use std::fs;
use std::io;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, ExitStatus};
use std::thread;
use std::time::{Duration, Instant};

use crate::cpu::{die_with_parent, with_cpus};
use crate::foreign::used;

/// A running child. Dropping it, also while a panic unwinds, kills and reaps it; the kernel kills
/// it if the bench itself is killed.
#[derive(Debug)]
pub struct Process {
    child: Child,
}

impl Process {
    /// Starts `command`, with all its threads, on `cpu`. Call it from a thread that lives as long
    /// as the child shall: the kernel kills the child when that thread ends.
    pub fn spawn(command: &mut Command, cpu: usize) -> io::Result<Self> {
        // SAFETY: between fork and exec the closure makes one system call and allocates nothing.
        let command = unsafe { command.pre_exec(die_with_parent) };
        let child = with_cpus(&[cpu], || command.spawn())?;
        Ok(Self { child })
    }

    /// The process id.
    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// The CPU time that it has used, with that of its threads that have ended; in ticks of 10 ms.
    pub fn cpu_time(&self) -> io::Result<Duration> {
        let stat = fs::read_to_string(format!("/proc/{}/stat", self.id()))?;
        let ticks = used(&stat, 2).ok_or(io::ErrorKind::InvalidData)?;
        Ok(Duration::from_millis(10) * u32::try_from(ticks).unwrap_or(u32::MAX))
    }

    /// The exit status if the child has ended, without waiting.
    pub fn try_wait(&mut self) -> io::Result<Option<ExitStatus>> {
        self.child.try_wait()
    }

    /// Waits for the child to end by itself, looking every 10 ms.
    pub fn wait(&mut self, patience: Duration) -> io::Result<ExitStatus> {
        let start = Instant::now();
        loop {
            if let Some(status) = self.child.try_wait()? {
                return Ok(status);
            }
            if start.elapsed() > patience {
                return Err(io::ErrorKind::TimedOut.into());
            }
            thread::sleep(Duration::from_millis(10));
        }
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // Both fail only if it has ended and was reaped already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
