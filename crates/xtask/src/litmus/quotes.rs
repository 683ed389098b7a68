//! The source lines that a test quotes.
//!
//! A line `(* source: FOLDER *)` names a folder of the workspace. A comment `// FILE: CODE` behind a
//! statement quotes code of a file below that folder. White space does not count, so a statement
//! that the source spreads over several lines is quoted on one.

use std::fs;
use std::path::Path;

/// Checks that each quote is in its file. With `wanted`, a test without a quote is an error.
pub(super) fn check(root: &Path, test: &str, wanted: bool) -> Result<(), String> {
    let mut count = 0;
    let folder = test
        .lines()
        .find_map(|line| line.strip_prefix("(* source: ")?.strip_suffix(" *)"))
        .map(|folder| root.join(folder));
    for (number, line) in test.lines().enumerate() {
        let Some((_, comment)) = line.split_once("// ") else { continue };
        let at = number + 1;
        let Some((file, code)) = comment.split_once(": ") else {
            return Err(format!("line {at}: the comment is not of the form `// FILE: CODE`"));
        };
        let Some(folder) = &folder else {
            return Err("no line `(* source: FOLDER *)`".to_string());
        };
        let path = folder.join(file);
        let source = fs::read_to_string(&path)
            .map_err(|error| format!("line {at}: {}: {error}", path.display()))?;
        if !dense(&source).contains(&dense(code)) {
            return Err(format!("line {at}: {} has no code `{code}`", path.display()));
        }
        count += 1;
    }
    if wanted && count == 0 { Err("the test quotes no source line".to_string()) } else { Ok(()) }
}

/// The text without white space.
fn dense(text: &str) -> String {
    text.split_whitespace().collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_quote_must_be_in_its_file() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
        let check = |quote: &str| {
            let test = format!("C x\n(* source: crates/xtask/src *)\n  f(); // {quote}\n");
            super::check(&root, &test, true)
        };
        assert_eq!(check("error.rs: pub(crate) fn status( &self )\t-> i32"), Ok(()));
        assert!(
            check("error.rs: pub(crate) fn status(&self) -> i64").unwrap_err().contains("line 3")
        );
        assert!(check("none.rs: fn").is_err());
        assert!(check("nothing").is_err());
        assert!(super::check(&root, "C x\n", true).is_err());
        assert!(super::check(&root, "C x\n", false).is_ok());
        assert!(super::check(&root, "C x\n  f(); // a.rs: b\n", false).is_err());
    }
}
