//! The messages of a client during the handshake, and the replies of the server.

use nbd_protocol::wire::{FLAG_C_FIXED_NEWSTYLE, FLAG_C_NO_ZEROES, OPTION_MAGIC, opt, rep};

use crate::driven;
use nbd_protocol::{
    ClientError, ClientHandshake, ClientStep, CloseReason, ExportInfo, Handshake, HeaderStyle,
    InfoType, MAX_META_DATA, MAX_OPTION_DATA, MAX_OPTION_DRAIN, MAX_OPTIONS, MAX_REPLIES,
    MAX_STRING, Negotiated, Step, TransmissionFlags,
};

pub(crate) const FIXED: u32 = FLAG_C_FIXED_NEWSTYLE;

/// Client flags and options, as bytes.
pub(crate) fn session(flags: u32, options: &[(u32, &[u8])]) -> Vec<u8> {
    let mut bytes = flags.to_be_bytes().to_vec();
    for (option, data) in options {
        bytes.extend(OPTION_MAGIC.to_be_bytes());
        bytes.extend(option.to_be_bytes());
        bytes.extend((data.len() as u32).to_be_bytes());
        bytes.extend(*data);
    }
    bytes
}

/// The data of INFO and GO.
pub(crate) fn info(name: &str, wanted: &[InfoType]) -> Vec<u8> {
    let mut data = (name.len() as u32).to_be_bytes().to_vec();
    data.extend(name.as_bytes());
    data.extend((wanted.len() as u16).to_be_bytes());
    data.extend(wanted.iter().flat_map(|&kind| (kind as u16).to_be_bytes()));
    data
}

/// Runs a session against the exports of the fuzz target: bytes taken, last step, option replies,
/// and what came after them.
pub(crate) fn serve(input: &[u8]) -> (usize, Step, Vec<driven::OptionReply>, Vec<u8>) {
    serve_by(Handshake::base_allocation, input)
}

/// Serves the input by a server that offers extended headers.
pub(crate) fn serve_extended(input: &[u8]) -> (usize, Step, Vec<driven::OptionReply>, Vec<u8>) {
    serve_by(|handshake| handshake.extended_headers().base_allocation(), input)
}

fn serve_by(
    configure: impl FnOnce(Handshake) -> Handshake,
    input: &[u8],
) -> (usize, Step, Vec<driven::OptionReply>, Vec<u8>) {
    let mut out = Vec::new();
    let mut server = configure(Handshake::new(&mut out));
    assert_eq!(out, b"NBDMAGICIHAVEOPT\x00\x03");
    out.clear();
    let (used, step) = server.receive(input, &driven::exports()[..], &mut out);
    let (replies, rest) = driven::option_replies(&out);
    let rest = rest.to_vec();
    (used, step, replies, rest)
}

/// The types of the replies to one option sent by a fixed newstyle client.
fn reply_types(option: u32, data: &[u8]) -> Vec<u32> {
    let input = session(FIXED, &[(option, data)]);
    let (used, _, replies, _) = serve(&input);
    assert_eq!(used, input.len());
    assert!(replies.iter().all(|r| r.0 == option));
    replies.iter().map(|r| r.1).collect()
}

fn closes(input: &[u8]) -> CloseReason {
    match serve(input) {
        (_, Step::Close(reason), _, _) => reason,
        other => panic!("expected a close, got {other:?}"),
    }
}

#[test]
fn what_ends_the_handshake() {
    let name = |data: &[u8]| session(FIXED, &[(opt::EXPORT_NAME, data)]);
    let magic = u64::from_be_bytes(*b"GET / HT");
    for (input, reason) in [
        (7_u32.to_be_bytes().to_vec(), CloseReason::UnknownClientFlags(7)),
        ((1_u32 << 31).to_be_bytes().to_vec(), CloseReason::UnknownClientFlags(1 << 31)),
        (b"\0\0\0\x01GET / HTTP/1.1\r\n\r\n".to_vec(), CloseReason::BadOptionMagic(magic)),
        (name(b"nope"), CloseReason::UnknownExport("nope".into())),
        (name(b"\xff"), CloseReason::BadExportName),
        (name(b"di\0sk"), CloseReason::BadExportName),
        (name(&[b'x'; MAX_STRING + 1]), CloseReason::BadExportName),
    ] {
        assert_eq!(closes(&input), reason);
    }
    for option in [opt::GO, opt::LIST, opt::ABORT, 4711] {
        assert_eq!(closes(&session(0, &[(option, b"")])), CloseReason::NotFixedNewstyle(option));
    }
}

