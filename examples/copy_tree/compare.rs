//! The comparison of a copy with its source.

use std::cell::RefCell;
use std::collections::BTreeSet;
use std::ffi::OsString;
use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::rc::Rc;

use aio_reap::{Engine, OpenOptions};

use super::{CHUNK, on_engine};

/// Compares a copy with its source. Returns the paths that differ.
pub(crate) fn differences(from: &Path, to: &Path) -> io::Result<Vec<PathBuf>> {
    let (mut dirs, mut files, mut differ) = (vec![PathBuf::new()], Vec::new(), Vec::new());
    while let Some(dir) = dirs.pop() {
        let names = |root: &Path| -> io::Result<BTreeSet<OsString>> {
            fs::read_dir(root.join(&dir))?.map(|entry| Ok(entry?.file_name())).collect()
        };
        let (ours, theirs) = (names(to)?, names(from)?);
        differ.extend(ours.symmetric_difference(&theirs).map(|name| dir.join(name)));
        for path in ours.intersection(&theirs).map(|name| dir.join(name)) {
            let ((a, b), target) = ((from.join(&path), to.join(&path)), path.clone());
            let (was, is) = (fs::symlink_metadata(&a)?, fs::symlink_metadata(&b)?);
            let owner_may = |mode: u32| mode & 0o700; // the umask may take the rest
            let same = was.file_type() == is.file_type()
                && owner_may(was.mode()) == owner_may(is.mode())
                && is.mode() & 0o777 & !was.mode() == 0
                && (was.is_dir() || was.size() == is.size())
                && (!was.is_symlink() || fs::read_link(&a)? == fs::read_link(&b)?);
            if !same {
                differ.push(target);
            } else if was.is_dir() {
                dirs.push(path);
            } else if was.is_file() {
                files.push(path);
            }
        }
    }
    let (files, differ) = (Rc::new(RefCell::new(files)), Rc::new(RefCell::new(differ)));
    on_engine(|engine| {
        let (files, differ) = (Rc::clone(&files), Rc::clone(&differ));
        let (from, to) = (from.to_path_buf(), to.to_path_buf());
        async move {
            while let Some(path) = { files.borrow_mut().pop() } {
                if !matches!(equal(&engine, &from.join(&path), &to.join(&path)).await, Ok(true)) {
                    differ.borrow_mut().push(path);
                }
            }
        }
    })?;
    Ok(differ.take())
}

/// Returns whether two files have the same bytes.
async fn equal(engine: &Engine, a: &Path, b: &Path) -> io::Result<bool> {
    let read = OpenOptions::read_only();
    let (a, b) = (engine.open(a, read).submit_async().await?, engine.open(b, read));
    let (b, a) = (b.submit_async().await?.await.0?, a.await.0?);
    let (mut left, mut right) = (vec![0; CHUNK], vec![0; CHUNK]);
    for at in (0..).step_by(CHUNK) {
        let one = engine.read(&a, left, at).submit_async().await?;
        let (other, bytes) = engine.read(&b, right, at).submit_async().await?.await;
        let (one, more) = one.await;
        let (one, other) = (one?, other?);
        if more[..one] != bytes[..other] {
            return Ok(false);
        }
        if one < CHUNK {
            break;
        }
        (left, right) = (more, bytes);
    }
    Ok(true)
}
