//! The client against replies of other servers, written by hand here.

use nbd_protocol::wire::{
    BASE_ALLOCATION, FLAG_C_FIXED_NEWSTYLE, FLAG_C_NO_ZEROES, OPTION_REPLY_MAGIC, opt, rep,
};
use nbd_protocol::{
    ClientError, ClientHandshake, ClientStep, Connected, HeaderStyle, InfoType, MAX_STRING,
    TlsPolicy,
};

use crate::handshake::{info, session};
use crate::meta::meta;

const GREETING: &[u8] = b"NBDMAGICIHAVEOPT\0\x03";

/// A reply to an option, from its parts.
fn reply(option: u32, kind: u32, data: &[u8]) -> Vec<u8> {
    let fields = [option, kind, data.len() as u32].map(u32::to_be_bytes);
    [&OPTION_REPLY_MAGIC.to_be_bytes()[..], &fields.concat(), data].concat()
}

/// Returns the options that the client sends after the greeting and these replies, and its last step.
fn hears(
    mut client: ClientHandshake,
    replies: &[Vec<u8>],
) -> Result<(Vec<u8>, ClientStep), ClientError> {
    let input = [GREETING, &replies.concat()].concat();
    let mut out = Vec::new();
    let (used, step) = client.receive(&input, &mut out)?;
    assert_eq!(used, input.len());
    Ok((out, step))
}

fn simple() -> ClientHandshake {
    ClientHandshake::new("disk", HeaderStyle::Simple)
}

/// The size and the flags of an export.
const EXPORT: &[u8] = b"\0\0\0\0\0\0\0\0\x10\0\0\x05";

/// Returns the export as the client knows it after this information, which follows the size.
fn learned(data: &[u8]) -> Result<Connected, ClientError> {
    let [export, more] = [EXPORT, data].map(|data| reply(opt::GO, rep::INFO, data));
    match hears(simple(), &[export, more, reply(opt::GO, rep::ACK, b"")])? {
        (_, ClientStep::Connected(connected)) => Ok(connected),
        other => panic!("{other:?}"),
    }
}

#[test]
fn information_is_learned_or_ignored_or_malformed() {
    let bare = learned(EXPORT).unwrap();
    assert_eq!((bare.size, bare.flags.0, bare.block_sizes), (4096, 5, None));
    assert_eq!(learned(b"\0\x01disk").unwrap().name.as_deref(), Some("disk"));
    assert_eq!(learned(b"\0\x02a disk").unwrap().description.as_deref(), Some("a disk"));
    let sizes = |sizes: [u32; 3]| [b"\0\x03", &sizes.map(u32::to_be_bytes).concat()[..]].concat();
    for told in
        [[512, 4096, 32 << 20], [1, 4096, 1], [512, 512, u32::MAX], [4096, 1 << 31, 3 << 20]]
    {
        let [min, preferred, max] = told;
        assert_eq!(learned(&sizes(told)).unwrap().block_sizes, Some((min, preferred, max)));
    }
    // What the client does not know, with data or without.
    for unknown in [&b"\0\x04"[..], b"\0\x04data", b"\xff\xff\0"] {
        assert_eq!(learned(unknown).unwrap(), bare, "{unknown:?}");
    }
    let three = sizes([512, 4096, 32 << 20]);
    for malformed in [
        &b""[..],
        b"\0",
        &[EXPORT, b"\0"].concat(),
        &EXPORT[..EXPORT.len() - 1],
        &[&three[..], b"\0"].concat(),
        &three[..three.len() - 1],
        b"\0\x01\xff",
        b"\0\x02\xff",
        // The client could not divide by these, or has no block between them.
        &sizes([0, 4096, 1 << 20]),
        &sizes([1, 0, 1 << 20]),
        &sizes([1, 4096, 0]),
        &sizes([3, 4096, 9]),
        &sizes([1, 4095, 9]),
    ] {
        assert_eq!(learned(malformed), Err(ClientError::BadOptionReply), "{malformed:?}");
    }
}

#[test]
fn a_greeting_that_is_not_fixed_newstyle_is_refused() {
    for greeting in [
        &b"HTTP/1.1 400 Bad Request"[..],
        b"NBDMAGICIHAVEOPT\0\x02",
        b"XBDMAGICIHAVEOPT\0\x03",
        b"NBDMAGIC\0\0\x42\x02\x81\x86\x12\x53\0\x03", // oldstyle
    ] {
        let result = ClientHandshake::list().receive(greeting, &mut Vec::new());
        assert_eq!(result, Err(ClientError::NotNbd));
    }
}

