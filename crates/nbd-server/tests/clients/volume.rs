//! Volumes on an object store: a folder, or a local S3 server.
//!
//! ```text
//! cargo test -p offlock-nbd --features objects --test clients -- volume/
//! OFFLOCK_TEARINGS=100 cargo test --release -p offlock-nbd --features objects --test clients -- volume/what
//! ```

use std::collections::BTreeMap;

use crate::images::fio;
use crate::lab::*;
use crate::metrics;
use crate::s3::{Answer, Proxy, check_hidden, environment, moto};
use crate::server::binary;

pub(crate) fn trials() -> Vec<Trial> {
    if !cfg!(feature = "objects") {
        return Vec::new();
    }
    let asked = std::env::var("OFFLOCK_TEARINGS").ok();
    let asked: Option<u32> = asked.map(|n| n.parse().expect("OFFLOCK_TEARINGS is a number"));
    let (folder, s3) = (asked.unwrap_or(5), asked.unwrap_or(3));
    let deadline = |count: u32| Duration::from_secs(300 + 30 * u64::from(count));
    let tools = [Need::QemuImg, Need::Fio];
    let with_s3 = [Need::QemuImg, Need::Fio, Need::Moto];
    let name = "volume/what_was_flushed_survives_kills";
    all([
        trial_for(deadline(folder), name, &tools, move |lab| kills(&Store::folder(lab), folder)),
        trial_for(deadline(s3), &format!("{name}_on_s3"), &with_s3, move |lab| {
            kills_on_s3(lab, s3)
        }),
        trial("volume/a_server_that_was_taken_over_ends_with_its_own_status", &[], |lab| {
            takeover(&Store::folder(lab))
        }),
        trial("volume/snapshots_by_the_command_line", &[], snapshots),
        trial("volume/credentials_are_in_no_log", &[], credentials),
        trial("volume/a_server_is_stopped_while_it_opens_a_volume", &[], stopped),
        trial("volume/on_an_s3_server", &[Need::Moto], on_s3),
        trial("volume/answers_that_are_lost_late_or_repeated", &[Need::Moto], bad_answers),
    ])
}

const BLOCK: u64 = 4096;
/// Bytes of a volume. The trial of kills checks the first half by itself; a quarter has an image, and fio writes to
/// the last.
const SIZE: u64 = 128 * MIB;
const HALF: u64 = SIZE / 2;
const QUARTER: u64 = SIZE / 4;

/// Where a trial's volume lies.
struct Store<'l> {
    lab: &'l Lab,
    address: String,
    /// For `env`.
    environment: Vec<String>,
}

impl<'l> Store<'l> {
    fn folder(lab: &'l Lab) -> Self {
        let address = format!("file://{}", lab.path("store").display());
        Self { lab, address, environment: vec!["env".to_owned()] }
    }

    fn s3(lab: &'l Lab, endpoint: &str) -> Self {
        let mut environment = environment(endpoint);
        environment.push("OFFLOCK_LOG=info".to_owned());
        Self { lab, address: "s3://bucket/a/vol".to_owned(), environment }
    }

    fn launch(&self, options: &str) -> Launch<'l> {
        let launch = Launch::new(self.lab, Backend::Threads).through(self.environment.clone());
        launch.arg("--image").arg(format!("vol={}{options}", self.address))
    }

    fn serve(&self) -> Res<Server> {
        self.launch("?size=128M").start()
    }
}

/// What a volume must have after a kill: of each block what was flushed, or was written later.
struct Blocks {
    random: Random,
    allowed: BTreeMap<u64, Vec<u8>>,
}

impl Blocks {
    fn new() -> Self {
        Self { random: Random::new(5), allowed: BTreeMap::new() }
    }

