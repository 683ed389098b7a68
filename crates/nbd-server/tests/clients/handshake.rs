//! The handshake: what every option is answered, and what bad bytes there lead to.

use libtest_mimic::Trial;

use crate::client::{Client, MIB, be32, be64, info_data, opt, rep};
use crate::image;
use crate::lab::{Backend, Lab, Res, check, trial};
use crate::server::{Launch, Server};

pub(crate) fn trials() -> Vec<Trial> {
    vec![
        trial("handshake/garbage_closes", &[], garbage),
        trial("handshake/unknown_client_flags_close", &[], unknown_client_flags),
        trial("handshake/unknown_option_goes_on", &[], unknown_option),
        trial("handshake/starttls_refused_session_goes_on", &[], starttls),
        trial("handshake/malformed_go_goes_on", &[], malformed_go),
        trial("handshake/list_and_info", &[], list_and_info),
        trial("handshake/export_name", &[], export_name),
        trial("handshake/abort", &[], abort),
        trial("handshake/structured_reply_once", &[], structured_reply),
    ]
}

fn start(lab: &Lab) -> Res<Server> {
    let image = lab.path("a.img");
    image::with_parts(&image, 4 * MIB, 4, 21)?;
    Launch::new(lab, Backend::Threads).image(&image).start()
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
        let mut client = server.connect()?;
        client.greet()?;
        client.send(&bytes)?;
        client.closed()?;
        server.logged_since(seen, "a garbage handshake")?;
        server.still_serves()?;
    }
    // Without them: an HTTP request where the flags belong.
    let seen = server.log().len();
    let mut client = server.connect()?;
    client.read_greeting()?;
    client.send(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")?;
    client.closed()?;
    server.logged_since(seen, "HTTP instead of NBD")?;
    server.still_serves()?;
    server.stop()
}

fn unknown_client_flags(lab: &Lab) -> Res {
    let mut server = start(lab)?;
    for flags in [4u32, 0x8000_0003, 0xffff_ffff] {
        let seen = server.log().len();
        let mut client = server.connect()?;
        client.read_greeting()?;
        client.send(&flags.to_be_bytes())?;
        client.closed()?;
        server.logged_since(seen, "unknown client flags")?;
    }
    server.still_serves()?;
    server.stop()
}

/// Reads a block, to show that the session reached the transmission phase in step.
fn reads(client: &mut Client) -> Res {
    client.go("vol")?;
    check!(client.read(0, 4096)?.is_ok(), "a read after the handshake");
    Ok(())
}

fn unknown_option(lab: &Lab) -> Res {
    let server = start(lab)?;
    let mut client = server.connect()?;
    client.greet()?;
    for (option, data) in [(4u32, &b""[..]), (99, b"some data"), (0x7fff_ffff, &[7; 3000])] {
        let kind = client.option(option, data)?;
        check!(kind == rep::ERR_UNSUP, "option {option}: reply {kind:#x}, wanted ERR_UNSUP");
    }
    reads(&mut client)?;
    client.disconnect()?;
    server.stop()
}

fn starttls(lab: &Lab) -> Res {
    let server = start(lab)?;
    let mut client = server.connect()?;
    client.greet()?;
    let kind = client.option(opt::STARTTLS, &[])?;
    check!([rep::ERR_UNSUP, rep::ERR_POLICY].contains(&kind), "STARTTLS: reply {kind:#x}");
    reads(&mut client)?;
    client.disconnect()?;
    server.stop()
}