/// An ACK to GO without the size of the export, an ACK to another option, an ACK to GO for a list, another magic,
/// and data that is longer than two strings and some fields.
#[test]
fn a_reply_that_is_none_to_the_option_is_refused() {
    let mut magic = reply(opt::GO, rep::INFO, EXPORT);
    magic[7] ^= 1;
    for (client, reply) in [
        (simple(), reply(opt::GO, rep::ACK, b"")),
        (simple(), reply(opt::LIST, rep::ACK, b"")),
        (ClientHandshake::list(), reply(opt::GO, rep::ACK, b"")),
        (simple(), magic),
        (simple(), reply(opt::GO, rep::INFO, &[0xff; 2 * MAX_STRING + 17])),
    ] {
        assert_eq!(hears(client, &[reply]), Err(ClientError::BadOptionReply));
    }
    assert!(learned(&[0xff; 2 * MAX_STRING + 16]).is_ok());
}

/// The data of one export of a list.
fn entry(len: u32, text: &[u8]) -> Vec<u8> {
    reply(opt::LIST, rep::SERVER, &[&len.to_be_bytes(), text].concat())
}

#[test]
fn a_list_has_names_and_descriptions_and_an_end() {
    let end = reply(opt::LIST, rep::ACK, b"");
    let list = |entries: &[Vec<u8>]| match hears(
        ClientHandshake::list(),
        &[entries, std::slice::from_ref(&end)].concat(),
    )?
    .1
    {
        ClientStep::Listed(listed) => Ok(listed),
        other => panic!("{other:?}"),
    };
    let listed = list(&[entry(4, b"disk"), entry(0, b"\xff"), entry(1, b"aone")]).unwrap();
    let listed: Vec<_> = listed.iter().map(|e| (&e.name[..], &e.description[..])).collect();
    assert_eq!(listed, [("disk", ""), ("", "\u{fffd}"), ("a", "one")]);
    for malformed in [entry(5, b"disk"), entry(1, b"\xff"), reply(opt::LIST, rep::SERVER, b"\0")] {
        assert_eq!(list(&[malformed]), Err(ClientError::BadOptionReply));
    }
    let most = vec![entry(1, b"a"); 10_000];
    assert_eq!(list(&most).unwrap().len(), 10_000);
    let more = [&most[..], &[entry(1, b"a")]].concat();
    assert_eq!(list(&more), Err(ClientError::BadOptionReply));
}

/// Checks the options that the client sends after the replies, as those of a session.
fn asks(client: ClientHandshake, replies: &[Vec<u8>], options: &[(u32, &[u8])]) {
    let (asked, step) = hears(client, replies).unwrap();
    assert_eq!(step, ClientStep::More);
    let expected = session(FLAG_C_FIXED_NEWSTYLE | FLAG_C_NO_ZEROES, options);
    assert_eq!(asked, expected, "{options:?}");
}

