//! Traces of block numbers, in the text formats of the caching literature.

use std::collections::HashMap;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::Command;

/// A trace: the requested blocks, in the order of the requests.
#[derive(Clone, Debug)]
pub struct Trace {
    /// The name of its file, without the endings.
    pub name: String,
    /// Blocks, numbered from 0 in the order of their first requests.
    pub keys: Vec<u32>,
    /// How many different blocks it has.
    pub blocks: usize,
}

impl Trace {
    /// Numbers the blocks anew.
    pub fn new(name: &str, blocks: impl IntoIterator<Item = u64>) -> Self {
        let mut numbers = HashMap::new();
        let mut number = |block| {
            let next = numbers.len() as u32;
            *numbers.entry(block).or_insert(next)
        };
        let keys = blocks.into_iter().map(&mut number).collect();
        Self { name: name.to_owned(), keys, blocks: numbers.len() }
    }

    /// Reads a file in one of these formats, packed by zstd or gzip if its name says so:
    ///
    /// - ARC: lines of four numbers, the first block, the number of blocks, and two that are ignored;
    /// - LIRS, and plain numbers: one block per line. Lines that are empty or begin with `*` or `#`
    ///   are skipped.
    ///
    /// # Errors
    ///
    /// The file cannot be read or unpacked; a line is in neither format.
    pub fn read(path: &Path) -> io::Result<Self> {
        let text = String::from_utf8_lossy(&unpacked(path)?).into_owned();
        let mut blocks = Vec::new();
        for (at, line) in text.lines().enumerate() {
            if line.trim().is_empty() || line.starts_with(['*', '#']) {
                continue;
            }
            let numbers: Result<Vec<u64>, _> = line.split_whitespace().map(str::parse).collect();
            match numbers.as_deref() {
                Ok(&[block]) => blocks.push(block),
                Ok(&[first, count, _, _]) => blocks.extend(first..first.saturating_add(count)),
                _ => {
                    let place = format!("{}:{}", path.display(), at + 1);
                    let error = format!("{place}: {line:?} is neither one number nor four");
                    return Err(io::Error::new(io::ErrorKind::InvalidData, error));
                }
            }
        }
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        Ok(Self::new(name.split('.').next().unwrap_or_default(), blocks))
    }
}

/// The files in a folder whose names say that they are traces: `.lis`, `.trc`, `.trace` or `.txt`, and these
/// with `.zst` or `.gz`. Sorted by name.
///
/// # Errors
///
/// The folder cannot be read.
pub fn in_folder(folder: &Path) -> io::Result<Vec<PathBuf>> {
    let mut paths = Vec::new();
    for entry in fs::read_dir(folder)? {
        let path = entry?.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let plain = name.trim_end_matches(".zst").trim_end_matches(".gz");
        if [".lis", ".trc", ".trace", ".txt"].iter().any(|ending| plain.ends_with(ending)) {
            paths.push(path);
        }
    }
    paths.sort();
    Ok(paths)
}

fn unpacked(path: &Path) -> io::Result<Vec<u8>> {
    let program = match path.extension().and_then(|ending| ending.to_str()) {
        Some("zst") => "zstd",
        Some("gz") => "gzip",
        _ => return fs::read(path),
    };
    let output = Command::new(program).arg("-dcq").arg(path).output()?;
    let said = String::from_utf8_lossy(&output.stderr);
    output.status.success().then_some(output.stdout).ok_or_else(|| io::Error::other(said.trim()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_format_is_read_and_a_line_of_another_is_refused_by_its_number() {
        let file = std::env::temp_dir().join(format!("traces-{}.one.lis", std::process::id()));
        let read = |text: &str| {
            fs::write(&file, text).unwrap();
            Trace::read(&file)
        };
        let arc = read("10 3 0 1\n11 2 0 2\n").unwrap();
        assert_eq!((arc.keys, arc.blocks), (vec![0, 1, 2, 1, 2], 3));
        let lirs = read("*\n7\n7\n\n# a comment\n9\n*\n").unwrap();
        assert_eq!((lirs.keys, lirs.blocks), (vec![0, 0, 1], 2));
        let error = read("1\n2 3\n").unwrap_err().to_string();
        assert!(error.contains(":2: \"2 3\""), "{error}");
        fs::remove_file(&file).unwrap();
    }
}
