//! The import cycles among the modules of a crate.
//!
//! A module is a file. A file imports another if it has a `use` line or a path that leads to an item
//! of the other. Names are followed through re-exports to the file that defines them. Declaring a
//! module and re-exporting its items is no import; using them is. Code under `cfg(test)` is left
//! out.
//!
//! ```text
//! lexer -> parser -> tree -> resolver -> cycles
//! ```
//!
//! The text is all that is read: imports that only a macro's expansion has, and methods, which need
//! no path, are not seen.

mod cycles;
mod lexer;
mod parser;
mod resolver;
mod tree;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use self::cycles::Component;
use self::resolver::Edge;
use crate::error::{Error, Result};
use crate::workspace::Workspace;

/// Lines of one import that are shown.
const SHOWN: usize = 4;

/// Prints the cycles of these crates, or of all.
pub(crate) fn run(ws: &Workspace, names: &[String], all: bool, check: bool) -> Result<()> {
    let known = roots(ws)?;
    for name in names {
        if !known.iter().any(|(known, _)| known == name) {
            return Err(Error::with_status(format!("no crate is called {name}"), 2));
        }
    }
    let mut cycles = 0;
    for (name, root) in &known {
        if names.is_empty() || names.contains(name) {
            cycles += report(ws, name, root, all)?;
        }
    }
    if check && cycles > 0 {
        return Err(Error::new(format!("{cycles} groups of modules import each other")));
    }
    Ok(())
}

/// The names and root files of the crates.
fn roots(ws: &Workspace) -> Result<Vec<(String, PathBuf)>> {
    let mut roots = Vec::new();
    for package in ws.crates()? {
        for file in ["src/lib.rs", "src/main.rs"] {
            if package.has(file) {
                roots.push((package.name.clone(), package.dir.join(file)));
            }
        }
    }
    roots.push(("nbd_server".to_string(), ws.root.join("examples/nbd_server/main.rs")));
    Ok(roots)
}

/// Prints what is found in one crate. Returns the number of groups of modules with a cycle.
fn report(ws: &Workspace, name: &str, root: &Path, all: bool) -> Result<usize> {
    let tree = tree::read(root)?;
    let edges = resolver::edges(&tree);
    let count = tree.files.len();
    let found = cycles::components(count, &edges);
    let imports = edges.len();
    println!("{name}: {count} modules, {imports} imports, {} cycles", Groups(&found));
    let shown = |file: usize| {
        let path = &tree.files[file].path;
        path.strip_prefix(&ws.root).unwrap_or(path).display().to_string()
    };
    for component in &found {
        let modules: Vec<&str> =
            component.files.iter().map(|&file| tree.files[file].name.as_str()).collect();
        println!("  {} modules import each other: {}", modules.len(), modules.join(", "));
        let closing = component.closing.len();
        println!("  without {closing} of {} imports they do not:", component.inside.len());
        for &(from, to) in if all { &component.inside } else { &component.closing } {
            let (from_name, to_name) = (&tree.files[from].name, &tree.files[to].name);
            println!("    {from_name} -> {to_name}: {}", places(&shown(from), &edges[&(from, to)]));
        }
    }
    Ok(found.len())
}

struct Groups<'a>(&'a [Component]);

impl std::fmt::Display for Groups<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.0.len() {
            0 => f.write_str("no"),
            count => write!(f, "{count} groups with"),
        }
    }
}

/// `path:12 (Name), :30 (other)`.
fn places(path: &str, edge: &Edge) -> String {
    let mut by_line: BTreeMap<usize, Vec<&str>> = BTreeMap::new();
    for (line, name) in edge {
        by_line.entry(*line).or_default().push(name);
    }
    let each = by_line.iter().take(SHOWN);
    let listed: Vec<String> =
        each.map(|(line, names)| format!(":{line} ({})", names.join(", "))).collect();
    let more = by_line.len().saturating_sub(SHOWN);
    let rest = if more > 0 { format!(" and {more} lines more") } else { String::new() };
    format!("{path}{}{rest}", listed.join(", "))
}
