//! Traces of block numbers, in the text formats of the caching literature.

use std::collections::HashMap;
use std::error::Error;
use std::fmt;
use std::fs::{self, File};
use std::io::{self, BufRead, BufReader, Read};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

/// The most bytes of a line, also of a comment.
pub const MOST_LINE: usize = 4096;
/// The most requests of a trace. The longest of the ARC paper has 44 million.
pub const MOST_REQUESTS: u64 = 1 << 26;
/// The most different blocks of a trace. With as many, reading takes up to 1.5 GiB of memory.
pub const MOST_BLOCKS: u64 = 1 << 24;

/// A trace: the requested blocks, in the order of the requests.
#[derive(Clone, Debug)]
pub struct Trace {
    /// The name of its file, without the endings.
    pub name: String,
    /// Blocks, numbered from 0 in the order of their first requests.
    pub keys: Vec<u32>,
    /// The number of different blocks of the trace.
    pub blocks: usize,
}

/// The reasons for which a trace was not read.
#[derive(Debug)]
#[non_exhaustive]
pub enum TraceError {
    /// The file or folder cannot be read, or the program that unpacks it cannot be started.
    Io {
        /// The file, the folder or the program.
        path: PathBuf,
        /// The error of the system.
        error: io::Error,
    },
    /// The file cannot be unpacked.
    Packed {
        /// The file.
        path: PathBuf,
        /// The standard error of the program that unpacks it.
        message: String,
    },
    /// A line cannot be used.
    Line {
        /// The file.
        path: PathBuf,
        /// The number of the line, from 1.
        line: u64,
        /// The reason.
        reason: LineError,
    },
}

/// The reasons for which a line of a trace cannot be used.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum LineError {
    /// The line has more than [`MOST_LINE`] bytes.
    TooLong,
    /// The line is neither one number nor four.
    Format {
        /// The beginning of the line.
        text: String,
    },
    /// The number of a block exceeds 64 bits.
    Block {
        /// The number of the first block.
        first: u64,
        /// The number of blocks.
        count: u64,
    },
    /// The trace has more requests than the limit from this line on.
    Requests {
        /// The requests of this line.
        count: u64,
        /// The requests of the lines before it.
        before: u64,
        /// The limit.
        limit: u64,
    },
    /// The trace has more different blocks than the limit from this line on.
    Blocks {
        /// The limit.
        limit: u64,
    },
}

impl fmt::Display for TraceError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Io { path, error } => write!(f, "{}: {error}", path.display()),
            Self::Packed { path, message } => {
                write!(f, "{} cannot be unpacked: {message}", path.display())
            }
            Self::Line { path, line, reason } => write!(f, "{}:{line}: {reason}", path.display()),
        }
    }
}

impl Error for TraceError {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        match self {
            Self::Io { error, .. } => Some(error),
            Self::Line { reason, .. } => Some(reason),
            Self::Packed { .. } => None,
        }
    }
}

impl fmt::Display for LineError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::TooLong => write!(f, "the line has more than {MOST_LINE} bytes"),
            Self::Format { text } => {
                write!(f, "{text:?} is neither one number of 64 bits nor four of them")
            }
            Self::Block { first, count } => {
                let limit = u64::MAX;
                write!(f, "{count} blocks from {first} on exceed the largest number, {limit}")
            }
            Self::Requests { count, before, limit } => write!(
                f,
                "{count} requests after {before} exceed the limit of {limit} requests of a trace"
            ),
            Self::Blocks { limit } => {
                write!(f, "the trace has more than {limit} different blocks, the limit")
            }
        }
    }
}

impl Error for LineError {}

/// The requests read so far.
struct Requests {
    /// The number of each block.
    numbers: HashMap<u64, u32>,
    keys: Vec<u32>,
    most_requests: u64,
    most_blocks: u64,
}

