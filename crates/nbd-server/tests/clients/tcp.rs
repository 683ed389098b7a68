//! Data over TCP, where closing over unread bytes would lose what was sent.

use crate::lab::*;

pub(crate) fn trials() -> Vec<Trial> {
    per_backend(ALL, "tcp_sigterm_delivers", &[], sigterm)
}

/// SIGTERM while 32 replies of 1 MiB are on their way and the client goes on sending requests:
/// every reply arrives whole, then the connection ends without a reset.
fn sigterm(lab: &Lab, backend: Backend) -> Res {
    let launch = Launch::new(lab, backend).parts(64 * MIB, 64, 77)?.with("--workers 1");
    let mut server = launch.with("--tcp 0").start()?;
    check!(server.tcp()?.ip().is_loopback(), "a port alone is open to all: {:?}", server.listeners);
    let mut client = server.tcp_client()?;
    let expected = image::bytes_at(&lab.path("a.img"), 0, 64 << 20)?;
    let reads: Vec<u8> =
        (0..32).flat_map(|i| header(0, cmd::READ, i, 2 * i * MIB, MIB as u32)).collect();
    client.send(&reads)?;
    // One reply shows that the server has all of them: they came in one segment.
    let mut first = Some(client.simple_reply()?);
    server.terminate();
    thread::sleep(Duration::from_millis(200));
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
        thread::sleep(Duration::from_millis(5));
    }
    let mut rest = Vec::new();
    let end = std::io::Read::read_to_end(&mut client.stream, &mut rest);
    check!(end.as_ref().is_ok_and(|rest| rest % (16 + 4096) == 0), "after the last: {end:?}");
    drop(client);
    server.finished()
}
