//! The figures, for people and for programs.

use std::collections::{HashMap, HashSet};

use rustix::process::{Pid, Resource, Rlimit, getrlimit, prlimit};

use crate::lab::*;

pub(crate) fn trials() -> Vec<Trial> {
    all([
        trial("metrics/count_what_clients_do", &[], counts),
        trial("metrics/of_two_files_with_one_name", &[], one_name),
        trial("metrics/by_curl", &[Need::Curl], by_curl),
        trial("metrics/slow_readers_harm_nobody", &[], slow_readers),
        trial("metrics/a_stopped_server_keeps_its_clients", &[], stopped),
        trial("metrics/no_thread_for_a_client", &[], no_thread),
    ])
}

fn start(lab: &Lab) -> Res<(Server, PathBuf)> {
    let (image, path) = (lab.path("a.img"), lab.path("metrics"));
    image::sparse(&image, MIB)?;
    let launch = Launch::threads(lab).image(&image).with("--workers 2");
    Ok((launch.arg("--metrics").arg(&path).start()?, path))
}

/// Head and body of the answer to a request.
pub(crate) fn ask(path: &Path, request: &str) -> Res<(String, String)> {
    let mut stream = UnixStream::connect(path)?;
    stream.set_read_timeout(Some(PATIENCE))?;
    stream.write_all(request.as_bytes())?;
    let mut text = String::new();
    stream.read_to_string(&mut text)?;
    let (head, body) = text.split_once("\r\n\r\n").ok_or_else(|| format!("no head: {text:?}"))?;
    Ok((head.to_string(), body.to_string()))
}

/// Every value by its name and label; fails on what Prometheus, or `promtool check metrics`, would not take.
pub(crate) fn values(path: &Path) -> Res<HashMap<String, f64>> {
    let (head, body) = ask(path, "GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")?;
    check!(head.starts_with("HTTP/1.0 200 OK\r\n"), "{head}");
    check!(head.contains("text/plain; version=0.0.4"), "{head}");
    check!(head.contains(&format!("Content-Length: {}", body.len())), "{head}");
    parse(&body)
}

fn parse(body: &str) -> Res<HashMap<String, f64>> {
    let mut found = HashMap::new();
    let (mut helped, mut family) = (String::new(), String::new());
    let mut families = HashSet::new();
    let is_word = |name: &str| {
        let ok = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'_';
        name.starts_with("offlock_nbd_") && name.bytes().all(ok)
    };
    for line in body.lines() {
        if let Some(rest) = line.strip_prefix("# HELP ") {
            let (name, help) = rest.split_once(' ').ok_or(format!("{line:?}"))?;
            check!(is_word(name) && !help.trim().is_empty(), "{line:?}");
            check!(families.insert(name), "{name} has two families");
            helped = name.to_string();
        } else if let Some(rest) = line.strip_prefix("# TYPE ") {
            let (name, kind) = rest.split_once(' ').ok_or(format!("{line:?}"))?;
            check!(name == helped, "{line:?} without help before it");
            check!((kind == "counter") == name.ends_with("_total"), "{line:?}");
            check!(["counter", "gauge"].contains(&kind), "{line:?}");
            // Of a histogram or a summary, and a kind in a name.
            let odd = ["_count", "_sum", "_bucket", "_gauge", "_counter", "_info"];
            check!(!odd.iter().any(|end| name.ends_with(end)), "{line:?}");
            family = name.to_string();
        } else {
            check!(!line.is_empty() && !line.starts_with('#'), "{line:?}");
            let (name, value) = line.rsplit_once(' ').ok_or(format!("{line:?}"))?;
            let bare = name.split('{').next().unwrap_or_default();
            check!(bare == family, "{line:?} is not of {family}");
            let value: f64 = value.parse().map_err(|e| format!("{line:?}: {e}"))?;
            check!(value.is_finite() && value >= 0.0, "{line:?}");
            check!(found.insert(name.to_string(), value).is_none(), "{name} twice");
        }
    }
    check!(body.ends_with('\n') && found.len() > 16, "{} values:\n{body}", found.len());
    Ok(found)
}

/// Requests, bytes, hits and errors are those of the clients; over several scrapes they only grow.
fn counts(lab: &Lab) -> Res {
    let (server, path) = start(lab)?;
    let before = values(&path)?;
    let get = |values: &HashMap<String, f64>, name: &str| -> Res<f64> {
        Ok(*values.get(&format!("offlock_nbd_{name}")).ok_or(format!("no {name}"))?)
    };
    check!(get(&before, "connections")? == 0.0 && get(&before, "workers")? == 2.0, "{before:?}");
    let mut client = server.client()?;
    let mut other = server.client()?;
    for _ in 0..3 {
        client.read(0, 4096)?.map_err(|e| format!("read: {e}"))?;
        other.write(8192, &[1; 512], 0)?.ok("write")?;
    }
    client.flush()?.ok("flush")?;
    client.plain(cmd::TRIM, 0, 0, 4096)?.ok("trim")?;
    check!(client.read(MIB, 4096)?.is_err(), "past the end");
    let after = values(&path)?;
    for (name, wanted) in [
        ("connections", 2.0),
        ("export_connections{export=\"vol\"}", 2.0),
        ("requests_total{type=\"read\"}", 3.0),
        ("requests_total{type=\"write\"}", 3.0),
        ("requests_total{type=\"flush\"}", 1.0),
        ("requests_total{type=\"other\"}", 1.0),
        ("bytes_total{direction=\"read\"}", 12_288.0),
        ("bytes_total{direction=\"written\"}", 1536.0),
        ("errors_total", 1.0),
    ] {
        let found = get(&after, name)?;
        check!(found == wanted, "{name} is {found}, wanted {wanted}");
    }
    check!(get(&after, "read_hits_total")?.total_cmp(&1.0).is_ge(), "no hits");
    for (name, value) in &before {
        let grown = after.get(name).is_some_and(|after| after >= value);
        check!(!name.contains("_total") || grown, "{name} was {value}: {:?}", after.get(name));
    }
    server.stop()
}