    fn compare(&mut self, client: &mut Client, round: u32) -> Res {
        for at in (0..HALF).step_by(MIB as usize) {
            let Ok(read) = client.read(at, MIB as u32)? else {
                fail!("round {round}: the MiB from {at} on is not readable");
            };
            for (block, read) in (at / BLOCK..).zip(read.chunks(BLOCK as usize)) {
                let found = read[0];
                let at = format!("round {round}: block {block}");
                check!(read.iter().all(|&byte| byte == found), "{at} is torn");
                let allowed = self.allowed.entry(block).or_insert(vec![0]);
                check!(allowed.contains(&found), "{at}: {found} of {allowed:?}");
                *allowed = vec![found];
            }
        }
        Ok(())
    }

    /// Writes, TRIMs and FLUSHes, and leaves some that were not flushed.
    fn change(&mut self, client: &mut Client) -> Res {
        let random = &mut self.random;
        for step in 0..60 {
            let (first, byte) = (random.below(HALF / BLOCK - 40), 1 + random.below(255) as u8);
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
                let allowed = self.allowed.entry(block).or_insert(vec![0]);
                allowed.push(if trims { 0 } else { byte });
            }
            if step == 40 || random.below(12) == 0 {
                client.flush()?.ok("FLUSH")?;
                for allowed in self.allowed.values_mut() {
                    let last = *allowed.last().unwrap_or(&0);
                    *allowed = vec![last];
                }
            }
        }
        Ok(())
    }
}

