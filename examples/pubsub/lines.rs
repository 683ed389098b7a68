//! Lines of bounded length from a stream.

use std::io;

use tokio::io::{AsyncBufReadExt, AsyncRead, AsyncReadExt, BufReader};

/// The longest line in bytes, without its line end.
pub(crate) const MAX_LINE: usize = 4096;

/// What a client sent.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Input<'a> {
    Line(&'a str),
    /// The line is not UTF-8.
    NotText,
    /// The line is longer than `MAX_LINE`. What follows cannot be read as lines.
    TooLong,
    /// The stream has ended. An incomplete last line is ignored.
    End,
}

/// Reads lines, and keeps one at a time.
#[derive(Debug)]
pub(crate) struct Lines<R> {
    stream: BufReader<R>,
    line: Vec<u8>,
}

impl<R: AsyncRead + Unpin> Lines<R> {
    pub(crate) fn new(stream: R) -> Lines<R> {
        Lines { stream: BufReader::new(stream), line: Vec::new() }
    }

    /// Reads the next line, without its line end (LF or CR LF).
    pub(crate) async fn next(&mut self) -> io::Result<Input<'_>> {
        self.line.clear();
        let longest = MAX_LINE as u64 + 2; // with CR LF
        (&mut self.stream).take(longest).read_until(b'\n', &mut self.line).await?;
        let Some(line) = self.line.strip_suffix(b"\n") else {
            let cut_off = self.line.len() as u64 == longest;
            return Ok(if cut_off { Input::TooLong } else { Input::End });
        };
        let line = line.strip_suffix(b"\r").unwrap_or(line);
        if line.len() > MAX_LINE {
            return Ok(Input::TooLong);
        }
        Ok(std::str::from_utf8(line).map_or(Input::NotText, Input::Line))
    }
}
