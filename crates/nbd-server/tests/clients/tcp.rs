//! Data over TCP, where closing over unread bytes would lose what was sent.

use std::time::Duration;

use libtest_mimic::Trial;

use crate::client::{Client, MIB, cmd, header};
use crate::image::{self, Random};
use crate::lab::{Backend, Lab, Res, check, fail, per_backend};
use crate::server::{Launch, Server};

pub(crate) fn trials() -> Vec<Trial> {
    let mut trials = Vec::new();
    trials.extend(per_backend(&Backend::ALL, "tcp_data", &[], data));
    trials.extend(per_backend(&Backend::ALL, "tcp_sigterm_delivers", &[], sigterm));
    trials
}

fn start(lab: &Lab, backend: Backend) -> Res<Server> {
    let launch = Launch::new(lab, backend).parts(64 * MIB, 64, 77)?;
    ["--workers", "1", "--tcp", "127.0.0.1:0"].into_iter().fold(launch, Launch::arg).start()
}

fn client(server: &Server) -> Res<Client> {
    let Some(address) = server.listeners.iter().find_map(|l| l.strip_prefix("tcp:")) else {
        fail!("no TCP listener in {:?}", server.listeners);
    };
    let mut client = Client::connect_tcp(address)?;
    client.greet()?;
    client.go("vol")?;
    Ok(client)
}

/// Writes of many sizes, 16 in flight, read back over another connection and from the file.
fn data(lab: &Lab, backend: Backend) -> Res {
    let server = start(lab, backend)?;
    let (mut client, mut other) = (client(&server)?, client(&server)?);
    let mut random = Random::new(5);
    let mut expected = image::bytes_at(&lab.path("a.img"), 0, 64 << 20)?;
    for round in 0..20 {
        let mut requests = Vec::new();
        for i in 0..16 {
            // Sixteen places of 4 MiB, so those in flight do not overlap.
            let len = 4096 * (1 + random.below(64) as usize);
            let offset = 4 * MIB * i + 4096 * random.below(256);
            let bytes = random.bytes(len);
            expected[offset as usize..offset as usize + len].copy_from_slice(&bytes);
            requests.extend(header(0, cmd::WRITE, i, offset, len as u32));
            requests.extend(bytes);
        }
        client.send(&requests)?;
        let mut answered = 0u32;
        for _ in 0..16 {
            let (answer, cookie) = client.simple_reply()?;
            answer.ok("a write over TCP")?;
            check!(cookie < 16 && answered & 1 << cookie == 0, "a reply to {cookie:#x}");
            answered |= 1 << cookie;
        }
        let offset = 4096 * random.below(12 << 10);
        let wanted = &expected[offset as usize..][..4 << 20];
        let back = other.read(offset, 4 << 20)?;
        check!(back.is_ok_and(|b| b == wanted), "round {round}: other bytes at {offset}");
    }
    client.flush()?.ok("FLUSH")?;
    client.disconnect()?;
    other.disconnect()?;
    server.stop()?;
    let file = image::bytes_at(&lab.path("a.img"), 0, 64 << 20)?;
    check!(file == expected, "the file differs from what was written");
    Ok(())
}

/// SIGTERM while 32 replies of 1 MiB are on their way and the client goes on sending requests:
/// every reply arrives whole, then the connection ends without a reset.
fn sigterm(lab: &Lab, backend: Backend) -> Res {
    let mut server = start(lab, backend)?;
    let mut client = client(&server)?;
    let expected = image::bytes_at(&lab.path("a.img"), 0, 64 << 20)?;
    let reads: Vec<u8> =
        (0..32).flat_map(|i| header(0, cmd::READ, i, 2 * i * MIB, MIB as u32)).collect();
    client.send(&reads)?;
    // One reply shows that the server has all of them: they came in one segment.
    let mut first = Some(client.simple_reply()?);
    server.terminate();
    std::thread::sleep(Duration::from_millis(200));
    // The server does not read these any more, unless it is late to hear of the signal, nor may they
    // cost the replies before them.
    let unwanted: Vec<u8> = (100..200).flat_map(|i| header(0, cmd::READ, i, 0, 4096)).collect();
    client.send(&unwanted)?;
    let mut answered = 0u32;
    for n in 0..32 {
        let (answer, cookie) = match first.take() {
            Some(reply) => reply,
            None => client.simple_reply().map_err(|e| {
                format!("reply {n} after SIGTERM: {}", e.message().unwrap_or_default())
            })?,
        };
        answer.ok("a READ over TCP")?;
        check!(cookie < 32 && answered & 1 << cookie == 0, "a reply to {cookie:#x}");
        answered |= 1 << cookie;
        let wanted = &expected[(2 * cookie * MIB) as usize..][..1 << 20];
        check!(client.recv_vec(1 << 20)? == wanted, "reply {n} has other bytes");
        std::thread::sleep(Duration::from_millis(5));
    }
    let mut rest = Vec::new();
    let end = std::io::Read::read_to_end(&mut client.stream, &mut rest);
    check!(end.as_ref().is_ok_and(|rest| rest % (16 + 4096) == 0), "after the last: {end:?}");
    drop(client);
    server.finished()
}
