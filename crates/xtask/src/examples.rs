//! The share of the public types of each library that have an example, from the rendered documentation.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

use crate::error::{Error, Result};
use crate::workspace::{Crate, Workspace};

/// The file names of types in rendered documentation begin with one of these.
const KINDS: [&str; 4] = ["struct.", "enum.", "trait.", "union."];

/// Renders the documentation of the libraries with these names, or of all, and prints their shares and
/// the types without an example.
///
/// # Errors
///
/// Fails with `check` if a type has no example.
pub(crate) fn run(ws: &Workspace, names: &[String], check: bool) -> Result<()> {
    let crates = ws.select(names)?;
    let mut cargo = ws.cargo(["doc", "--locked", "--no-deps", "--all-features"]);
    for package in &crates {
        cargo = cargo.arg("-p").arg(&package.package);
    }
    cargo.run()?;
    report(ws, names, check)
}

/// Prints the shares of libraries whose documentation is rendered.
///
/// # Errors
///
/// Fails with `check` if a type has no example.
pub(crate) fn report(ws: &Workspace, names: &[String], check: bool) -> Result<()> {
    let mut missing = 0;
    for package in &ws.select(names)? {
        missing += print(&ws.target.join("doc"), package)?;
    }
    if check && missing > 0 {
        return Err(Error::new(format!("{missing} public types have no example")));
    }
    Ok(())
}

/// Prints one library. Returns how many of its types have no example.
fn print(doc: &Path, package: &Crate) -> Result<usize> {
    let folder = doc.join(package.package.replace('-', "_"));
    let all = read(&folder.join("all.html"))?;
    let pages = types(&all);
    let mut missing = Vec::new();
    for page in &pages {
        if !has_example(&read(&folder.join(page))?) {
            missing.push(page.trim_end_matches(".html").replace('/', "::"));
        }
    }
    let having = pages.len() - missing.len();
    println!("{}: {having} of {} public types have an example", package.package, pages.len());
    missing.iter().for_each(|name| println!("  without: {name}"));
    Ok(missing.len())
}

fn read(path: &Path) -> Result<String> {
    fs::read_to_string(path).map_err(|error| Error::io(path.display(), error))
}

/// Returns the pages of types that a crate's list of items links to.
fn types(all: &str) -> BTreeSet<&str> {
    let links = all.split("href=\"").skip(1).filter_map(|rest| rest.split('"').next());
    let is_type = |link: &&str| {
        let name = link.rsplit('/').next().unwrap_or(link);
        link.ends_with(".html") && KINDS.iter().any(|kind| name.starts_with(kind))
    };
    links.filter(is_type).collect()
}

/// Returns whether the description of the item itself, above its methods, has a code block.
fn has_example(page: &str) -> bool {
    let description = page.split("top-doc").nth(1).and_then(|rest| rest.split("</details>").next());
    description.is_some_and(|text| text.contains("rust-example-rendered"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_links_to_types_count_and_each_once() {
        let all = r#"<a href="struct.A.html">A</a><a href="m/enum.B.html">B</a><a href="struct.A.html">A</a>
            <a href="fn.f.html">f</a><a href="../static.files/x.css">x</a>"#;
        assert_eq!(types(all).into_iter().collect::<Vec<_>>(), ["m/enum.B.html", "struct.A.html"]);
    }

    #[test]
    fn an_example_of_a_method_is_not_one_of_the_type() {
        let example = r#"<pre class="rust rust-example-rendered">"#;
        assert!(has_example(&format!("<details class=\"top-doc\"><p>x</p>{example}</details>")));
        assert!(!has_example(&format!("<details class=\"top-doc\"></details><h2></h2>{example}")));
        assert!(!has_example(example));
    }
}
