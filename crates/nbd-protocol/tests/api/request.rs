//! Refused requests, with their errors, and the bytes of replies.

use nbd_protocol::wire::cmd;
use nbd_protocol::{
    ALLOCATION_ID, Agreed, BadMagic, Command, CommandFlags, ExportInfo, HeaderStyle, MAX_PAYLOAD,
    MAX_STRING, NbdError, Reply, ReplyContent, ReplyHeader, Request, TransmissionFlags,
};

use crate::driven::{STYLES, expected};

const SIZE: u64 = 1 << 30;
const STRUCTURED: HeaderStyle = HeaderStyle::Structured;
const ALL: Agreed = Agreed { style: STRUCTURED, allocation: true };

fn export() -> ExportInfo {
    let mut export = ExportInfo::new("disk", SIZE);
    export.flags = TransmissionFlags(0x0fff) - TransmissionFlags::READ_ONLY;
    export
}

fn request(command: u16, flags: CommandFlags, offset: u64, len: u64) -> Request {
    Request { flags, command, cookie: 9, offset, len }
}

fn check(command: u16, flags: CommandFlags, offset: u64, len: u64) -> Result<Command, NbdError> {
    request(command, flags, offset, len).check(&export(), ALL)
}

#[test]
fn headers_are_laid_out_as_the_protocol_says() {
    let request = request(cmd::WRITE, CommandFlags::FUA, 0x0102_0304_0506_0708, 0x0a0b_0c0d);
    let header = request.encode(STRUCTURED).unwrap();
    let bytes = header.as_slice();
    let expected =
        b"\x25\x60\x95\x13\0\x01\0\x01\0\0\0\0\0\0\0\x09\x01\x02\x03\x04\x05\x06\x07\x08\
                     \x0a\x0b\x0c\x0d";
    assert_eq!(bytes, expected);
    assert_eq!(Request::parse(bytes, STRUCTURED), Ok(Some((request, 28))));
    assert_eq!(request.payload_len(STRUCTURED), 0x0a0b_0c0d);
    for style in STYLES {
        assert_eq!(Request::parse(&[0x42; 32], style), Err(BadMagic(0x4242_4242)));
    }
}

