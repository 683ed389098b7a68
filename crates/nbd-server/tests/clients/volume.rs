//! Volumes on an object store, which is a folder here.
//!
//! ```text
//! cargo test -p offlock-nbd --features objects --test clients -- volume/
//! OFFLOCK_TEARINGS=1000 cargo test --release -p offlock-nbd --features objects --test clients -- volume/
//! cargo test -p offlock-nbd --features objects --test clients -- --ignored measure_volume
//! ```

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use libtest_mimic::Trial;

use crate::client::{Client, MIB, cmd, err, flag};
use crate::image::{self, Random};
use crate::images::fio;
use crate::lab::{Backend, Lab, Res, Tracked, check, fail, trial, trial_for, wait_until};
use crate::metrics;
use crate::need::Need;
use crate::server::{Launch, Server, binary};

pub(crate) fn trials() -> Vec<Trial> {
    if !cfg!(feature = "objects") {
        return Vec::new();
    }
    let asked = std::env::var("OFFLOCK_TEARINGS").ok();
    let count: u32 = asked.map_or(8, |n| n.parse().expect("OFFLOCK_TEARINGS is a number"));
    let deadline = Duration::from_secs(120 + 10 * u64::from(count));
    let name = "volume/what_was_flushed_survives_kills";
    vec![
        trial_for(deadline, name, &[], move |lab| kills(lab, count)),
        trial("volume/a_server_that_was_taken_over_ends_with_its_own_status", &[], takeover),
        trial("volume/qemu_img_copies_an_image_in_and_compares", &[Need::QemuImg], copied),
        trial("volume/snapshots_by_the_command_line", &[], snapshots),
        trial("volume/credentials_are_in_no_log", &[], credentials),
        trial("volume/on_an_s3_server", &[Need::Moto], s3),
        trial_for(HOUR, "measure_volume", &[Need::Moto, Need::Fio], measure)
            .with_ignored_flag(true),
    ]
}

const BLOCK: u64 = 4096;
const SIZE: u64 = 64 * MIB;
const HOUR: Duration = Duration::from_secs(3600);

fn address(lab: &Lab) -> String {
    format!("file://{}", lab.path("store").display())
}

fn launch<'a>(lab: &'a Lab, options: &str) -> Launch<'a> {
    let image = format!("vol={}{options}", address(lab));
    Launch::new(lab, Backend::Threads).arg("--image").arg(image)
}

fn serve(lab: &Lab) -> Res<Server> {
    launch(lab, "?size=64M").start()
}

/// Writes, FLUSHes, and kills the server while it has writes that were not flushed. Each block has what
/// was flushed, or was written later: a check that fio lacks, which does not know what a kill may lose.
fn kills(lab: &Lab, count: u32) -> Res {
    let (mut random, mut values) = (Random::new(5), BTreeMap::<u64, Vec<u8>>::new());
    for round in 0..count {
        let mut server = serve(lab)?;
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
        lab.run(&mut command)
    };
    let volume = address(lab);
    let server = serve(lab)?;
    let mut client = server.client()?;
    client.write(0, &[1; BLOCK as usize], flag::FUA)?.ok("WRITE with FUA")?;
    // A server would make the snapshot, but not at once.
    drop(client);
    server.stop()?;
    let made = snapshot(&["create", &volume, "before"])?;
    check!(made.status.success(), "create: {}", made.text);
    let server = serve(lab)?;
    let mut client = server.client()?;
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

/// What the environment of a trial's server has; the values are sought in all that the server says.
const CREDENTIALS: [(&str, &str); 3] = [
    ("AWS_ACCESS_KEY_ID", "AKIAhidden0000000000"),
    ("AWS_SECRET_ACCESS_KEY", "hidden/Secret+Access/Key000000000000000="),
    ("AWS_SESSION_TOKEN", "hidden+Session/Token00000000000000000000=="),
];

/// A server of a volume on an S3 server, or `offlock-nbd snapshot`, by `env`.
fn environment(endpoint: &str) -> Vec<String> {
    let set = |(name, value): (&str, &str)| format!("{name}={value}");
    let region = [("AWS_REGION", "us-east-1"), ("AWS_ENDPOINT", endpoint)];
    let settings = CREDENTIALS.into_iter().chain(region).map(set);
    ["env".to_owned(), "OFFLOCK_LOG=trace".to_owned()].into_iter().chain(settings).collect()
}

fn check_hidden(text: &str) -> Res {
    let seen = text.lines().find(|line| line.contains("hidden"));
    check!(seen.is_none(), "a credential is shown: {seen:?}");
    Ok(())
}

/// A store that refuses each request, and answers with the headers of the request.
fn credentials(lab: &Lab) -> Res {
    let listener = TcpListener::bind("127.0.0.1:0")?;
    let endpoint = format!("http://{}", listener.local_addr()?);
    std::thread::spawn(move || {
        for mut stream in listener.incoming().flatten() {
            let mut request = vec![0; 1 << 16];
            let count = stream.read(&mut request).unwrap_or(0);
            let echo = String::from_utf8_lossy(&request[..count]);
            let answer = format!(
                "HTTP/1.1 403 Forbidden\r\nContent-Length: {}\r\nConnection: close\r\n\r\n{echo}",
                echo.len()
            );
            let _ = stream.write_all(answer.as_bytes());
        }
    });
    let image = "s3://bucket/vol?size=64M";
    let launch = Launch::new(lab, Backend::Threads).through(["env", "OFFLOCK_LOG=trace"]);
    let launch = launch.through(environment(&endpoint)).arg("--image").arg(image);
    let (code, log) = launch.start_refused()?;
    check!(code == 1 && log.contains("403") && log.contains("***"), "{code}: {log}");
    check_hidden(&log)?;
    let mut words = environment(&endpoint).into_iter();
    let mut snapshot = Command::new(words.next().expect("env"));
    snapshot.args(words).arg(binary()).args(["snapshot", "list", "s3://bucket/vol"]);
    let listed = lab.run(&mut snapshot)?;
    check!(listed.status.code() == Some(1) && listed.text.contains("403"), "{}", listed.text);
    check_hidden(&listed.text)
}

/// A local S3 server with the bucket `bucket`, and its address.
fn moto(lab: &Lab) -> Res<(Tracked, String)> {
    let log = lab.path("moto.log");
    let mut command = Command::new("moto_server");
    command.args(["-H", "127.0.0.1", "-p", "0"]).stdin(Stdio::null()).stdout(Stdio::null());
    let process = lab.spawn(command.stderr(File::create(&log)?))?;
    let address = wait_until(|| {
        let text = fs::read_to_string(&log).ok()?;
        let (_, rest) = text.split_once("Running on http://")?;
        rest.split_once('\n').map(|(address, _)| address.trim().to_owned())
    });
    let Some(address) = address else {
        fail!("moto does not run: {}", fs::read_to_string(&log)?);
    };
    let mut stream = TcpStream::connect(&address)?;
    let create = "PUT /bucket HTTP/1.0\r\nHost: 127.0.0.1\r\nContent-Length: 0\r\n\r\n";
    stream.write_all(create.as_bytes())?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer)?;
    check!(answer.contains(" 200 "), "no bucket: {answer}");
    Ok((process, format!("http://{address}")))
}

