//! W9: writes of one export, without and beside another whose device answers no more.
//!
//! The device that answers no more is a frozen file system on a loop device: every write to it waits until it is
//! thawed. That takes root.

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::thread;
use std::time::Duration;

use harness::{FioMix, Process, median};

use crate::servers::{Server, Site};

/// The median over the rounds of the p99 of writes beside the hung export over that without it.
pub(crate) fn ratio(
    site: &Site<'_>,
    client: usize,
    rounds: usize,
    window: Duration,
    scratch: &Path,
) -> io::Result<Option<f64>> {
    let frozen = Frozen::mount(scratch)?;
    let image = site.image.with_extension("beside");
    fs::copy(site.image, &image)?;
    let mut server = site.start_ours(&[image, frozen.image.clone()])?;
    let measure = |server: &mut Server| {
        server.check()?;
        let p99 = |window: FioMix| Some(window.writes?.p99?.as_secs_f64());
        FioMix::measure(client, window, scratch, writes(server, "image.beside")).map(p99)
    };
    let mut ratios = Vec::new();
    for _ in 0..rounds {
        let alone = measure(&mut server)?;
        let beside = frozen.during(|| {
            let mut fio = Command::new("fio");
            fio.arg("--name=hung").arg("--fsync=32").args(writes(&server, "hung"));
            fio.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
            let _hung = Process::spawn(&mut fio, client)?;
            thread::sleep(Duration::from_secs(1)); // until its writes hang
            measure(&mut server)
        })?;
        ratios.extend(beside.zip(alone).map(|(beside, alone)| beside / alone));
        let ms = |p99: Option<f64>| p99.map_or("none".into(), |p99| format!("{:.1} ms", p99 * 1e3));
        println!("# write beside a hung export: p99 {}, alone {}", ms(beside), ms(alone));
        thread::sleep(Duration::from_secs(1)); // until what hung is done
    }
    Ok(median(&ratios))
}

fn writes(server: &Server, export: &str) -> Vec<String> {
    let uri = format!("--uri=nbd+unix:///{export}?socket={}", server.socket.display());
    let args = ["--rw=randwrite", "--bs=4k", "--iodepth=32", "--ioengine=nbd", &uri];
    args.map(String::from).into()
}

/// A file system of its own that can be frozen. Thawed and unmounted when it drops.
struct Frozen {
    folder: PathBuf,
    image: PathBuf,
}

impl Frozen {
    fn mount(scratch: &Path) -> io::Result<Self> {
        let (disk, folder) = (scratch.join("disk"), scratch.join("frozen"));
        File::create(&disk)?.set_len(128 << 20)?;
        fs::create_dir(&folder)?;
        run("mkfs.ext4", &["-q", "-F", &disk.to_string_lossy()])?;
        run("mount", &["-o", "loop", &disk.to_string_lossy(), &folder.to_string_lossy()])?;
        let mounted = Self { image: folder.join("hung"), folder };
        fs::write(&mounted.image, vec![1; 64 << 20])?;
        File::open(&mounted.image)?.sync_all()?;
        Ok(mounted)
    }

    /// Runs `f` while writes to the file system wait.
    fn during<R>(&self, f: impl FnOnce() -> R) -> R {
        struct Thaw<'a>(&'a str);
        impl Drop for Thaw<'_> {
            fn drop(&mut self) {
                if let Err(error) = run("fsfreeze", &["--unfreeze", self.0]) {
                    println!("# {error}");
                }
            }
        }
        let folder = self.folder.to_string_lossy();
        let _thaw = Thaw(&folder);
        if let Err(error) = run("fsfreeze", &["--freeze", &folder]) {
            println!("# {error}");
        }
        f()
    }
}

impl Drop for Frozen {
    fn drop(&mut self) {
        if let Err(error) = run("umount", &["--lazy", &self.folder.to_string_lossy()]) {
            println!("# {error}");
        }
    }
}

fn run(program: &str, args: &[&str]) -> io::Result<()> {
    let output = Command::new(program).args(args).output()?;
    let said = String::from_utf8_lossy(&output.stderr);
    let failed = || io::Error::other(format!("{program} (as root): {}", said.trim()));
    output.status.success().then_some(()).ok_or_else(failed)
}