/// The bytes of an export from `at` on, for qemu-img.
fn quarter(server: &Server, at: u64) -> String {
    let nbd = r#"{"driver":"nbd","server":{"type":"unix","path":"PATH"},"export":"vol"}"#;
    let nbd = nbd.replace("PATH", &server.socket().display().to_string());
    format!(r#"json:{{"driver":"raw","offset":{at},"size":{QUARTER},"file":{nbd}}}"#)
}

/// Copies an image in, and compares it. Then again and again: writes, FLUSHes, kills the server while fio writes,
/// and while there are writes that were not flushed, and compares all: the image, each block that fio has written, old or
/// new, by its checksum, and the rest by the trial's own check, because fio does not know what a kill may lose.
fn kills(store: &Store<'_>, count: u32) -> Res {
    let lab = store.lab;
    let image = lab.path("a.img");
    image::with_parts(&image, QUARTER, 20, 3)?;
    let path = image.to_str().expect("a path of the trial");
    let mut server = store.serve()?;
    let convert = ["convert", "-n", "-f", "raw", path, &quarter(&server, HALF)];
    lab.run_ok(Command::new("qemu-img").args(convert))?;
    let jobs = [
        "--bs=4k",
        "--iodepth=16",
        "--verify=crc32c",
        "--verify_fatal=1",
        "--size=16M",
        "--numjobs=2",
        "--offset=96M",
        "--offset_increment=16M",
    ];
    let writes = [&jobs[..], &["--rw=randwrite"]].concat();
    lab.run_ok(&mut fio(&server, &writes))?;
    // A MiB at a time: moto needs some milliseconds for a request.
    let reads = [&jobs[1..], &["--rw=read", "--bs=1m", "--verify_interval=4k"]].concat();
    let more = ["--do_verify=0", "--time_based", "--runtime=100", "--randrepeat=0", "--fsync=64"];
    let writes = [&writes[..], &more].concat();
    let mut blocks = Blocks::new();
    for round in 0..=count {
        let mut client = server.client()?;
        blocks.compare(&mut client, round)?;
        lab.run_ok(Command::new("qemu-img").args(["compare", path, &quarter(&server, HALF)]))
            .map_err(|error| format!("round {round}: {error:?}"))?;
        lab.run_ok(&mut fio(&server, &reads))
            .map_err(|error| format!("round {round}: {error:?}"))?;
        if round == count {
            break;
        }
        let mut command = fio(&server, &writes);
        let _fio = lab.spawn(command.stdout(Stdio::null()).stderr(Stdio::null()))?;
        blocks.change(&mut client)?;
        thread::sleep(Duration::from_millis(blocks.random.below(500)));
        server.kill();
        server.ended()?;
        server = store.serve()?;
    }
    server.stop()
}

/// A hundred kills at a time: moto keeps all objects in memory.
fn kills_on_s3(lab: &Lab, count: u32) -> Res {
    for begun in (0..count).step_by(100) {
        let (_moto, endpoint) = moto(lab)?;
        kills(&Store::s3(lab, &endpoint), (count - begun).min(100))?;
    }
    Ok(())
}

/// A takeover of a volume on S3, and the errors of a volume and of a bucket that do not exist. No log shows the
/// credentials.
fn on_s3(lab: &Lab) -> Res {
    let (_moto, endpoint) = moto(lab)?;
    let mut store = Store::s3(lab, &endpoint);
    store.environment = environment(&endpoint); // with every line of the log
    let address = std::mem::replace(&mut store.address, "s3://no-bucket/vol".to_owned());
    let missing = store.launch("?size=64M").refused(1, &["NoSuchBucket"])?;
    store.address = address;
    let none = store.launch("").refused(1, &["'s3://bucket/a/vol': there is none"])?;
    [missing, none].iter().try_for_each(|log| check_hidden(log))?;
    takeover(&store)
}

/// The volume of a killed server is opened by the next one, and has what was flushed. The volume of a running server
/// is opened with `--takeover` only, which ends that server.
fn takeover(store: &Store<'_>) -> Res {
    let lab = store.lab;
    let mut killed = store.serve()?;
    let mut client = killed.client()?;
    client.write(BLOCK, &vec![5; 3 * MIB as usize], flag::FUA)?.ok("WRITE with FUA")?;
    client.plain(cmd::TRIM, 0, 2 * MIB, MIB)?.ok("TRIM")?;
    client.flush()?.ok("FLUSH")?;
    killed.kill();
    killed.ended()?;
    let mut first = store.launch("").metrics().start()?;
    let mut client = first.client()?;
    let mut wanted = [vec![0; BLOCK as usize], vec![5; 3 * MIB as usize]].concat();
    wanted[2 * MIB as usize..3 * MIB as usize].fill(0);
    check!(client.read(0, wanted.len() as u32)? == Ok(wanted), "after a kill");
    client.write(0, &[1; BLOCK as usize], flag::FUA)?.ok("WRITE with FUA")?;
    check!(first.figure("volume_puts_total{export=\"vol\"}")? > 0, "no PUT is counted");
    let other = || store.launch("").socket(&lab.path("s2"));
    let log = other().refused(1, &["--takeover"])?;
    for takeover in [&[][..], &["--takeover"]] {
        let reader = store.launch(",readonly").socket(&lab.path("s2"));
        let reader = takeover.iter().fold(reader, Launch::arg);
        let log = reader.refused(1, &["serve a snapshot"])?;
        check!(!log.contains("--takeover"), "a server that only reads: {log}");
    }
    let second = other().arg("--takeover").start()?;
    let mut new = second.client()?;
    check!(new.read(0, 4096)? == Ok(vec![1; 4096]), "what the first server has flushed");
    new.write(0, &[2; BLOCK as usize], flag::FUA)?.ok("WRITE with FUA")?;
    client.write(BLOCK, &[3; BLOCK as usize], 0)?.ok("WRITE to memory")?;
    client.flush()?.is(err::EIO, "FLUSH of the first server")?;
    let status = first.ended()?;
    check!(status.code() == Some(3), "{status}: {}", first.log());
    check!(first.log().contains("taken it over"), "{}", first.log());
    for text in [&log, &killed.log(), &first.log(), &second.log()] {
        check_hidden(text)?;
    }
    second.stop()?;
    let third = store.serve()?;
    let mut client = third.client()?;
    check!(client.read(0, 4096)? == Ok(vec![2; 4096]), "what the second server has flushed");
    let late = client.read(BLOCK, 4096)?;
    check!(late == Ok(vec![5; 4096]), "what the first one wrote after its end");
    third.stop()
}

fn snapshots(lab: &Lab) -> Res {
    let snapshot = |words: &[&str]| {
        let mut command = Command::new(binary());
        command.arg("snapshot").args(words);
        lab.run(&mut command)
    };
    let store = Store::folder(lab);
    let volume = store.address.clone();
    let server = store.serve()?;
    let mut client = server.client()?;
    client.write(0, &[1; BLOCK as usize], flag::FUA)?.ok("WRITE with FUA")?;
    // A server would make the snapshot, but not at once.
    drop(client);
    server.stop()?;
    let made = snapshot(&["create", &volume, "before"])?;
    check!(made.status.success(), "create: {}", made.text);
    let server = store.serve()?;
    let mut client = server.client()?;
    client.write(0, &[2; BLOCK as usize], flag::FUA)?.ok("WRITE with FUA")?;
    let again = snapshot(&["create", &volume, "before"])?;
    check!(again.status.code() == Some(1) && again.text.contains("already"), "{}", again.text);
    let list = snapshot(&["list", &volume])?;
    check!(list.text.trim_end().ends_with("UTC  before"), "{}", list.text);
    let old = store.launch("?snapshot=before").socket(&lab.path("s2")).start()?;
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

/// A store that refuses each request, and answers with the headers of the request. The credentials are those of the
/// environment, or come from the provider of the machine, which is the same server.
fn credentials(lab: &Lab) -> Res {
    let listener = TcpListener::bind("127.0.0.1:0")?;
    let endpoint = format!("http://{}", listener.local_addr()?);
    thread::spawn(move || {
        for mut stream in listener.incoming().flatten() {
            let mut request = vec![0; 1 << 16];
            let count = stream.read(&mut request).unwrap_or(0);
            let echo = String::from_utf8_lossy(&request[..count]);
            let (status, text) = match echo.split(' ').nth(1).unwrap_or_default() {
                "/latest/api/token" => ("200 OK", "hiddenMetadataToken"),
                "/latest/meta-data/iam/security-credentials/" => ("200 OK", "role"),
                "/latest/meta-data/iam/security-credentials/role" => ("200 OK", ISSUED),
                _ => ("403 Forbidden", &*echo),
            };
            let answer = format!(
                "HTTP/1.1 {status}\r\nContent-Length: {}\r\nConnection: close\r\n\r\n{text}",
                text.len()
            );
            let _ = stream.write_all(answer.as_bytes());
        }
    });
    let issued = ["env", "OFFLOCK_LOG=trace", "AWS_REGION=us-east-1"].map(str::to_owned);
    let places = [format!("AWS_ENDPOINT={endpoint}"), format!("AWS_METADATA_ENDPOINT={endpoint}")];
    let issued = issued.into_iter().chain(places).collect();
    for environment in [environment(&endpoint), issued] {
        let image = "s3://bucket/vol?size=64M";
        let launch = Launch::threads(lab).through(environment.clone());
        let log = launch.arg("--image").arg(image).refused(1, &["403", "***"])?;
        check_hidden(&log)?;
        let mut words = environment.into_iter();
        let mut snapshot = Command::new(words.next().expect("env"));
        snapshot.args(words).arg(binary()).args(["snapshot", "list", "s3://bucket/vol"]);
        let listed = lab.run(&mut snapshot)?;
        check!(listed.status.code() == Some(1) && listed.text.contains("403"), "{}", listed.text);
        check_hidden(&listed.text)?;
    }
    let address = "s3://KEY:hidden/+=@bucket/vol";
    for words in [&["--image", address][..], &["snapshot", "list", address], &["snapshot", address]]
    {
        let refused = lab.run(Command::new(binary()).args(words))?;
        check!(refused.status.code() == Some(2), "{words:?}: {}", refused.text);
        check_hidden(&refused.text)?;
    }
    Ok(())
}

/// What a machine's provider answers.
const ISSUED: &str = r#"{"Code": "Success", "LastUpdated": "2026-01-01T00:00:00Z", "Type": "AWS-HMAC",
    "AccessKeyId": "ASIAhidden0000000000", "SecretAccessKey": "hiddenIssuedSecretKey000000000000",
    "Token": "IQoJhiddenIssuedToken//////////wEaCXVzLWVhc3QtMSJHMEUCIQD", "Expiration": "2099-01-01T00:00:00Z"}"#;

/// SIGTERM ends a server within seconds while the store refuses each request, or answers none.
fn stopped(lab: &Lab) -> Res {
    for answer in [Answer::Status(503), Answer::Late(1000)] {
        let proxy = Proxy::new("http://127.0.0.1:9", Duration::ZERO, move |_| answer)?;
        let (store, socket) = (Store::s3(lab, &proxy.endpoint), lab.path("s"));
        let mut server = store.launch("?size=64M").socket(&socket).start_silent()?;
        eventually("it sends a request", || proxy.seen("").0 > 0)?;
        server.signal(libc::SIGTERM);
        let since = Instant::now();
        let status = server.wait_for(Duration::from_secs(60))?;
        let Some(status) = status else { fail!("{answer:?}: it runs on after SIGTERM") };
        check!(status.code() == Some(1), "{answer:?}: {status}");
        check!(since.elapsed() < Duration::from_secs(20), "{answer:?}: {:?}", since.elapsed());
    }
    Ok(())
}

/// One request in four fails in some way, then all do for a while, then one is late. Each FLUSH succeeds, within the
/// time that the server waits for a store, and a server that is started later has what was flushed.
fn bad_answers(lab: &Lab) -> Res {
    let (_moto, endpoint) = moto(lab)?;
    let proxy = Proxy::new(&endpoint, Duration::ZERO, |_| Answer::Pass)?;
    let store = Store::s3(lab, &proxy.endpoint);
    let metrics = lab.path("metrics");
    let mut server = store.launch("?size=128M").arg("--metrics").arg(&metrics).start()?;
    let (mut client, mut blocks) = (server.client()?, Blocks::new());
    let mut random = Random::new(9);
    proxy.set_rule(move |first| {
        let creates = first.starts_with("PUT");
        match random.below(28) {
            0 => Answer::Lost,
            1 => Answer::Unanswered,
            2 => Answer::Repeated,
            3 => Answer::Status(429),
            4 => Answer::Status(500),
            5 => Answer::Status(503),
            6 if creates => Answer::Status(409),
            7 => Answer::Late(1),
            _ => Answer::Pass,
        }
    });
    for _ in 0..2 {
        blocks.change(&mut client)?;
    }
    let flush = |client: &mut Client, blocks: &mut Blocks, what: &str| -> Res {
        blocks.change(client)?;
        let since = Instant::now();
        client.flush()?.ok(what)?;
        check!(since.elapsed() < Duration::from_secs(150), "{what}: {:?}", since.elapsed());
        Ok(())
    };
    let burst = Instant::now() + Duration::from_secs(5);
    let is_over = move || Instant::now() > burst;
    proxy.set_rule(move |_| if is_over() { Answer::Pass } else { Answer::Status(503) });
    flush(&mut client, &mut blocks, "FLUSH during a burst of 503")?;
    let mut is_late = true;
    proxy.set_rule(
        move |_| if std::mem::take(&mut is_late) { Answer::Late(60) } else { Answer::Pass },
    );
    flush(&mut client, &mut blocks, "FLUSH whose answer is late")?;
    let page = metrics::ask(&metrics, "GET /metrics HTTP/1.1\r\n\r\n")?.1;
    let failed = page.lines().find(|line| line.contains("volume_failed_total{"));
    check!(failed.is_some_and(|line| !line.ends_with(" 0")), "{failed:?}");
    server.kill();
    server.ended()?;
    let server = store.serve()?;
    blocks.compare(&mut server.client()?, 0)?;
    server.stop()
}
