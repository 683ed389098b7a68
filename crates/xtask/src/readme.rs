//! The commands that README.md promises.

use std::fs;

use crate::error::{Error, Result};
use crate::process::Cmd;
use crate::workspace::Workspace;

/// Returns the command, if README.md has it as a line of its own, word for word.
pub(crate) fn command(ws: &Workspace, line: &str) -> Result<Cmd> {
    let path = ws.root.join("README.md");
    let text = fs::read_to_string(&path).map_err(|error| Error::io(path.display(), error))?;
    if !text.lines().any(|there| there == line) {
        return Err(Error::new(format!("README.md has no line: {line}")));
    }
    let mut words = line.split_whitespace();
    let program = words.next().unwrap_or_default();
    Ok(ws.cmd(program).args(words))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_command_must_be_a_whole_line() {
        let ws = Workspace::open().unwrap();
        assert!(command(&ws, "cargo test --workspace").is_ok());
        assert!(command(&ws, "cargo test").is_err());
        assert!(command(&ws, "test --workspace").is_err());
    }
}