/// A file of a folder takes the name of another that a client has open: the figures have the name once.
fn one_name(lab: &Lab) -> Res {
    let (folder, path) = (lab.path("folder"), lab.path("metrics"));
    fs::create_dir(&folder)?;
    image::sparse(&folder.join("a"), MIB)?;
    let launch = Launch::threads(lab).arg("--export-dir").arg(&folder);
    let server = launch.arg("--metrics").arg(&path).start()?;
    let first = server.client_of("a")?;
    image::sparse(&folder.join("new"), 2 * MIB)?;
    fs::rename(folder.join("new"), folder.join("a"))?;
    let second = server.client_of("a")?;
    let found = values(&path)?;
    let open = found.get("offlock_nbd_export_connections{export=\"a\"}");
    check!(open == Some(&2.0), "{found:?}");
    drop((first, second));
    server.stop()
}

fn by_curl(lab: &Lab) -> Res {
    let (server, path) = start(lab)?;
    let socket = path.to_str().expect("temporary paths are UTF-8");
    let curl = |more: &[&str], url: &str| {
        let mut command = Command::new("curl");
        command.args(["-sS", "--max-time", "30", "--unix-socket", socket]).args(more).arg(url);
        lab.run_ok(&mut command)
    };
    parse(&curl(&["--fail"], "http://localhost/metrics")?)?;
    parse(&curl(&["--fail", "--http1.0"], "http://localhost/metrics")?)?;
    let head = curl(&["--head"], "http://localhost/metrics")?;
    check!(head.starts_with("HTTP/1.0 200 OK"), "{head}");
    let code = ["-o", "/dev/null", "-w", "%{http_code}"];
    check!(curl(&code, "http://localhost/other")? == "404", "another page");
    let post = [&code[..], &["--data", "x"]].concat();
    check!(curl(&post, "http://localhost/metrics")? == "405", "another method");
    server.stop()
}

/// Who asks and does not read, or does not ask: the next one gets its answer, clients are served, and the
/// server stops.
fn slow_readers(lab: &Lab) -> Res {
    let (mut server, path) = start(lab)?;
    let mut mute: Vec<UnixStream> = Vec::new();
    for said in ["", "GET /metrics HTTP/1.1\r\n\r\n", "GET", "no sense\n\n"] {
        let mut stream = UnixStream::connect(&path)?;
        stream.write_all(said.as_bytes())?;
        mute.push(stream);
    }
    server.still_serves()?;
    values(&path)?;
    // More than anybody asks for.
    let mut long = UnixStream::connect(&path)?;
    long.set_write_timeout(Some(PATIENCE))?;
    let _ = long.write_all(&vec![b'x'; 1 << 20]); // it may be cut off
    let mut last = UnixStream::connect(&path)?;
    last.write_all(b"GET ")?;
    values(&path)?;
    server.still_serves()?;
    drop(mute);
    // The server has 64 clients at a time, and closes the oldest for the next one. Were each silent client
    // kept until it is late, after 5 s, this answer would take 35 s.
    let since = Instant::now();
    let crowd = (0..500).map(|_| UnixStream::connect(&path)).collect::<Result<Vec<_>, _>>()?;
    values(&path)?;
    check!(since.elapsed() < Duration::from_secs(25), "answered after {:?}", since.elapsed());
    drop(crowd);
    // One is being waited for: the end does not wait for it to be late.
    let silent = UnixStream::connect(&path)?;
    server.stop()?;
    drop((silent, last));
    Ok(())
}

/// A server that is stopped and continued while it waits for a request answers it.
fn stopped(lab: &Lab) -> Res {
    let (server, path) = start(lab)?;
    let mut stream = UnixStream::connect(&path)?;
    stream.set_read_timeout(Some(PATIENCE))?;
    stream.write_all(b"GET /metrics ")?;
    for number in [libc::SIGSTOP, libc::SIGCONT] {
        thread::sleep(Duration::from_millis(50)); // by now its thread waits, or is stopped
        signal(server.pid(), number);
    }
    stream.write_all(b"HTTP/1.1\r\n\r\n")?;
    let mut text = String::new();
    stream.read_to_string(&mut text)?;
    check!(text.starts_with("HTTP/1.0 200 OK"), "{text:?}");
    server.stop()
}

/// A client for which the system has no thread is closed, and a later one is answered.
fn no_thread(lab: &Lab) -> Res {
    let (server, path) = start(lab)?;
    let limit = |limit| prlimit(Pid::from_raw(server.pid() as i32), Resource::As, limit);
    let room = server.memory("VmSize")? + MIB; // for no stack
    let before = limit(Rlimit { current: Some(room), ..getrlimit(Resource::As) })?;
    // Some of them get the stack of a thread that has ended.
    let crowd = (0..16).map(|_| UnixStream::connect(&path)).collect::<Result<Vec<_>, _>>()?;
    server.logged("cannot accept a client of the metrics")?;
    limit(before)?;
    drop(crowd);
    values(&path)?;
    server.stop()
}
