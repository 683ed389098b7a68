//! The demo client of `offlock-nbd`, against a server in memory that can be told to misbehave.
//!
//! What the demo says about a good server means something only if it notices a bad one.

#[path = "../../src/demo/mod.rs"]
mod demo;
mod server;

use std::time::Duration;

use demo::{DemoError, DemoOptions, DemoReport};
use nbd_protocol::NbdError;
use server::{Fault, Server};

const SIZE: u64 = 16 << 20;

fn run(server: &Server) -> Result<DemoReport, DemoError> {
    let options = DemoOptions { connections: 3, depth: 16, mixed: Duration::ZERO, at_least: 2000 };
    demo::run(&server.socket(), &options)
}

#[test]
fn a_good_server_passes_and_every_byte_is_compared() {
    let server = Server::start(SIZE, Fault::None);
    let report = run(&server).unwrap();
    assert!(report.is_verified());
    assert_eq!((report.size, report.connections, report.structured), (SIZE, 3, 2));
    assert_eq!(report.fill.written, SIZE);
    assert_eq!(report.verify.read, SIZE);
    let kinds = report.mixed.kinds();
    let count = |name: &str| {
        kinds.iter().find(|kind| kind.name.starts_with(name)).map_or(0, |kind| kind.count)
    };
    let (reads, writes) = (count("read 4"), count("write 4"));
    assert!(reads > writes && writes > 0, "{report}");
    for kind in ["large read", "large write", "trim", "zero", "flush"] {
        assert!(count(kind) > 0, "no {kind}: {report}");
    }
    let page = report.to_string();
    assert!(page.contains("3 x 16"), "{page}");
    assert!(page.contains("every byte of the image right"), "{page}");
}

#[test]
fn a_server_without_options_gets_plain_requests_on_one_connection() {
    let server = Server::start(SIZE, Fault::Plain);
    let report = run(&server).unwrap();
    assert!(report.is_verified());
    assert_eq!(report.connections, 1);
    let kinds = report.mixed.kinds();
    assert!(kinds.iter().all(|kind| kind.name.contains("read") || kind.name.contains("wr")));
}

#[test]
fn each_fault_is_noticed() {
    type IsTold = fn(&DemoError) -> bool;
    let data: IsTold = |error| matches!(error, DemoError::WrongData { .. });
    let stray: IsTold = |error| matches!(error, DemoError::Stray(_));
    for (fault, is_told) in [
        (Fault::LostWrite, data),
        (Fault::FlippedBit, data),
        (Fault::WriteElsewhere, data),
        (Fault::LostZeroes, data),
        (Fault::WrongCookie, stray),
        (Fault::SimpleReplyToStructuredRead, stray),
        (Fault::ShortData, stray),
        (Fault::Garbage, |error| matches!(error, DemoError::Protocol(_))),
        (Fault::Error, |error| matches!(error, DemoError::Failed { error: NbdError::Io, .. })),
        (Fault::Hangup, |error| matches!(error, DemoError::Lost(_))),
    ] {
        let error = run(&Server::start(SIZE, fault)).expect_err("a fault");
        assert!(is_told(&error), "{fault:?}: {error:?}");
    }
}

#[test]
fn an_image_that_is_too_small_or_read_only_is_refused() {
    let server = Server::start(1 << 20, Fault::None);
    let Err(DemoError::Unusable { needed, .. }) = run(&server) else { panic!("1 MiB was enough") };
    assert!(run(&Server::start(needed, Fault::None)).is_ok());
    for (size, fault) in [(needed - 8 * 4096, Fault::None), (SIZE, Fault::ReadOnly)] {
        assert!(matches!(run(&Server::start(size, fault)), Err(DemoError::Unusable { .. })));
    }
}

#[test]
fn no_server_is_a_clear_error() {
    let dir = tempfile::tempdir().unwrap();
    let result = demo::run(&dir.path().join("none"), &DemoOptions::default());
    let message = result.unwrap_err().to_string();
    assert!(message.starts_with("cannot connect to "), "{message}");
}
