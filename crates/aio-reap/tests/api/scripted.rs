//! Engines on the scripted device.

use aio_reap::{Engine, EngineBuilder};
use aio_reap_test::Build;
use aio_reap_test::sim::Script;

/// An engine with at most `depth` requests in flight.
pub(crate) fn scripted(depth: usize) -> (Engine, Script) {
    scripted_by(Engine::builder().depth(depth))
}

/// An engine with as many slots as requests in flight.
pub(crate) fn full_at(capacity: usize) -> (Engine, Script) {
    scripted_by(Engine::builder().depth(capacity).capacity(capacity))
}

pub(crate) fn scripted_by(builder: EngineBuilder) -> (Engine, Script) {
    let script = Script::new();
    (builder.build_sim(&script).unwrap(), script)
}