#[test]
fn every_command_is_accepted_with_its_flags() {
    use CommandFlags as F;
    assert_eq!(check(cmd::READ, F::DF, 0, 4096), Ok(Command::Read { df: true }));
    assert_eq!(check(cmd::WRITE, F::FUA, 0, 4096), Ok(Command::Write { fua: true }));
    assert_eq!(check(cmd::FLUSH, F::NONE, 0, 0), Ok(Command::Flush));
    assert_eq!(check(cmd::TRIM, F::NONE, 0, 4096), Ok(Command::Trim { fua: false }));
    assert_eq!(check(cmd::CACHE, F::NONE, 0, 4096), Ok(Command::Cache));
    assert_eq!(
        check(cmd::WRITE_ZEROES, F::FUA | F::NO_HOLE | F::FAST_ZERO, 0, 4096),
        Ok(Command::WriteZeroes { fua: true, no_hole: true, fast: true })
    );
    assert_eq!(
        check(cmd::WRITE_ZEROES, F::NONE, 0, 4096),
        Ok(Command::WriteZeroes { fua: false, no_hole: false, fast: false })
    );
    // FUA is in order on every command; DISC is never refused.
    assert_eq!(check(cmd::READ, F::FUA, 0, 1), Ok(Command::Read { df: false }));
    assert_eq!(check(cmd::FLUSH, F::FUA, 0, 0), Ok(Command::Flush));
    assert_eq!(check(cmd::DISC, CommandFlags(0xffff), 1, 1), Ok(Command::Disconnect));
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
                    let verdict = request.check(export, agreed).map(|_| ());
                    let said = expected(&request, export, agreed);
                    assert_eq!(verdict, said, "{request:?} {agreed:?} {export:?}");
                    seen[match verdict {
                        Ok(()) => 0,
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
fn replies_are_laid_out_as_the_protocol_says() {
    let cookie = 0x1122_3344_5566_7788;
    let read = Request { cookie, ..request(cmd::READ, CommandFlags::NONE, 0x1000, 512) };
    let write = Request { command: cmd::WRITE, ..read };
    let simple = ReplyHeader::simple(cookie, Err(NbdError::NoSpc));
    let expected = b"\x67\x44\x66\x98\0\0\0\x1c\x11\x22\x33\x44\x55\x66\x77\x88";
    assert_eq!(simple.as_slice(), expected);
    for (request, style) in [(read, HeaderStyle::Simple), (write, STRUCTURED)] {
        assert_eq!(ReplyHeader::error(&request, style, NbdError::NoSpc), simple);
        let done = ReplyHeader::simple(cookie, Ok(()));
        assert_eq!(ReplyHeader::done(&request, style), done);
    }
    let plain = ReplyHeader::read_data(&read, HeaderStyle::Simple);
    assert_eq!(plain, ReplyHeader::simple(cookie, Ok(())));

    let data = ReplyHeader::read_data(&read, STRUCTURED);
    let expected = b"\x66\x8e\x33\xef\0\x01\0\x01\x11\x22\x33\x44\x55\x66\x77\x88\0\0\x02\x08\
                     \0\0\0\0\0\0\x10\0";
    assert_eq!(data.as_slice(), expected);

    let extents = ReplyHeader::block_status(&read, STRUCTURED, ALLOCATION_ID, 3);
    let expected =
        b"\x66\x8e\x33\xef\0\x01\0\x05\x11\x22\x33\x44\x55\x66\x77\x88\0\0\0\x1c\0\0\0\x01";
    assert_eq!(extents.as_slice(), expected);

    let error = ReplyHeader::error(&read, STRUCTURED, NbdError::Io);
    let expected = b"\x66\x8e\x33\xef\0\x01\x80\x01\x11\x22\x33\x44\x55\x66\x77\x88\0\0\0\x06\
                     \0\0\0\x05\0\0";
    assert_eq!(error.as_slice(), expected);

    let done = b"\x66\x8e\x33\xef\0\x01\0\0\x11\x22\x33\x44\x55\x66\x77\x88\0\0\0\0";
    assert_eq!(ReplyHeader::done(&read, STRUCTURED).as_slice(), done);
    // A chunk of data must hold at least one byte.
    assert_eq!(ReplyHeader::read_data(&Request { len: 0, ..read }, STRUCTURED).as_slice(), done);
}

#[test]
fn only_structured_reads_and_extents_are_answered_in_chunks() {
    for command in 0..9 {
        let request = request(command, CommandFlags::NONE, 0, 0);
        let chunks = matches!(command, cmd::READ | cmd::BLOCK_STATUS);
        assert_eq!(request.wants_chunks(STRUCTURED), chunks);
        assert!(!request.wants_chunks(HeaderStyle::Simple));
        assert!(request.wants_chunks(HeaderStyle::Extended));
    }
}

/// A chunk of a structured reply, from its parts.
pub(crate) fn chunk(flags: u16, kind: u16, payload: &[u8]) -> Vec<u8> {
    let mut bytes = b"\x66\x8e\x33\xef".to_vec();
    bytes.extend(flags.to_be_bytes());
    bytes.extend(kind.to_be_bytes());
    bytes.extend(5_u64.to_be_bytes());
    bytes.extend((payload.len() as u32).to_be_bytes());
    bytes.extend(payload);
    bytes
}

#[test]
fn a_client_reads_the_chunks_of_other_servers() {
    let parsed = |bytes: &[u8]| {
        let (reply, used) = Reply::parse(bytes, STRUCTURED).unwrap().unwrap();
        assert_eq!((reply.cookie, reply.request_offset), (5, None));
        (reply.content, reply.done, used)
    };
    let hole = chunk(0, 2, b"\0\0\0\0\0\0\x10\0\0\0\x20\0");
    let content = ReplyContent::Hole { offset: 0x1000, len: 0x2000 };
    assert_eq!(parsed(&hole), (content, false, hole.len()));

    let extents = chunk(0, 5, b"\0\0\0\x09\0\0\x10\0\0\0\0\x03");
    let content = ReplyContent::Extents { context: 9, len: 8 };
    assert_eq!(parsed(&extents), (content, false, extents.len() - 8));

    let with_message = chunk(1, 0x8001, b"\0\0\0\x16\0\x02no");
    let content = ReplyContent::Error(NbdError::Inval);
    assert_eq!(parsed(&with_message), (content, true, with_message.len()));

    let with_offset = chunk(0, 0x8002, b"\0\0\0\x05\0\0\0\0\0\0\0\0\x10\0");
    let content = ReplyContent::Error(NbdError::Io);
    assert_eq!(parsed(&with_offset), (content, false, with_offset.len()));
}

#[test]
fn a_chunk_of_an_error_has_its_fields_and_at_most_a_string_and_an_offset() {
    let longest = 4 + 2 + MAX_STRING + 8;
    for (len, fits) in [(5, false), (6, true), (longest, true), (longest + 1, false)] {
        let mut payload = vec![0; len];
        payload[3] = NbdError::NoSpc as u8;
        for kind in [0x8001, 0x8002, 0x8003] {
            let bytes = chunk(1, kind, &payload);
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
    for bad in [
        chunk(0, 0, b""),                             // the last chunk, not marked so
        chunk(1, 0, b"x"),                            // a last chunk with content
        chunk(1, 1, b"\0\0\0\0\0\0\0\0"),             // data without data
        chunk(1, 2, b"\0\0\0\0\0\0\0\0\0\0\0\0"),     // a hole of no bytes
        chunk(1, 2, b"\0\0\0\0\0\0\0\0\0\0\0\x01\0"), // a hole and more
        chunk(1, 5, b"\0\0\0\x01"),                   // a context without extents
        chunk(1, 5, b"\0\0\0\x01\0\0\x10\0\0\0\0"),   // a part of an extent
        chunk(1, 3, b"what is this"),                 // unknown, not an error
        chunk(1, 0x8001, b"\0\0\0\x16\0"),            // no length of the message
        chunk(1, 0x8001, b"\0\0\0\x16\0\x09too short"[..14].as_ref()), // message cut off
    ] {
        assert!(Reply::parse(&bad, STRUCTURED).is_err(), "{bad:02x?}");
    }
    assert!(Reply::parse(b"\x67\x44\x66\x99", STRUCTURED).is_err());
}