/// A GO whose lengths disagree, or for an export that is not there, is refused; a good one after
/// it on the same connection works.
fn malformed_go(lab: &Lab) -> Res {
    let server = start(lab)?;
    let mut client = server.connect()?;
    client.greet()?;
    let mut name_too_long = info_data("vol");
    name_too_long[3] = 200;
    let mut too_many_requests = info_data("vol");
    too_many_requests[8] = 9;
    let with_tail = [info_data("vol"), vec![1, 2, 3]].concat();
    for data in [vec![], vec![0; 3], name_too_long, too_many_requests, with_tail] {
        for option in [opt::INFO, opt::GO] {
            let kind = client.option(option, &data)?;
            check!(kind == rep::ERR_INVALID, "a malformed option {option}: reply {kind:#x}");
        }
    }
    let kind = client.option(opt::GO, &info_data("nosuch"))?;
    check!(kind == rep::ERR_UNKNOWN, "GO for an unknown export: reply {kind:#x}");
    let kind = client.option(opt::LIST, b"data where none belongs")?;
    check!(kind == rep::ERR_INVALID, "LIST with data: reply {kind:#x}");
    reads(&mut client)?;
    client.disconnect()?;
    server.stop()
}

fn list_and_info(lab: &Lab) -> Res {
    let server = start(lab)?;
    let mut client = server.connect()?;
    client.greet()?;
    client.send_option(opt::LIST, &[])?;
    let (kind, data) = client.option_reply(opt::LIST)?;
    // The name's length, the name, and whatever description the server likes.
    let listed = be32(&data) == 3 && data[4..].starts_with(b"vol");
    check!(kind == rep::SERVER && listed, "LIST: {kind:#x} {data:?}");
    let (kind, _) = client.option_reply(opt::LIST)?;
    check!(kind == rep::ACK, "the end of LIST: {kind:#x}");

    let kind = client.info_or_go(opt::INFO, "vol")?;
    check!(kind == rep::ACK, "INFO: reply {kind:#x}");
    let info = client.export;
    check!(info.size == 4 * MIB, "size {}", info.size);
    let blocks = info.blocks.ok_or("no block sizes although they were asked for")?;
    check!(blocks.2 == crate::client::MAX_PAYLOAD, "maximum block size {}", blocks.2);
    client.export = Default::default();
    client.go("")?; // the default export is the first image
    check!(client.export == info, "GO says {:?}, INFO said {info:?}", client.export);
    client.disconnect()?;
    server.stop()
}

/// The old way in, with and without the 124 zero bytes; an unknown name closes.
fn export_name(lab: &Lab) -> Res {
    let mut server = start(lab)?;
    for (client_flags, zeroes) in [(3u32, 0), (1, 124)] {
        let mut client = server.connect()?;
        client.read_greeting()?;
        client.send(&client_flags.to_be_bytes())?;
        client.send_option(opt::EXPORT_NAME, b"vol")?;
        let reply = client.recv_vec(10 + zeroes)?;
        check!(be64(&reply) == 4 * MIB, "size {}", be64(&reply));
        check!(reply[9] & 1 == 1 && reply[10..].iter().all(|&b| b == 0), "reply {reply:x?}");
        check!(client.read(0, 4096)?.is_ok(), "a read after EXPORT_NAME");
        client.disconnect()?;
    }
    let mut client = server.connect()?;
    client.greet()?;
    client.send_option(opt::EXPORT_NAME, b"nosuch")?;
    let rest = client.closed()?;
    check!(rest == 0, "{rest} bytes instead of a close");
    server.still_serves()?;
    server.stop()
}

fn abort(lab: &Lab) -> Res {
    let mut server = start(lab)?;
    let mut client = server.connect()?;
    client.greet()?;
    let kind = client.option(opt::ABORT, &[])?;
    check!(kind == rep::ACK, "ABORT: reply {kind:#x}");
    client.closed()?;
    server.still_serves()?;
    server.stop()
}

fn structured_reply(lab: &Lab) -> Res {
    let server = start(lab)?;
    let mut client = server.connect()?;
    client.greet()?;
    let kind = client.option(opt::STRUCTURED_REPLY, b"x")?;
    check!(kind == rep::ERR_INVALID, "STRUCTURED_REPLY with data: reply {kind:#x}");
    let kind = client.option(opt::STRUCTURED_REPLY, &[])?;
    check!(kind == rep::ACK, "STRUCTURED_REPLY: reply {kind:#x}");
    client.go("vol")?;
    client.disconnect()?;
    server.stop()
}
