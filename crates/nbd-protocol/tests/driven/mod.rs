//! What the fuzz target runs. The test of the corpus runs it with stable Rust.
//!
//! The first byte of an input chooses who reads the rest (its two low bits) and the length of the
//! pieces it arrives in (the others, plus 1): a client's whole session, a server's handshake, a
//! server's replies, or one request to an arbitrary export.

use nbd_protocol::{
    ALLOCATION_ID, Agreed, ClientError, ClientHandshake, ClientStep, Command, CommandFlags,
    ExportInfo, Exports as _, Extent, Handshake, MAX_PAYLOAD, NbdError, Negotiated, REQUEST_LEN,
    Reply, ReplyHeader, Request, Step, TransmissionFlags,
};

/// First byte of a session: what a client sends, from its flags to its last request.
pub(crate) const SESSION: u8 = 0;
/// First byte of what a server sends during the handshake.
pub(crate) const SERVER: u8 = 1;
/// First byte of what a server sends after the handshake.
pub(crate) const REPLIES: u8 = 2;
/// First byte of one request, after an export: size, flags and logarithm of the unit, 11 bytes.
pub(crate) const REQUEST: u8 = 3;

/// Runs one input.
///
/// # Panics
///
/// Panics if the protocol code breaks one of its promises.
pub(crate) fn run(input: &[u8]) {
    let Some((&mode, input)) = input.split_first() else { return };
    let piece = usize::from(mode >> 2) + 1;
    match mode & 3 {
        SESSION => session(input, piece),
        SERVER => server(input, piece),
        REPLIES => replies(input),
        _ => {
            request(input);
        }
    }
}

/// The exports every session is offered: one that can do everything, and one read-only with units
/// of 512 bytes.
#[must_use]
pub(crate) fn exports() -> [ExportInfo; 2] {
    let mut disk = ExportInfo::new("disk", 1 << 20);
    disk.description = "one mebibyte".into();
    disk.flags = TransmissionFlags(0x0fff) - TransmissionFlags::READ_ONLY;
    let mut frozen = ExportInfo::new("frozen", 64 << 10);
    frozen.flags = TransmissionFlags::READ_ONLY | TransmissionFlags::SEND_DF;
    frozen.min_block = 512;
    [disk, frozen]
}

/// A handshake says the same whole and in pieces; every request after it gets a sound verdict.
fn session(input: &[u8], piece: usize) {
    let exports = exports();
    let whole = handshake(input, input.len().max(1), &exports);
    assert_eq!(whole, handshake(input, piece, &exports));

    let (used, step, _) = whole;
    let Step::Ready(negotiated) = step else { return };
    let agreed = negotiated.agreed();
    assert!(agreed.structured || !agreed.allocation);
    let Negotiated { export, .. } = negotiated;
    let Some(export) = exports[..].find(&export) else { panic!("ready with unknown {export:?}") };
    let mut rest = &input[used..];
    while let Some((header, behind)) = rest.split_first_chunk::<REQUEST_LEN>() {
        let Ok(request) = Request::parse(header) else { return };
        assert_eq!(request.encode(), *header);
        if let Ok(Command::Disconnect) = judge(&request, &export, agreed) {
            return;
        }
        let Some(behind) = behind.get(request.payload_len() as usize..) else { return };
        rest = behind;
    }
}

/// Feeds `input` in pieces: bytes taken, the last step, everything said.
fn handshake(input: &[u8], piece: usize, exports: &[ExportInfo]) -> (usize, Step, Vec<u8>) {
    let mut out = Vec::new();
    let mut handshake = Handshake::new(&mut out);
    let mut used = 0;
    for piece in input.chunks(piece) {
        let (taken, step) = handshake.receive(piece, exports, &mut out);
        assert!(taken <= piece.len());
        used += taken;
        if step != Step::More {
            assert!(!handshake.is_open());
            let said = out.len();
            assert_eq!(handshake.receive(input, exports, &mut out), (0, step.clone()));
            assert_eq!(out.len(), said);
            return (used, step, out);
        }
        assert_eq!(taken, piece.len());
    }
    assert!(handshake.is_open());
    (used, Step::More, out)
}

/// A client's handshake says the same whole and in pieces.
fn server(input: &[u8], piece: usize) {
    for client in [
        ClientHandshake::new("disk", true),
        ClientHandshake::new("disk", true).ask_allocation(),
        ClientHandshake::new("", false),
        ClientHandshake::list(),
    ] {
        let whole = connect(client.clone(), input, input.len().max(1));
        assert_eq!(whole, connect(client, input, piece));
    }
}

type Connection = (usize, Result<ClientStep, ClientError>, Vec<u8>);

fn connect(mut client: ClientHandshake, input: &[u8], piece: usize) -> Connection {
    let (mut used, mut arrived, mut out) = (0, 0, Vec::new());
    while arrived < input.len() {
        arrived = input.len().min(arrived + piece);
        match client.receive(&input[used..arrived], &mut out) {
            Ok((taken, step)) => {
                used += taken;
                assert!(used <= arrived);
                if step != ClientStep::More {
                    return (used, Ok(step), out);
                }
            }
            // How far it got before the error depends on the pieces; what it said does not.
            Err(error) => return (0, Err(error), out),
        }
    }
    (used, Ok(ClientStep::More), out)
}

