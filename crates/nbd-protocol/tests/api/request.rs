//! Requests and their verdicts, and the bytes of headers.

use nbd_protocol::wire::cmd;
use nbd_protocol::{
    ALLOCATION_ID, Agreed, BadMagic, BadPayload, ClientError, CommandFlags, ExportInfo, Extent,
    HeaderStyle, MAX_PAYLOAD, MAX_STRING, NbdError, Reply, ReplyContent, ReplyHeader, Request,
    TransmissionFlags,
};

use crate::driven::{STYLES, expected};

const SIZE: u64 = 1 << 30;
const STRUCTURED: HeaderStyle = HeaderStyle::Structured;
const WIDE: HeaderStyle = HeaderStyle::Extended;

fn export() -> ExportInfo {
    let mut export = ExportInfo::new("disk", SIZE);
    export.flags = TransmissionFlags(0x0fff) - TransmissionFlags::READ_ONLY;
    export
}

fn request(command: u16, flags: CommandFlags, offset: u64, len: u64) -> Request {
    Request { flags, command, cookie: 0x1122_3344_5566_7788, offset, len }
}

/// Every byte of a client and of a server.
#[test]
fn inv03_headers_are_laid_out_as_the_protocol_says() {
    let write = request(cmd::WRITE, CommandFlags::FUA, 0x0102_0304_0506_0708, 0x0a0b_0c0d);
    let zero = request(cmd::WRITE_ZEROES, CommandFlags::NO_HOLE, 1 << 20, 1 << 40);
    for (request, style, bytes) in [
        (
            write,
            STRUCTURED,
            &b"\x25\x60\x95\x13\0\x01\0\x01\x11\x22\x33\x44\x55\x66\x77\x88\
               \x01\x02\x03\x04\x05\x06\x07\x08\x0a\x0b\x0c\x0d"[..],
        ),
        (
            zero,
            WIDE,
            b"\x21\xe4\x1c\x71\0\x02\0\x06\x11\x22\x33\x44\x55\x66\x77\x88\
              \0\0\0\0\0\x10\0\0\0\0\x01\0\0\0\0\0",
        ),
    ] {
        assert_eq!(request.encode(style).unwrap().as_slice(), bytes);
        assert_eq!(Request::parse(bytes, style), Ok(Some((request, bytes.len()))));
        assert_eq!(Request::parse(&[0x42; 32], style), Err(BadMagic(0x4242_4242)));
    }
    let read = request(cmd::READ, CommandFlags::NONE, 1 << 20, 512);
    let nothing = Request { len: 0, ..read }; // a chunk of data must hold at least one byte
    let done = b"\x66\x8e\x33\xef\0\x01\0\0\x11\x22\x33\x44\x55\x66\x77\x88\0\0\0\0";
    for (header, bytes) in [
        (
            ReplyHeader::simple(read.cookie, Err(NbdError::NoSpc)),
            &b"\x67\x44\x66\x98\0\0\0\x1c\x11\x22\x33\x44\x55\x66\x77\x88"[..],
        ),
        (
            ReplyHeader::read_data(&read, HeaderStyle::Simple),
            b"\x67\x44\x66\x98\0\0\0\0\x11\x22\x33\x44\x55\x66\x77\x88",
        ),
        (
            ReplyHeader::read_data(&read, STRUCTURED),
            b"\x66\x8e\x33\xef\0\x01\0\x01\x11\x22\x33\x44\x55\x66\x77\x88\
              \0\0\x02\x08\0\0\0\0\0\x10\0\0",
        ),
        (
            ReplyHeader::block_status(&read, STRUCTURED, ALLOCATION_ID, 3),
            b"\x66\x8e\x33\xef\0\x01\0\x05\x11\x22\x33\x44\x55\x66\x77\x88\
              \0\0\0\x1c\0\0\0\x01",
        ),
        (
            ReplyHeader::error(&read, STRUCTURED, NbdError::Io),
            b"\x66\x8e\x33\xef\0\x01\x80\x01\x11\x22\x33\x44\x55\x66\x77\x88\
              \0\0\0\x06\0\0\0\x05\0\0",
        ),
        (ReplyHeader::done(&read, STRUCTURED), done),
        (ReplyHeader::read_data(&nothing, STRUCTURED), done),
        (
            ReplyHeader::done(&zero, WIDE),
            b"\x6e\x8a\x27\x8c\0\x01\0\0\x11\x22\x33\x44\x55\x66\x77\x88\
              \0\0\0\0\0\x10\0\0\0\0\0\0\0\0\0\0",
        ),
        (
            ReplyHeader::error(&zero, WIDE, NbdError::NoSpc),
            b"\x6e\x8a\x27\x8c\0\x01\x80\x01\x11\x22\x33\x44\x55\x66\x77\x88\
              \0\0\0\0\0\x10\0\0\0\0\0\0\0\0\0\x06\0\0\0\x1c\0\0",
        ),
        (
            ReplyHeader::read_data(&read, WIDE),
            b"\x6e\x8a\x27\x8c\0\x01\0\x01\x11\x22\x33\x44\x55\x66\x77\x88\
              \0\0\0\0\0\x10\0\0\0\0\0\0\0\0\x02\x08\0\0\0\0\0\x10\0\0",
        ),
        (
            ReplyHeader::block_status(&read, WIDE, ALLOCATION_ID, 2),
            b"\x6e\x8a\x27\x8c\0\x01\0\x06\x11\x22\x33\x44\x55\x66\x77\x88\
              \0\0\0\0\0\x10\0\0\0\0\0\0\0\0\0\x28\0\0\0\x01\0\0\0\x02",
        ),
    ] {
        assert_eq!(header.as_slice(), bytes);
    }
}