#[test]
fn export_name_ends_the_handshake_with_or_without_zeroes() {
    for (flags, zeroes) in [(0, 124), (FIXED, 124), (FIXED | FLAG_C_NO_ZEROES, 0)] {
        let mut input = session(flags, &[(opt::EXPORT_NAME, b"frozen")]);
        let len = input.len();
        input.extend(b"the first request");
        let (used, step, replies, rest) = serve(&input);
        assert_eq!((used, replies.len()), (len, 0));
        let Step::Ready(negotiated) = step else { panic!("{step:?}") };
        assert_eq!(negotiated.export, "frozen");
        assert_eq!((negotiated.style, negotiated.block_sizes), (HeaderStyle::Simple, false));
        assert_eq!(rest[..8], (64_u64 << 10).to_be_bytes());
        // HAS_FLAGS and READ_ONLY; SEND_DF only with structured replies.
        assert_eq!(rest[8..10], [0, 3]);
        assert_eq!(rest[10..], vec![0; zeroes]);
    }
}

#[test]
fn abort_is_acknowledged_whatever_its_data() {
    for data in [&b""[..], b"farewell"] {
        let (_, step, replies, _) = serve(&session(FIXED, &[(opt::ABORT, data)]));
        assert_eq!(step, Step::Close(CloseReason::Aborted));
        assert_eq!(replies, [(opt::ABORT, rep::ACK, vec![])]);
    }
}

#[test]
fn list_names_every_export_with_its_description() {
    let (_, step, replies, _) = serve(&session(FIXED, &[(opt::LIST, b"")]));
    assert_eq!(step, Step::More);
    let disk = b"\0\0\0\x04diskone mebibyte".to_vec();
    let frozen = b"\0\0\0\x06frozen".to_vec();
    assert_eq!(
        replies,
        [
            (opt::LIST, rep::SERVER, disk),
            (opt::LIST, rep::SERVER, frozen),
            (opt::LIST, rep::ACK, vec![]),
        ]
    );
    assert_eq!(reply_types(opt::LIST, b"x"), [rep::ERR_INVALID]);
}

#[test]
fn structured_reply_takes_no_data_and_may_be_repeated() {
    assert_eq!(reply_types(opt::STRUCTURED_REPLY, b""), [rep::ACK]);
    assert_eq!(reply_types(opt::STRUCTURED_REPLY, b"x"), [rep::ERR_INVALID]);
    let go = info("disk", &[]);
    for (options, style) in [
        (
            vec![(opt::STRUCTURED_REPLY, &b""[..]), (opt::STRUCTURED_REPLY, b"")],
            HeaderStyle::Structured,
        ),
        (vec![(opt::STRUCTURED_REPLY, b"x")], HeaderStyle::Simple), // refused, so not in force
    ] {
        let options: Vec<_> = options.into_iter().chain([(opt::GO, &go[..])]).collect();
        let (_, step, _, _) = serve(&session(FIXED, &options));
        assert!(matches!(step, Step::Ready(Negotiated { style: s, .. }) if s == style));
    }
}

#[test]
fn what_is_not_supported_is_drained_and_refused() {
    for option in [4, opt::STARTTLS, opt::EXTENDED_HEADERS, 0, !0] {
        assert_eq!(reply_types(option, b""), [rep::ERR_UNSUP]);
        assert_eq!(reply_types(option, &[7; 70_000]), [rep::ERR_UNSUP]);
    }
}

#[test]
fn info_answers_what_was_asked_and_goes_on() {
    use InfoType::{BlockSize, Description, Export, Name};
    let data = info("frozen", &[BlockSize, Export, BlockSize, Name, Description]);
    let (_, step, replies, _) = serve(&session(FIXED, &[(opt::INFO, &data)]));
    assert_eq!(step, Step::More);
    let data: Vec<_> = replies.iter().map(|r| (r.1, &r.2[..])).collect();
    assert_eq!(
        data,
        [
            (rep::INFO, &b"\0\0\0\0\0\0\0\x01\0\0\0\x03"[..]),
            (rep::INFO, b"\0\x01frozen"),
            (rep::INFO, b"\0\x02"),
            (rep::INFO, b"\0\x03\0\0\x02\0\0\0\x10\0\x02\0\0\0"),
            (rep::ACK, b""),
        ]
    );
    assert_eq!(reply_types(opt::INFO, &info("disk", &[])), [rep::INFO, rep::ACK]);
}

