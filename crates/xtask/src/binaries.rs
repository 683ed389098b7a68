//! The test programs that a build makes, run one by one.
//!
//! `cargo test` runs everything it has built, and another selection may be another build: with fewer
//! packages, dependencies can have other features. So one build serves several runs here: cargo
//! lists the programs of a build in JSON, and each is started in its package's folder, as cargo
//! does it.

use std::path::PathBuf;

use crate::error::{Error, Result};
use crate::process::Cmd;
use crate::workspace::Workspace;

/// A test program.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct TestBinary {
    /// The folder of its package.
    pub(crate) package: PathBuf,
    /// Whether it has the unit tests of a library.
    pub(crate) library: bool,
    /// The target's name: the library's, or that of the file below `tests`.
    pub(crate) name: String,
    pub(crate) executable: PathBuf,
}

impl TestBinary {
    /// The command that runs the tests.
    pub(crate) fn cmd(&self, ws: &Workspace) -> Cmd {
        ws.cmd(&self.executable)
            .dir(&self.package)
            .base_env("CARGO_MANIFEST_DIR", Some(self.package.clone().into()))
    }
}

/// Builds what `cmd`, a `cargo test`, would run.
pub(crate) fn build(cmd: Cmd) -> Result<Vec<TestBinary>> {
    let json = cmd.args(["--no-run", "--message-format=json-render-diagnostics"]).output()?;
    let mut binaries: Vec<TestBinary> = json.lines().filter_map(parse).collect();
    if binaries.is_empty() {
        return Err(Error::new("the build has no test program"));
    }
    binaries.sort();
    Ok(binaries)
}

/// Reads one line of cargo's JSON. Returns `None` if it is not about a test program.
///
/// The values wanted here are paths and names, which cargo writes without escapes unless a folder's
/// name has a quote or a backslash; such a line is refused.
fn parse(line: &str) -> Option<TestBinary> {
    if !line.starts_with("{\"reason\":\"compiler-artifact\"")
        || !line.contains("\"test\":true},\"features\"")
    {
        return None;
    }
    let manifest = PathBuf::from(value(line, "manifest_path")?);
    let target = line.split_once("\"target\":{")?.1;
    Some(TestBinary {
        package: manifest.parent()?.to_path_buf(),
        library: target.starts_with("\"kind\":[\"lib\"]"),
        name: value(target, "name")?.to_string(),
        executable: PathBuf::from(value(line, "executable")?),
    })
}

/// The string at the first `"key":"`.
fn value<'a>(json: &'a str, key: &str) -> Option<&'a str> {
    let (_, rest) = json.split_once(&format!("\"{key}\":\""))?;
    let (value, _) = rest.split_once('"')?;
    (!value.contains('\\')).then_some(value)
}

#[cfg(test)]
mod tests {
    use super::*;

    const LINE: &str = r#"{"reason":"compiler-artifact","package_id":"path+file:///w/crates/a#0.1.0","manifest_path":"/w/crates/a/Cargo.toml","target":{"kind":["test"],"crate_types":["bin"],"name":"stress","src_path":"/w/crates/a/tests/stress.rs","edition":"2024","doc":false,"doctest":false,"test":true},"profile":{"opt_level":"0","debuginfo":1,"debug_assertions":true,"overflow_checks":true,"test":true},"features":[],"filenames":["/t/debug/deps/stress-1"],"executable":"/t/debug/deps/stress-1","fresh":true}"#;

    #[test]
    fn test_programs_are_read_and_other_lines_are_not() {
        let binary = parse(LINE).unwrap();
        assert_eq!(binary.package, PathBuf::from("/w/crates/a"));
        assert_eq!(binary.name, "stress");
        assert!(!binary.library);
        assert!(parse(&LINE.replace("[\"test\"]", "[\"lib\"]")).unwrap().library);
        assert_eq!(binary.executable, PathBuf::from("/t/debug/deps/stress-1"));

        let library = LINE.replace("\"/t/debug/deps/stress-1\",\"fresh\"", "null,\"fresh\"");
        assert_eq!(parse(&library), None);
        let example = LINE.replace("\"test\":true},\"features\"", "\"test\":false},\"features\"");
        assert_eq!(
            parse(&example.replace("\"doctest\":false,\"test\":true", "\"test\":false")),
            None
        );
        assert_eq!(parse(r#"{"reason":"build-finished","success":true}"#), None);
        assert_eq!(parse(""), None);
    }
}