/// Each command with each flag, at each edge of the export and of the limits: for exports that lack one flag,
/// that are read-only, that have a unit, or no maximum.
#[test]
fn inv08_every_verdict_is_that_of_the_protocol() {
    use CommandFlags as F;
    let mut exports = vec![export(); 12];
    for (bit, export) in exports.iter_mut().enumerate() {
        export.flags.0 ^= 1 << bit;
    }
    let with = |flags, size, min_block, max_block| {
        let mut export = ExportInfo::new("disk", size);
        (export.flags, export.min_block, export.max_block) = (flags, min_block, max_block);
        export
    };
    exports.extend([
        with(export().flags, SIZE, 512, MAX_PAYLOAD),
        with(TransmissionFlags::READ_ONLY, SIZE, 512, MAX_PAYLOAD),
        with(export().flags, 1 << 40, 1, u32::MAX),
    ]);
    let mut flags: Vec<F> = (0..16).map(|bit| F(1 << bit)).collect();
    flags.extend([F::NONE, F::FUA | F::NO_HOLE | F::FAST_ZERO, F::FUA | F::PAYLOAD_LEN]);
    let chunk = u64::from(u32::MAX - 8); // beside it a chunk has an offset
    let most = u64::from(MAX_PAYLOAD);
    let mut lens = vec![0, 1, 511, 512, most, most + 1, chunk, chunk + 1];
    lens.extend([SIZE - 1, SIZE, SIZE + 1, 1 << 40, (1 << 40) + 1]);
    let offsets = [0, 1, 512, SIZE - 1, SIZE, 1 << 63, u64::MAX];
    let agreed = STYLES
        .iter()
        .flat_map(|&style| [false, true].map(|allocation| Agreed { style, allocation }));
    let mut seen = [0; 4];
    for (export, agreed) in agreed.flat_map(|agreed| exports.iter().map(move |e| (e, agreed))) {
        for command in (0..10).chain([4711, u16::MAX]) {
            for (&flags, &len) in flags.iter().flat_map(|f| lens.iter().map(move |len| (f, len))) {
                for offset in offsets {
                    let request = request(command, flags, offset, len);
                    let verdict = request.check(export, agreed);
                    let said = expected(&request, export, agreed);
                    assert_eq!(verdict, said, "{request:?} {agreed:?} {export:?}");
                    seen[match verdict {
                        Ok(_) => 0,
                        Err(NbdError::Inval) => 1,
                        Err(NbdError::Perm) => 2,
                        Err(_) => 3,
                    }] += 1;
                }
            }
        }
    }
    assert!(seen.iter().all(|seen| *seen > 1_000), "{seen:?}");
}

