//! The messages of a client during the handshake, and the replies of the server.

use nbd_protocol::wire::{FLAG_C_FIXED_NEWSTYLE, FLAG_C_NO_ZEROES, OPTION_MAGIC, opt, rep};
use nbd_protocol::{
    ClientError, ClientHandshake, ClientStep, CloseReason, ExportInfo, Handshake, HeaderStyle,
    InfoType, MAX_META_DATA, MAX_OPTION_DATA, MAX_OPTION_DRAIN, MAX_OPTIONS, MAX_REPLIES,
    MAX_STRING, Negotiated, Step,
};

use crate::driven;
use crate::meta::meta;

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

/// A server that grants whatever a client asks for.
pub(crate) fn all(server: Handshake) -> Handshake {
    server.extended_headers().base_allocation()
}

/// Serves a session with the exports of the fuzz target. Returns the number of bytes taken, the last step, the
/// replies to options, and what came after them.
pub(crate) fn serve(input: &[u8]) -> (usize, Step, Vec<driven::OptionReply>, Vec<u8>) {
    let mut out = Vec::new();
    let mut server = all(Handshake::new(&mut out));
    assert_eq!(out, b"NBDMAGICIHAVEOPT\x00\x03");
    out.clear();
    let (used, step) = server.receive(input, &driven::exports()[..], &mut out);
    let (replies, rest) = driven::option_replies(&out);
    let rest = rest.to_vec();
    (used, step, replies, rest)
}

/// Checks the types of the replies to the options of a session. Returns the last step.
pub(crate) fn answered(options: &[(u32, &[u8])], kinds: &[u32]) -> Step {
    let input = session(FIXED, options);
    let (used, step, replies, _) = serve(&input);
    assert_eq!(used, input.len());
    assert!(replies.iter().map(|reply| reply.1).eq(kinds.iter().copied()), "{replies:?}");
    let mut sent: Vec<u32> = options.iter().map(|option| option.0).collect();
    let mut answered: Vec<u32> = replies.iter().map(|reply| reply.0).collect();
    sent.dedup();
    answered.dedup(); // one option may have several replies
    assert_eq!(answered, sent);
    step
}

#[test]
fn inv05_a_close_has_a_reason() {
    let name = |data: &[u8]| session(FIXED, &[(opt::EXPORT_NAME, data)]);
    let magic = u64::from_be_bytes(*b"GET / HT");
    let mut flood = session(FIXED, &[(opt::GO, b"")]);
    flood.splice(16.., (MAX_OPTION_DRAIN + 1).to_be_bytes());
    let too_long = CloseReason::OptionTooLong { option: opt::GO, len: MAX_OPTION_DRAIN + 1 };
    let many = vec![(opt::LIST, &b""[..]); MAX_OPTIONS as usize + 1];
    assert_eq!(serve(&session(FIXED, &many[1..])).1, Step::More);
    let extended = [(opt::EXTENDED_HEADERS, &b""[..]), (opt::EXPORT_NAME, b"disk")];
    let mut cases = vec![
        (7_u32.to_be_bytes().to_vec(), CloseReason::UnknownClientFlags(7)),
        ((1_u32 << 31).to_be_bytes().to_vec(), CloseReason::UnknownClientFlags(1 << 31)),
        (b"\0\0\0\x01GET / HTTP/1.1\r\n\r\n".to_vec(), CloseReason::BadOptionMagic(magic)),
        (name(b"nope"), CloseReason::UnknownExport("nope".into())),
        (name(&[b'x'; MAX_STRING]), CloseReason::UnknownExport("x".repeat(MAX_STRING))),
        (name(b"\xff"), CloseReason::BadExportName),
        (name(b"di\0sk"), CloseReason::BadExportName),
        (name(&[b'x'; MAX_STRING + 1]), CloseReason::BadExportName),
        (session(FIXED, &extended), CloseReason::ExportNameWithExtendedHeaders),
        (flood, too_long),
        (session(FIXED, &many), CloseReason::TooManyOptions),
    ];
    for option in [opt::GO, opt::LIST, opt::ABORT, 4711] {
        cases.push((session(0, &[(option, b"")]), CloseReason::NotFixedNewstyle(option)));
    }
    for (input, reason) in cases {
        assert_eq!(serve(&input).1, Step::Close(reason));
    }
}

