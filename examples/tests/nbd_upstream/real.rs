//! qemu-nbd and nbdkit as upstreams. A test whose program is not installed says so and passes.

use std::fs;
use std::io::ErrorKind;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use bufcache::{BlockDevice, Cache, Device};
use tempfile::TempDir;

use crate::upstream::{NbdDevice, UpstreamOptions};

const BLOCK: usize = 4096;
const BLOCKS: usize = 256;

/// A server in a process of its own, and its image.
struct Server {
    dir: TempDir,
    program: &'static str,
    args: Vec<String>,
    child: Option<Child>,
}

impl Server {
    /// Starts a server. `IMAGE` and `DIR` in the arguments are replaced by paths. `None` if the
    /// program is missing.
    fn start(program: &'static str, args: &str) -> Option<Self> {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("image"), original()).unwrap();
        let folder = dir.path().to_str().unwrap().to_owned();
        let args = args.replace("IMAGE", &format!("{folder}/image")).replace("DIR", &folder);
        let args = args.split_whitespace().map(str::to_owned).collect();
        let mut server = Self { dir, program, args, child: None };
        server.restart().then_some(server)
    }

    fn socket(&self) -> PathBuf {
        self.dir.path().join("s")
    }

    fn restart(&mut self) -> bool {
        let _ = fs::remove_file(self.socket());
        let mut command = Command::new(self.program);
        command.args(&self.args).stdout(Stdio::null()).stderr(Stdio::null());
        match command.spawn() {
            Ok(child) => self.child = Some(child),
            Err(error) if error.kind() == ErrorKind::NotFound => {
                println!("skipped: {} is not installed", self.program);
                return false;
            }
            Err(error) => panic!("{error}"),
        }
        let deadline = Instant::now() + Duration::from_secs(20);
        while UnixStream::connect(self.socket()).is_err() {
            assert!(Instant::now() < deadline, "{} does not listen", self.program);
            std::thread::sleep(Duration::from_millis(10));
        }
        true
    }

    fn kill(&mut self) {
        if let Some(mut child) = self.child.take() {
            let _ = child.kill(); // fails if it has ended
            child.wait().unwrap();
        }
    }

    fn image(&self) -> Vec<u8> {
        fs::read(self.dir.path().join("image")).unwrap()
    }

    fn device(&self) -> Arc<NbdDevice> {
        let uri = format!("nbd+unix:///?socket={}", self.socket().display());
        Arc::new(NbdDevice::open(uri.parse().unwrap(), UpstreamOptions::default()).unwrap())
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.kill();
    }
}

fn original() -> Vec<u8> {
    (0..BLOCK * BLOCKS).map(|at| (at / 512 * 37 + at) as u8).collect()
}

fn cached(device: &Arc<NbdDevice>) -> Device {
    Cache::new(1 << 20).unwrap().attach(Arc::clone(device), BLOCK).unwrap()
}

const QEMU: &str =
    "--persistent --shared=8 --format=raw --discard=unmap --cache=writeback --socket=DIR/s IMAGE";
const NBDKIT: &str = "--foreground --unix DIR/s";

/// Writes every third block, and reads all back, some past the cache.
fn write_and_read(device: &Arc<NbdDevice>) -> Vec<u8> {
    let disk = cached(device);
    let mut model = original();
    for block in (0..BLOCKS).step_by(3) {
        disk.create(block as u64).unwrap().fill(block as u8);
        model[block * BLOCK..][..BLOCK].fill(block as u8);
        if block % 60 == 0 {
            disk.sync().unwrap();
        }
    }
    disk.discard(10..14).unwrap();
    model[10 * BLOCK..14 * BLOCK].fill(0);
    disk.sync().unwrap();
    for block in (0..BLOCKS).rev() {
        if block % 2 == 0 {
            disk.invalidate(block as u64).unwrap();
        }
        assert!(disk.get(block as u64).unwrap()[..] == model[block * BLOCK..][..BLOCK], "{block}");
    }
    model
}

