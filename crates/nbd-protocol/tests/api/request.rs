//! Refused requests, with their errors, and the bytes of replies.

use nbd_protocol::wire::cmd;
use nbd_protocol::{
    ALLOCATION_ID, Agreed, BadMagic, Command, CommandFlags, ExportInfo, HeaderStyle, MAX_PAYLOAD,
    MAX_STRING, NbdError, Reply, ReplyContent, ReplyHeader, Request, TransmissionFlags,
};

use crate::driven::STYLES;

const SIZE: u64 = 1 << 30;
const STRUCTURED: HeaderStyle = HeaderStyle::Structured;
const ALL: Agreed = Agreed { style: STRUCTURED, allocation: true };
const DATA: [u16; 2] = [cmd::READ, cmd::WRITE];

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

#[test]
fn unknown_commands_and_flags_are_invalid() {
    for command in [8, 9, 4711, u16::MAX] {
        assert_eq!(check(command, CommandFlags::NONE, 0, 0), Err(NbdError::Inval));
    }
    use CommandFlags as F;
    for (command, flags) in [
        (cmd::READ, F::NO_HOLE),
        (cmd::READ, F::FAST_ZERO),
        (cmd::WRITE, F::DF),
        (cmd::WRITE, F::NO_HOLE),
        (cmd::TRIM, F::NO_HOLE),
        (cmd::FLUSH, F::DF),
        (cmd::CACHE, F::FAST_ZERO),
        (cmd::WRITE_ZEROES, F::DF),
        (cmd::WRITE_ZEROES, F::REQ_ONE),
        (cmd::READ, F::REQ_ONE),
        (cmd::READ, F(1 << 5)),
        (cmd::WRITE, F(1 << 15)),
    ] {
        assert_eq!(check(command, flags, 0, 0), Err(NbdError::Inval), "{command} {flags:?}");
    }
}

#[test]
fn flags_and_commands_that_were_not_advertised_are_invalid() {
    use {CommandFlags as F, TransmissionFlags as T};
    for (command, flags, missing) in [
        (cmd::WRITE, F::FUA, T::SEND_FUA),
        (cmd::READ, F::FUA, T::SEND_FUA),
        (cmd::READ, F::DF, T::SEND_DF),
        (cmd::FLUSH, F::NONE, T::SEND_FLUSH),
        (cmd::TRIM, F::NONE, T::SEND_TRIM),
        (cmd::CACHE, F::NONE, T::SEND_CACHE),
        (cmd::WRITE_ZEROES, F::NONE, T::SEND_WRITE_ZEROES),
        (cmd::WRITE_ZEROES, F::FAST_ZERO, T::SEND_FAST_ZERO),
    ] {
        let mut export = export();
        assert!(request(command, flags, 0, 0).check(&export, ALL).is_ok());
        export.flags = export.flags - missing;
        assert_eq!(request(command, flags, 0, 0).check(&export, ALL), Err(NbdError::Inval));
    }
    // DF needs structured replies.
    let df = request(cmd::READ, F::DF, 0, 512);
    assert_eq!(df.check(&export(), Agreed::default()), Err(NbdError::Inval));
}

#[test]
fn block_status_needs_a_context_and_a_length() {
    use CommandFlags as F;
    assert_eq!(check(cmd::BLOCK_STATUS, F::NONE, 1, 1), Ok(Command::BlockStatus { one: false }));
    let one = check(cmd::BLOCK_STATUS, F::REQ_ONE | F::FUA, 0, 1 << 30);
    assert_eq!(one, Ok(Command::BlockStatus { one: true }));
    for (flags, offset, len) in
        [(F::NONE, 0, 0), (F::NONE, SIZE, 1), (F::NONE, 1, SIZE), (F::DF, 0, 1), (F::NO_HOLE, 0, 1)]
    {
        assert_eq!(check(cmd::BLOCK_STATUS, flags, offset, len), Err(NbdError::Inval));
    }
    let request = request(cmd::BLOCK_STATUS, F::NONE, 0, 512);
    for style in STYLES {
        let agreed = Agreed { style, allocation: false };
        assert_eq!(request.check(&export(), agreed), Err(NbdError::Inval));
    }
    // Who may not write may ask; and keeps to the unit as everybody does.
    let mut frozen = export();
    (frozen.flags, frozen.min_block) = (TransmissionFlags::READ_ONLY, 512);
    assert_eq!(request.check(&frozen, ALL), Ok(Command::BlockStatus { one: false }));
    let odd = Request { len: 511, ..request };
    assert_eq!(odd.check(&frozen, ALL), Err(NbdError::Inval));
}

