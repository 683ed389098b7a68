//! The list of sessions: counted when asked for, and told to end when the server does.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::Duration;

use libtest_mimic::Trial;

use crate::client::{Client, MIB};
use crate::lab::{Backend, Lab, Res, check, fail, per_backend, tail, wait_until};
use crate::server::{Launch, Server};

pub(crate) fn trials() -> Vec<Trial> {
    per_backend(&Backend::ALL, "sigterm_ends_every_session", &[], ends)
}

fn start(lab: &Lab, backend: Backend, more: &[&str]) -> Res<Server> {
    let launch = Launch::new(lab, backend).sparse(16 * MIB)?.metrics().arg("--workers").arg("2");
    more.iter().fold(launch, |launch, &arg| launch.arg(arg)).start()
}

/// At SIGTERM each of many sessions is told to end, wherever it stands, and ends by itself. A connection that
/// comes meanwhile is admitted before or not at all.
fn ends(lab: &Lab, backend: Backend) -> Res {
    let mut server = start(lab, backend, &["--max-connections", "1000"])?;
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
    let some = wait_until(|| (greetings.load(Ordering::Relaxed) > 2).then_some(()));
    check!(some.is_some(), "no client is let in beside the others");
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