#[test]
fn inv03_payloads_follow_the_flag_and_only_a_write_may_have_one() {
    let request = |command, flags| request(command, flags, 0, 512);
    let wide = Agreed { style: WIDE, allocation: true };
    let (none, flag) = (CommandFlags::NONE, CommandFlags::PAYLOAD_LEN);
    let write = request(cmd::WRITE, flag);
    assert_eq!(write.payload_len(WIDE), 512);
    assert!(write.check(&export(), wide).is_ok());
    let effect = request(cmd::WRITE, none);
    assert_eq!(effect.payload_len(WIDE), 0);
    assert_eq!(effect.checked_payload_len(WIDE, MAX_PAYLOAD), Err(BadPayload::NoFlag(512)));
    assert_eq!(effect.check(&export(), wide), Err(NbdError::Inval));
    // No payload is skipped that is longer than the maximum, whichever command it belongs to.
    for command in [cmd::READ, cmd::WRITE, cmd::TRIM, 4711] {
        for (len, max) in [(513, 512), (u64::MAX, u32::MAX)] {
            let long = Request { len, ..request(command, flag) };
            let refused = long.checked_payload_len(WIDE, max);
            assert_eq!(refused, Err(BadPayload::TooLong { len, max }));
        }
        assert_eq!(request(command, flag).checked_payload_len(WIDE, 512), Ok(512));
    }
    assert_eq!(request(cmd::TRIM, none).checked_payload_len(WIDE, 0), Ok(0));
    for command in [cmd::READ, cmd::TRIM, cmd::CACHE, cmd::WRITE_ZEROES, cmd::BLOCK_STATUS] {
        assert_eq!(request(command, flag).payload_len(WIDE), 512);
        assert_eq!(request(command, flag).check(&export(), wide), Err(NbdError::Inval));
        assert!(request(command, none).check(&export(), wide).is_ok());
    }
    // Without extended headers the flag is unknown, and the command alone decides.
    let structured = Agreed { style: STRUCTURED, allocation: true };
    assert_eq!(write.payload_len(structured.style), 512);
    assert_eq!(effect.checked_payload_len(structured.style, 512), Ok(512));
    let long = effect.checked_payload_len(structured.style, 511);
    assert_eq!(long, Err(BadPayload::TooLong { len: 512, max: 511 }));
    assert_eq!(write.check(&export(), structured), Err(NbdError::Inval));
}

/// A chunk from its parts. Its payload may be shorter than its length.
fn chunk(style: HeaderStyle, flags: u16, kind: u16, len: usize, payload: &[u8]) -> Vec<u8> {
    let fields = [flags, kind].map(u16::to_be_bytes).concat();
    let cookie = 5_u64.to_be_bytes();
    if style.is_extended() {
        let (offset, len) = (4096_u64.to_be_bytes(), (len as u64).to_be_bytes());
        [b"\x6e\x8a\x27\x8c", &fields[..], &cookie, &offset, &len, payload].concat()
    } else {
        [b"\x66\x8e\x33\xef", &fields[..], &cookie, &(len as u32).to_be_bytes(), payload].concat()
    }
}

#[test]
fn a_client_reads_the_chunks_of_other_servers() {
    let extents = [Extent { len: 1 << 40, flags: 3 }, Extent { len: 4096, flags: 1 << 40 }];
    let encoded = extents.map(Extent::encode64).concat();
    assert!(Extent::parse_all(&encoded, WIDE).eq(extents));
    let wide = [b"\0\0\0\x09\0\0\0\x02", &encoded[..]].concat();
    for (style, flags, kind, payload, content, behind) in [
        (
            STRUCTURED,
            0,
            2,
            &b"\0\0\0\0\0\0\x10\0\0\0\x20\0"[..],
            ReplyContent::Hole { offset: 0x1000, len: 0x2000 },
            0,
        ),
        (
            STRUCTURED,
            0,
            5,
            b"\0\0\0\x09\0\0\x10\0\0\0\0\x03",
            ReplyContent::Extents { context: 9, len: 8 },
            8,
        ),
        (WIDE, 1, 6, &wide, ReplyContent::Extents { context: 9, len: 32 }, 32),
        // An error with a message, and one with an offset.
        (STRUCTURED, 1, 0x8001, b"\0\0\0\x16\0\x02no", ReplyContent::Error(NbdError::Inval), 0),
        (
            STRUCTURED,
            0,
            0x8002,
            b"\0\0\0\x05\0\0\0\0\0\0\0\0\x10\0",
            ReplyContent::Error(NbdError::Io),
            0,
        ),
    ] {
        let bytes = chunk(style, flags, kind, payload.len(), payload);
        let request_offset = style.is_extended().then_some(4096);
        let reply = Reply { cookie: 5, request_offset, done: flags == 1, content };
        assert_eq!(Reply::parse(&bytes, style), Ok(Some((reply, bytes.len() - behind))));
    }
}

