//! Files without the page cache.

use std::os::unix::fs::OpenOptionsExt;

use aio_reap::{Engine, File};

/// Makes a file in the target directory, so that `O_DIRECT` works if tmpfs refuses it.
pub(crate) fn direct_file(engine: &Engine) -> Option<(tempfile::NamedTempFile, File)> {
    let file = tempfile::NamedTempFile::new_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let opened = std::fs::OpenOptions::new()
        .read(true)
        .write(true)
        .custom_flags(libc::O_DIRECT)
        .open(file.path());
    let attached = engine.attach(opened.ok()?).unwrap();
    Some((file, attached))
}
