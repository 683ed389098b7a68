//! Helpers of the tests on real backends.

use aio_reap::{BackendKind, Engine};

/// Runs `test` on every backend that the system allows. A container may refuse io_uring and AIO,
/// but not threads.
pub(crate) fn on_every_backend(test: impl Fn(&Engine)) {
    for kind in [BackendKind::Uring, BackendKind::Aio, BackendKind::Threads] {
        let builder = Engine::builder().depth(8).capacity(64).backend(kind);
        match builder.build() {
            Ok(engine) => {
                assert_eq!(engine.backend(), kind);
                test(&engine);
                engine.validate();
                assert_eq!(engine.stats().stray, 0);
            }
            Err(error) if kind != BackendKind::Threads => {
                assert!(std::env::var_os("OFFLOCK_REQUIRE_ALL").is_none(), "{kind}: {error}");
                eprintln!("skipped: {error}");
            }
            Err(error) => panic!("{error}"),
        }
    }
}