fn s3(lab: &Lab) -> Res {
    let (_moto, endpoint) = moto(lab)?;
    let launch = |socket: &str, options: &str| {
        let bucket = if socket == "none" { "no-bucket" } else { "bucket" };
        let image = format!("vol=s3://{bucket}/a/vol{options}");
        let launch = Launch::bare(lab).on_socket(socket).through(environment(&endpoint));
        launch.arg("--image").arg(image).arg("--metrics").arg(lab.path(&format!("{socket}.m")))
    };
    let (code, log) = launch("none", "?size=64M").start_refused()?;
    check!(code == 1 && log.contains("NoSuchBucket"), "{code}: {log}");
    let (code, log) = launch("s0", "").start_refused()?;
    check!(code == 1 && log.contains("no volume 's3://bucket/a/vol'"), "{code}: {log}");
    let mut server = launch("s1", "?size=64M").start()?;
    let mut client = server.client()?;
    let written: Vec<u8> = (0..3 * MIB).map(|at| (at / 512 % 251) as u8).collect();
    client.write(BLOCK, &written, 0)?.ok("WRITE")?;
    client.flush()?.ok("FLUSH")?;
    client.plain(cmd::TRIM, 0, 2 * MIB, MIB)?.ok("TRIM")?;
    client.flush()?.ok("FLUSH")?;
    let (code, refusal) = launch("s2", "").start_refused()?;
    check!(code == 1 && refusal.contains("--takeover"), "a second server: {code}\n{refusal}");
    let metrics = metrics::ask(&lab.path("s1.m"), "GET /metrics HTTP/1.1\r\n\r\n")?.1;
    check!(metrics.contains("volume_puts_total{export=\"vol\"}"), "{metrics}");
    server.kill();
    server.ended()?;
    for text in [&log, &server.log(), &refusal, &metrics] {
        check_hidden(text)?;
    }
    let mut first = launch("s3", "").start()?;
    let mut client = first.client()?;
    let mut wanted = vec![0; 4 * MIB as usize];
    wanted[BLOCK as usize..][..written.len()].copy_from_slice(&written);
    wanted[2 * MIB as usize..3 * MIB as usize].fill(0);
    check!(client.read(0, 4 * MIB as u32)? == Ok(wanted.clone()), "after a kill");
    let second = launch("s4", "").arg("--takeover").start()?;
    client.write(0, &[9; BLOCK as usize], 0)?.ok("WRITE to memory")?;
    client.flush()?.is(err::EIO, "FLUSH of the first server")?;
    check!(first.ended()?.code() == Some(3), "{}", first.log());
    check!(second.client()?.read(0, 4 * MIB as u32)? == Ok(wanted), "after a takeover");
    second.stop()
}

