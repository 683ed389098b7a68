//! Volumes on an object store, which is a folder here.
//!
//! ```text
//! cargo test -p offlock-nbd --features objects --test clients -- volume/
//! OFFLOCK_TEARINGS=1000 cargo test --release -p offlock-nbd --features objects --test clients -- volume/
//! ```

use std::collections::BTreeMap;
use std::process::Command;
use std::time::Duration;

use libtest_mimic::Trial;

use crate::client::{Client, MIB, cmd, err, flag};
use crate::image::{self, Random};
use crate::lab::{Backend, Lab, Res, check, fail, per_backend_for, trial};
use crate::need::Need;
use crate::server::{Launch, Server, binary};

pub(crate) fn trials() -> Vec<Trial> {
    if !cfg!(feature = "objects") {
        return Vec::new();
    }
    let asked = std::env::var("OFFLOCK_TEARINGS").ok();
    let count: u32 = asked.map_or(8, |n| n.parse().expect("OFFLOCK_TEARINGS is a number"));
    let name = "volume/what_was_flushed_survives_kills";
    let deadline = Duration::from_secs(120 + 10 * u64::from(count));
    let body = move |lab: &Lab, backend| kills(lab, backend, count);
    let mut trials =
        per_backend_for(deadline, &[Backend::Threads, Backend::Uring], name, &[], body);
    trials.extend([
        trial("volume/a_server_that_was_taken_over_ends_with_its_own_status", &[], takeover),
        trial("volume/qemu_img_copies_an_image_in_and_compares", &[Need::QemuImg], copied),
        trial("volume/snapshots_by_the_command_line", &[], snapshots),
    ]);
    trials
}

const BLOCK: u64 = 4096;
const SIZE: u64 = 64 * MIB;

fn address(lab: &Lab) -> String {
    format!("file://{}", lab.path("store").display())
}

fn launch<'a>(lab: &'a Lab, options: &str) -> Launch<'a> {
    launch_on(lab, Backend::Threads, options)
}

fn launch_on<'a>(lab: &'a Lab, backend: Backend, options: &str) -> Launch<'a> {
    let image = format!("vol={}{options}", address(lab));
    Launch::new(lab, backend).arg("--image").arg(image)
}

fn serve(lab: &Lab) -> Res<Server> {
    launch(lab, "?size=64M").start()
}

/// Writes, FLUSHes, and kills the server while it has writes that were not flushed. Each block has what
/// was flushed, or was written later.
fn kills(lab: &Lab, backend: Backend, count: u32) -> Res {
    let (mut random, mut values) = (Random::new(5), BTreeMap::<u64, Vec<u8>>::new());
    for round in 0..count {
        let mut server = launch_on(lab, backend, "?size=64M").start()?;
        let mut client = server.client()?;
        for (&block, allowed) in &mut values {
            let Ok(read) = client.read(block * BLOCK, BLOCK as u32)? else {
                fail!("round {round}: block {block} is not readable");
            };
            let found = read[0];
            check!(read.iter().all(|&byte| byte == found), "round {round}: block {block} is torn");
            check!(
                allowed.contains(&found),
                "round {round}: block {block}: {found} of {allowed:?}"
            );
            *allowed = vec![found];
        }
        for step in 0..60 {
            let (first, byte) = (random.below(SIZE / BLOCK - 40), 1 + random.below(255) as u8);
            let count = if step % 5 == 0 { 1 + random.below(40) } else { 1 };
            let trims = step % 9 == 8;
            match trims {
                true => client.plain(cmd::TRIM, 0, first * BLOCK, count * BLOCK)?.ok("TRIM")?,
                false => {
                    let data = vec![byte; (count * BLOCK) as usize];
                    client.write(first * BLOCK, &data, 0)?.ok("WRITE")?;
                }
            }
            for block in first..first + count {
                values.entry(block).or_insert(vec![0]).push(if trims { 0 } else { byte });
            }
            if step == 40 || random.below(12) == 0 {
                client.flush()?.ok("FLUSH")?;
                for allowed in values.values_mut() {
                    let last = *allowed.last().unwrap_or(&0);
                    *allowed = vec![last];
                }
            }
        }
        server.kill();
        server.ended()?;
    }
    serve(lab)?.stop()
}

