//! A signal that ends this program ends what it has started, too.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

fn until<T>(mut look: impl FnMut() -> Option<T>) -> T {
    let began = Instant::now();
    loop {
        if let Some(found) = look() {
            return found;
        }
        assert!(began.elapsed() < Duration::from_secs(30), "it did not happen in time");
        thread::sleep(Duration::from_millis(10));
    }
}

#[test]
fn a_signal_ends_the_descendants_and_is_reported() {
    // A `cargo` that starts a process in the background and waits.
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("signal");
    let _ = fs::remove_dir_all(&folder);
    fs::create_dir_all(&folder).unwrap();
    let hangs = "sleep 1000 & echo $! >pid.new; mv pid.new pid; wait";
    let cargo = folder.join("cargo");
    fs::write(&cargo, format!("#!/bin/sh\ncd {}\n{hangs}\n", folder.display())).unwrap();
    fs::set_permissions(&cargo, fs::Permissions::from_mode(0o755)).unwrap();
    let path = std::env::var("PATH").unwrap();
    let mut xtask = Command::new(env!("CARGO_BIN_EXE_xtask"))
        .args(["ci", "lint"])
        .env("PATH", format!("{}:{path}", folder.display()))
        .env("CARGO_TARGET_DIR", folder.join("target"))
        .stdin(Stdio::null())
        .spawn()
        .unwrap();
    let read = || fs::read_to_string(folder.join("pid")).ok()?.trim().parse::<u32>().ok();
    let descendant = until(read);
    let kill = format!("kill -TERM {}", xtask.id());
    assert!(Command::new("sh").args(["-c", &kill]).status().unwrap().success());
    assert_eq!(xtask.wait().unwrap().code(), Some(128 + 15));
    // It has ended, whether or not a parent has waited for it.
    until(|| {
        let stat = fs::read_to_string(format!("/proc/{descendant}/stat")).unwrap_or_default();
        (stat.is_empty() || stat.contains(") Z")).then_some(())
    });
}
