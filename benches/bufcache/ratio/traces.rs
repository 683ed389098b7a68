//! Traces of blocks, as text: first block, number of blocks, a number to be ignored, number of the
//! request.

use std::collections::HashMap;
use std::fs;
use std::io;
use std::path::Path;
use std::process::Command;

use rustc_hash::FxBuildHasher;

/// What was asked for.
pub(crate) struct Trace {
    /// Blocks, numbered in the order in which they come first.
    pub(crate) keys: Vec<u32>,
    /// How many different ones.
    pub(crate) blocks: usize,
}

/// Reads `NAME.lis` in `folder`, or `NAME.lis.zst` by the program `zstd`.
pub(crate) fn load(folder: &Path, name: &str) -> io::Result<Trace> {
    let plain = folder.join(format!("{name}.lis"));
    let text = if plain.exists() { fs::read(plain)? } else { unpack(folder, name)? };
    let mut numbers: HashMap<u64, u32, FxBuildHasher> = HashMap::default();
    let mut keys = Vec::new();
    for line in String::from_utf8_lossy(&text).lines() {
        let mut words = line.split_whitespace().map(str::parse::<u64>);
        let (Some(Ok(first)), Some(Ok(count))) = (words.next(), words.next()) else {
            return Err(io::Error::new(io::ErrorKind::InvalidData, format!("a line {line:?}")));
        };
        for block in first..first + count {
            let next = numbers.len() as u32;
            keys.push(*numbers.entry(block).or_insert(next));
        }
    }
    Ok(Trace { keys, blocks: numbers.len() })
}

fn unpack(folder: &Path, name: &str) -> io::Result<Vec<u8>> {
    let packed = folder.join(format!("{name}.lis.zst"));
    let output = Command::new("zstd").arg("-dcq").arg(packed).output()?;
    let said = String::from_utf8_lossy(&output.stderr);
    output.status.success().then_some(output.stdout).ok_or_else(|| io::Error::other(said.trim()))
}
