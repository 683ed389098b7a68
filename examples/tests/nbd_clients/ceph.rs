//! A Ceph of one monitor and one OSD behind the server: qemu-nbd's rbd driver is the upstream. The upstream, the OSD and
//! the server are killed; every flushed write is there.
//!
//! ```text
//! client ─► nbd_server ─► qemu-nbd (rbd) ─► ceph-osd, in a file      all on loopback, in the trial's directory
//!                                              └─► ceph-mon
//! OFFLOCK_STRESS_SECONDS=600 cargo test --release -p examples --test nbd_clients -- --ignored ceph_
//! ```
//!
//! Ignored by default, as it needs Debian's `ceph-mon`, `ceph-osd`, `ceph-common` and `qemu-block-extra`.
//! `OFFLOCK_STRESS_SECONDS` (60) is how long it kills.

use std::fs::{self, File};
use std::net::TcpListener;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use libtest_mimic::Trial;
use testkit::stress::stress_time;

use crate::client::MIB;
use crate::image::Random;
use crate::lab::{Lab, Res, Tracked, check, fail, signal, tail, trial_for, wait_until};
use crate::need::Need;
use crate::server::{Launch, Server};

const BLOCK: usize = 4096;
const BLOCKS: usize = 1024;
/// How long an OSD may take to serve again. A guess: the monitor believes for 20 seconds in one that was killed.
const PATIENCE: Duration = Duration::from_secs(120);

pub(crate) fn trials() -> Vec<Trial> {
    let time = stress_time(60);
    let needs = [Need::CephMon, Need::CephOsd, Need::Rbd, Need::QemuRbd];
    let body = move |lab: &Lab| flushed_writes_survive(lab, time);
    vec![
        trial_for(time + 5 * PATIENCE, "ceph_flushed_writes_survive", &needs, body)
            .with_ignored_flag(true),
    ]
}

/// Ends with the trial. In the order of the fields: a client of the rbd waits for its OSD.
struct Ceph<'a> {
    nbd: Option<Tracked>,
    osd: Option<Tracked>,
    _mon: Tracked,
    lab: &'a Lab,
}

impl<'a> Ceph<'a> {
    fn start(lab: &'a Lab) -> Res<Self> {
        let port = TcpListener::bind("127.0.0.1:0")?.local_addr()?.port();
        let id = || fs::read_to_string("/proc/sys/kernel/random/uuid");
        let (cluster, osd) = (id()?.trim().to_owned(), id()?.trim().to_owned());
        let dir = lab.dir().display();
        fs::write(
            lab.path("ceph.conf"),
            format!(
                "[global]\nfsid = {cluster}\nmon host = v2:127.0.0.1:{port}/0\n\
                 public addr = 127.0.0.1\ncluster addr = 127.0.0.1\nms bind ipv6 = false\n\
                 auth cluster required = none\nauth service required = none\nauth client required = none\n\
                 osd pool default size = 1\nosd pool default min size = 1\nmon allow pool size one = true\n\
                 osd crush chooseleaf type = 0\nosd pool default pg autoscale mode = off\n\
                 mon data = {dir}/mon\nosd data = {dir}/osd\nosd objectstore = bluestore\n\
                 bluestore block size = 2147483648\nosd memory target = 939524096\n\
                 admin socket = {dir}/$name.$pid.asok\npid file =\nrun dir = {dir}\ncrash dir = {dir}\n\
                 log file = {dir}/$name.log\nmon cluster log file = {dir}/cluster.log\n\
                 keyring = {dir}/keyring\n"
            ),
        )?;
        fs::create_dir(lab.path("mon"))?;
        fs::create_dir(lab.path("osd"))?;
        let tool = |program: &str, words: &str| {
            lab.run_ok(Command::new(program).args(words.split_whitespace()))
        };
        let address = format!("[v2:127.0.0.1:{port}]");
        tool("monmaptool", &format!("--create --addv a {address} --fsid {cluster} monmap"))?;
        tool("ceph-mon", "--mkfs -i a --monmap monmap -c ceph.conf")?;
        let mon = daemon(lab, "ceph-mon", "-f -i a -c ceph.conf")?;
        let mut ceph = Self { nbd: None, osd: None, _mon: mon, lab };
        ceph.tool("ceph", &format!("osd new {osd}"))?;
        tool("ceph-osd", &format!("-i 0 --mkfs --osd-uuid {osd} -c ceph.conf"))?;
        ceph.start_osd()?;
        ceph.tool("ceph", "osd pool create rbd 8")?;
        ceph.tool("rbd", "pool init rbd")?;
        // No exclusive lock: a client that was killed would keep it until the OSD misses it, for 30 seconds.
        let size = BLOCKS * BLOCK / MIB as usize;
        ceph.tool("rbd", &format!("create disk --size {size}M --image-feature layering"))?;
        ceph.start_nbd()?;
        Ok(ceph)
    }

