//! Metadata contexts: the clients that may choose one, the exports that have one, and the replies.

use nbd_protocol::wire::{BASE_ALLOCATION, cmd, opt, rep};

use crate::driven;
use nbd_protocol::{
    ALLOCATION_ID, ClientHandshake, ClientStep, CommandFlags, ExportInfo, Handshake, HeaderStyle,
    InfoType, MAX_META_DATA, MAX_STRING, NbdError, Negotiated, Request, Step,
};

use crate::handshake::{FIXED, info, negotiate, negotiate_with, serve, session};

/// The data of LIST_META_CONTEXT and SET_META_CONTEXT.
pub(crate) fn meta(name: &str, queries: &[&str]) -> Vec<u8> {
    let text = |text: &str| [&(text.len() as u32).to_be_bytes(), text.as_bytes()].concat();
    let mut data = text(name);
    data.extend((queries.len() as u32).to_be_bytes());
    data.extend(queries.iter().flat_map(|query| text(query)));
    data
}

/// Returns the replies to options after structured replies were granted: types and data.
fn replies(options: &[(u32, &[u8])]) -> Vec<(u32, Vec<u8>)> {
    let options = [&[(opt::STRUCTURED_REPLY, &b""[..])], options].concat();
    let input = session(FIXED, &options);
    let (used, _, replies, _) = serve(&input);
    assert_eq!(used, input.len());
    replies.into_iter().skip(1).map(|(_, kind, data)| (kind, data)).collect()
}

/// Returns the replies to one option.
fn said(option: u32, name: &str, queries: &[&str]) -> Vec<(u32, Vec<u8>)> {
    replies(&[(option, &meta(name, queries))])
}

fn granted(id: u32) -> Vec<(u32, Vec<u8>)> {
    let context = [&id.to_be_bytes(), BASE_ALLOCATION.as_bytes()].concat();
    vec![(rep::META_CONTEXT, context), (rep::ACK, vec![])]
}

fn nothing() -> Vec<(u32, Vec<u8>)> {
    vec![(rep::ACK, vec![])]
}

/// Whether a client that sends these options, then asks for the export `name`, has the context.
fn chosen(options: &[(u32, Vec<u8>)], name: &str) -> bool {
    let go = info(name, &[InfoType::Name]);
    let mut options: Vec<_> = options.iter().map(|(option, data)| (*option, &data[..])).collect();
    options.push((opt::GO, &go));
    match serve(&session(FIXED, &options)).1 {
        Step::Ready(negotiated) => negotiated.allocation,
        step => panic!("{step:?}"),
    }
}

#[test]
fn a_list_has_what_is_asked_for_or_all_there_is() {
    let list = |queries: &[&str]| said(opt::LIST_META_CONTEXT, "disk", queries);
    for queries in [
        &[][..],
        &["base:"],
        &["base:allocation"],
        &["base:allocation", "base:", "base:allocation"], // once
        &["qemu:dirty-bitmap:b", "", "base:allocation"],
    ] {
        assert_eq!(list(queries), granted(0), "{queries:?}");
    }
    for queries in
        [&["base:other"][..], &["x:"], &["base:allocation:"], &["BASE:ALLOCATION"], &[""]]
    {
        assert_eq!(list(queries), nothing(), "{queries:?}");
    }
}

#[test]
fn only_the_context_itself_is_chosen() {
    let set = |queries: &[&str]| said(opt::SET_META_CONTEXT, "disk", queries);
    for queries in [
        &["base:allocation"][..],
        &["base:allocation"; 3], // once
        &["qemu:allocation-depth", "base:allocation", "nonsense"],
    ] {
        assert_eq!(set(queries), granted(ALLOCATION_ID), "{queries:?}");
    }
    for queries in [&[][..], &["base:"], &["base:other"], &["x:y"]] {
        assert_eq!(set(queries), nothing(), "{queries:?}");
    }
}

