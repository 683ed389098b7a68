//! A signal that ends this program ends what it has started, too.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::thread;
use std::time::{Duration, Instant};

/// Far more than anything here takes.
const PATIENCE: Duration = Duration::from_secs(30);

/// A folder with a `cargo` that starts a process in the background and waits.
struct Stub {
    folder: PathBuf,
}

impl Stub {
    fn new(name: &str, script: &str) -> Stub {
        let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
        let _ = fs::remove_dir_all(&folder);
        fs::create_dir_all(&folder).unwrap();
        let cargo = folder.join("cargo");
        fs::write(&cargo, format!("#!/bin/sh\ncd {}\n{script}\n", folder.display())).unwrap();
        fs::set_permissions(&cargo, fs::Permissions::from_mode(0o755)).unwrap();
        Stub { folder }
    }

    /// `xtask ci lint`, whose first command is the stub.
    fn start(&self) -> Child {
        let path = std::env::var("PATH").unwrap();
        Command::new(env!("CARGO_BIN_EXE_xtask"))
            .args(["ci", "lint"])
            .env("PATH", format!("{}:{path}", self.folder.display()))
            .env("CARGO_TARGET_DIR", self.folder.join("target"))
            .stdin(Stdio::null())
            .stdout(fs::File::create(self.folder.join("said")).unwrap())
            .spawn()
            .unwrap()
    }

    /// The process that the stub has started in the background.
    fn descendant(&self) -> u32 {
        until(|| fs::read_to_string(self.folder.join("pid")).ok()?.trim().parse().ok())
    }

    fn said(&self) -> String {
        fs::read_to_string(self.folder.join("said")).unwrap()
    }
}

const HANGS: &str = "sleep 1000 & echo $! >pid.new; mv pid.new pid; wait";

fn until<T>(mut look: impl FnMut() -> Option<T>) -> T {
    let began = Instant::now();
    loop {
        if let Some(found) = look() {
            return found;
        }
        assert!(began.elapsed() < PATIENCE, "it did not happen in time");
        thread::sleep(Duration::from_millis(10));
    }
}

/// Returns once the process has ended, whether or not a parent has waited for it.
fn until_ended(process: u32) {
    until(|| {
        let stat = fs::read_to_string(format!("/proc/{process}/stat")).unwrap_or_default();
        let state = stat.rsplit_once(") ").map_or("", |(_, rest)| rest);
        (state.is_empty() || state.starts_with('Z')).then_some(())
    });
}

fn send(signal: &str, child: &mut Child) -> ExitStatus {
    let kill = format!("kill -{signal} {}", child.id());
    assert!(Command::new("sh").args(["-c", &kill]).status().unwrap().success());
    child.wait().unwrap()
}

#[test]
fn a_signal_ends_the_descendants_and_is_reported() {
    for (signal, number) in [("INT", 2), ("TERM", 15), ("HUP", 1)] {
        let stub = Stub::new(&format!("signal-{signal}"), HANGS);
        let mut xtask = stub.start();
        let descendant = stub.descendant();
        assert_eq!(send(signal, &mut xtask).code(), Some(128 + number), "SIG{signal}");
        until_ended(descendant);
        let said = stub.said();
        assert!(said.contains("FAILED in part 'lint'"), "{said}");
        assert!(said.contains(&format!("(exit status {})", 128 + number)), "{said}");
    }
}

#[test]
fn a_failed_part_ends_the_run_with_its_status() {
    let stub = Stub::new("fails", "exit 7");
    assert_eq!(stub.start().wait().unwrap().code(), Some(7));
    let said = stub.said();
    assert!(said.ends_with("minutes (exit status 7)\n"), "{said}");
    assert!(said.contains("FAILED in part 'lint' after 0.0"), "{said}");
}
