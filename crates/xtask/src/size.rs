//! Lines, files and public functions of each crate, beside those of the last version. The models in
//! `src/models` count as tests.
//!
//! `unreachable_pub` is an error in CI, so that `pub fn` in the sources is what a user can call.

use std::fs;

use crate::error::{Error, Result};
use crate::workspace::{Workspace, rust_files};

/// Crate, lines in `src`, files in `src`, lines in `tests`, public functions: version 0.2.
const BEFORE: [(&str, [usize; 4]); 11] = [
    ("aio-reap", [12237, 67, 8851, 207]),
    ("aio-reap-test", [1394, 8, 0, 30]),
    ("bufcache", [16893, 74, 13434, 155]),
    ("mq-rbtree", [10768, 54, 11665, 99]),
    ("nbd-protocol", [3023, 13, 2395, 42]),
    ("nbd-server", [16458, 71, 10978, 0]),
    ("percpu", [12908, 98, 7145, 206]),
    ("percpu-list", [6191, 30, 4778, 84]),
    ("radix-ctx", [10053, 51, 5985, 127]),
    ("testkit", [2077, 19, 90, 50]),
    ("xtask", [6581, 45, 111, 0]),
];

/// Prints the table of all packages below `crates`.
pub(crate) fn run(ws: &Workspace) -> Result<()> {
    println!("{:<14} {:>15} {:>9} {:>15} {:>11}", "crate", "src", "files", "tests", "public fns");
    let mut sum = [[0; 2]; 4];
    for package in ws.crates()? {
        let models = count(&package.dir.join("src/models"))?;
        let (src, files, public) = count(&package.dir.join("src"))?;
        let (src, files) = (src - models.0, files - models.1);
        let tests = models.0 + count(&package.dir.join("tests"))?.0;
        let before = BEFORE.iter().find(|(name, _)| *name == package.name);
        let before = before.map_or([0; 4], |(_, counts)| *counts);
        let now = [src, files, tests, public];
        for (sum, pair) in sum.iter_mut().zip(before.into_iter().zip(now)) {
            *sum = [sum[0] + pair.0, sum[1] + pair.1];
        }
        println!("{}", row(&package.name, before, now));
    }
    println!("{}", row("all", sum.map(|pair| pair[0]), sum.map(|pair| pair[1])));
    Ok(())
}

fn row(name: &str, before: [usize; 4], now: [usize; 4]) -> String {
    let pair = |at: usize| format!("{} -> {}", before[at], now[at]);
    format!("{name:<14} {:>15} {:>9} {:>15} {:>11}", pair(0), pair(1), pair(2), pair(3))
}

/// Returns the lines, the files and the public functions of the sources below a folder.
fn count(folder: &std::path::Path) -> Result<(usize, usize, usize)> {
    let files = rust_files(folder);
    let (mut lines, mut public) = (0, 0);
    for file in &files {
        let text = fs::read_to_string(file).map_err(|error| Error::io(file.display(), error))?;
        lines += text.lines().count();
        public += text.lines().filter(|line| is_public_function(line)).count();
    }
    Ok((lines, files.len(), public))
}

fn is_public_function(line: &str) -> bool {
    let Some(mut rest) = line.trim_start().strip_prefix("pub ") else { return false };
    while let Some(next) =
        ["const ", "unsafe ", "async "].iter().find_map(|word| rest.strip_prefix(word))
    {
        rest = next;
    }
    rest.starts_with("fn ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn public_functions_are_counted_whatever_qualifies_them() {
        for line in ["pub fn a()", "    pub const unsafe fn b()", "pub async fn c()"] {
            assert!(is_public_function(line), "{line}");
        }
        for line in
            ["pub(crate) fn a()", "fn b()", "pub struct C", "// pub fn d()", "pub const E: u8"]
        {
            assert!(!is_public_function(line), "{line}");
        }
    }
}
