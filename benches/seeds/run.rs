//! Building other benches, and running them.

use std::collections::HashMap;
use std::env;
use std::error::Error;
use std::io::{BufRead, BufReader};
use std::path::PathBuf;
use std::process::{Command, Stdio};

use harness::profile;
use serde_json::Value;

/// A bench that is built.
pub(crate) struct Program {
    file: PathBuf,
    /// Where cargo starts it.
    folder: PathBuf,
}

impl Program {
    /// What cargo would run.
    pub(crate) fn command(&self) -> Command {
        let mut command = Command::new(&self.file);
        command.arg("--bench").current_dir(&self.folder).env("CARGO_MANIFEST_DIR", &self.folder);
        command
    }
}

/// Builds benches as this one was built; by name.
pub(crate) fn build(benches: &[&str]) -> Result<HashMap<String, Program>, Box<dyn Error>> {
    let cargo = env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let mut command = Command::new(cargo);
    // `--workspace`: with fewer packages dependencies have other features, and are compiled anew.
    command.args(["bench", "--workspace", "--no-run", "--profile"]).arg(profile());
    command.arg("--message-format=json-render-diagnostics");
    command.args(benches.iter().flat_map(|bench| ["--bench", bench]));
    command.current_dir(env!("CARGO_MANIFEST_DIR")).stdin(Stdio::null()).stderr(Stdio::inherit());
    let mut programs = HashMap::new();
    lines_of(command, |line| {
        let Ok(message) = serde_json::from_str::<Value>(&line) else { return };
        let text = |value: &Value| value.as_str().map(String::from);
        let found = (
            text(&message["target"]["name"]),
            text(&message["executable"]),
            text(&message["manifest_path"]),
        );
        if let (Some(name), Some(file), Some(manifest)) = found {
            let mut folder = PathBuf::from(manifest);
            folder.pop();
            programs.insert(name, Program { file: file.into(), folder });
        }
    })?;
    Ok(programs)
}

/// Runs a program and hands over each line that it prints.
pub(crate) fn lines_of(
    mut command: Command,
    mut tell: impl FnMut(String),
) -> Result<(), Box<dyn Error>> {
    let mut child = command.stdout(Stdio::piped()).spawn()?;
    let printed = child.stdout.take().ok_or("its output is not piped")?;
    for line in BufReader::new(printed).lines() {
        tell(line?);
    }
    let status = child.wait()?;
    if status.success() { Ok(()) } else { Err(status.to_string().into()) }
}
