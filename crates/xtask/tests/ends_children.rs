//! A signal that ends this program ends what it has started, too; and a failed part ends it with its status.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

fn until<T>(mut look: impl FnMut() -> Option<T>) -> T {
    let began = Instant::now();
    loop {
        if let Some(found) = look() {
            return found;
        }
        assert!(began.elapsed() < Duration::from_secs(60), "it did not happen in time");
        thread::sleep(Duration::from_millis(10));
    }
}

/// The tests take turns. A child that one test forks holds the script that another test writes open until
/// its exec, and the script cannot be run meanwhile.
fn alone() -> MutexGuard<'static, ()> {
    static TURN: Mutex<()> = Mutex::new(());
    TURN.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Starts `xtask ci lint` with this script as its `cargo`. Returns the folder in which the script runs, too.
fn start(name: &str, script: &str) -> (Child, PathBuf) {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    let _ = fs::remove_dir_all(&folder);
    fs::create_dir_all(&folder).unwrap();
    let cargo = folder.join("cargo");
    fs::write(&cargo, format!("#!/bin/sh\ncd {}\n{script}\n", folder.display())).unwrap();
    fs::set_permissions(&cargo, fs::Permissions::from_mode(0o755)).unwrap();
    let path = std::env::var("PATH").unwrap();
    let xtask = Command::new(env!("CARGO_BIN_EXE_xtask"))
        .args(["ci", "lint"])
        .env("PATH", format!("{}:{path}", folder.display()))
        .env("CARGO_TARGET_DIR", folder.join("target"))
        .stdin(Stdio::null())
        .stdout(fs::File::create(folder.join("said")).unwrap())
        .spawn();
    (xtask.unwrap(), folder)
}

#[test]
fn a_signal_ends_the_descendants_and_is_reported() {
    let _alone = alone();
    for (signal, number) in [("INT", 2), ("TERM", 15), ("HUP", 1)] {
        // It starts a process in the background and waits.
        let script = "sleep 1000 & echo $! >pid.new; mv pid.new pid; wait";
        let (mut xtask, folder) = start(&format!("signal-{signal}"), script);
        let read = || fs::read_to_string(folder.join("pid")).ok()?.trim().parse::<u32>().ok();
        let descendant = until(read);
        let kill = format!("kill -{signal} {}", xtask.id());
        assert!(Command::new("sh").args(["-c", &kill]).status().unwrap().success());
        assert_eq!(xtask.wait().unwrap().code(), Some(128 + number), "SIG{signal}");
        // It has ended, whether or not a parent has waited for it.
        until(|| {
            let stat = fs::read_to_string(format!("/proc/{descendant}/stat")).unwrap_or_default();
            (stat.is_empty() || stat.contains(") Z")).then_some(())
        });
    }
}

#[test]
fn a_failed_part_ends_the_run_with_its_status() {
    let _alone = alone();
    let (mut xtask, folder) = start("fails", "exit 7");
    assert_eq!(xtask.wait().unwrap().code(), Some(7));
    let said = fs::read_to_string(folder.join("said")).unwrap();
    assert!(said.ends_with("minutes (exit status 7)\n"), "{said}");
    assert!(said.contains("FAILED in part 'lint' after "), "{said}");
}
