//! Traces of block numbers, in the text formats of the caching literature.

use std::collections::HashMap;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The most requests of a trace. The longest of the ARC paper has 44 million.
const MOST_REQUESTS: usize = 1 << 26;
/// The most different blocks of a trace. With as many, reading takes up to 1.5 GiB of memory.
const MOST_BLOCKS: usize = 1 << 24;

/// A trace: the requested blocks, in the order of the requests.
#[derive(Clone, Debug, Default)]
pub struct Trace {
    /// The name of its file, without the endings.
    pub name: String,
    /// Blocks, numbered from 0 in the order of their first requests.
    pub keys: Vec<u32>,
    /// The number of different blocks of the trace.
    pub blocks: usize,
    numbers: HashMap<u64, u32>,
}

impl Trace {
    /// Numbers the blocks anew.
    ///
    /// # Panics
    ///
    /// With more than 67 million requests, or more than 16 million blocks.
    pub fn new(name: &str, blocks: impl IntoIterator<Item = u64>) -> Self {
        let mut trace = Self { name: name.to_owned(), ..Self::default() };
        let result = blocks.into_iter().try_for_each(|block| trace.add(block, 1));
        result.unwrap_or_else(|error| panic!("{name}: {error}"));
        trace.end()
    }

    /// Reads a file in one of these formats, packed by zstd or gzip if its name says so:
    ///
    /// - ARC: lines of four numbers, the first block, the number of blocks, and two that are
    ///   ignored;
    /// - LIRS, and plain numbers: one block per line.
    ///
    /// Lines that are empty, or begin with `*` or `#` after blanks, are skipped.
    ///
    /// # Errors
    ///
    /// The file cannot be read or unpacked; a line is in neither format, or exceeds a limit. The
    /// error names the file, and the line.
    pub fn read(path: &Path) -> io::Result<Self> {
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        let name = name.split('.').next().unwrap_or_default().to_owned();
        let mut trace = Self { name, ..Self::default() };
        let text = match path.extension().and_then(|ending| ending.to_str()) {
            Some("zst") => unpacked("zstd", path)?,
            Some("gz") => unpacked("gzip", path)?,
            _ => fs::read(path).map_err(in_file(path))?,
        };
        for (line, number) in text.split(|byte| *byte == b'\n').zip(1..) {
            trace.add_line(line).map_err(|why| {
                let why = format!("{}:{number}: {why}", path.display());
                io::Error::new(io::ErrorKind::InvalidData, why)
            })?;
        }
        Ok(trace.end())
    }

    fn end(mut self) -> Self {
        self.blocks = self.numbers.len();
        self.numbers = HashMap::new();
        self
    }

    fn add(&mut self, first: u64, count: u64) -> Result<(), String> {
        if count > (MOST_REQUESTS - self.keys.len()) as u64 {
            return Err(format!("the trace has more than {MOST_REQUESTS} requests"));
        }
        for at in 0..count {
            let block = first.checked_add(at).ok_or("the number of a block exceeds 64 bits")?;
            let next = self.numbers.len() as u32;
            let key = *self.numbers.entry(block).or_insert(next);
            if key as usize == MOST_BLOCKS {
                return Err(format!("the trace has more than {MOST_BLOCKS} different blocks"));
            }
            self.keys.push(key);
        }
        Ok(())
    }

    /// Adds the requests of a line, which has none if it is empty or a comment.
    fn add_line(&mut self, line: &[u8]) -> Result<(), String> {
        let line = line.trim_ascii();
        if line.is_empty() || line.starts_with(b"*") || line.starts_with(b"#") {
            return Ok(());
        }
        let text = String::from_utf8_lossy(line);
        let numbers = text.split_ascii_whitespace().map(str::parse);
        match numbers.collect::<Result<Vec<u64>, _>>().as_deref() {
            Ok(&[block]) => self.add(block, 1),
            Ok(&[first, count, _, _]) => self.add(first, count),
            _ => {
                let text: String = text.chars().take(80).collect();
                Err(format!("{text:?} is neither one number of 64 bits nor four of them"))
            }
        }
    }
}