/// Prints what requests of clients cost on a local S3 server, which itself needs some milliseconds for
/// each request.
///
/// The requests that the database sends by itself are counted too.
fn measure(lab: &Lab) -> Res {
    const OTHERS: [&str; 3] = ["gets", "lists", "deletes"];
    let (_moto, endpoint) = moto(lab)?;
    let metrics = lab.path("metrics");
    let start = || {
        let launch = Launch::new(lab, Backend::Threads).through(environment(&endpoint));
        let launch =
            launch.through(["OFFLOCK_LOG=info"]).arg("--image").arg("vol=s3://bucket/vol?size=4T");
        launch.arg("--cache").arg("256M").arg("--metrics").arg(&metrics).start()
    };
    let count = |names: &[&str]| -> Res<u64> {
        let page = metrics::ask(&metrics, "GET /metrics HTTP/1.1\r\n\r\n")?.1;
        let value = |line: &str| {
            let (name, value) = line.split_once("{export=\"vol\"} ")?;
            let asked = names.iter().any(|asked| name.ends_with(&format!("volume_{asked}_total")));
            asked.then(|| value.parse().unwrap_or(0))
        };
        Ok(page.lines().filter_map(value).sum())
    };
    let server = start()?;
    let mut client = server.client()?;
    let mut random = Random::new(1);
    let timed = |what: &str, run: &mut dyn FnMut() -> Res<u64>| -> Res {
        let (puts, others) = (count(&["puts"])?, count(&OTHERS)?);
        let (bytes, since) = (count(&["put_bytes"])?, Instant::now());
        let written = run()?;
        let (time, puts, others) =
            (since.elapsed(), count(&["puts"])? - puts, count(&OTHERS)? - others);
        let bytes = (count(&["put_bytes"])? - bytes) as f64 / written.max(1) as f64;
        println!("| {what} | {puts} | {others} | {bytes:.2} | {time:.2?} |");
        Ok(())
    };
    println!("| operation | PUTs | other requests | bytes PUT per byte written | time |");
    println!("|---|---|---|---|---|");
    for writes in [1, 100] {
        timed(&format!("{writes} random writes of 4 KiB and a FLUSH"), &mut || {
            for _ in 0..writes {
                let at = random.below(16 << 20) * BLOCK;
                client.write(at, &[1; BLOCK as usize], 0)?.ok("WRITE")?;
            }
            client.flush()?.ok("FLUSH")?;
            Ok(writes * BLOCK)
        })?;
    }
    timed("256 MiB in order, and a FLUSH", &mut || {
        let data: Vec<u8> = (0..MIB).map(|at| (at % 251) as u8).collect();
        for at in 0..256 {
            client.write(at * MIB, &data, 0)?.ok("WRITE")?;
        }
        client.flush()?.ok("FLUSH")?;
        Ok(256 * MIB)
    })?;
    timed("one minute without a request of a client", &mut || {
        std::thread::sleep(Duration::from_secs(60));
        Ok(0)
    })?;
    for at in 0..2048 {
        let written = client.write(at * 1024 * MIB, &[1; BLOCK as usize], 0);
        written.map_err(|_| server.log())?.ok("WRITE")?;
    }
    client.flush()?.ok("FLUSH")?;
    timed("TRIM of 2 TiB with data in each GiB, and a FLUSH", &mut || {
        for at in 0..1024 {
            client.plain(cmd::TRIM, 0, at * 2048 * MIB, 2048 * MIB)?.ok("TRIM")?;
        }
        client.flush()?.ok("FLUSH")?;
        Ok(0)
    })?;
    client.write(0, &[1; 1 << 20], 0)?.ok("WRITE")?;
    drop(client);
    server.stop()?;
    let server = start()?;
    let mut client = server.client()?;
    for what in ["the first read of a server, of 4 KiB", "a cold read of 4 KiB"] {
        timed(what, &mut || {
            let at = random.below(16) * 65536;
            check!(client.read(at, 4096)?.is_ok_and(|read| read == [1; 4096]), "{what}");
            Ok(0)
        })?;
    }
    let image = lab.path("local.img");
    image::sparse(&image, 64 * MIB)?;
    let local = Launch::bare(lab).on_socket("l").image(&image);
    let local = local.arg("--cache").arg("256M").start()?;
    let args = ["--rw=randread", "--bs=4k", "--iodepth=32", "--size=64M", "--time_based"];
    let last = ["--runtime=5", "--output-format=terse", "--terse-version=3"];
    for (what, server) in [("a local image", &local), ("a volume", &server)].repeat(3) {
        let mut warm = server.client()?;
        for at in 0..64 {
            check!(warm.read(at * MIB, MIB as u32)?.is_ok(), "{what}");
        }
        let text = lab.run_ok(&mut fio(server, &[&args[..], &last[..]].concat()))?;
        let rate = text.split(';').nth(7).unwrap_or("?").to_owned();
        println!("cached random reads of 4 KiB, depth 32, of {what}: {rate} a second");
    }
    Ok(())
}
