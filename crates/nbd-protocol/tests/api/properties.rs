//! Properties on random input.

use nbd_protocol::wire::opt;
use nbd_protocol::{
    ClientHandshake, ClientStep, CommandFlags, ExportInfo, NbdError, Reply, ReplyHeader, Request,
    Step, TransmissionFlags,
};

use crate::driven;
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
    let len = prop_oneof![0..8192_u32, any::<u32>()];
    let request = (0..32_u16, 0..8_u16, any::<u64>(), edge, len).prop_map(
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
    fn plausible_sessions(
        piece in 0..64_u8,
        flags in 0..4_u32,
        options in options(),
        name in prop::sample::select(vec!["disk", "frozen", ""]),
        requests in requests(),
    ) {
        let mut input = vec![piece << 2 | driven::SESSION];
        let mut options: Vec<_> = options.iter().map(|(o, d)| (*o, &d[..])).collect();
        let go = info(name, &[]);
        options.push((opt::GO, &go));
        input.extend(session(flags, &options));
        for request in requests {
            input.extend(request.encode());
            input.resize(input.len() + request.payload_len().min(9000) as usize, 0x25);
        }
        driven::run(&input);
    }

    /// Any bytes at all, read by each side.
    #[test]
    fn any_bytes(input in vec(any::<u8>(), 0..200)) {
        driven::run(&input);
    }

    /// Any bytes after a valid start, so that they reach the option parser and the reply parsers.
    #[test]
    fn any_bytes_after_a_valid_start(mode in any::<u8>(), tail in vec(any::<u8>(), 0..200)) {
        let starts: [&[u8]; 4] = [
            &session(1, &[(opt::GO, &info("", &[]))]),
            b"NBDMAGICIHAVEOPT\0\x03",
            b"\x66\x8e\x33\xef",
            b"",
        ];
        driven::run(&[&[mode], starts[usize::from(mode & 3)], &tail].concat());
    }

    #[test]
    fn any_request_to_any_export(export in vec(any::<u8>(), 11), request in requests()) {
        for request in request {
            driven::run(&[&[driven::REQUEST], &export[..], &request.encode()].concat());
        }
    }

    #[test]
    fn requests_round_trip(flags: u16, command: u16, cookie: u64, offset: u64, len: u32) {
        let request = Request { flags: CommandFlags(flags), command, cookie, offset, len };
        prop_assert_eq!(Request::parse(&request.encode()), Ok(request));
    }

    #[test]
    fn replies_round_trip(cookie: u64, offset: u64, len in 1..=u32::MAX - 8, code in 1..200_u32) {
        let error = NbdError::from_code(code).expect("not zero");
        for (header, reply) in [
            (ReplyHeader::simple(cookie, Ok(())), Reply::Simple { cookie, result: Ok(()) }),
            (ReplyHeader::error(cookie, false, error), Reply::Simple { cookie, result: Err(error) }),
            (ReplyHeader::error(cookie, true, error), Reply::Error { cookie, error, done: true }),
            (ReplyHeader::done(cookie), Reply::Done { cookie }),
            (
                ReplyHeader::read_data(cookie, true, offset, len),
                Reply::Data { cookie, offset, len, done: true },
            ),
            (
                ReplyHeader::block_status(cookie, code, 1 + len % 1000),
                Reply::Extents { cookie, context: code, len: 8 + len % 1000 * 8, done: true },
            ),
        ] {
            let bytes = header.as_slice();
            prop_assert_eq!(Reply::parse(bytes), Ok(Some((reply, bytes.len()))));
            for end in 0..bytes.len() {
                prop_assert_eq!(Reply::parse(&bytes[..end]), Ok(None));
            }
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
        structured: bool,
        allocation: bool,
    ) {
        let mut export = ExportInfo::new(name.clone(), size);
        export.description = description.clone();
        export.flags = TransmissionFlags(flags);
        export.min_block = 1 << shift;
        let exports = [export.clone()];
        let mut client = ClientHandshake::new(&name, structured);
        if allocation {
            client = client.ask_allocation();
        }
        let (step, server) = negotiate(client, &exports).unwrap();
        let ClientStep::Connected(connected) = step else { panic!("{step:?}") };
        let Step::Ready(negotiated) = server else { panic!("{server:?}") };
        prop_assert_eq!(negotiated.export, name.clone());
        prop_assert_eq!(negotiated.structured, structured);
        prop_assert_eq!(connected.structured, structured);
        prop_assert_eq!(negotiated.allocation, structured && allocation);
        prop_assert_eq!(connected.allocation.is_some(), structured && allocation);
        prop_assert_eq!(connected.size, size);
        prop_assert_eq!(connected.flags, export.advertised(structured));
        prop_assert_eq!(connected.flags, negotiated.flags);
        prop_assert_eq!(connected.block_sizes, Some((1 << shift, 4096, export.max_block)));
        prop_assert_eq!(connected.name, Some(name));
        prop_assert_eq!(connected.description, Some(description));
    }
}