/// By EXPORT_NAME and by GO, by its name and as the default. Zeroes follow unless both sides leave them out.
#[test]
fn an_export_is_opened_by_each_option() {
    let go = info("", &[]);
    for (flags, option, data, export, zeroes) in [
        (0, opt::EXPORT_NAME, &b"frozen"[..], "frozen", 124),
        (FIXED, opt::EXPORT_NAME, b"", "", 124),
        (FIXED | FLAG_C_NO_ZEROES, opt::EXPORT_NAME, b"frozen", "frozen", 0),
        (FIXED, opt::GO, &go, "", 0),
    ] {
        let mut input = session(flags, &[(option, data)]);
        let len = input.len();
        input.extend(b"the first request");
        let (used, step, replies, rest) = serve(&input);
        assert_eq!(used, len);
        let Step::Ready(negotiated) = step else { panic!("{step:?}") };
        assert_eq!(negotiated.export, export);
        assert_eq!((negotiated.style, negotiated.block_sizes), (HeaderStyle::Simple, false));
        // HAS_FLAGS and READ_ONLY, or all else; SEND_DF only with structured replies.
        let told: [&[u8]; 2] = [b"\0\0\0\0\0\x01\0\0\0\x03", b"\0\0\0\0\0\x10\0\0\x0f\x7d"];
        let told = told[usize::from(export.is_empty())];
        if option == opt::GO {
            assert_eq!(replies[0].2, [b"\0\0", told].concat());
        } else {
            assert_eq!((replies.len(), rest), (0, [told, &vec![0; zeroes]].concat()));
        }
    }
}

#[test]
fn list_names_every_export_with_its_description() {
    let (_, step, replies, _) = serve(&session(FIXED, &[(opt::LIST, b"")]));
    assert_eq!(step, Step::More);
    let data = [&b"\0\0\0\x04diskone mebibyte"[..], b"\0\0\0\x06frozen", b""];
    let kinds = [rep::SERVER, rep::SERVER, rep::ACK];
    assert!(replies.into_iter().eq([0, 1, 2].map(|n| (opt::LIST, kinds[n], data[n].to_vec()))));
    let (step, server) = (negotiate(ClientHandshake::list(), all, &driven::exports()))
        .map(|talk| (talk.client, talk.server))
        .unwrap();
    let ClientStep::Listed(listed) = step else { panic!("{step:?}") };
    let names: Vec<_> = listed.iter().map(|e| (&e.name[..], &e.description[..])).collect();
    assert_eq!(names, [("disk", "one mebibyte"), ("frozen", "")]);
    assert_eq!(server, Step::Close(CloseReason::Aborted));
}