#[test]
fn go_with_an_empty_name_opens_the_default_export() {
    let data = info("", &[InfoType::BlockSize]);
    let mut input = session(FIXED, &[(opt::STRUCTURED_REPLY, b""), (opt::GO, &data)]);
    let len = input.len();
    input.push(0x25);
    let (used, step, replies, rest) = serve(&input);
    assert_eq!((used, rest.len()), (len, 0));
    let flags = TransmissionFlags(0x0ffd);
    let ready = Negotiated {
        export: String::new(),
        style: HeaderStyle::Structured,
        allocation: false,
        block_sizes: true,
        size: 1 << 20,
        flags,
        tls: false,
    };
    assert_eq!(step, Step::Ready(ready));
    assert_eq!(replies[1].2, b"\0\0\0\0\0\0\0\x10\0\0\x0f\xfd");
}

#[test]
fn a_bad_go_is_refused_and_the_client_may_try_again() {
    let unknown = info("nope", &[]);
    let mut long = info("disk", &[]);
    long.push(0);
    let mut short = info("disk", &[InfoType::Name]);
    short.pop();
    let mut overrun = info("disk", &[]);
    overrun[3] = 200;
    let mut wide = info("disk", &[]);
    wide[0] = 0xff;
    let huge = vec![0; 8192];
    for option in [opt::INFO, opt::GO] {
        assert_eq!(reply_types(option, &unknown), [rep::ERR_UNKNOWN]);
        for malformed in [&long, &short, &overrun, &wide, &vec![], &info("\0", &[])] {
            assert_eq!(reply_types(option, malformed), [rep::ERR_INVALID]);
        }
        assert_eq!(reply_types(option, &huge), [rep::ERR_TOO_BIG]);
    }
    let good = info("disk", &[]);
    let tries = [(opt::GO, &unknown[..]), (opt::GO, &short), (opt::GO, &huge), (opt::GO, &good)];
    assert!(matches!(serve(&session(FIXED, &tries)).1, Step::Ready(_)));
}

#[test]
fn inv05_floods_are_cut_off() {
    let mut input = session(FIXED, &[]);
    input.extend(OPTION_MAGIC.to_be_bytes());
    input.extend(opt::GO.to_be_bytes());
    input.extend((MAX_OPTION_DRAIN + 1).to_be_bytes());
    let reason = CloseReason::OptionTooLong { option: opt::GO, len: MAX_OPTION_DRAIN + 1 };
    assert_eq!(closes(&input), reason);

    let many = vec![(opt::LIST, &b""[..]); MAX_OPTIONS as usize + 1];
    assert_eq!(serve(&session(FIXED, &many[1..])).1, Step::More);
    assert_eq!(closes(&session(FIXED, &many)), CloseReason::TooManyOptions);
}

#[test]
fn inv05_lists_of_many_exports_cannot_be_asked_for_without_end() {
    let exports: Vec<_> =
        (0..300).map(|i| ExportInfo::new(format!("{i:04}").repeat(1000), 0)).collect();
    let input = session(FIXED, &[(opt::LIST, &b""[..]); 3]);
    let mut out = Vec::new();
    let (_, step) = Handshake::new(&mut out).receive(&input, &exports[..], &mut out);
    assert_eq!(step, Step::Close(CloseReason::TooManyOptions));
    assert!(out.len() < 3 << 20, "{}", out.len());
}

