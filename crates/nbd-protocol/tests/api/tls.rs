//! STARTTLS on both sides: what is answered before it, and what is not carried over it.

use nbd_protocol::wire::{opt, rep};
use nbd_protocol::{
    ClientError, ClientHandshake, ClientStep, CloseReason, Handshake, HeaderStyle, InfoType, Step,
    TlsPolicy,
};

use crate::driven;
use crate::handshake::{FIXED, all, info, negotiate, session};
use crate::meta::meta;

/// Returns the steps of a server with `policy` for each input, and the types of its replies. Checks that the
/// server knows whether it has refused an option for want of TLS.
fn answers(policy: TlsPolicy, inputs: &[&[u8]]) -> Vec<(Step, Vec<(u32, u32)>)> {
    let mut server = all(Handshake::new(&mut Vec::new())).tls(policy);
    let mut lacked = false;
    let answer = |input: &&[u8]| {
        let mut out = Vec::new();
        let (_, step) = server.receive(input, &driven::exports()[..], &mut out);
        let (replies, _) = driven::option_replies(&out);
        lacked |= replies.iter().any(|reply| reply.1 == rep::ERR_TLS_REQD);
        assert_eq!(server.lacked_tls(), lacked);
        (step, replies.into_iter().map(|(option, kind, _)| (option, kind)).collect())
    };
    inputs.iter().map(answer).collect()
}

fn option(option: u32, data: &[u8]) -> Vec<u8> {
    session(0, &[(option, data)])[4..].to_vec()
}

const FLAGS: &[u8] = &FIXED.to_be_bytes();

#[test]
fn inv06_nothing_but_starttls_and_abort_is_answered_where_tls_is_required() {
    let go = info("disk", &[InfoType::Name]);
    for (number, data) in [
        (opt::LIST, &b""[..]),
        (opt::INFO, &go),
        (opt::GO, &go),
        (opt::STRUCTURED_REPLY, b""),
        (opt::EXTENDED_HEADERS, b""),
        (opt::LIST_META_CONTEXT, b"x"),
        (opt::SET_META_CONTEXT, b"x"),
        (4711, b"x"),
    ] {
        let said = answers(TlsPolicy::Require, &[FLAGS, &option(number, data)]);
        assert_eq!(said[1], (Step::More, vec![(number, rep::ERR_TLS_REQD)]));
    }
    let said = answers(TlsPolicy::Require, &[FLAGS, &option(opt::ABORT, b"")]);
    let aborted = Step::Close(CloseReason::Aborted);
    assert_eq!(said[1], (aborted, vec![(opt::ABORT, rep::ACK)]));
    let said = answers(TlsPolicy::Require, &[FLAGS, &option(opt::EXPORT_NAME, b"disk")]);
    assert_eq!(said[1], (Step::Close(CloseReason::TlsRequired), vec![]));
    // Nor to a client that is not fixed newstyle.
    let said = answers(TlsPolicy::Require, &[&[0; 4], &option(opt::EXPORT_NAME, b"disk")]);
    assert_eq!(said[1].0, Step::Close(CloseReason::TlsRequired));
}

#[test]
fn inv06_over_tls_everything_is_answered_and_tls_starts_once() {
    let start = option(opt::STARTTLS, b"");
    let list = option(opt::LIST, b"");
    for policy in [TlsPolicy::On, TlsPolicy::Require] {
        let said = answers(policy, &[FLAGS, &start, &start, &list]);
        assert_eq!(said[1], (Step::StartTls, vec![(opt::STARTTLS, rep::ACK)]));
        assert_eq!(said[2], (Step::More, vec![(opt::STARTTLS, rep::ERR_INVALID)]));
        let (server, ack) = ((opt::LIST, rep::SERVER), (opt::LIST, rep::ACK));
        assert_eq!(said[3], (Step::More, vec![server, server, ack]));
        let said = answers(policy, &[FLAGS, &option(opt::STARTTLS, b"x")]);
        assert_eq!(said[1], (Step::More, vec![(opt::STARTTLS, rep::ERR_INVALID)]));
    }
    let said = answers(TlsPolicy::Off, &[FLAGS, &start]);
    assert_eq!(said[1], (Step::More, vec![(opt::STARTTLS, rep::ERR_UNSUP)]));
}

/// Bytes that are injected behind STARTTLS would pass for the client's first option over TLS.
#[test]
fn inv07_plaintext_behind_starttls_ends_the_handshake() {
    for policy in [TlsPolicy::On, TlsPolicy::Require] {
        let injected = [option(opt::STARTTLS, b""), option(opt::LIST, b"")].concat();
        let said = answers(policy, &[FLAGS, &injected, b"more"]);
        let reason = Step::Close(CloseReason::PlaintextBehindStartTls(16));
        assert_eq!(said[1], (reason.clone(), vec![]), "not even acknowledged");
        assert_eq!(said[2], (reason, vec![]));
    }
    let mut client = ClientHandshake::new("disk", HeaderStyle::Simple).tls(TlsPolicy::On);
    client.receive(b"NBDMAGICIHAVEOPT\0\x03", &mut Vec::new()).unwrap();
    let granted = b"\0\x03\xe8\x89\x04\x55\x65\xa9\0\0\0\x05\0\0\0\x01\0\0\0\0injected";
    let refused = client.receive(granted, &mut Vec::new());
    assert_eq!(refused, Err(ClientError::PlaintextBehindStartTls(8)));
}

#[test]
fn inv07_what_was_negotiated_in_plaintext_is_forgotten() {
    let context = option(opt::SET_META_CONTEXT, &meta("disk", &["base:allocation"]));
    let go = option(opt::GO, &info("disk", &[]));
    let inputs =
        [FLAGS, &option(opt::EXTENDED_HEADERS, b""), &context, &option(opt::STARTTLS, b""), &go];
    let said = answers(TlsPolicy::On, &inputs);
    let Step::Ready(negotiated) = &said[4].0 else { panic!("{said:?}") };
    assert_eq!((negotiated.style, negotiated.allocation), (HeaderStyle::Simple, false));
    assert!(negotiated.tls);
}

#[test]
fn our_client_starts_tls_with_our_server_as_both_policies_say() {
    use TlsPolicy::{Off, On, Require};
    for (server, client, tls) in [
        (Off, Off, Some(false)),
        (Off, On, Some(false)),
        (Off, Require, None),
        (On, Off, Some(false)),
        (On, On, Some(true)),
        (On, Require, Some(true)),
        (Require, Off, None),
        (Require, On, Some(true)),
        (Require, Require, Some(true)),
    ] {
        let asks = ClientHandshake::new("disk", HeaderStyle::Extended).ask_allocation().tls(client);
        let offers = |handshake| all(handshake).tls(server);
        let result = negotiate(asks, offers, &driven::exports());
        match (tls, result.map(|talk| (talk.client, talk.server))) {
            (Some(tls), Ok((ClientStep::Connected(export), Step::Ready(negotiated)))) => {
                assert_eq!((export.tls, negotiated.tls), (tls, tls));
                assert_eq!(export.style, HeaderStyle::Extended);
                assert!(export.allocation.is_some() && negotiated.allocation);
            }
            (None, Err(ClientError::Refused { option, code, .. })) => {
                let refused =
                    [(opt::STARTTLS, rep::ERR_UNSUP), (opt::STRUCTURED_REPLY, rep::ERR_TLS_REQD)];
                let last = (opt::GO, rep::ERR_TLS_REQD);
                assert!(refused.contains(&(option, code)) || last == (option, code));
            }
            (_, result) => panic!("{server:?} {client:?}: {result:?}"),
        }
    }
}