fn takeover(lab: &Lab) -> Res {
    let mut first = serve(lab)?;
    let mut client = first.client()?;
    client.write(0, &[1; BLOCK as usize], flag::FUA)?.ok("WRITE with FUA")?;
    let other = || launch(lab, "").socket(&lab.path("s2"));
    let (code, log) = other().start_refused()?;
    check!(code == 1 && log.contains("--takeover"), "a second server: {code}\n{log}");
    let second = other().arg("--takeover").start()?;
    let mut new = second.client()?;
    check!(new.read(0, 4096)? == Ok(vec![1; 4096]), "what the first server has flushed");
    new.write(0, &[2; BLOCK as usize], flag::FUA)?.ok("WRITE with FUA")?;
    client.write(BLOCK, &[3; BLOCK as usize], 0)?.ok("WRITE to memory")?;
    client.flush()?.is(err::EIO, "FLUSH of the first server")?;
    let status = first.ended()?;
    check!(status.code() == Some(3), "{status}: {}", first.log());
    check!(first.log().contains("taken it over"), "{}", first.log());
    second.stop()?;
    let third = serve(lab)?;
    let mut client = third.client()?;
    check!(client.read(0, 4096)? == Ok(vec![2; 4096]), "what the second server has flushed");
    check!(
        client.read(BLOCK, 4096)? == Ok(vec![0; 4096]),
        "what the first one wrote after its end"
    );
    third.stop()
}

fn copied(lab: &Lab) -> Res {
    let image = lab.path("a.img");
    image::with_parts(&image, SIZE, 40, 3)?;
    let server = serve(lab)?;
    let uri = server.uri("vol");
    let path = image.to_str().expect("a path of the trial");
    let convert = ["convert", "-n", "-f", "raw", "-O", "raw", path, &uri];
    lab.run_ok(Command::new("qemu-img").args(convert))?;
    server.stop()?;
    let server = serve(lab)?;
    let compare = ["compare", "-f", "raw", "-F", "raw", path, &uri];
    lab.run_ok(Command::new("qemu-img").args(compare))?;
    server.stop()
}

fn snapshots(lab: &Lab) -> Res {
    let snapshot = |words: &[&str]| {
        let mut command = Command::new(binary());
        command.arg("snapshot").args(words);
        lab.run(&mut command, Duration::from_secs(60))
    };
    let volume = address(lab);
    let server = serve(lab)?;
    let mut client = server.client()?;
    client.write(0, &[1; BLOCK as usize], flag::FUA)?.ok("WRITE with FUA")?;
    let made = snapshot(&["create", &volume, "before"])?;
    check!(made.status.success(), "create: {}", made.text);
    client.write(0, &[2; BLOCK as usize], flag::FUA)?.ok("WRITE with FUA")?;
    let again = snapshot(&["create", &volume, "before"])?;
    check!(again.status.code() == Some(1) && again.text.contains("already"), "{}", again.text);
    let list = snapshot(&["list", &volume])?;
    check!(list.text.trim_end().ends_with("UTC  before"), "{}", list.text);
    let old = launch(lab, "?snapshot=before").socket(&lab.path("s2")).start()?;
    let mut reader = old.client()?;
    check!(reader.read(0, 4096)? == Ok(vec![1; 4096]), "the snapshot");
    check!(client.read(0, 4096)? == Ok(vec![2; 4096]), "the volume");
    reader.write(0, &[3; 4096], 0)?.is(err::EPERM, "WRITE to a snapshot")?;
    old.stop()?;
    check!(snapshot(&["delete", &volume, "before"])?.status.success(), "delete");
    check!(snapshot(&["list", &volume])?.text.is_empty(), "it is deleted");
    let missing = snapshot(&["delete", &volume, "before"])?;
    check!(missing.text.contains("no snapshot 'before'"), "{}", missing.text);
    Client::connect(server.socket())?;
    server.stop()
}
