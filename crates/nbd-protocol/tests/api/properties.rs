//! Properties on random input.

use nbd_protocol::wire::{cmd, opt};
use nbd_protocol::{
    ClientError, ClientHandshake, ClientStep, CommandFlags, ExportInfo, Extent, Handshake,
    HeaderStyle, LengthTooLong, NbdError, Reply, ReplyContent, ReplyHeader, Request, Step,
    TransmissionFlags,
};

use crate::driven::{self, STYLES};
use proptest::collection::vec;
use proptest::prelude::*;

use crate::handshake::{info, negotiate, session};
use crate::meta::meta;

/// Data for an option: often what it should be.
fn option_data() -> impl Strategy<Value = Vec<u8>> {
    prop_oneof![
        3 => Just(Vec::new()),
        1 => vec(any::<u8>(), 0..40),
        1 => Just(vec![0; 9000]),
        4 => prop::sample::select(vec!["disk", "frozen", "", "nope"]).prop_map(|n| info(n, &[])),
        4 => (
            prop::sample::select(vec!["disk", "frozen", "", "nope"]),
            vec(prop::sample::select(vec!["base:", "base:allocation", "x:y", ""]), 0..4),
        )
            .prop_map(|(name, queries)| meta(name, &queries)),
    ]
}

/// Options as a client might send them: mostly known, mostly not the last.
fn options() -> impl Strategy<Value = Vec<(u32, Vec<u8>)>> {
    let option = prop_oneof![
        2 => Just(opt::INFO),
        2 => Just(opt::LIST),
        2 => Just(opt::STRUCTURED_REPLY),
        1 => Just(opt::LIST_META_CONTEXT),
        3 => Just(opt::SET_META_CONTEXT),
        1 => 0..12_u32,
        1 => any::<u32>(),
    ];
    vec((option, option_data()), 0..12)
}

fn requests() -> impl Strategy<Value = Vec<Request>> {
    let edge = prop_oneof![0..0x11_0000_u64, any::<u64>()];
    let len = prop_oneof![0..8192_u64, any::<u32>().prop_map(u64::from)];
    let request = (0..64_u16, 0..8_u16, any::<u64>(), edge, len).prop_map(
        |(flags, command, cookie, offset, len)| {
            let flags = CommandFlags(flags);
            Request { flags, command, cookie, offset, len }
        },
    );
    vec(request, 0..8)
}

