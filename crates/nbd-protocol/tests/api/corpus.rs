//! The corpus of the fuzz target `nbd_protocol`: replayed, and kept complete.
//!
//! `fuzz/corpus/nbd_protocol` holds three kinds of inputs: `seed-*`, one per option, command and
//! reply, written from the list below; `captured-*`, what nbdinfo, nbdcopy, qemu-io, qemu-img and
//! fio said to a server and what it replied; `found-*`, what the fuzzer added to their coverage.

use std::collections::BTreeMap;
use std::fs;
use std::path::PathBuf;

use nbd_protocol::wire::{FLAG_C_FIXED_NEWSTYLE, FLAG_C_NO_ZEROES, cmd, opt};

use crate::driven;
use nbd_protocol::{
    ClientHandshake, ClientStep, CommandFlags, Extent, Handshake, HeaderStyle, InfoType, NbdError,
    ReplyHeader, Request,
};

use crate::handshake::{info, session};
use crate::meta::meta;
use crate::request::chunk;

fn corpus() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/corpus/nbd_protocol")
}

#[test]
fn inv04_every_input_of_the_corpus_holds() {
    let mut names = Vec::new();
    for entry in fs::read_dir(corpus()).expect("the corpus is committed") {
        let path = entry.unwrap().path();
        let input = fs::read(&path).unwrap();
        println!("{}", path.display()); // shown if it panics
        driven::run(&input);
        // As it is, and in every other length of pieces.
        for piece in 0..64 {
            let [mode, rest @ ..] = &input[..] else { continue };
            driven::run(&[&[piece << 2 | mode & 3], rest].concat());
        }
        names.push(path.file_name().unwrap().to_string_lossy().into_owned());
    }
    for kind in ["seed-", "captured-session-", "captured-replies-", "found-"] {
        assert!(names.iter().any(|name| name.starts_with(kind)), "no {kind}* in the corpus");
    }
}

