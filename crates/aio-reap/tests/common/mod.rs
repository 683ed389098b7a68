//! Helpers of the tests on real backends.

mod variants;

use aio_reap::{BackendKind, Engine};
use variants::VARIANTS;

/// Runs `test` on every backend that the system allows. A container may refuse io_uring and AIO,
/// but not threads.
pub(crate) fn on_every_backend(test: impl Fn(&Engine)) {
    for (kind, defer) in VARIANTS {
        let builder = Engine::builder().depth(8).capacity(64).backend(kind).defer_task_run(defer);
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