#[test]
fn refusals_say_why() {
    let good = meta("disk", &["base:allocation"]);
    let mut short = good.clone();
    short.pop();
    let long = [&good[..], b"x"].concat();
    let latin = [&meta("disk", &["base:\0"])[..8], b"\0\0\0\x01\0\0\0\x01\xff"].concat();
    let name = meta(&"x".repeat(MAX_STRING + 1), &[]);
    let query = meta("disk", &[&"x".repeat(MAX_STRING + 1)]);
    for option in [opt::LIST_META_CONTEXT, opt::SET_META_CONTEXT] {
        for malformed in [&short, &long, &latin, &name, &query, &vec![]] {
            assert_eq!(replies(&[(option, malformed)]), [(rep::ERR_INVALID, vec![])]);
        }
        assert_eq!(said(option, "nope", &[])[0].0, rep::ERR_UNKNOWN);
        let most = "x".repeat(MAX_STRING);
        let many = meta(&most, &[&most, &most, &most[..4000], "base:allocation"]);
        assert!(many.len() <= MAX_META_DATA);
        assert_eq!(replies(&[(option, &many)])[0].0, rep::ERR_UNKNOWN, "it was read");
        let more = replies(&[(option, &vec![0; MAX_META_DATA + 1]), (opt::LIST, b"x")]);
        assert_eq!(more, [(rep::ERR_TOO_BIG, vec![]), (rep::ERR_INVALID, vec![])]);
        // Before structured replies are granted.
        let (_, _, early, _) = serve(&session(FIXED, &[(option, &good)]));
        assert_eq!(early, [(option, rep::ERR_INVALID, vec![])]);
    }
}

#[test]
fn inv09_the_last_choice_counts_and_only_for_its_export() {
    let structured = || (opt::STRUCTURED_REPLY, vec![]);
    let set = |name: &str, queries: &[&str]| (opt::SET_META_CONTEXT, meta(name, queries));
    let good = || set("disk", &["base:allocation"]);
    assert!(chosen(&[structured(), good()], "disk"));
    assert!(chosen(&[structured(), set("", &["base:allocation"])], ""));
    assert!(chosen(&[structured(), set("disk", &[]), good()], "disk"));
    // Asking has no effect.
    let list = (opt::LIST_META_CONTEXT, meta("frozen", &["base:allocation"]));
    assert!(chosen(&[structured(), good(), list.clone()], "disk"));
    assert!(!chosen(&[structured(), list], "frozen"));
    // Another export, even if it is the same by another name.
    assert!(!chosen(&[structured(), good()], "frozen"));
    assert!(!chosen(&[structured(), good()], ""));
    for last in [
        set("disk", &[]),
        set("disk", &["base:"]),
        set("nope", &["base:allocation"]),
        (opt::SET_META_CONTEXT, vec![]),
        (opt::SET_META_CONTEXT, vec![0; MAX_META_DATA + 1]),
        set("frozen", &["base:allocation"]),
    ] {
        assert!(!chosen(&[structured(), good(), last.clone()], "disk"), "{last:?}");
    }
    assert!(!chosen(&[good(), structured()], "disk"), "it was refused");
}

#[test]
fn inv09_a_server_that_does_not_offer_the_context_accepts_no_block_status() {
    let exports = driven::exports();
    for style in [HeaderStyle::Structured, HeaderStyle::Extended] {
        let client = ClientHandshake::new("disk", style).ask_allocation();
        let mut greeting = Vec::new();
        let server = Handshake::new(&mut greeting).extended_headers();
        let (client, server) = negotiate_with(client, server, greeting, &exports).unwrap();
        assert!(matches!(client, ClientStep::Connected(c) if c.allocation.is_none()));
        let Step::Ready(negotiated) = server else { panic!("{server:?}") };
        assert_eq!((negotiated.style, negotiated.allocation), (style, false));
        let (flags, command) = (CommandFlags::NONE, cmd::BLOCK_STATUS);
        let request = Request { flags, command, cookie: 1, offset: 0, len: 512 };
        let export = exports.iter().find(|export| export.name == "disk").unwrap();
        assert_eq!(request.check(export, negotiated.agreed()), Err(NbdError::Inval));
    }
    for option in [opt::LIST_META_CONTEXT, opt::SET_META_CONTEXT] {
        let asks = meta("disk", &[BASE_ALLOCATION]);
        let input = session(FIXED, &[(opt::STRUCTURED_REPLY, b""), (option, &asks)]);
        let mut out = Vec::new();
        let (used, step) = Handshake::new(&mut Vec::new()).receive(&input, &exports[..], &mut out);
        assert_eq!((used, step), (input.len(), Step::More));
        let refused = [option, rep::ERR_UNSUP, 0].map(u32::to_be_bytes).concat();
        assert!(out.ends_with(&refused), "{out:02x?}");
    }
}

/// The longest name of an export that has one.
#[test]
fn a_long_name_leaves_room_for_queries() {
    let name = "n".repeat(MAX_STRING);
    let exports = [ExportInfo::new(name.clone(), 1 << 20)];
    let client = ClientHandshake::new(&name, HeaderStyle::Structured).ask_allocation();
    let (_, server) = negotiate(client, &exports).unwrap();
    assert!(matches!(server, Step::Ready(Negotiated { allocation: true, .. })));
}
