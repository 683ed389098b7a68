//! Properties on random input.

use nbd_protocol::wire::{cmd, opt};
use nbd_protocol::{
    ALLOCATION_ID, ClientHandshake, ClientStep, CommandFlags, Connected, ExportInfo, Extent,
    Handshake, HeaderStyle, LengthTooLong, Negotiated, Request, Step, TransmissionFlags,
};
use proptest::collection::vec;
use proptest::prelude::*;

use crate::driven::{self, STYLES};
use crate::handshake::{all, info, negotiate, session};
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
    let len = prop_oneof![0..8192_u64, any::<u32>().prop_map(u64::from), any::<u64>()];
    let request = (prop_oneof![0..64_u16, any::<u16>()], 0..9_u16, any::<u64>(), edge, len)
        .prop_map(|(flags, command, cookie, offset, len)| {
            let flags = CommandFlags(flags);
            Request { flags, command, cookie, offset, len }
        });
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
            let Ok(header) = request.encode(style) else { continue };
            input.extend(header.as_slice());
            input.resize(input.len() + request.payload_len(style).min(9000) as usize, 0x25);
        }
        driven::run(&input);
    }

    /// Any bytes, also after a valid start, so that they reach the option parser and the reply parsers.
    #[test]
    fn inv04_any_bytes(mode in any::<u8>(), valid: bool, tail in vec(any::<u8>(), 0..200)) {
        let starts: [&[u8]; 4] = [
            &session(1, &[(opt::GO, &info("", &[]))]),
            b"NBDMAGICIHAVEOPT\0\x03",
            b"\x66\x8e\x33\xef",
            b"",
        ];
        let start = if valid { starts[usize::from(mode & 3)] } else { b"" };
        driven::run(&[&[mode], start, &tail].concat());
    }

    /// Requests to any export, and the replies to them (by the assertions in `driven::run`).
    #[test]
    fn inv01_requests_and_replies_round_trip(
        export in vec(any::<u8>(), 11),
        requests in requests(),
    ) {
        for (mut request, style) in requests.into_iter().flat_map(|it| STYLES.map(|style| (it, style))) {
            let encoded = request.encode(style);
            if request.len > u32::MAX.into() && !style.is_extended() {
                prop_assert_eq!(encoded, Err(LengthTooLong(request.len)));
                continue;
            }
            let header = encoded.unwrap();
            if style.is_extended() && request.command == cmd::WRITE {
                request.flags |= CommandFlags::PAYLOAD_LEN;
            }
            let parsed = Request::parse(header.as_slice(), style);
            prop_assert_eq!(parsed, Ok(Some((request, style.request_len()))));
            driven::run(&[&[driven::REQUEST], &export[..], header.as_slice()].concat());
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
        for (len, flags) in [(1 << 32, 0), (1, 1 << 32)] {
            prop_assert_eq!(Extent { len, flags }.encode32(), None);
        }
    }

    /// Client against server: what one export says is what the client learns. Every prefix of what either says
    /// leaves the other waiting for more.
    #[test]
    fn inv02_client_against_server(
        name in "[^\0]{0,40}",
        description in "[^\0]{0,40}",
        size: u64,
        flags: u16,
        shift in 0..=16_u32,
        style in 0..3_usize,
        allocation: bool,
    ) {
        let style = STYLES[style];
        let chosen = style.has_chunks() && allocation;
        let mut export = ExportInfo::new(name.clone(), size);
        export.description = description.clone();
        export.flags = TransmissionFlags(flags);
        export.min_block = 1 << shift;
        // Some flags need structured replies, or another flag.
        let mut flags = export.flags | TransmissionFlags::HAS_FLAGS;
        if !style.has_chunks() {
            flags = flags - TransmissionFlags::SEND_DF;
        }
        if !flags.contains(TransmissionFlags::SEND_WRITE_ZEROES) {
            flags = flags - TransmissionFlags::SEND_FAST_ZERO;
        }
        let block_sizes = Some((1 << shift, 4096, export.max_block));
        let exports = [export];
        let mut client = ClientHandshake::new(&name, style);
        if allocation {
            client = client.ask_allocation();
        }
        let talk = negotiate(client.clone(), all, &exports).unwrap();
        let negotiated = Negotiated {
            export: name.clone(), style, allocation: chosen, block_sizes: true, size, flags, tls: false,
        };
        prop_assert_eq!(talk.server, Step::Ready(negotiated));
        let connected = Connected {
            size, flags, style, tls: false, allocation: chosen.then_some(ALLOCATION_ID), block_sizes,
            name: Some(name), description: Some(description),
        };
        prop_assert_eq!(talk.client, ClientStep::Connected(connected));
        for end in 0..talk.said.len() {
            let (_, step) = client.clone().receive(&talk.said[..end], &mut Vec::new()).unwrap();
            prop_assert_eq!(step, ClientStep::More);
        }
        for end in 0..talk.asked.len() {
            let mut server = all(Handshake::new(&mut Vec::new()));
            let (used, step) = server.receive(&talk.asked[..end], &exports[..], &mut Vec::new());
            prop_assert_eq!((used, step), (end, Step::More));
        }
    }
}

/// The corpus has `seed-*`, one input per option, command and reply; `captured-*`, what nbdinfo, nbdcopy, qemu-io,
/// qemu-img and fio said to a server and what it replied; `found-*`, what the fuzzer added to their coverage.
#[test]
fn inv04_every_input_of_the_corpus_holds() {
    let corpus = concat!(env!("CARGO_MANIFEST_DIR"), "/../../fuzz/corpus/nbd_protocol");
    testkit::corpus::replay(corpus, 200, 200 * 64, |input| {
        // In every length of pieces.
        let [mode, rest @ ..] = input else { panic!("an empty input") };
        (0..64).for_each(|piece| driven::run(&[&[piece << 2 | mode & 3], rest].concat()));
        64
    });
}