impl Requests {
    fn new(most_requests: u64, most_blocks: u64) -> Self {
        Self { numbers: HashMap::new(), keys: Vec::new(), most_requests, most_blocks }
    }

    fn add(&mut self, first: u64, count: u64) -> Result<(), LineError> {
        let (before, limit) = (self.keys.len() as u64, self.most_requests);
        if count > limit - before {
            return Err(LineError::Requests { count, before, limit });
        }
        if count > 0 && first.checked_add(count - 1).is_none() {
            return Err(LineError::Block { first, count });
        }
        for at in 0..count {
            let next = self.numbers.len() as u32;
            let key = *self.numbers.entry(first + at).or_insert(next);
            if u64::from(key) == self.most_blocks {
                return Err(LineError::Blocks { limit: self.most_blocks });
            }
            self.keys.push(key);
        }
        Ok(())
    }

    /// Adds the requests of a line, which has none if it is empty or a comment.
    fn add_line(&mut self, line: &[u8]) -> Result<(), LineError> {
        let line = line.trim_ascii();
        if line.is_empty() || line.starts_with(b"*") || line.starts_with(b"#") {
            return Ok(());
        }
        let text = String::from_utf8_lossy(line);
        let mut numbers = [0; 4];
        let mut len = 0;
        for word in text.split_ascii_whitespace() {
            let place = numbers.get_mut(len);
            let (Some(place), Ok(number)) = (place, word.parse()) else {
                len = 0;
                break;
            };
            (*place, len) = (number, len + 1);
        }
        match (len, numbers) {
            (1, [block, ..]) => self.add(block, 1),
            (4, [first, count, ..]) => self.add(first, count),
            _ => Err(LineError::Format { text: text.chars().take(80).collect() }),
        }
    }

    fn into_trace(self, name: &str) -> Trace {
        Trace { name: name.to_owned(), keys: self.keys, blocks: self.numbers.len() }
    }
}

impl Trace {
    /// Numbers the blocks anew.
    ///
    /// # Panics
    ///
    /// With more requests than [`MOST_REQUESTS`], or more blocks than [`MOST_BLOCKS`].
    pub fn new(name: &str, blocks: impl IntoIterator<Item = u64>) -> Self {
        let mut requests = Requests::new(MOST_REQUESTS, MOST_BLOCKS);
        let result = blocks.into_iter().try_for_each(|block| requests.add(block, 1));
        result.unwrap_or_else(|error| panic!("{name}: {error}"));
        requests.into_trace(name)
    }

    /// Reads a file in one of these formats, packed by zstd or gzip if its name says so:
    ///
    /// - ARC: lines of four numbers, the first block, the number of blocks, and two that are
    ///   ignored;
    /// - LIRS, and plain numbers: one block per line.
    ///
    /// Lines that are empty, or begin with `*` or `#` after blanks, are skipped. The memory is
    /// bounded by [`MOST_LINE`], [`MOST_REQUESTS`] and [`MOST_BLOCKS`], whatever the file.
    ///
    /// # Errors
    ///
    /// The file cannot be read or unpacked; a line is in neither format, or exceeds a limit.
    pub fn read(path: &Path) -> Result<Self, TraceError> {
        Self::read_within(path, MOST_REQUESTS, MOST_BLOCKS)
    }

    fn read_within(path: &Path, requests: u64, blocks: u64) -> Result<Self, TraceError> {
        let mut requests = Requests::new(requests, blocks);
        match path.extension().and_then(|ending| ending.to_str()) {
            Some("zst") => unpack("zstd", path, &mut requests)?,
            Some("gz") => unpack("gzip", path, &mut requests)?,
            _ => read_lines(path, File::open(path).map_err(in_file(path))?, &mut requests)?,
        }
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        Ok(requests.into_trace(name.split('.').next().unwrap_or_default()))
    }
}

/// Returns a function that adds the path to an error.
fn in_file(path: &Path) -> impl Fn(io::Error) -> TraceError + '_ {
    |error| TraceError::Io { path: path.to_owned(), error }
}