#[test]
fn inv04_qemu_nbd_and_nbdkit_keep_what_was_written() {
    let nbdkit = |words| ("nbdkit", format!("{NBDKIT} {words}"));
    for (program, args) in [
        ("qemu-nbd", QEMU.to_owned()),
        nbdkit("--filter=delay file IMAGE rdelay=1ms wdelay=1ms"),
        nbdkit("--filter=readahead file IMAGE"),
    ] {
        let Some(server) = Server::start(program, &args) else { continue };
        let device = server.device();
        let model = write_and_read(&device);
        assert!(server.image() == model, "{program}");
        let extents = device.extents(0..(BLOCK * BLOCKS) as u64).unwrap();
        assert_eq!(extents.iter().map(|extent| extent.len).sum::<u64>(), (BLOCK * BLOCKS) as u64);
        assert_eq!(device.stats().losses, 0);
    }
}

/// nbdkit's cache filter keeps writes in its memory until a FLUSH, and loses them if it is killed.
#[test]
fn inv03_inv04_an_upstream_that_is_killed_loses_nothing() {
    let filters = "--filter=cache file IMAGE cache=writeback";
    for (program, args) in
        [("nbdkit", format!("{NBDKIT} {filters}")), ("qemu-nbd", QEMU.to_owned())]
    {
        let Some(mut server) = Server::start(program, &args) else { continue };
        let device = server.device();
        let disk = cached(&device);
        let mut model = original();
        for round in 1..=8_u8 {
            for block in (round as usize..BLOCKS).step_by(7) {
                disk.create(block as u64).unwrap().fill(round);
                model[block * BLOCK..][..BLOCK].fill(round);
            }
            disk.flush().unwrap();
            if round % 3 == 0 {
                disk.sync().unwrap();
            }
            server.kill();
            (0..BLOCKS as u64).for_each(|block| _ = disk.invalidate(block).unwrap());
            server.restart();
            for block in 0..BLOCKS {
                let there = disk.get(block as u64).unwrap();
                assert!(there[..] == model[block * BLOCK..][..BLOCK], "{program} {round} {block}");
            }
        }
        disk.sync().unwrap();
        server.kill();
        assert!(server.image() == model, "{program}");
        assert!(!device.stats().poisoned && device.stats().losses >= 8);
    }
}

/// A tenth of the reads and writes fail at the upstream. The cache repeats them.
#[test]
fn inv02_nbdkit_error_filter() {
    let filters = "--filter=error file IMAGE error-pread-rate=10% error-pwrite-rate=10%";
    let Some(server) = Server::start("nbdkit", &format!("{NBDKIT} {filters}")) else { return };
    let device = server.device();
    let disk = cached(&device);
    let mut model = original();
    for block in 0..BLOCKS {
        disk.create(block as u64).unwrap().fill(block as u8);
        model[block * BLOCK..][..BLOCK].fill(block as u8);
    }
    let mut failures = 0;
    while disk.flush().is_err() {
        failures += 1;
        assert!(failures < 1000);
    }
    disk.sync().unwrap();
    for block in 0..BLOCKS {
        disk.invalidate(block as u64).unwrap();
        while disk.get(block as u64).is_err() {
            failures += 1;
            assert!(failures < 1000);
        }
        assert!(disk.get(block as u64).unwrap()[..] == model[block * BLOCK..][..BLOCK]);
    }
    assert!(failures > 0, "no fault was met");
    assert!(server.image() == model);
    assert_eq!(device.stats().losses, 0, "an error is no loss of the connection");
}

#[test]
fn inv07_nbdkit_blocksize_policy() {
    let filters = "--filter=blocksize-policy file IMAGE blocksize-minimum=4096 blocksize-preferred=8192 \
                   blocksize-maximum=16384 blocksize-error-policy=error";
    let Some(server) = Server::start("nbdkit", &format!("{NBDKIT} {filters}")) else { return };
    let device = server.device();
    assert_eq!(device.alignment(), 4096);
    let model = write_and_read(&device);
    let mut all = vec![0; model.len()];
    device.read(0, &mut all).unwrap();
    assert!(all == model && server.image() == model);
}