/// Replies parse the same however much follows, and no shorter prefix is taken for one.
fn replies(input: &[u8]) {
    let mut rest = input;
    while let Ok(Some((reply, used))) = Reply::parse(rest) {
        assert!(used > 0 && used <= rest.len());
        assert_eq!(Reply::parse(&rest[..used]), Ok(Some((reply.clone(), used))));
        assert_eq!(Reply::parse(&rest[..used - 1]), Ok(None));
        rest = &rest[used..];
        if let Reply::Data { len, .. } | Reply::Extents { len, .. } = reply {
            rest = rest.get(len as usize..).unwrap_or_default();
        }
    }
}

/// One request to an arbitrary export, with and without structured replies and a context; `None` if the input
/// is too short for both or the magic is wrong.
fn request(input: &[u8]) -> Option<()> {
    let (size, input) = input.split_first_chunk()?;
    let (flags, input) = input.split_first_chunk()?;
    let (shift, input) = input.split_first()?;
    let mut export = ExportInfo::new("any", u64::from_be_bytes(*size));
    export.flags = TransmissionFlags(u16::from_be_bytes(*flags));
    export.min_block = 1 << (shift % 17);
    let header = input.first_chunk()?;
    let request = Request::parse(header).ok()?;
    assert_eq!(request.encode(), *header);
    for (structured, allocation) in [(false, false), (true, false), (true, true)] {
        let _ = judge(&request, &export, Agreed { structured, allocation });
    }
    Some(())
}

/// Checks that the verdict on a request is sound and that a client understands its reply.
fn judge(request: &Request, export: &ExportInfo, agreed: Agreed) -> Result<Command, NbdError> {
    let verdict = request.check(export, agreed);
    let structured = agreed.structured;
    let offered = export.advertised(structured);
    let read_only = offered.contains(TransmissionFlags::READ_ONLY);
    let end = request.offset.checked_add(request.len.into());
    match verdict {
        Ok(Command::Disconnect) => return verdict,
        Ok(Command::Flush) => assert_eq!((request.offset, request.len), (0, 0)),
        Ok(command) => {
            assert!(end.is_some_and(|end| end <= export.size));
            let unit = u64::from(export.min_block.max(1));
            assert!(request.offset.is_multiple_of(unit));
            assert!(u64::from(request.len).is_multiple_of(unit));
            match command {
                Command::Read { df } => {
                    assert!(request.len <= MAX_PAYLOAD);
                    assert!(!df || (structured && offered.contains(TransmissionFlags::SEND_DF)));
                }
                Command::Write { .. } => assert!(request.len <= MAX_PAYLOAD && !read_only),
                Command::Trim { .. } | Command::WriteZeroes { .. } => assert!(!read_only),
                Command::BlockStatus { one } => {
                    assert!(agreed.allocation && request.len > 0);
                    assert_eq!(one, request.flags.contains(CommandFlags::REQ_ONE));
                }
                Command::Cache | Command::Flush | Command::Disconnect => {}
            }
        }
        // The only errors that a header alone can deserve.
        Err(NbdError::Perm) => assert!(read_only),
        Err(NbdError::NoSpc) => assert!(end.is_none_or(|end| end > export.size)),
        Err(error) => assert_eq!(error, NbdError::Inval),
    }
    if request.flags.contains(CommandFlags::FUA) && verdict.is_ok() {
        assert!(offered.contains(TransmissionFlags::SEND_FUA));
    }

    let Request { cookie, offset, len, .. } = *request;
    let header = match verdict {
        Err(error) => ReplyHeader::error(cookie, request.wants_chunks(structured), error),
        Ok(Command::Read { .. }) => ReplyHeader::read_data(cookie, structured, offset, len),
        Ok(Command::BlockStatus { .. }) => ReplyHeader::block_status(cookie, ALLOCATION_ID, 2),
        Ok(_) => ReplyHeader::simple(cookie, Ok(())),
    };
    let parsed = Reply::parse(header.as_slice());
    let Ok(Some((reply, used))) = parsed else { panic!("{header:?} parses as {parsed:?}") };
    assert_eq!((used, reply.cookie(), reply.is_last()), (header.as_slice().len(), cookie, true));
    match reply {
        Reply::Simple { result, .. } => assert_eq!(result, verdict.map(|_| ())),
        Reply::Data { offset, len, .. } => {
            assert_eq!((offset, len), (request.offset, request.len));
        }
        Reply::Error { error, .. } => assert_eq!(verdict, Err(error)),
        Reply::Extents { context, len, .. } => {
            assert!(matches!(verdict, Ok(Command::BlockStatus { .. })));
            assert_eq!((context, len as usize), (ALLOCATION_ID, 2 * Extent::SIZE));
        }
        Reply::Done { .. } => assert_eq!(len, 0),
        Reply::Hole { .. } => panic!("the server never sends holes"),
    }
    verdict
}