    fn tool(&self, program: &str, words: &str) -> Res<String> {
        let limit = ["--conf", "ceph.conf", "--connect-timeout", "60"];
        let limit = if program == "ceph" { &limit[..] } else { &limit[..2] };
        self.lab.run_ok(Command::new(program).args(limit).args(words.split_whitespace()))
    }

    fn start_osd(&mut self) -> Res {
        self.osd = Some(daemon(self.lab, "ceph-osd", "-f -i 0 -c ceph.conf")?);
        Ok(())
    }

    fn socket(&self) -> PathBuf {
        self.lab.path("rbd")
    }

    fn start_nbd(&mut self) -> Res {
        let _ = fs::remove_file(self.socket()); // of one that was killed
        let rbd = format!("rbd:rbd/disk:conf={}", self.lab.path("ceph.conf").display());
        let words = "--persistent --shared=16 --format=raw --cache=writeback --socket";
        let words = format!("{words} {} {rbd}", self.socket().display());
        self.nbd = Some(daemon(self.lab, "qemu-nbd", &words)?);
        let there = || self.socket().exists().then_some(());
        match wait_until(PATIENCE, there) {
            Some(()) => Ok(()),
            None => {
                let said = fs::read_to_string(self.lab.path("daemons.log"))?;
                fail!("qemu-nbd does not reach the Ceph:\n{}", tail(&said, 20))
            }
        }
    }

    fn kill_nbd(&mut self) {
        drop(self.nbd.take());
    }

    fn kill_osd(&mut self) {
        drop(self.osd.take());
    }
}

fn daemon(lab: &Lab, program: &str, words: &str) -> Res<Tracked> {
    let log = File::options().create(true).append(true).open(lab.path("daemons.log"))?;
    let mut command = Command::new(program);
    command.args(words.split_whitespace()).current_dir(lab.dir()).stdin(Stdio::null());
    lab.spawn(command.stdout(log.try_clone()?).stderr(log))
}

fn front(ceph: &Ceph<'_>) -> Res<Server> {
    let uri = format!("nbd+unix:///?socket={}", ceph.socket().display());
    let launch = Launch::bare(ceph.lab).image(&PathBuf::from(uri)).on_socket("front");
    launch.arg("--cache").arg("1M").arg("--reconnect").arg(PATIENCE.as_secs().to_string()).start()
}

fn flushed_writes_survive(lab: &Lab, time: Duration) -> Res {
    let mut ceph = Ceph::start(lab)?;
    let mut server = front(&ceph)?;
    let mut random = Random::new(1);
    // Of each block its last write, and that of the last flush.
    let (mut now, mut flushed) = (vec![0_u32; BLOCKS], vec![0_u32; BLOCKS]);
    let (began, mut writes, mut kills) = (Instant::now(), 0_u32, 0);
    while began.elapsed() < time {
        let mut client = server.client()?;
        client.be_patient(PATIENCE)?;
        for at in 0..200 {
            let block = random.below(BLOCKS as u64) as usize;
            match random.below(20) {
                0 => {
                    client.flush()?.ok("FLUSH")?;
                    flushed.clone_from(&now);
                }
                1..4 => {
                    let found = client.read((block * BLOCK) as u64, BLOCK as u32)?;
                    check!(
                        found == Ok(content(block, now[block])),
                        "block {block} is not version {}",
                        now[block]
                    );
                }
                _ => {
                    writes += 1;
                    client
                        .write((block * BLOCK) as u64, &content(block, writes), 0)?
                        .ok("WRITE")?;
                    now[block] = writes;
                }
            }
            if at == 100 {
                kills += 1;
                match kills % 4 {
                    0 => {
                        ceph.kill_nbd();
                        ceph.start_nbd()?;
                    }
                    1 => {
                        ceph.kill_osd();
                        ceph.start_osd()?;
                    }
                    2 => {
                        ceph.kill_nbd();
                        ceph.kill_osd();
                        ceph.start_osd()?;
                        ceph.start_nbd()?;
                    }
                    _ => {}
                }
            }
        }
        if kills % 4 == 3 {
            // With its cache: what was not flushed may be there or not.
            signal(server.pid(), libc::SIGKILL);
            drop(server);
            ceph.kill_nbd();
            ceph.start_nbd()?;
            server = front(&ceph)?;
            let mut client = server.client()?;
            client.be_patient(PATIENCE)?;
            for block in 0..BLOCKS {
                let found = client.read((block * BLOCK) as u64, BLOCK as u32)?;
                let found = found.map_err(|error| format!("READ: error {error}"))?;
                let version = u32::from_le_bytes(found[..4].try_into().expect("four bytes"));
                check!(
                    version >= flushed[block]
                        && version <= writes
                        && found == content(block, version),
                    "block {block}: version {version} of {}, flushed {}",
                    now[block],
                    flushed[block]
                );
                now[block] = version;
            }
        }
    }
    println!("ceph: {kills} kills, {writes} acknowledged writes");
    Ok(())
}

fn content(block: usize, version: u32) -> Vec<u8> {
    let word = if version == 0 { 0 } else { (block as u64) << 32 | u64::from(version) };
    word.to_le_bytes().repeat(BLOCK / 8)
}
