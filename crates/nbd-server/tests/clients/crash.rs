//! Clients and servers that end under load: nothing acknowledged is lost, and other clients are served.

use crate::images::fio;
use crate::lab::*;

pub(crate) fn trials() -> Vec<Trial> {
    all([
        per_backend(ALL, "client_killed_under_load", &[Need::Fio], client_killed),
        per_backend(ALL, "sigterm_ends_every_session", &[], sessions_end),
    ])
}

/// kill -9 of a fio with 64 writes in flight. A bystander's reads and writes go on, and the dead
/// client's descriptors are released. In the end the tables of contexts are empty.
fn client_killed(lab: &Lab, backend: Backend) -> Res {
    let image = lab.path("a.img");
    image::sparse(&image, 64 * MIB)?;
    let server = Launch::new(lab, backend).image(&image).metrics().start()?;
    let socket = server.socket().to_path_buf();
    let (stop, rounds) = (AtomicBool::new(false), AtomicU64::new(0));

    // The cache's threads keep rings of their own.
    let sockets = || -> Res<usize> {
        let all = server.descriptors()?;
        Ok(all.iter().filter(|path| path.to_string_lossy().starts_with("socket:")).count())
    };
    let outcome: Res = thread::scope(|scope| {
        let bystander = scope.spawn(|| bystander(&socket, &stop, &rounds));
        let result = (|| {
            eventually("the bystander is served", || rounds.load(Ordering::Relaxed) > 0)?;
            let quiet = sockets()?;
            for _ in 0..2 {
                let before = fs::metadata(&image)?.blocks();
                // The first 16 MiB belong to the bystander.
                let load =
                    ["--rw=randwrite", "--bs=16k", "--iodepth=16", "--numjobs=4", "--thread"];
                let end = ["--time_based", "--runtime=60", "--offset=16M", "--size=48M"];
                let mut command = fio(&server, &[&load[..], &end[..]].concat());
                command.current_dir(lab.dir()).stdout(std::process::Stdio::null());
                let mut victim = lab.spawn(&mut command)?;
                eventually("fio writes", || {
                    let grown = fs::metadata(&image).is_ok_and(|now| now.blocks() > before + 256);
                    grown && sockets().is_ok_and(|count| count >= quiet + 4)
                })?;
                victim.signal(libc::SIGKILL);
                victim.wait_for(PATIENCE)?;
                let seen = rounds.load(Ordering::Relaxed);
                let goes_on = || rounds.load(Ordering::Relaxed) > seen + 20;
                eventually("the other client goes on after the kill", goes_on)?;
                let is_released = || sockets().is_ok_and(|count| count <= quiet);
                eventually("sockets of the dead client are closed", is_released)?;
                // Punch its part, so that the second round can be seen to write again.
                let mut client = server.client()?;
                client.plain(cmd::TRIM, 0, 16 * MIB, 48 * MIB)?.ok("TRIM")?;
                client.disconnect()?;
            }
            Ok(())
        })();
        stop.store(true, Ordering::Relaxed);
        let other = bystander.join().expect("returns its failures");
        result.and(other)
    });
    outcome?;
    let empty = wait_until(|| {
        let figures = server.figures().ok()?;
        let in_flight = figures.keys().any(|name| name.starts_with("offlock_nbd_in_flight"));
        (figures.get("offlock_nbd_connections") == Some(&0.0) && !in_flight).then_some(())
    });
    check!(empty.is_some(), "contexts of dead clients are left: {:?}", server.figures()?);
    server.serves_to_the_end()
}

/// Writes and reads back 4 KiB blocks in the first 16 MiB until told to stop.
fn bystander(socket: &Path, stop: &AtomicBool, rounds: &AtomicU64) -> Res {
    let mut client = Client::connect(socket)?.opened("vol")?;
    let mut random = Random::new(7);
    while !stop.load(Ordering::Relaxed) {
        let offset = 4096 * random.below(4096);
        let data = random.bytes(4096);
        client.write(offset, &data, 0)?.ok("the bystander's write")?;
        let back = client.read(offset, 4096)?;
        check!(back.as_ref() == Ok(&data), "the bystander read back other bytes");
        rounds.fetch_add(1, Ordering::Relaxed);
    }
    client.disconnect()
}

/// At SIGTERM each of many sessions is told to end, wherever it stands, and ends by itself. A connection that
/// comes meanwhile is admitted before or not at all.
fn sessions_end(lab: &Lab, backend: Backend) -> Res {
    let mut server = Launch::new(lab, backend)
        .sparse(16 * MIB)?
        .arg("--workers")
        .arg("2")
        .arg("--max-connections")
        .arg("1000")
        .start()?;
    let mut clients = Vec::new();
    for n in 0..300 {
        let mut client = if n % 10 == 0 { server.connect()? } else { server.client()? };
        if n % 10 == 0 {
            client.read_greeting()?;
        } else if n % 10 == 1 {
            check!(client.read(0, 4096)?.is_ok(), "a read");
        }
        clients.push(client);
    }
    let socket = server.socket().to_path_buf();
    let greetings = Arc::new(AtomicU64::new(0));
    let count = Arc::clone(&greetings);
    let came = thread::spawn(move || -> u64 {
        let mut refused = 0;
        // Until the socket is gone; a connection that was not accepted is reset then.
        while let Ok(mut client) = Client::connect(&socket) {
            match client.read_greeting() {
                Ok(_) => drop(count.fetch_add(1, Ordering::Relaxed)), // waited for below
                Err(_) => refused += 1,
            }
            client.stream.set_read_timeout(Some(Duration::from_millis(1))).ok();
            client.closed().ok();
        }
        refused
    });
    let are_let_in = || greetings.load(Ordering::Relaxed) > 2;
    eventually("clients are let in beside the others", are_let_in)?;
    server.terminate();
    for client in &mut clients {
        check!(client.closed()? == 0, "bytes that were not asked for");
    }
    server.finished()?;
    let refused = came.join().expect("no panic");

    let log = server.log();
    check!(!log.contains("while the server stopped"), "one did not end:\n{}", tail(&log, 20));
    // On a slow machine, some of those that were only greeted are gone by then.
    let late = log.matches("no handshake within").count() as u64;
    let told =
        log.lines().find_map(|line| line.split_once("told to end sessions=")?.1.parse().ok());
    let Some(told) = told else { fail!("no session was told:\n{}", tail(&log, 20)) };
    let most = 300 + greetings.load(Ordering::Relaxed) + refused;
    check!((300 - late.min(30)..=most).contains(&told), "{told} were told, of 300 to {most}");
    Ok(())
}
