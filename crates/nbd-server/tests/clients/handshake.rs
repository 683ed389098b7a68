//! The handshake: what every option is answered, and what bad bytes there lead to.

use crate::lab::*;

pub(crate) fn trials() -> Vec<Trial> {
    all([
        trial("handshake/garbage_closes", &[], garbage),
        trial("handshake/answers_to_options", &[], options),
    ])
}

fn start(lab: &Lab) -> Res<Server> {
    Launch::threads(lab).parts(4 * MIB, 4, 21)?.start()
}

/// Options that are refused, each with its answer; the session goes on, and in the end is aborted or reads.
fn options(lab: &Lab) -> Res {
    let server = start(lab)?;
    let mut name_too_long = info_data("vol");
    name_too_long[3] = 200;
    let mut too_many_requests = info_data("vol");
    too_many_requests[8] = 9;
    let with_tail = [info_data("vol"), vec![1, 2, 3]].concat();
    let malformed = [vec![], vec![0; 3], name_too_long, too_many_requests, with_tail];
    let malformed = malformed.into_iter().flat_map(|data| {
        [(opt::INFO, data.clone(), rep::ERR_INVALID), (opt::GO, data, rep::ERR_INVALID)]
    });
    let others = [
        (4, vec![], rep::ERR_UNSUP),
        (99, b"some data".to_vec(), rep::ERR_UNSUP),
        (0x7fff_ffff, vec![7; 3000], rep::ERR_UNSUP),
        (opt::STARTTLS, vec![], rep::ERR_UNSUP),
        (opt::GO, info_data("nosuch"), rep::ERR_UNKNOWN),
        (opt::LIST, b"data where none belongs".to_vec(), rep::ERR_INVALID),
        (opt::STRUCTURED_REPLY, b"x".to_vec(), rep::ERR_INVALID),
    ];
    let (mut aborted, mut client) = (server.greeted()?, server.greeted()?);
    for (option, data, wanted) in malformed.chain(others) {
        for client in [&mut aborted, &mut client] {
            let kind = client.option(option, &data)?;
            check!(kind == wanted, "option {option}, {data:x?}: reply {kind:#x}, not {wanted:#x}");
        }
    }
    check!(aborted.option(opt::ABORT, &[])? == rep::ACK, "ABORT");
    aborted.closed()?;
    check!(client.info_or_go(opt::INFO, "vol")? == rep::ACK, "INFO");
    let info = std::mem::take(&mut client.export);
    let most = info.blocks.ok_or("no block sizes although they were asked for")?.2;
    check!((info.size, most) == (4 * MIB, MAX_PAYLOAD), "{info:?}");
    client.go("")?; // the default export is the first image
    check!(client.export == info, "GO says {:?}, INFO said {info:?}", client.export);
    check!(client.read(0, 4096)?.is_ok(), "a read after the handshake");
    client.disconnect()?;
    let mut client = server.greeted()?;
    let kind = client.option(opt::STRUCTURED_REPLY, &[])?;
    check!(kind == rep::ACK, "STRUCTURED_REPLY: reply {kind:#x}");
    client.go("vol")?;
    client.disconnect()?;
    server.stop()
}

/// Bytes that are no NBD: the connection closes promptly with a log line, others go on.
fn garbage(lab: &Lab) -> Res {
    let mut server = start(lab)?;
    let mut random = image::Random::new(22);
    let huge_option = [&b"IHAVEOPT"[..], &[0, 0, 0, 7], &[0xff; 4], &[0; 64]].concat();
    let wrong_magic = [&b"IHAVEOPS"[..], &[0, 0, 0, 3, 0, 0, 0, 0]].concat();
    // With the right client flags first, then bytes that are no option.
    let after_flags =
        [random.bytes(64), b"GET / HTTP/1.1\r\n\r\n".to_vec(), huge_option, wrong_magic];
    for bytes in after_flags {
        let seen = server.log().len();
        let mut client = server.greeted()?;
        client.send(&bytes)?;
        client.closed()?;
        server.logged_since(seen, "a garbage handshake")?;
        server.still_serves()?;
    }
    // Where the flags belong: an HTTP request, and flags that do not exist.
    let flags = [4_u32, 0x8000_0003, 0xffff_ffff].map(|flags| flags.to_be_bytes().to_vec());
    for bytes in [b"GET / HTTP/1.1\r\nHost: x\r\n\r\n".to_vec()].into_iter().chain(flags) {
        let seen = server.log().len();
        let mut client = server.connect()?;
        client.read_greeting()?;
        client.send(&bytes)?;
        client.closed()?;
        server.logged_since(seen, "client flags that do not exist")?;
    }
    server.serves_to_the_end()
}