proptest! {
    /// Sessions made of plausible messages, in pieces of every length: same output as whole, no
    /// panic, every verdict sound (the assertions are in `driven::run`).
    #[test]
    fn inv04_plausible_sessions(
        piece in 0..64_u8,
        flags in 0..4_u32,
        options in options(),
        name in prop::sample::select(vec!["disk", "frozen", ""]),
        requests in requests(),
        extended: bool,
    ) {
        let mut input = vec![piece << 2 | driven::SESSION];
        let mut options: Vec<_> = options.iter().map(|(o, d)| (*o, &d[..])).collect();
        let style = if extended { HeaderStyle::Extended } else { HeaderStyle::Structured };
        if extended {
            options.push((opt::EXTENDED_HEADERS, b""));
        }
        let go = info(name, &[]);
        options.push((opt::GO, &go));
        input.extend(session(flags, &options));
        for request in requests {
            input.extend(request.encode(style).unwrap().as_slice());
            input.resize(input.len() + request.payload_len(style).min(9000) as usize, 0x25);
        }
        driven::run(&input);
    }

    /// Any bytes at all, read by each side.
    #[test]
    fn inv04_any_bytes(input in vec(any::<u8>(), 0..200)) {
        driven::run(&input);
    }

    /// Any bytes after a valid start, so that they reach the option parser and the reply parsers.
    #[test]
    fn inv04_any_bytes_after_a_valid_start(mode in any::<u8>(), tail in vec(any::<u8>(), 0..200)) {
        let starts: [&[u8]; 4] = [
            &session(1, &[(opt::GO, &info("", &[]))]),
            b"NBDMAGICIHAVEOPT\0\x03",
            b"\x66\x8e\x33\xef",
            b"",
        ];
        driven::run(&[&[mode], starts[usize::from(mode & 3)], &tail].concat());
    }

    #[test]
    fn inv08_any_request_to_any_export(export in vec(any::<u8>(), 11), request in requests()) {
        for request in request {
            for style in STYLES {
                let header = request.encode(style).unwrap();
                driven::run(&[&[driven::REQUEST], &export[..], header.as_slice()].concat());
            }
        }
    }

    #[test]
    fn inv01_requests_round_trip(
        flags: u16, command in 0..9_u16, cookie: u64, offset: u64, len: u64, wide: bool,
    ) {
        let len = if wide { len } else { len & 0xffff_ffff };
        for style in STYLES {
            let mut request = Request { flags: CommandFlags(flags), command, cookie, offset, len };
            let encoded = request.encode(style);
            if len > u32::MAX.into() && !style.is_extended() {
                prop_assert_eq!(encoded, Err(LengthTooLong(len)));
                continue;
            }
            let header = encoded.unwrap();
            let bytes = header.as_slice();
            if style.is_extended() && command == cmd::WRITE {
                request.flags |= CommandFlags::PAYLOAD_LEN;
                prop_assert_eq!(request.payload_len(style), len);
            }
            prop_assert_eq!(bytes.len(), style.request_len());
            prop_assert_eq!(Request::parse(bytes, style), Ok(Some((request, bytes.len()))));
            for end in 0..bytes.len() {
                prop_assert_eq!(Request::parse(&bytes[..end], style), Ok(None));
            }
        }
    }

    #[test]
    fn inv01_replies_round_trip(
        command in 0..9_u16, cookie: u64, offset: u64, len in 1..=u32::MAX - 8, code in 1..200_u32,
        at: u64,
    ) {
        let error = NbdError::from_code(code).expect("not zero");
        let (flags, count) = (CommandFlags::NONE, 1 + len % 1000);
        let request = Request { flags, command, cookie, offset, len: len.into() };
        for style in STYLES {
            let chunks = request.wants_chunks(style);
            let done = if chunks { ReplyContent::None } else { ReplyContent::Simple(Ok(())) };
            let failed = if chunks { ReplyContent::Error(error) } else { ReplyContent::Simple(Err(error)) };
            let mut said = vec![
                (ReplyHeader::done(&request, style), done, true),
                (ReplyHeader::error(&request, style, error), failed, true),
            ];
            if style.has_chunks() {
                let data = ReplyContent::Data { offset, len };
                said.push((ReplyHeader::read_data(&request, style), data, true));
                let piece = ReplyHeader::data_chunk(&request, style, at, len.into(), false);
                said.push((piece, ReplyContent::Data { offset: at, len }, false));
                let extents = ReplyContent::Extents { context: code, len: count * Extent::size(style) as u32 };
                said.push((ReplyHeader::block_status(&request, style, code, count), extents, true));
            }
            for (header, content, done) in said {
                let request_offset = style.is_extended().then_some(offset);
                let reply = Reply { cookie, request_offset, done, content };
                let bytes = header.as_slice();
                prop_assert_eq!(Reply::parse(bytes, style), Ok(Some((reply, bytes.len()))));
                for end in 0..bytes.len() {
                    prop_assert_eq!(Reply::parse(&bytes[..end], style), Ok(None));
                }
                // Extended headers and the others exclude each other.
                for other in STYLES.into_iter().filter(|other| other.is_extended() != style.is_extended()) {
                    prop_assert!(matches!(Reply::parse(bytes, other), Err(ClientError::BadReplyMagic(_))));
                }
            }
        }
    }

    #[test]
    fn inv01_extents_round_trip(extents in vec((any::<u64>(), any::<u64>()), 1..20)) {
        let wide: Vec<_> = extents.iter().map(|&(len, flags)| Extent { len, flags }).collect();
        let bytes: Vec<u8> = wide.iter().flat_map(|extent| extent.encode64()).collect();
        prop_assert!(Extent::parse_all(&bytes, HeaderStyle::Extended).eq(wide.iter().copied()));
        let compact: Vec<_> =
            wide.iter().map(|e| Extent { len: e.len >> 32, flags: e.flags >> 32 }).collect();
        let bytes: Vec<u8> = compact.iter().flat_map(|extent| extent.encode32().unwrap()).collect();
        prop_assert!(Extent::parse_all(&bytes, HeaderStyle::Structured).eq(compact));
        for extent in wide.iter().filter(|e| e.len | e.flags > u32::MAX.into()) {
            prop_assert_eq!(extent.encode32(), None);
        }
    }

    /// A client that asks for everything against a server that grants everything: every prefix of what
    /// either says leaves the other waiting for more.
    #[test]
    fn inv02_prefixes_of_a_handshake_are_incomplete(name in "[^\0]{0,40}", style in 0..3_usize) {
        let exports = [ExportInfo::new(name.clone(), 1 << 20)];
        let mut client = ClientHandshake::new(&name, STYLES[style]).ask_allocation();
        let fresh = client.clone();
        let (mut said, mut heard, mut asked) = (Vec::new(), 0, Vec::new());
        let mut server = Handshake::new(&mut said).extended_headers().base_allocation();
        let mut sent = 0;
        loop {
            let (used, step) = client.receive(&said[heard..], &mut asked).unwrap();
            heard += used;
            if step != ClientStep::More {
                break;
            }
            let (used, _) = server.receive(&asked[sent..], &exports[..], &mut said);
            sent += used;
        }
        for end in 0..said.len() {
            let (_, step) = fresh.clone().receive(&said[..end], &mut Vec::new()).unwrap();
            prop_assert_eq!(step, ClientStep::More);
        }
        for end in 0..asked.len() {
            let mut server = Handshake::new(&mut Vec::new()).extended_headers().base_allocation();
            let (used, step) = server.receive(&asked[..end], &exports[..], &mut Vec::new());
            prop_assert_eq!((used, step), (end, Step::More));
        }
    }

    /// Client against server: what one export says is what the client learns.
    #[test]
    fn client_against_server(
        name in "[^\0]{1,40}",
        description in "[^\0]{0,40}",
        size: u64,
        flags: u16,
        shift in 0..=16_u32,
        style in 0..3_usize,
        allocation: bool,
    ) {
        let style = STYLES[style];
        let chunks = style.has_chunks();
        let mut export = ExportInfo::new(name.clone(), size);
        export.description = description.clone();
        export.flags = TransmissionFlags(flags);
        export.min_block = 1 << shift;
        let exports = [export.clone()];
        let mut client = ClientHandshake::new(&name, style);
        if allocation {
            client = client.ask_allocation();
        }
        let (step, server) = negotiate(client, &exports).unwrap();
        let ClientStep::Connected(connected) = step else { panic!("{step:?}") };
        let Step::Ready(negotiated) = server else { panic!("{server:?}") };
        prop_assert_eq!(negotiated.export, name.clone());
        prop_assert_eq!(negotiated.style, style);
        prop_assert_eq!(connected.style, style);
        prop_assert_eq!(negotiated.allocation, chunks && allocation);
        prop_assert_eq!(connected.allocation.is_some(), chunks && allocation);
        prop_assert_eq!(connected.size, size);
        prop_assert_eq!(connected.flags, export.advertised(style));
        prop_assert_eq!(connected.flags, negotiated.flags);
        prop_assert_eq!(connected.block_sizes, Some((1 << shift, 4096, export.max_block)));
        prop_assert_eq!(connected.name, Some(name));
        prop_assert_eq!(connected.description, Some(description));
    }
}
