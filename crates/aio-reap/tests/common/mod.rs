//! Helpers of the tests on real backends.
#![allow(dead_code, reason = "not every test program uses all of it")]

use std::ffi::CString;
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;

use aio_reap::{BackendKind, Engine, EngineBuilder};

pub(crate) const REAL: [BackendKind; 3] =
    [BackendKind::Uring, BackendKind::Aio, BackendKind::Threads];

/// The limits of the engines of most tests.
pub(crate) fn small() -> EngineBuilder {
    Engine::builder().depth(8).capacity(64)
}

/// Builds an engine on every backend that the system allows. A container may refuse io_uring and AIO,
/// but not threads.
pub(crate) fn engines(builder: EngineBuilder) -> impl Iterator<Item = Engine> {
    REAL.into_iter().filter_map(move |kind| match builder.clone().backend(kind).build() {
        Ok(engine) => {
            assert_eq!(engine.backend(), kind);
            Some(engine)
        }
        Err(error) => {
            assert!(kind != BackendKind::Threads, "{error}");
            assert!(std::env::var_os("OFFLOCK_REQUIRE_ALL").is_none(), "{kind}: {error}");
            eprintln!("skipped: {error}");
            None
        }
    })
}

/// Runs `test` on every backend that the system allows.
pub(crate) fn on_every_backend(test: impl Fn(&Engine)) {
    on_engines(small(), test);
}

/// Runs `test` on the engines of a builder.
pub(crate) fn on_engines(builder: EngineBuilder, test: impl Fn(&Engine)) {
    for engine in engines(builder) {
        test(&engine);
        engine.validate();
        assert_eq!(engine.stats().stray, 0);
    }
}

/// Makes a FIFO, whose open waits for its other end.
pub(crate) fn fifo() -> (tempfile::TempDir, PathBuf) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("fifo");
    let name = CString::new(path.as_os_str().as_bytes()).unwrap();
    // SAFETY: `name` ends with a zero byte and outlives the call.
    assert_eq!(unsafe { libc::mkfifo(name.as_ptr(), 0o600) }, 0);
    (folder, path)
}