fn read_lines(path: &Path, text: impl Read, requests: &mut Requests) -> Result<(), TraceError> {
    let mut text = BufReader::new(text);
    let mut bytes = Vec::new();
    for line in 1.. {
        bytes.clear();
        // One more than a line of the largest length and its end.
        let mut limited = text.by_ref().take(MOST_LINE as u64 + 2);
        limited.read_until(b'\n', &mut bytes).map_err(in_file(path))?;
        if bytes.is_empty() {
            break;
        }
        let is_long = bytes.strip_suffix(b"\n").unwrap_or(&bytes).len() > MOST_LINE;
        let result = if is_long { Err(LineError::TooLong) } else { requests.add_line(&bytes) };
        result.map_err(|reason| TraceError::Line { path: path.to_owned(), line, reason })?;
    }
    Ok(())
}

/// A program that unpacks a file. It ends with the value.
struct Unpacking(Child);

impl Drop for Unpacking {
    fn drop(&mut self) {
        // Both fail if the program has ended.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn unpack(program: &str, path: &Path, requests: &mut Requests) -> Result<(), TraceError> {
    let mut command = Command::new(program);
    command.arg("-dcq").arg("--").arg(path);
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let started = command.spawn().map_err(in_file(program.as_ref()))?;
    let mut running = Unpacking(started);
    let (stdout, stderr) = (running.0.stdout.take(), running.0.stderr.take());
    if let Some(stdout) = stdout {
        read_lines(path, stdout, requests)?;
    }
    let mut message = Vec::new();
    if let Some(stderr) = stderr {
        // A quiet program writes a line, which the pipe holds until here.
        stderr.take(MOST_LINE as u64).read_to_end(&mut message).map_err(in_file(path))?;
    }
    let status = running.0.wait().map_err(in_file(path))?;
    if status.success() {
        return Ok(());
    }
    let message = String::from_utf8_lossy(&message).trim().to_owned();
    Err(TraceError::Packed { path: path.to_owned(), message })
}

/// The files in a folder whose names say that they are traces: `.lis`, `.trc`, `.trace` or `.txt`,
/// and these with `.zst` or `.gz`. Sorted by name.
///
/// # Errors
///
/// The folder cannot be read.
pub fn in_folder(folder: &Path) -> Result<Vec<PathBuf>, TraceError> {
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

    /// A file of a test, removed at its end.
    struct TestFile(PathBuf);

    impl TestFile {
        fn new(name: &str, bytes: impl AsRef<[u8]>) -> Self {
            let name = format!("traces-{}-{name}", std::process::id());
            let file = Self(std::env::temp_dir().join(name));
            fs::write(&file.0, bytes).unwrap();
            file
        }
    }

    impl Drop for TestFile {
        fn drop(&mut self) {
            let _ = fs::remove_file(&self.0);
        }
    }

    fn read(name: &str, text: impl AsRef<[u8]>) -> Result<Trace, TraceError> {
        Trace::read(&TestFile::new(name, text).0)
    }

    /// The line and the reason of the error.
    fn refused(read: Result<Trace, TraceError>) -> (u64, LineError) {
        match read.unwrap_err() {
            TraceError::Line { line, reason, .. } => (line, reason),
            error => panic!("{error}"),
        }
    }

    #[test]
    fn each_format_is_read() {
        let arc = read("arc.lis", "10 3 0 1\n11 2 0 2\n").unwrap();
        assert_eq!((arc.keys, arc.blocks), (vec![0, 1, 2, 1, 2], 3));
        let lirs = read("lirs.lis", "*\n7\n7\n\n# a comment\n  # one after blanks\n\t*\n9\r\n*\n");
        let lirs = lirs.unwrap();
        assert_eq!((lirs.keys, lirs.blocks), (vec![0, 0, 1], 2));
        let last = read("last.lis", format!("{}\n# \u{e9}\n0 0 0 0\n5", u64::MAX)).unwrap();
        assert_eq!((last.keys, last.blocks), (vec![0, 1], 2));
    }

    #[test]
    fn a_line_that_is_no_request_is_refused_by_its_number() {
        let lines = ["2 3", "1 2 3 4 5", "x", "-1", "18446744073709551616", "1 2 3 x", "\u{e9}"];
        for bad in lines {
            let refused = refused(read("bad.lis", format!("1\n# 2\n{bad}\n")));
            assert_eq!(refused, (3, LineError::Format { text: bad.to_owned() }));
        }
        let file = TestFile::new("sentence.lis", "1\n2 3\n");
        let place = file.0.display();
        let error = Trace::read(&file.0).unwrap_err().to_string();
        let reason = "\"2 3\" is neither one number of 64 bits nor four of them";
        assert_eq!(error, format!("{place}:2: {reason}"));
    }

    #[test]
    fn a_line_beyond_a_limit_is_refused_with_the_value_and_the_limit() {
        let (count, limit) = (100_000_000_000, MOST_REQUESTS);
        let refused_ = refused(read("requests.lis", format!("7\n0 {count} 0 0\n")));
        assert_eq!(refused_, (2, LineError::Requests { count, before: 1, limit }));
        let refused_ = refused(read("most.lis", format!("0 {} 0 0\n", u64::MAX)));
        assert_eq!(refused_, (1, LineError::Requests { count: u64::MAX, before: 0, limit }));
        let first = u64::MAX - 1;
        let refused_ = refused(read("block.lis", format!("{first} 2 0 0\n{first} 3 0 0\n")));
        assert_eq!(refused_, (2, LineError::Block { first, count: 3 }));

        let file = TestFile::new("blocks.lis", "1 4 0 0\n1 4 0 0\n5\n");
        let within = |requests, blocks| Trace::read_within(&file.0, requests, blocks);
        assert_eq!(within(9, 5).unwrap().blocks, 5);
        assert_eq!(refused(within(9, 4)), (3, LineError::Blocks { limit: 4 }));
        let requests = LineError::Requests { count: 1, before: 8, limit: 8 };
        assert_eq!(refused(within(8, 5)), (3, requests));
    }

    /// An endless line: its reader must give up within it.
    #[test]
    fn a_long_line_is_refused_before_its_end() {
        let fits = read("fits.lis", format!("#{}\n7\n", " ".repeat(MOST_LINE - 1))).unwrap();
        assert_eq!(fits.keys, [0]);
        let long = format!("7\n#{}\n", " ".repeat(MOST_LINE));
        assert_eq!(refused(read("long.lis", long)), (2, LineError::TooLong));
        let endless = Trace::read("/dev/zero".as_ref());
        assert_eq!(refused(endless), (1, LineError::TooLong));
    }

    #[test]
    fn packed_files_are_read_and_what_is_not_packed_is_refused() {
        for (program, ending) in [("gzip", "gz"), ("zstd", "zst")] {
            if Command::new(program).arg("-V").output().is_err() {
                println!("not tested: {program} is not installed");
                continue;
            }
            let plain = TestFile::new(&format!("{program}.lis"), "3\n3\n2 3\n");
            let packed = Command::new(program).arg("-cq").arg(&plain.0).output().unwrap();
            let name = format!("packed.lis.{ending}");
            let bad_line = refused(read(&name, packed.stdout));
            assert_eq!(bad_line, (3, LineError::Format { text: "2 3".to_owned() }));
            let error = read(&name, "3\n").unwrap_err();
            assert!(matches!(&error, TraceError::Packed { message, .. } if !message.is_empty()));
        }
        let missing = Trace::read("/nonexistent/1.lis".as_ref()).unwrap_err().to_string();
        assert_eq!(missing, "/nonexistent/1.lis: No such file or directory (os error 2)");
    }
}