/// The last byte that is allowed of each length, and the first that is not.
#[test]
fn inv05_limits_are_exact() {
    // A name that no export has, and data that is drained unread.
    assert_eq!(
        closes(&session(FIXED, &[(opt::EXPORT_NAME, &[b'x'; MAX_STRING])])),
        CloseReason::UnknownExport("x".repeat(MAX_STRING))
    );
    assert_eq!(reply_types(4711, &vec![7; MAX_OPTION_DRAIN as usize]), [rep::ERR_UNSUP]);
    for (option, limit) in [
        (opt::INFO, MAX_OPTION_DATA),
        (opt::GO, MAX_OPTION_DATA),
        (opt::LIST_META_CONTEXT, MAX_META_DATA),
        (opt::SET_META_CONTEXT, MAX_META_DATA),
    ] {
        for (len, verdict) in [(limit, rep::ERR_INVALID), (limit + 1, rep::ERR_TOO_BIG)] {
            let data = vec![0; len];
            let input = session(FIXED, &[(opt::STRUCTURED_REPLY, b""), (option, &data)]);
            let (_, _, replies, _) = serve(&input);
            assert_eq!(replies[1], (option, verdict, vec![]), "{len}");
        }
    }
}

#[test]
fn inv05_the_last_option_is_answered_at_the_limit_of_replies() {
    let options = [(4711, &b"drained"[..]), (opt::LIST, b""), (opt::LIST, b"")];
    // 20 bytes for the refusal, 24 and the text for each export, 20 for the end.
    for (last, step) in [(8128, Step::More), (8129, Step::Close(CloseReason::TooManyOptions))] {
        let texts = [8168; 127].into_iter().chain([last]);
        let exports: Vec<_> = texts
            .map(|len| {
                let mut export = ExportInfo::new("n".repeat(MAX_STRING), 0);
                export.description = "d".repeat(len - MAX_STRING);
                export
            })
            .collect();
        let (mut out, mut greeting) = (Vec::new(), Vec::new());
        let mut server = Handshake::new(&mut greeting);
        server.receive(&session(FIXED, &options[..2]), &exports[..], &mut out);
        assert_eq!(out.len(), MAX_REPLIES + last - 8128);
        let input = session(0, &options[2..]);
        assert_eq!(server.receive(&input[4..], &exports[..], &mut out).1, step);
    }
}

/// Negotiates the library's client with its server, each fed what the other said.
pub(crate) fn negotiate(
    client: ClientHandshake,
    exports: &[ExportInfo],
) -> Result<(ClientStep, Step), ClientError> {
    let mut greeting = Vec::new();
    let server = Handshake::new(&mut greeting).extended_headers().base_allocation();
    negotiate_with(client, server, greeting, exports)
}

/// Negotiates with a server that has sent `to_client`.
pub(crate) fn negotiate_with(
    mut client: ClientHandshake,
    mut server: Handshake,
    mut to_client: Vec<u8>,
    exports: &[ExportInfo],
) -> Result<(ClientStep, Step), ClientError> {
    let mut to_server = Vec::new();
    let mut server_step = Step::More;
    loop {
        let (used, step) = client.receive(&to_client, &mut to_server)?;
        to_client.drain(..used);
        let over = !matches!(step, ClientStep::More | ClientStep::StartTls);
        if !to_server.is_empty() {
            let (used, step) = server.receive(&to_server, exports, &mut to_client);
            to_server.drain(..used);
            server_step = step;
        }
        if over {
            return Ok((step, server_step));
        }
    }
}

#[test]
fn our_client_lists_and_aborts() {
    let (step, server) = negotiate(ClientHandshake::list(), &driven::exports()).unwrap();
    let ClientStep::Listed(listed) = step else { panic!("{step:?}") };
    let names: Vec<_> = listed.iter().map(|e| (&e.name[..], &e.description[..])).collect();
    assert_eq!(names, [("disk", "one mebibyte"), ("frozen", "")]);
    assert_eq!(server, Step::Close(CloseReason::Aborted));
}

#[test]
fn flags_that_need_another_are_not_advertised_without_it() {
    use TransmissionFlags as F;
    let mut export = ExportInfo::new("disk", 0);
    export.flags = F::SEND_DF | F::SEND_FAST_ZERO;
    assert_eq!(export.advertised(HeaderStyle::Structured), F::HAS_FLAGS | F::SEND_DF);
    assert_eq!(export.advertised(HeaderStyle::Simple), F::HAS_FLAGS);
    export.flags |= F::SEND_WRITE_ZEROES;
    assert_eq!(
        export.advertised(HeaderStyle::Simple),
        F::HAS_FLAGS | F::SEND_WRITE_ZEROES | F::SEND_FAST_ZERO
    );
}