#[test]
fn a_chunk_of_an_error_has_its_fields_and_at_most_a_string_and_an_offset() {
    let longest = 4 + 2 + MAX_STRING + 8;
    for (len, fits) in [(5, false), (6, true), (longest, true), (longest + 1, false)] {
        let mut payload = vec![0; len];
        payload[3] = NbdError::NoSpc as u8;
        for kind in [0x8001, 0x8002, 0x8003] {
            let bytes = chunk(STRUCTURED, 1, kind, len, &payload);
            let parsed = Reply::parse(&bytes, STRUCTURED);
            assert_eq!(parsed.is_ok(), fits, "{len}");
            if let Ok(parsed) = parsed {
                let (reply, used) = parsed.unwrap();
                assert_eq!((reply.content, used), (ReplyContent::Error(NbdError::NoSpc), 20 + len));
            }
        }
    }
}

#[test]
fn a_client_refuses_chunks_that_contradict_themselves() {
    for (style, flags, kind, len, payload) in [
        (STRUCTURED, 0, 0, 0, &b""[..]), // the last chunk, not marked so
        (STRUCTURED, 1, 0, 1, b"x"),     // a last chunk with content
        (STRUCTURED, 1, 1, 8, b"\0\0\0\0\0\0\0\0"), // data without data
        (STRUCTURED, 1, 2, 12, b"\0\0\0\0\0\0\0\0\0\0\0\0"), // a hole of no bytes
        (STRUCTURED, 1, 2, 13, b"\0\0\0\0\0\0\0\0\0\0\0\x01\0"), // a hole and more
        (STRUCTURED, 1, 5, 4, b"\0\0\0\x01"), // a context without extents
        (STRUCTURED, 1, 5, 13, b"\0\0\0\x01\0\0\x10\0\0\0\0\0\0"), // a part of an extent
        (STRUCTURED, 1, 6, 24, b"\0\0\0\x09\0\0\0\x01"), // extents in 64 bits
        (STRUCTURED, 1, 3, 12, b"what is this"), // unknown, not an error
        (STRUCTURED, 1, 0x8001, 5, b"\0\0\0\x16\0"), // no length of the message
        (STRUCTURED, 1, 0x8001, 15, b"\0\0\0\x16\0\x0atoo short"), // message cut off
        (WIDE, 1, 6, 24 + 16, b"\0\0\0\x09\0\0\0\x01"), // a count that is not the length's
        (WIDE, 1, 6, 8, b"\0\0\0\x09\0\0\0\0"), // no extent
        (WIDE, 1, 6, 8 + 24, b"\0\0\0\x09\0\0\0\x01"), // half an extent
        (WIDE, 1, 5, 12, b"\0\0\0\x01\0\0\x10\0\0\0\0\0"), // in 32 bits
        (WIDE, 1, 1, (1 << 32) + 16, b"\0\0\0\0\0\0\0\0"), // more than a request may ask for
        (WIDE, 1, 0, 1, b"x"),           // a last chunk with content
    ] {
        let refused = Reply::parse(&chunk(style, flags, kind, len, payload), style);
        assert!(matches!(refused, Err(ClientError::BadChunk { .. })), "{kind} {payload:02x?}");
    }
    assert!(Reply::parse(b"\x67\x44\x66\x99", STRUCTURED).is_err());
}