/// Returns the content of a file that a program has packed.
fn unpacked(program: &str, path: &Path) -> io::Result<Vec<u8>> {
    let output = Command::new(program).arg("-dcq").arg("--").arg(path).output();
    let output = output.map_err(in_file(program.as_ref()))?;
    let said = || String::from_utf8_lossy(&output.stderr).trim().to_string();
    let failed = || in_file(path)(io::Error::other(said()));
    if output.status.success() { Ok(output.stdout) } else { Err(failed()) }
}

/// Returns a function that adds the path to an error.
fn in_file(path: &Path) -> impl Fn(io::Error) -> io::Error + '_ {
    |error| io::Error::new(error.kind(), format!("{}: {error}", path.display()))
}

/// The files in a folder whose names say that they are traces: `.lis`, `.trc`, `.trace` or `.txt`,
/// and these with `.zst` or `.gz`. Sorted by name.
///
/// # Errors
///
/// The folder cannot be read.
pub fn in_folder(folder: &Path) -> io::Result<Vec<PathBuf>> {
    let mut paths = Vec::new();
    for entry in fs::read_dir(folder).map_err(in_file(folder))? {
        let path = entry.map_err(in_file(folder))?.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let plain = name.trim_end_matches(".zst").trim_end_matches(".gz");
        if [".lis", ".trc", ".trace", ".txt"].iter().any(|ending| plain.ends_with(ending)) {
            paths.push(path);
        }
    }
    paths.sort();
    Ok(paths)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What a file with these bytes is read as: the keys and the number of blocks, or the error without the path.
    fn read(name: &str, bytes: impl AsRef<[u8]>) -> Result<(Vec<u32>, usize), String> {
        let path = std::env::temp_dir().join(format!("traces-{}-{name}", std::process::id()));
        fs::write(&path, bytes).unwrap();
        let trace = Trace::read(&path);
        fs::remove_file(&path).unwrap();
        let trace = trace.map_err(|error| error.to_string().replace(&*path.to_string_lossy(), ""));
        trace.map(|trace| (trace.keys, trace.blocks))
    }

    #[test]
    fn each_format_is_read() {
        assert_eq!(read("arc.lis", "10 3 0 1\n11 2 0 2\n"), Ok((vec![0, 1, 2, 1, 2], 3)));
        let lirs = "*\n7\n7\n\n# a comment\n  # one after blanks\n\t*\n9\r\n*\n";
        assert_eq!(read("lirs.lis", lirs), Ok((vec![0, 0, 1], 2)));
        let last = format!("{}\n# \u{e9}\n0 0 0 0\n5", u64::MAX);
        assert_eq!(read("last.lis", last), Ok((vec![0, 1], 2)));
    }

    #[test]
    fn a_line_that_is_no_request_or_beyond_a_limit_is_refused_by_its_number() {
        for bad in ["2 3", "1 2 3 4 5", "x", "-1", "18446744073709551616", "1 2 3 x", "\u{e9}"] {
            let refused = read("bad.lis", format!("1\n# 2\n{bad}\n")).unwrap_err();
            assert_eq!(
                refused,
                format!(":3: {bad:?} is neither one number of 64 bits nor four of them")
            );
        }
        let max = u64::MAX;
        for (beyond, reason) in [
            (format!("0 {max} 0 0"), "67108864 requests"),
            (format!("{} 3 0 0", max - 1), "64 bits"),
        ] {
            let refused = read("beyond.lis", format!("7\n{beyond}\n")).unwrap_err();
            assert!(refused.starts_with(":2: ") && refused.contains(reason), "{refused}");
        }
    }

    #[test]
    fn packed_files_are_read_and_what_is_not_packed_is_refused() {
        for (program, ending) in [("gzip", "gz"), ("zstd", "zst")] {
            let script = format!("printf '3\\n3\\n4\\n' | {program} -cq");
            let packed = Command::new("sh").arg("-c").arg(script).output().unwrap().stdout;
            if packed.is_empty() {
                println!("not tested: {program} is not installed");
                continue;
            }
            assert_eq!(read(&format!("a.lis.{ending}"), packed), Ok((vec![0, 0, 1], 2)));
            assert!(read(&format!("b.lis.{ending}"), "3\n").is_err_and(|why| why.len() > 2));
        }
    }
}