/// Every seed is in the corpus as written here. `WRITE_CORPUS=1` writes them.
#[test]
fn seeds_are_in_the_corpus() {
    for (name, input) in seeds() {
        let path = corpus().join(format!("seed-{name}"));
        if std::env::var_os("WRITE_CORPUS").is_some() {
            fs::write(&path, &input).unwrap();
        }
        let found = fs::read(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
        assert_eq!(found, input, "{}", path.display());
    }
}

/// One input per option, command, flag, reply and kind of nonsense.
fn seeds() -> BTreeMap<String, Vec<u8>> {
    let mut seeds = BTreeMap::new();
    let mut add = |name: &str, mode: u8, input: &[u8]| {
        assert!(seeds.insert(name.to_owned(), [&[mode], input].concat()).is_none());
    };
    let both = FLAG_C_FIXED_NEWSTYLE | FLAG_C_NO_ZEROES;
    use InfoType::{BlockSize, Description, Export, Name};
    let all = info("disk", &[Export, Name, Description, BlockSize]);

    for (name, flags, options) in [
        ("flags-unknown", 4, vec![]),
        ("export-name", both, vec![(opt::EXPORT_NAME, &b"disk"[..])]),
        ("export-name-zeroes", FLAG_C_FIXED_NEWSTYLE, vec![(opt::EXPORT_NAME, b"")]),
        ("export-name-not-fixed", 0, vec![(opt::EXPORT_NAME, b"frozen")]),
        ("export-name-unknown", both, vec![(opt::EXPORT_NAME, b"nope")]),
        ("go-not-fixed", 0, vec![(opt::GO, &all)]),
        ("abort", both, vec![(opt::ABORT, b"bye")]),
        ("list", both, vec![(opt::LIST, b""), (opt::LIST, b"x"), (opt::ABORT, b"")]),
        ("starttls", both, vec![(opt::STARTTLS, b""), (opt::GO, &all)]),
        (
            "info",
            both,
            vec![(opt::INFO, &all), (opt::INFO, b"\0\0\0\x09disk\0\0"), (opt::GO, &all)],
        ),
        ("structured-reply", both, vec![(opt::STRUCTURED_REPLY, b""), (opt::GO, &all)]),
        ("structured-reply-data", both, vec![(opt::STRUCTURED_REPLY, b"x"), (opt::GO, &all)]),
        ("meta-context", both, vec![(9, &all), (10, &all), (11, b""), (opt::GO, &all)]),
        (
            "meta-list",
            both,
            vec![
                (opt::STRUCTURED_REPLY, b""),
                (9, &meta("disk", &[])),
                (9, &meta("disk", &["base:"])),
            ],
        ),
        (
            "meta-set",
            both,
            vec![
                (opt::STRUCTURED_REPLY, b""),
                (10, &meta("frozen", &["x:y", "base:allocation"])),
                (10, &meta("nope", &["base:allocation"])),
                (10, &meta("disk", &["", "base:allocation"])),
                (opt::GO, &all),
            ],
        ),
        (
            "meta-long",
            both,
            vec![(opt::STRUCTURED_REPLY, b""), (10, &[0; 17_000]), (opt::GO, &all)],
        ),
        ("option-long", both, vec![(opt::GO, &[0; 6000]), (4711, &[0; 6000]), (opt::GO, &all)]),
    ] {
        add(&format!("option-{name}"), driven::SESSION, &session(flags, &options));
    }

    let context = meta("disk", &["base:allocation"]);
    let connected = session(
        both,
        &[(opt::STRUCTURED_REPLY, b""), (opt::SET_META_CONTEXT, &context), (opt::GO, &all)],
    );
    let export = [&(1_u64 << 20).to_be_bytes()[..], b"\x0f\xfd\x09"].concat();
    for (name, command, flags, len) in [
        ("read", cmd::READ, 0, 4096),
        ("read-df", cmd::READ, CommandFlags::DF.0, 512),
        ("read-empty", cmd::READ, 0, 0),
        ("write", cmd::WRITE, 0, 512),
        ("write-fua", cmd::WRITE, CommandFlags::FUA.0, 512),
        ("flush", cmd::FLUSH, 0, 0),
        ("trim", cmd::TRIM, 0, 65536),
        ("cache", cmd::CACHE, 0, 65536),
        ("write-zeroes", cmd::WRITE_ZEROES, CommandFlags::NO_HOLE.0, 1 << 20),
        ("write-zeroes-fast", cmd::WRITE_ZEROES, CommandFlags::FAST_ZERO.0, 4096),
        ("block-status", cmd::BLOCK_STATUS, 0, 4096),
        ("block-status-one", cmd::BLOCK_STATUS, CommandFlags::REQ_ONE.0, 4096),
        ("block-status-empty", cmd::BLOCK_STATUS, 0, 0),
        ("unknown", 4711, 0, 0),
        ("flags-unknown", cmd::READ, 0x8000, 512),
        ("past-the-end", cmd::READ, 0, u64::from(u32::MAX)),
        ("disc", cmd::DISC, 0, 0),
    ] {
        let flags = CommandFlags(flags);
        let request = Request { flags, command, cookie: 0x6368_6f63, offset: 0, len };
        let header = encode(request, HeaderStyle::Structured);
        let payload = vec![0x5a; request.payload_len(HeaderStyle::Structured) as usize];
        let and_disc = Request { flags: CommandFlags::NONE, command: cmd::DISC, len: 0, ..request };
        let input = [&connected[..], &header, &payload, &encode(and_disc, HeaderStyle::Structured)]
            .concat();
        add(&format!("session-{name}"), driven::SESSION, &input);
        add(&format!("request-{name}"), driven::REQUEST, &[&export[..], &header].concat());
    }

    let extended = session(
        both,
        &[(opt::EXTENDED_HEADERS, b""), (opt::SET_META_CONTEXT, &context), (opt::GO, &all)],
    );
    for (name, command, flags, len) in [
        ("read", cmd::READ, 0, 4096),
        ("write", cmd::WRITE, 0, 512),
        ("read-payload", cmd::READ, CommandFlags::PAYLOAD_LEN.0, 16),
        ("write-zeroes", cmd::WRITE_ZEROES, 0, 1 << 40),
        ("block-status", cmd::BLOCK_STATUS, 0, 1 << 20),
        ("flush", cmd::FLUSH, 0, 0),
    ] {
        let flags = CommandFlags(flags);
        let request = Request { flags, command, cookie: 0x6368_6f63, offset: 0, len };
        let header = encode(request, HeaderStyle::Extended);
        let payload = vec![0x5a; if len <= 512 { len as usize } else { 0 }];
        add(
            &format!("extended-{name}"),
            driven::SESSION,
            &[&extended[..], &header, &payload].concat(),
        );
        let input = [&export[..], &header].concat();
        add(&format!("request-extended-{name}"), driven::REQUEST, &input);
    }
    for (name, options) in [
        ("twice", vec![(opt::EXTENDED_HEADERS, &b""[..]), (opt::EXTENDED_HEADERS, b"")]),
        ("then-structured", vec![(opt::EXTENDED_HEADERS, b""), (opt::STRUCTURED_REPLY, b"")]),
        ("data", vec![(opt::EXTENDED_HEADERS, b"x"), (opt::GO, &all)]),
        ("export-name", vec![(opt::EXTENDED_HEADERS, b""), (opt::EXPORT_NAME, b"disk")]),
    ] {
        add(&format!("option-extended-{name}"), driven::SESSION, &session(both, &options));
    }
    let in_order = [(opt::STARTTLS, &b""[..]), (opt::STRUCTURED_REPLY, b""), (opt::GO, &all)];
    // In pieces of 20 bytes STARTTLS ends with one: 4 of flags and 16 of the option.
    add("option-starttls-alone", 19 << 2 | driven::SESSION, &session(both, &in_order));
    let again = [(opt::STARTTLS, &b""[..]), (opt::STARTTLS, b"")];
    add("option-starttls-twice", 19 << 2 | driven::SESSION, &session(both, &again));

    for (name, client) in [
        ("extended", ClientHandshake::new("disk", HeaderStyle::Extended).ask_allocation()),
        ("structured", ClientHandshake::new("disk", HeaderStyle::Structured)),
        ("simple", ClientHandshake::new("", HeaderStyle::Simple)),
        ("meta", ClientHandshake::new("disk", HeaderStyle::Structured).ask_allocation()),
        ("list", ClientHandshake::list()),
    ] {
        add(&format!("server-{name}"), driven::SERVER, &server_stream(client));
    }
    let refusal = b"NBDMAGICIHAVEOPT\0\x03\0\x03\xe8\x89\x04\x55\x65\xa9\0\0\0\x07\x80\0\0\x01\
                    \0\0\0\0\0\0\0\0\0\x10\0\0\0\x05";
    add("server-without-go", driven::SERVER, refusal);

    let (structured, wide) = (HeaderStyle::Structured, HeaderStyle::Extended);
    let (flags, command) = (CommandFlags::NONE, cmd::READ);
    let read = Request { flags, command, cookie: 1, offset: 0, len: 8 };
    let status = Request { command: cmd::BLOCK_STATUS, ..read };
    let extent = Extent { len: 1 << 40, flags: 3 }.encode64();
    for (name, reply) in [
        ("extended-data", [ReplyHeader::read_data(&read, wide).as_slice(), b"8 bytes!"].concat()),
        ("extended-done", ReplyHeader::done(&read, wide).as_slice().to_vec()),
        ("extended-error", ReplyHeader::error(&read, wide, NbdError::Io).as_slice().to_vec()),
        (
            "extended-block-status",
            [ReplyHeader::block_status(&status, wide, 1, 1).as_slice(), &extent].concat(),
        ),
        ("simple", ReplyHeader::simple(1, Err(NbdError::NoSpc)).as_slice().to_vec()),
        ("data", [ReplyHeader::read_data(&read, structured).as_slice(), b"8 bytes!"].concat()),
        ("done", ReplyHeader::done(&read, structured).as_slice().to_vec()),
        ("error", ReplyHeader::error(&read, structured, NbdError::Io).as_slice().to_vec()),
        ("error-offset", chunk(0, 0x8002, b"\0\0\0\x05\0\x02no\0\0\0\0\0\0\x10\0")),
        ("hole", chunk(1, 2, b"\0\0\0\0\0\0\x10\0\0\0\x20\0")),
        ("block-status", chunk(1, 5, b"\0\0\0\x01\0\0\x10\0\0\0\0\0")),
        ("block-status-none", chunk(1, 5, b"\0\0\0\x01")),
    ] {
        add(&format!("reply-{name}"), driven::REPLIES, &[&reply[..], &reply].concat());
    }
    seeds
}

fn encode(request: Request, style: HeaderStyle) -> Vec<u8> {
    request.encode(style).expect("the length fits").as_slice().to_vec()
}

/// Everything our server says to `client` during the handshake.
fn server_stream(mut client: ClientHandshake) -> Vec<u8> {
    let exports = driven::exports();
    let (mut said, mut heard, mut out) = (Vec::new(), 0, Vec::new());
    let mut server = Handshake::new(&mut said).extended_headers().base_allocation();
    loop {
        let (used, step) = client.receive(&said[heard..], &mut out).unwrap();
        heard += used;
        if step != ClientStep::More {
            return said;
        }
        server.receive(&std::mem::take(&mut out), &exports[..], &mut said);
    }
}