#[test]
fn the_client_goes_on_without_what_is_refused_where_it_can() {
    let wanted = [InfoType::Name, InfoType::Description, InfoType::BlockSize];
    let (go, asked) = (info("disk", &wanted), meta("disk", &[BASE_ALLOCATION]));
    let new = |style| ClientHandshake::new("disk", style);
    let refused = |option, code| reply(option, code, b"no");
    let (extended, structured) = (opt::EXTENDED_HEADERS, opt::STRUCTURED_REPLY);
    let [no_tls, no_extended, no_structured] =
        [opt::STARTTLS, extended, structured].map(|option| refused(option, rep::ERR_POLICY));
    let no_go = refused(opt::GO, rep::ERR_UNSUP);

    let options = [(extended, &b""[..]), (structured, b""), (opt::GO, &go)];
    asks(new(HeaderStyle::Extended), &[no_extended, no_structured.clone()], &options);
    let options = [(structured, &b""[..]), (opt::GO, &go), (opt::EXPORT_NAME, b"disk")];
    let without = [no_structured, no_go.clone()];
    asks(new(HeaderStyle::Structured).ask_allocation(), &without, &options);
    let context = [(structured, &b""[..]), (opt::SET_META_CONTEXT, &asked), (opt::GO, &go)];
    let granted = [&7_u32.to_be_bytes(), BASE_ALLOCATION.as_bytes()].concat();
    let replies = [
        reply(structured, rep::ACK, b""),
        reply(opt::SET_META_CONTEXT, rep::META_CONTEXT, &granted),
        refused(opt::SET_META_CONTEXT, rep::ERR_UNSUP),
    ];
    asks(new(HeaderStyle::Structured).ask_allocation(), &replies, &context);
    let options = [(opt::STARTTLS, &b""[..]), (opt::GO, &go)];
    asks(simple().tls(TlsPolicy::On), std::slice::from_ref(&no_tls), &options);

    // Where it cannot, the error has the server's message.
    let ends = |client, replies: &[Vec<u8>], option, code| {
        let refused = ClientError::Refused { option, code, message: "no".to_owned() };
        assert_eq!(hears(client, replies), Err(refused));
    };
    ends(simple().tls(TlsPolicy::Require), &[no_tls], opt::STARTTLS, rep::ERR_POLICY);
    ends(simple(), &[refused(opt::GO, rep::ERR_POLICY)], opt::GO, rep::ERR_POLICY);
    let granted = [reply(extended, rep::ACK, b""), no_go];
    ends(new(HeaderStyle::Extended), &granted, opt::GO, rep::ERR_UNSUP); // no EXPORT_NAME with these
    let no_list = refused(opt::LIST, rep::ERR_POLICY);
    ends(ClientHandshake::list(), &[no_list], opt::LIST, rep::ERR_POLICY);
}

#[test]
fn only_the_context_that_was_asked_for_is_taken() {
    let allocation_until = |last: u32, context: &[u8]| {
        let replies = [
            reply(opt::STRUCTURED_REPLY, rep::ACK, b""),
            reply(opt::SET_META_CONTEXT, rep::META_CONTEXT, context),
            reply(opt::SET_META_CONTEXT, last, b""),
            reply(opt::GO, rep::INFO, EXPORT),
            reply(opt::GO, rep::ACK, b""),
        ];
        let client = ClientHandshake::new("disk", HeaderStyle::Structured).ask_allocation();
        match hears(client, &replies)?.1 {
            ClientStep::Connected(connected) => Ok(connected.allocation),
            other => panic!("{other:?}"),
        }
    };
    let allocation = |context: &[u8]| allocation_until(rep::ACK, context);
    let named = |name: &[u8]| [&7_u32.to_be_bytes(), name].concat();
    assert_eq!(allocation(&named(BASE_ALLOCATION.as_bytes())), Ok(Some(7)));
    assert_eq!(allocation(&named(b"base:other")), Ok(None));
    let refused = allocation_until(rep::ERR_UNSUP, &named(BASE_ALLOCATION.as_bytes()));
    assert_eq!(refused, Ok(None), "a context that was refused after all");
    for malformed in [&b"\0\0\0"[..], &named(b"\xff")] {
        assert_eq!(allocation(malformed), Err(ClientError::BadOptionReply));
    }
}

/// The zeroes behind the answer to EXPORT_NAME come unless both sides have said that they do not.
#[test]
fn the_zeroes_are_left_out_if_the_server_offers_that() {
    let no_go = reply(opt::GO, rep::ERR_UNSUP, b"");
    for (offered, zeroes, flags) in
        [(1, 124, FLAG_C_FIXED_NEWSTYLE), (3, 0, FLAG_C_FIXED_NEWSTYLE | FLAG_C_NO_ZEROES)]
    {
        let mut input = b"NBDMAGICIHAVEOPT\0".to_vec();
        input.push(offered);
        input.extend(&no_go);
        let mut client = simple();
        let mut out = Vec::new();
        assert_eq!(client.receive(&input, &mut out), Ok((input.len(), ClientStep::More)));
        assert_eq!(out[..4], flags.to_be_bytes());
        assert!(out.ends_with(&session(0, &[(opt::EXPORT_NAME, b"disk")])[4..]));
        assert_eq!(client.receive(&EXPORT[2..11], &mut out), Ok((0, ClientStep::More)));
        let answer = [&EXPORT[2..], &vec![0; zeroes], b"more"].concat();
        let (used, step) = client.receive(&answer, &mut out).unwrap();
        assert_eq!(used, 10 + zeroes);
        assert!(matches!(step, ClientStep::Connected(c) if c.size == 4096 && c.flags.0 == 5));
    }
}
