//! The circumstances of this build, for benches that build other programs.

use std::env;
use std::io;
use std::path::{Path, PathBuf};

/// The profile that this bench was built with: it lies in `<target>/<profile>/deps`.
pub fn profile() -> String {
    let folder = profile_dir().ok();
    match folder.as_deref().and_then(Path::file_name).and_then(|name| name.to_str()) {
        None | Some("release") => "bench".into(),
        Some("debug") => "dev".into(),
        Some(other) => other.into(),
    }
}

/// The target directory that this bench was built in.
pub fn target_dir() -> io::Result<PathBuf> {
    above(3)
}

/// The profile's folder in the [target directory](target_dir).
pub fn profile_dir() -> io::Result<PathBuf> {
    above(2)
}

fn above(folders: usize) -> io::Result<PathBuf> {
    let program = env::current_exe()?;
    let folder = program.ancestors().nth(folders);
    folder.map(Path::to_path_buf).ok_or_else(|| io::Error::other("not in a target directory"))
}
