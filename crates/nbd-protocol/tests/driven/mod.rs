//! The body of the fuzz target. The test of the corpus runs it with stable Rust.
//!
//! The first byte of an input chooses the parser of the rest (its two low bits) and the length of the
//! pieces it arrives in (the others, plus 1): a client's whole session, a server's handshake, a
//! server's replies, or one request to an arbitrary export. Headers of every style are tried.

use nbd_protocol::wire::{CommandFlags, OPTION_REPLY_MAGIC, TransmissionFlags, cmd, opt, rep};
use nbd_protocol::{
    Agreed, ClientError, ClientHandshake, ClientStep, Command, ExportInfo, Exports as _, Extent,
    Handshake, HeaderStyle, NbdError, Negotiated, Reply, ReplyContent, ReplyHeader, Request, Step,
    TlsPolicy,
};

/// Every style of headers.
pub(crate) const STYLES: [HeaderStyle; 3] =
    [HeaderStyle::Simple, HeaderStyle::Structured, HeaderStyle::Extended];

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
        REQUEST.. => {
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
    let whole = handshake(input, input.len().max(1), TlsPolicy::Off, &exports);
    assert_eq!(whole, handshake(input, piece, TlsPolicy::Off, &exports));
    for policy in [TlsPolicy::On, TlsPolicy::Require] {
        handshake(input, piece, policy, &exports);
    }

    let (used, step, _) = whole;
    let Step::Ready(negotiated) = step else { return };
    let agreed = negotiated.agreed();
    assert!(agreed.style.has_chunks() || !agreed.allocation);
    let Negotiated { export, .. } = negotiated;
    let Ok(export) = exports[..].find(&export) else { panic!("ready with unknown {export:?}") };
    let mut rest = &input[used..];
    while let Ok(Some((request, used))) = Request::parse(rest, agreed.style) {
        assert_eq!(used, agreed.style.request_len());
        if let Ok(Command::Disconnect) = judge(&request, &export, agreed) {
            return;
        }
        let Ok(payload) = request.checked_payload_len(agreed.style, export.max_block) else {
            return;
        };
        let payload = payload as usize; // no more than 32 bits
        let Some(behind) = rest[used..].get(payload..) else { return };
        rest = behind;
    }
}

/// Checks that a server that requires TLS has granted nothing in plaintext but STARTTLS and ABORT.
fn only_refusals(said: &[u8], policy: TlsPolicy) {
    let (replies, rest) = option_replies(said);
    assert!(policy != TlsPolicy::Require || rest.is_empty());
    for (option, kind, _) in replies {
        let granted = matches!((option, kind), (opt::STARTTLS | opt::ABORT, rep::ACK));
        let refused =
            kind == rep::ERR_TLS_REQD || (option, kind) == (opt::STARTTLS, rep::ERR_INVALID);
        let all_right = policy != TlsPolicy::Require || granted || refused;
        assert!(all_right, "option {option} was answered with {kind:#x}");
    }
}

/// One option reply: option, type, data.
pub(crate) type OptionReply = (u32, u32, Vec<u8>);

/// Returns the replies to options, and what follows them.
pub(crate) fn option_replies(said: &[u8]) -> (Vec<OptionReply>, &[u8]) {
    let (mut replies, mut rest) = (Vec::new(), said);
    while rest.starts_with(&OPTION_REPLY_MAGIC.to_be_bytes()) {
        let field =
            |at: usize| u32::from_be_bytes(rest[at..at + 4].try_into().expect("four bytes"));
        let end = 20 + field(16) as usize;
        replies.push((field(8), field(12), rest[20..end].to_vec()));
        rest = &rest[end..];
    }
    (replies, rest)
}

/// Feeds `input` in pieces, of which those behind STARTTLS stand for what was decrypted. Returns the number of
/// bytes taken, the last step, and everything said.
fn handshake(
    input: &[u8],
    piece: usize,
    policy: TlsPolicy,
    exports: &[ExportInfo],
) -> (usize, Step, Vec<u8>) {
    let mut out = Vec::new();
    let mut handshake = Handshake::new(&mut out).extended_headers().base_allocation().tls(policy);
    out.clear();
    let (mut used, mut last, mut in_plaintext) = (0, Step::More, None);
    for piece in input.chunks(piece) {
        let (taken, step) = handshake.receive(piece, exports, &mut out);
        assert!(taken <= piece.len());
        used += taken;
        match &step {
            Step::More => assert_eq!(taken, piece.len()),
            Step::StartTls => assert_eq!(in_plaintext.replace(out.len()), None, "TLS twice"),
            Step::Ready(negotiated) => {
                assert_eq!(negotiated.tls, in_plaintext.is_some());
                assert!(negotiated.tls || policy != TlsPolicy::Require);
            }
            Step::Close(_) => {}
        }
        last = step;
        if matches!(last, Step::Ready(_) | Step::Close(_)) {
            let said = out.len();
            assert_eq!(handshake.receive(input, exports, &mut out), (0, last.clone()));
            assert_eq!(out.len(), said);
            break;
        }
    }
    assert_eq!(handshake.is_open(), !matches!(last, Step::Ready(_) | Step::Close(_)));
    only_refusals(&out[..in_plaintext.unwrap_or(out.len())], policy);
    (used, last, out)
}