/// The last length that is allowed of each kind of data, and the first that is not; data that is no request; what
/// is granted before and what is not. A client may go on after each refusal.
#[test]
fn inv05_each_option_is_answered() {
    let (structured, extended) = (opt::STRUCTURED_REPLY, opt::EXTENDED_HEADERS);
    let [unknown, mut long, mut short, mut overrun, mut wide] =
        ["nope", "disk", "disk", "disk", "disk"].map(|name| info(name, &[InfoType::Name]));
    long.push(0);
    short.pop();
    overrun[3] = 200;
    wide[0] = 0xff;
    let good = info("disk", &[]);
    for option in [opt::INFO, opt::GO] {
        answered(&[(option, &unknown)], &[rep::ERR_UNKNOWN]);
        for malformed in [&long, &short, &overrun, &wide, &vec![], &info("\0", &[])] {
            let step = answered(&[(option, malformed)], &[rep::ERR_INVALID]);
            assert_eq!(step, Step::More);
        }
        let (most, more) = ([0; MAX_OPTION_DATA], [0; MAX_OPTION_DATA + 1]);
        let kinds = [rep::ERR_INVALID, rep::ERR_TOO_BIG, rep::INFO, rep::ACK];
        answered(&[(option, &most), (option, &more), (option, &good)], &kinds);
    }

    let request = meta("disk", &["base:allocation"]);
    let longer = [&request[..], b"x"].concat();
    let latin = [&request[..8], b"\0\0\0\x01\0\0\0\x01\xff"].concat();
    let name = meta(&"x".repeat(MAX_STRING + 1), &[]);
    let query = meta("disk", &[&"x".repeat(MAX_STRING + 1)]);
    let most = "x".repeat(MAX_STRING);
    let many = meta(&most, &[&most, &most, &most[..4000], "base:allocation"]);
    assert!(many.len() <= MAX_META_DATA);
    for option in [opt::LIST_META_CONTEXT, opt::SET_META_CONTEXT] {
        let cut = &request[..request.len() - 1];
        for (data, kind) in [
            (cut, rep::ERR_INVALID),
            (&longer, rep::ERR_INVALID),
            (&latin, rep::ERR_INVALID),
            (&name, rep::ERR_INVALID),
            (&query, rep::ERR_INVALID),
            (&[], rep::ERR_INVALID),
            (&meta("nope", &[]), rep::ERR_UNKNOWN),
            (&many, rep::ERR_UNKNOWN), // it was read
            (&[0; MAX_META_DATA], rep::ERR_INVALID),
            (&[0; MAX_META_DATA + 1], rep::ERR_TOO_BIG),
        ] {
            let options = [(structured, &b""[..]), (option, data), (opt::LIST, b"x")];
            answered(&options, &[rep::ACK, kind, rep::ERR_INVALID]);
        }
        // Before structured replies are granted.
        answered(&[(option, &request)], &[rep::ERR_INVALID]);
    }

    for option in [4, opt::STARTTLS, 0, !0] {
        answered(&[(option, b"")], &[rep::ERR_UNSUP]);
        answered(&[(option, &vec![7; MAX_OPTION_DRAIN as usize])], &[rep::ERR_UNSUP]);
    }
    for data in [&b""[..], b"farewell"] {
        assert_eq!(answered(&[(opt::ABORT, data)], &[rep::ACK]), Step::Close(CloseReason::Aborted));
    }
    answered(&[(opt::LIST, b"x")], &[rep::ERR_INVALID]);

    for (options, kinds, style) in [
        (&[(structured, &b""[..])][..], &[rep::ACK][..], HeaderStyle::Structured),
        (&[(structured, b"x")], &[rep::ERR_INVALID], HeaderStyle::Simple),
        (&[(structured, b""), (structured, b"")], &[rep::ACK; 2], HeaderStyle::Structured),
        (&[(extended, b"")], &[rep::ACK], HeaderStyle::Extended),
        (&[(extended, b"x")], &[rep::ERR_INVALID], HeaderStyle::Simple),
        (&[(extended, b""), (extended, b"")], &[rep::ACK, rep::ERR_INVALID], HeaderStyle::Extended),
        (&[(structured, b""), (extended, b"")], &[rep::ACK; 2], HeaderStyle::Extended),
        (
            &[(extended, b""), (structured, b"")],
            &[rep::ACK, rep::ERR_EXT_HEADER_REQD],
            HeaderStyle::Extended,
        ),
    ] {
        answered(options, kinds);
        let (_, step, ..) = serve(&session(FIXED, &[options, &[(opt::GO, &good)]].concat()));
        assert!(matches!(step, Step::Ready(Negotiated { style: it, .. }) if it == style));
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
}

#[test]
fn an_option_that_is_not_offered_is_unknown() {
    let asks = meta("disk", &["base:allocation"]);
    for (option, data) in [
        (opt::EXTENDED_HEADERS, &b""[..]),
        (opt::LIST_META_CONTEXT, &asks),
        (opt::SET_META_CONTEXT, &asks),
    ] {
        let input = session(FIXED, &[(opt::STRUCTURED_REPLY, b""), (option, data)]);
        let (mut out, exports) = (Vec::new(), driven::exports());
        let (used, step) = Handshake::new(&mut Vec::new()).receive(&input, &exports[..], &mut out);
        assert_eq!((used, step), (input.len(), Step::More));
        assert_eq!(driven::option_replies(&out).0[1], (option, rep::ERR_UNSUP, vec![]));
    }
}

/// Lists of many exports cannot be asked for without end. The last option is answered at the limit.
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

/// A negotiation of the library's client with its server: all that each said, and its last step.
pub(crate) struct Talk {
    pub(crate) said: Vec<u8>,
    pub(crate) asked: Vec<u8>,
    pub(crate) client: ClientStep,
    pub(crate) server: Step,
}

/// Negotiates a client with a server, each fed what the other said.
pub(crate) fn negotiate(
    mut client: ClientHandshake,
    configure: impl FnOnce(Handshake) -> Handshake,
    exports: &[ExportInfo],
) -> Result<Talk, ClientError> {
    let (mut said, mut asked) = (Vec::new(), Vec::new());
    let mut server = configure(Handshake::new(&mut said));
    let (mut heard, mut served, mut last) = (0, 0, Step::More);
    loop {
        let (used, step) = client.receive(&said[heard..], &mut asked)?;
        heard += used;
        if served < asked.len() {
            let (used, step) = server.receive(&asked[served..], exports, &mut said);
            served += used;
            last = step;
        }
        if !matches!(step, ClientStep::More | ClientStep::StartTls) {
            return Ok(Talk { said, asked, client: step, server: last });
        }
    }
}
