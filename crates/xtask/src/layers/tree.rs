//! The modules of a crate, from its root file down.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use super::lexer;
use super::parser::{self, Scope};
use crate::error::{Error, Result};

/// A crate.
pub(super) struct Tree {
    pub(super) files: Vec<File>,
    /// The first is the root.
    pub(super) modules: Vec<Module>,
    /// The macros that the root has from other modules, and where they are defined.
    pub(super) exported_macros: BTreeMap<String, usize>,
}

pub(super) struct File {
    pub(super) path: PathBuf,
    /// The path of its module, such as `rcu::domain`; of the root, `crate`.
    pub(super) name: String,
}

/// A file, or an inline module in it.
pub(super) struct Module {
    pub(super) file: usize,
    pub(super) parent: usize,
    /// More than one where a cfg decides between several.
    pub(super) children: BTreeMap<String, Vec<usize>>,
    pub(super) scope: Scope,
}

/// Reads a crate from its root file.
pub(super) fn read(root: &Path) -> Result<Tree> {
    let mut tree =
        Tree { files: Vec::new(), modules: Vec::new(), exported_macros: BTreeMap::new() };
    let scope = parse(root)?.unwrap_or_default();
    tree.files.push(File { path: root.to_path_buf(), name: "crate".to_string() });
    let folder = root.parent().unwrap_or(Path::new("")).to_path_buf();
    tree.add(scope, 0, 0, &folder)?;
    Ok(tree)
}

/// Reads a file. Returns `None` if all of it is for tests.
fn parse(path: &Path) -> Result<Option<Scope>> {
    let text = fs::read_to_string(path).map_err(|error| Error::io(path.display(), error))?;
    let tokens =
        lexer::tokens(&text).map_err(|error| Error::new(format!("{}: {error}", path.display())))?;
    Ok(parser::parse(&tokens))
}

impl Tree {
    /// Adds a module and those below it. `folder` is where the files of its children are.
    fn add(
        &mut self,
        mut scope: Scope,
        file: usize,
        parent: usize,
        folder: &Path,
    ) -> Result<usize> {
        let id = self.modules.len();
        for name in &scope.exported_macros {
            self.exported_macros.insert(name.clone(), id);
        }
        let children = std::mem::take(&mut scope.children);
        self.modules.push(Module { file, parent, children: BTreeMap::new(), scope });
        for child in children {
            let below = folder.join(&child.name);
            let added = match child.body {
                Some(body) => Some(self.add(body, file, id, &below)?),
                None => self.add_file(&child.name, child.path.as_deref(), file, id, folder)?,
            };
            self.modules[id].children.entry(child.name).or_default().extend(added);
        }
        Ok(id)
    }

    /// Adds a module in a file of its own. Returns `None` if there is no such file, or if it is for
    /// tests.
    fn add_file(
        &mut self,
        name: &str,
        path: Option<&str>,
        declared_in: usize,
        parent: usize,
        folder: &Path,
    ) -> Result<Option<usize>> {
        let beside = self.files[declared_in].path.parent().unwrap_or(Path::new(""));
        let candidates = match path {
            Some(path) => vec![beside.join(path)],
            None => vec![folder.join(format!("{name}.rs")), folder.join(name).join("mod.rs")],
        };
        let Some(path) = candidates.into_iter().find(|path| path.is_file()) else {
            return Ok(None);
        };
        let Some(scope) = parse(&path)? else { return Ok(None) };
        let stem = path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
        let below = match stem.as_str() {
            "mod" => path.with_file_name(""),
            stem => path.with_file_name(stem),
        };
        let above = &self.files[declared_in].name;
        let full = if above == "crate" { name.to_string() } else { format!("{above}::{name}") };
        // Two files may take turns as one module.
        let full = if stem == name || stem == "mod" { full } else { format!("{full} ({stem}.rs)") };
        self.files.push(File { path, name: full });
        let file = self.files.len() - 1;
        self.add(scope, file, parent, &below).map(Some)
    }
}