/// A client's handshake says the same whole and in pieces.
fn server(input: &[u8], piece: usize) {
    for client in [
        ClientHandshake::new("disk", HeaderStyle::Structured),
        ClientHandshake::new("disk", HeaderStyle::Structured).ask_allocation(),
        ClientHandshake::new("", HeaderStyle::Simple),
        ClientHandshake::new("disk", HeaderStyle::Extended).ask_allocation(),
        ClientHandshake::list(),
    ] {
        let whole = connect(client.clone(), input, input.len().max(1));
        assert_eq!(whole, connect(client.clone(), input, piece));
        // What is in plaintext behind the start of TLS depends on the pieces.
        for policy in [TlsPolicy::On, TlsPolicy::Require] {
            let (_, result, _) = connect(client.clone().tls(policy), input, piece);
            if let (Ok(ClientStep::Connected(export)), TlsPolicy::Require) = (result, policy) {
                assert!(export.tls);
            }
        }
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
                if !matches!(step, ClientStep::More | ClientStep::StartTls) {
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
    for style in STYLES {
        let mut rest = input;
        while let Ok(Some((reply, used))) = Reply::parse(rest, style) {
            assert!(used > 0 && used <= rest.len());
            assert_eq!(Reply::parse(&rest[..used], style), Ok(Some((reply.clone(), used))));
            assert_eq!(Reply::parse(&rest[..used - 1], style), Ok(None));
            assert_eq!(reply.request_offset.is_some(), style.is_extended());
            rest = &rest[used..];
            let (ReplyContent::Data { len, .. } | ReplyContent::Extents { len, .. }) =
                reply.content
            else {
                continue;
            };
            let Some((data, behind)) = rest.split_at_checked(len as usize) else { break };
            if let ReplyContent::Extents { .. } = reply.content {
                let extents = Extent::parse_all(data, style).count();
                assert_eq!(extents * Extent::size(style), data.len());
            }
            rest = behind;
        }
    }
}

/// One request to an arbitrary export, with headers of every style and a context; `None` if the input
/// is too short for both or the magic is wrong.
fn request(input: &[u8]) -> Option<()> {
    let (size, input) = input.split_first_chunk()?;
    let (flags, input) = input.split_first_chunk()?;
    let (shift, input) = input.split_first()?;
    let mut export = ExportInfo::new("any", u64::from_be_bytes(*size));
    export.flags = TransmissionFlags(u16::from_be_bytes(*flags));
    export.min_block = 1 << (shift % 17);
    for style in STYLES {
        let Ok(Some((request, used))) = Request::parse(input, style) else { continue };
        let has_payload = style.is_extended() && request.command == cmd::WRITE;
        if !has_payload || request.flags.contains(CommandFlags::PAYLOAD_LEN) {
            let encoded = request.encode(style).expect("its length came in such a header");
            assert_eq!(encoded.as_slice(), &input[..used]);
        }
        for end in 0..used {
            assert_eq!(Request::parse(&input[..end], style), Ok(None));
        }
        for allocation in [false, style.has_chunks()] {
            let _ = judge(&request, &export, Agreed { style, allocation });
        }
    }
    Some(())
}

/// What the protocol document says of a command: what a server must have advertised for it; its flags besides
/// FUA, and what must have been advertised for them; whether it writes, whether data goes with it, and the error
/// past the end.
type Rule =
    (u16, TransmissionFlags, &'static [(CommandFlags, TransmissionFlags)], bool, bool, NbdError);

const RULES: [Rule; 7] = {
    use {CommandFlags as F, NbdError::*, TransmissionFlags as T};
    let zero = &[(F::NO_HOLE, T::NONE), (F::FAST_ZERO, T::SEND_FAST_ZERO)];
    [
        (cmd::READ, T::NONE, &[(F::DF, T::SEND_DF)], false, true, Inval),
        (cmd::WRITE, T::NONE, &[], true, true, NoSpc),
        (cmd::FLUSH, T::SEND_FLUSH, &[], false, false, Inval),
        (cmd::TRIM, T::SEND_TRIM, &[], true, false, Inval),
        (cmd::CACHE, T::SEND_CACHE, &[], false, false, Inval),
        (cmd::WRITE_ZEROES, T::SEND_WRITE_ZEROES, zero, true, false, NoSpc),
        (cmd::BLOCK_STATUS, T::NONE, &[(F::REQ_ONE, T::NONE)], false, false, Inval),
    ]
};

/// Returns the verdict of the protocol document on a request.
pub(crate) fn expected(
    request: &Request,
    export: &ExportInfo,
    agreed: Agreed,
) -> Result<Command, NbdError> {
    let &Request { flags, command, offset, len, .. } = request;
    if command == cmd::DISC {
        return Ok(Command::Disconnect); // it has no reply to carry an error
    }
    let rule = RULES.iter().find(|rule| rule.0 == command).ok_or(NbdError::Inval)?;
    let &(_, needed, its_flags, writes, carries_data, past_the_end) = rule;
    let advertised = |flag| match flag {
        TransmissionFlags::SEND_DF if !agreed.style.has_chunks() => false,
        TransmissionFlags::SEND_FAST_ZERO => {
            export.flags.contains(flag | TransmissionFlags::SEND_WRITE_ZEROES)
        }
        _ => export.flags.contains(flag),
    };
    let extended_write = agreed.style.is_extended() && command == cmd::WRITE;
    let takes = |flag| match flag {
        CommandFlags::FUA => advertised(TransmissionFlags::SEND_FUA),
        CommandFlags::PAYLOAD_LEN => extended_write,
        _ => its_flags.iter().any(|&(its, needed)| its == flag && advertised(needed)),
    };
    let all_taken =
        (0..16).map(|bit| CommandFlags(1 << bit)).all(|flag| !flags.contains(flag) || takes(flag));
    if !all_taken || (extended_write && !flags.contains(CommandFlags::PAYLOAD_LEN)) {
        return Err(NbdError::Inval);
    }
    if writes && export.flags.contains(TransmissionFlags::READ_ONLY) {
        return Err(NbdError::Perm);
    }
    let too_long = carries_data && len > u64::from(export.max_block.min(u32::MAX - 8));
    let about_nothing = command == cmd::BLOCK_STATUS && (!agreed.allocation || len == 0);
    let not_of_all = command == cmd::FLUSH && (offset, len) != (0, 0);
    if !advertised(needed) || too_long || about_nothing || not_of_all {
        return Err(NbdError::Inval);
    }
    if command != cmd::FLUSH && u128::from(offset) + u128::from(len) > export.size.into() {
        return Err(past_the_end);
    }
    let unit = u64::from(export.min_block.max(1));
    if offset % unit != 0 || len % unit != 0 {
        return Err(NbdError::Inval);
    }
    let set = |flag| flags.contains(flag);
    let fua = set(CommandFlags::FUA);
    Ok(match command {
        cmd::READ => Command::Read { df: set(CommandFlags::DF) },
        cmd::WRITE => Command::Write { fua },
        cmd::FLUSH => Command::Flush,
        cmd::TRIM => Command::Trim { fua },
        cmd::CACHE => Command::Cache,
        cmd::BLOCK_STATUS => Command::BlockStatus { one: set(CommandFlags::REQ_ONE) },
        _ => {
            let (no_hole, fast) = (set(CommandFlags::NO_HOLE), set(CommandFlags::FAST_ZERO));
            Command::WriteZeroes { fua, no_hole, fast }
        }
    })
}

/// Checks the verdict on a request, and that a client understands every reply to it.
fn judge(request: &Request, export: &ExportInfo, agreed: Agreed) -> Result<Command, NbdError> {
    let (style, verdict) = (agreed.style, request.check(export, agreed));
    assert_eq!(verdict, expected(request, export, agreed));
    if let Ok(Command::Write { .. }) = verdict {
        assert_eq!(request.checked_payload_len(style, export.max_block), Ok(request.len));
    }
    let code = (request.cookie as u32 % 200).max(1);
    let error = verdict.err().or(NbdError::from_code(code)).expect("not zero");
    let chunks = style.is_extended()
        || style.has_chunks() && matches!(request.command, cmd::READ | cmd::BLOCK_STATUS);
    assert_eq!(request.wants_chunks(style), chunks);
    let content = |chunk, simple| if chunks { chunk } else { ReplyContent::Simple(simple) };
    let failed = content(ReplyContent::Error(error), Err(error));
    let mut said = vec![
        (ReplyHeader::done(request, style), true, content(ReplyContent::None, Ok(()))),
        (ReplyHeader::error(request, style, error), true, failed),
    ];
    if style.has_chunks() {
        let context = request.cookie as u32;
        let count = 1 + context % 1_000;
        let extents = ReplyContent::Extents { context, len: count * Extent::size(style) as u32 };
        said.push((ReplyHeader::block_status(request, style, context, count), true, extents));
        if let len @ 1..=0xffff_fff7 = request.len {
            let (at, offset) = (request.cookie, request.offset);
            let data = |offset| ReplyContent::Data { offset, len: len as u32 };
            said.push((ReplyHeader::read_data(request, style), true, data(offset)));
            let piece = ReplyHeader::data_chunk(request, style, at, len, false);
            said.push((piece, false, data(at)));
        }
    }
    for (header, done, content) in said {
        let request_offset = style.is_extended().then_some(request.offset);
        let reply = Reply { cookie: request.cookie, request_offset, done, content };
        let bytes = header.as_slice();
        assert_eq!(Reply::parse(bytes, style), Ok(Some((reply, bytes.len()))), "{header:?}");
        for end in 0..bytes.len() {
            assert_eq!(Reply::parse(&bytes[..end], style), Ok(None));
        }
        // Extended headers and the others exclude each other.
        for other in STYLES.into_iter().filter(|it| it.is_extended() != style.is_extended()) {
            assert!(matches!(Reply::parse(bytes, other), Err(ClientError::BadReplyMagic(_))));
        }
    }
    verdict
}
