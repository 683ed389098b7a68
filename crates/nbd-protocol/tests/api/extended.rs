//! Extended headers: a client made by hand against the server, a server made by hand against the client.

use nbd_protocol::wire::{cmd, opt, rep};
use nbd_protocol::{
    ALLOCATION_ID, Agreed, BadPayload, ClientError, CloseReason, Command, CommandFlags, ExportInfo,
    Extent, HeaderStyle, MAX_PAYLOAD, NbdError, Reply, ReplyContent, ReplyHeader, Request, Step,
    TransmissionFlags,
};

use crate::handshake::{FIXED, info, serve_extended, session};
use crate::meta::meta;

const WIDE: HeaderStyle = HeaderStyle::Extended;
const AGREED: Agreed = Agreed { style: WIDE, allocation: true };

fn huge() -> ExportInfo {
    let mut export = ExportInfo::new("disk", 1 << 50);
    export.flags = TransmissionFlags(0x0fff) - TransmissionFlags::READ_ONLY;
    export
}

/// The types of the replies to `options`, and the last step.
fn replies(options: &[(u32, &[u8])]) -> (Vec<(u32, u32)>, Step) {
    let (_, step, replies, _) = serve_extended(&session(FIXED, options));
    (replies.into_iter().map(|(option, kind, _)| (option, kind)).collect(), step)
}

#[test]
fn the_option_takes_no_data_and_cannot_be_taken_back() {
    let (extended, structured) = (opt::EXTENDED_HEADERS, opt::STRUCTURED_REPLY);
    for (options, kinds) in [
        (&[(extended, &b""[..])][..], &[rep::ACK][..]),
        (&[(extended, b"x")], &[rep::ERR_INVALID]),
        (&[(extended, b""), (extended, b"")], &[rep::ACK, rep::ERR_INVALID]),
        (&[(structured, b""), (extended, b"")], &[rep::ACK, rep::ACK]),
        (&[(extended, b""), (structured, b"")], &[rep::ACK, rep::ERR_EXT_HEADER_REQD]),
    ] {
        let said: Vec<_> = replies(options).0.iter().map(|&(_, kind)| kind).collect();
        assert_eq!(said, kinds);
    }
    let (_, step) = replies(&[(extended, b""), (opt::EXPORT_NAME, b"disk")]);
    assert_eq!(step, Step::Close(CloseReason::ExportNameWithExtendedHeaders));
    // It grants chunks, and with them contexts.
    let context = meta("disk", &["base:allocation"]);
    let go = info("disk", &[]);
    let (_, step) = replies(&[(extended, b""), (opt::SET_META_CONTEXT, &context), (opt::GO, &go)]);
    let Step::Ready(negotiated) = step else { panic!("{step:?}") };
    assert_eq!(negotiated.agreed(), AGREED);
    assert!(negotiated.flags.contains(TransmissionFlags::SEND_DF));
}

/// Every byte of a client and of a server as the protocol document lays them out.
#[test]
fn inv03_headers_are_laid_out_as_the_protocol_says() {
    let zero = b"\x21\xe4\x1c\x71\0\0\0\x06\x11\x22\x33\x44\x55\x66\x77\x88\
                 \0\0\0\0\0\x10\0\0\0\0\x01\0\0\0\0\0";
    let (request, used) = Request::parse(zero, WIDE).unwrap().unwrap();
    assert_eq!((used, request.offset, request.len), (32, 1 << 20, 1 << 40));
    let command = Command::WriteZeroes { fua: false, no_hole: false, fast: false };
    assert_eq!(request.check(&huge(), AGREED), Ok(command));
    assert_eq!(request.encode(WIDE).unwrap().as_slice(), zero);
    assert_eq!(
        ReplyHeader::done(&request, WIDE).as_slice(),
        b"\x6e\x8a\x27\x8c\0\x01\0\0\x11\x22\x33\x44\x55\x66\x77\x88\
          \0\0\0\0\0\x10\0\0\0\0\0\0\0\0\0\0"
    );
    assert_eq!(
        ReplyHeader::error(&request, WIDE, NbdError::NoSpc).as_slice(),
        b"\x6e\x8a\x27\x8c\0\x01\x80\x01\x11\x22\x33\x44\x55\x66\x77\x88\
          \0\0\0\0\0\x10\0\0\0\0\0\0\0\0\0\x06\0\0\0\x1c\0\0"
    );
    let read = Request { command: cmd::READ, len: 512, ..request };
    assert_eq!(
        ReplyHeader::read_data(&read, WIDE).as_slice(),
        b"\x6e\x8a\x27\x8c\0\x01\0\x01\x11\x22\x33\x44\x55\x66\x77\x88\
          \0\0\0\0\0\x10\0\0\0\0\0\0\0\0\x02\x08\0\0\0\0\0\x10\0\0"
    );
    assert_eq!(
        ReplyHeader::block_status(&read, WIDE, ALLOCATION_ID, 2).as_slice(),
        b"\x6e\x8a\x27\x8c\0\x01\0\x06\x11\x22\x33\x44\x55\x66\x77\x88\
          \0\0\0\0\0\x10\0\0\0\0\0\0\0\0\0\x28\0\0\0\x01\0\0\0\x02"
    );
}