#[test]
fn past_the_end_is_no_space_for_writes_and_invalid_for_the_rest() {
    for (offset, len) in [(SIZE, 1), (SIZE - 1, 2), (u64::MAX, 1), (u64::MAX, 0), (1 << 63, 512)] {
        for (command, error) in [
            (cmd::READ, NbdError::Inval),
            (cmd::WRITE, NbdError::NoSpc),
            (cmd::TRIM, NbdError::Inval),
            (cmd::CACHE, NbdError::Inval),
            (cmd::WRITE_ZEROES, NbdError::NoSpc),
        ] {
            assert_eq!(check(command, CommandFlags::NONE, offset, len), Err(error));
        }
    }
    for command in DATA {
        assert!(check(command, CommandFlags::NONE, SIZE - 1, 1).is_ok());
        assert!(check(command, CommandFlags::NONE, SIZE, 0).is_ok());
    }
}

#[test]
fn the_maximum_limits_only_what_carries_data() {
    for command in DATA {
        assert!(check(command, CommandFlags::NONE, 0, MAX_PAYLOAD.into()).is_ok());
        let long = check(command, CommandFlags::NONE, 0, u64::from(MAX_PAYLOAD) + 1);
        assert_eq!(long, Err(NbdError::Inval));
    }
    // Without a maximum, the length of the chunk that carries the data must fit its 32 bits.
    let mut endless = ExportInfo::new("endless", 1 << 40);
    endless.max_block = u32::MAX;
    for (len, fits) in [(u32::MAX - 8, true), (u32::MAX - 7, false)] {
        let read = request(cmd::READ, CommandFlags::NONE, 0, len.into());
        assert_eq!(read.check(&endless, ALL).is_ok(), fits, "{len}");
    }
    for command in [cmd::TRIM, cmd::CACHE, cmd::WRITE_ZEROES] {
        assert!(check(command, CommandFlags::NONE, 0, 1 << 30).is_ok());
    }
}

#[test]
fn a_read_only_export_refuses_every_write_first_of_all() {
    let mut export = export();
    export.flags = TransmissionFlags::READ_ONLY;
    export.min_block = 512;
    for command in [cmd::WRITE, cmd::TRIM, cmd::WRITE_ZEROES] {
        for (offset, len) in [(0, 512), (SIZE, 512), (0, u64::from(u32::MAX)), (1, 1)] {
            let verdict = request(command, CommandFlags::NONE, offset, len).check(&export, ALL);
            assert_eq!(verdict, Err(NbdError::Perm));
        }
    }
    let read = request(cmd::READ, CommandFlags::NONE, 0, 512);
    assert_eq!(read.check(&export, ALL), Ok(Command::Read { df: false }));
}

#[test]
fn offsets_and_lengths_keep_to_the_unit() {
    let mut export = export();
    export.min_block = 512;
    for command in [cmd::READ, cmd::WRITE, cmd::TRIM, cmd::CACHE, cmd::WRITE_ZEROES] {
        let verdict = |offset, len| {
            request(command, CommandFlags::NONE, offset, len).check(&export, Agreed::default())
        };
        assert!(verdict(512, 1024).is_ok());
        assert_eq!(verdict(1, 512), Err(NbdError::Inval));
        assert_eq!(verdict(512, 511), Err(NbdError::Inval));
    }
}

#[test]
fn a_flush_has_neither_offset_nor_length() {
    assert_eq!(check(cmd::FLUSH, CommandFlags::NONE, 512, 0), Err(NbdError::Inval));
    assert_eq!(check(cmd::FLUSH, CommandFlags::NONE, 0, 512), Err(NbdError::Inval));
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
