//! Metadata contexts: the clients that may choose one, the exports that have one, and the replies.

use nbd_protocol::wire::{BASE_ALLOCATION, cmd, opt, rep};
use nbd_protocol::{
    ALLOCATION_ID, ClientHandshake, ClientStep, CommandFlags, ExportInfo, Handshake, HeaderStyle,
    InfoType, MAX_META_DATA, MAX_STRING, NbdError, Negotiated, Request, Step,
};

use crate::driven;
use crate::handshake::{FIXED, all, info, negotiate, serve, session};

/// The data of LIST_META_CONTEXT and SET_META_CONTEXT.
pub(crate) fn meta(name: &str, queries: &[&str]) -> Vec<u8> {
    let text = |text: &str| [&(text.len() as u32).to_be_bytes(), text.as_bytes()].concat();
    let mut data = text(name);
    data.extend((queries.len() as u32).to_be_bytes());
    data.extend(queries.iter().flat_map(|query| text(query)));
    data
}

/// Checks the context that is granted to an option, by its id, if one is.
fn grants(option: u32, queries: &[&str], id: Option<u32>) {
    let data = meta("disk", queries);
    let (_, _, replies, _) =
        serve(&session(FIXED, &[(opt::STRUCTURED_REPLY, b""), (option, &data)]));
    let context = |id: u32| [&id.to_be_bytes(), BASE_ALLOCATION.as_bytes()].concat();
    let granted = id.map(|id| (option, rep::META_CONTEXT, context(id)));
    let ack = [(option, rep::ACK, vec![])];
    assert!(replies[1..].iter().eq(granted.iter().chain(&ack)), "{queries:?}: {replies:?}");
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

/// A list has what is asked for, or all there is. Only the context itself is chosen.
#[test]
fn a_context_is_granted_once() {
    for (queries, listed, chosen) in [
        (&["base:allocation"][..], true, true),
        (&["base:allocation", "base:", "base:allocation"], true, true),
        (&["qemu:dirty-bitmap:b", "", "base:allocation"], true, true),
        (&[], true, false),
        (&["base:"], true, false),
        (&["base:other"], false, false),
        (&["x:y"], false, false),
        (&["base:allocation:"], false, false),
        (&["BASE:ALLOCATION"], false, false),
        (&[""], false, false),
    ] {
        grants(opt::LIST_META_CONTEXT, queries, listed.then_some(0));
        grants(opt::SET_META_CONTEXT, queries, chosen.then_some(ALLOCATION_ID));
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
        let talk = negotiate(client, Handshake::extended_headers, &exports).unwrap();
        assert!(matches!(talk.client, ClientStep::Connected(c) if c.allocation.is_none()));
        let Step::Ready(negotiated) = talk.server else { panic!("{:?}", talk.server) };
        assert_eq!((negotiated.style, negotiated.allocation), (style, false));
        let (flags, command) = (CommandFlags::NONE, cmd::BLOCK_STATUS);
        let request = Request { flags, command, cookie: 1, offset: 0, len: 512 };
        assert_eq!(request.check(&exports[0], negotiated.agreed()), Err(NbdError::Inval));
    }
}

/// The longest name of an export that has one.
#[test]
fn a_long_name_leaves_room_for_queries() {
    let name = "n".repeat(MAX_STRING);
    let exports = [ExportInfo::new(name.clone(), 1 << 20)];
    let client = ClientHandshake::new(&name, HeaderStyle::Structured).ask_allocation();
    let talk = negotiate(client, all, &exports).unwrap();
    assert!(matches!(talk.server, Step::Ready(Negotiated { allocation: true, .. })));
}