#[test]
fn inv03_payloads_follow_the_flag_and_only_a_write_may_have_one() {
    let request = |command, flags| Request { flags, command, cookie: 1, offset: 0, len: 512 };
    let (none, flag) = (CommandFlags::NONE, CommandFlags::PAYLOAD_LEN);
    let write = request(cmd::WRITE, flag);
    assert_eq!(write.payload_len(WIDE), 512);
    assert_eq!(write.check(&huge(), AGREED), Ok(Command::Write { fua: false }));
    let effect = request(cmd::WRITE, none);
    assert_eq!(effect.payload_len(WIDE), 0);
    assert_eq!(effect.checked_payload_len(WIDE, MAX_PAYLOAD), Err(BadPayload::NoFlag(512)));
    assert_eq!(effect.check(&huge(), AGREED), Err(NbdError::Inval));
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
        assert_eq!(request(command, flag).check(&huge(), AGREED), Err(NbdError::Inval));
        assert!(request(command, none).check(&huge(), AGREED).is_ok());
    }
    // Without extended headers the flag is unknown, and the command alone decides.
    let structured = Agreed { style: HeaderStyle::Structured, allocation: true };
    assert_eq!(write.payload_len(structured.style), 512);
    assert_eq!(effect.checked_payload_len(structured.style, 512), Ok(512));
    let long = effect.checked_payload_len(structured.style, 511);
    assert_eq!(long, Err(BadPayload::TooLong { len: 512, max: 511 }));
    assert_eq!(write.check(&huge(), structured), Err(NbdError::Inval));
}

/// A chunk with an extended header, from its parts.
fn chunk(kind: u16, len: u64, payload: &[u8]) -> Vec<u8> {
    let mut bytes = b"\x6e\x8a\x27\x8c\0\x01".to_vec();
    bytes.extend(kind.to_be_bytes());
    bytes.extend(5_u64.to_be_bytes());
    bytes.extend(4096_u64.to_be_bytes());
    bytes.extend(len.to_be_bytes());
    bytes.extend(payload);
    bytes
}

#[test]
fn a_client_reads_the_extents_of_other_servers_and_refuses_lies() {
    let extents = [Extent { len: 1 << 40, flags: 3 }, Extent { len: 4096, flags: 1 << 40 }];
    let encoded = extents.map(Extent::encode64).concat();
    let said = chunk(6, 8 + 32, &[b"\0\0\0\x09\0\0\0\x02", &encoded[..]].concat());
    let (reply, used) = Reply::parse(&said, WIDE).unwrap().unwrap();
    assert_eq!((reply.cookie, reply.request_offset, reply.done), (5, Some(4096), true));
    assert_eq!(reply.content, ReplyContent::Extents { context: 9, len: 32 });
    assert!(Extent::parse_all(&said[used..], WIDE).eq(extents));
    for bad in [
        chunk(6, 8 + 16, b"\0\0\0\x09\0\0\0\x02"), // a count that is not the length's
        chunk(6, 8, b"\0\0\0\x09\0\0\0\0"),        // no extent
        chunk(6, 8 + 24, b"\0\0\0\x09\0\0\0\x01"), // half an extent
        chunk(5, 12, b"\0\0\0\x01\0\0\x10\0\0\0\0\0"), // in 32 bits
        chunk(1, (1 << 32) + 8, &[0; 8]),          // more than a request may ask for
        chunk(0, 1, b"x"),                         // a last chunk with content
    ] {
        let refused = Reply::parse(&bad, WIDE);
        assert!(matches!(refused, Err(ClientError::BadChunk { .. })), "{refused:?}");
    }
    // Nor extents in 64 bits, without extended headers.
    let wide = b"\x66\x8e\x33\xef\0\x01\0\x06\0\0\0\0\0\0\0\x05\0\0\0\x18\0\0\0\x09\0\0\0\x01";
    assert!(Reply::parse(wide, HeaderStyle::Structured).is_err());
}
