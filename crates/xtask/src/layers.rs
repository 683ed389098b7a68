//! The import cycles among the modules of a crate.
//!
//! A module is a file. A file imports another if it has a `use` line or a path that leads to an item
//! of the other. Names are followed through re-exports to the file that defines them. Declaring a
//! module and re-exporting its items is no import; using them is. Code under `cfg(test)` is left
//! out. Not seen are macros of `macro_export`, imports that only the expansion of a macro has, methods, which need
//! no path, and imports of all names of a module, of which the facade of `sync` alone has some.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;

use proc_macro2::TokenTree;

use crate::process::{Error, Result};
use crate::source::{self, Item, Module, is_punct, is_test, path, word};
use crate::workspace::{Crate, Workspace, choose};

/// The number of re-exports that are followed before a name is taken for a circle of them.
const MOST: usize = 16;
/// The crates whose modules do not form layers yet.
const NOT_LAYERED: [&str; 1] = ["bufcache"];

/// Prints the groups of modules that import each other, of these crates or of all. With `check` a group is an
/// error, except in a crate whose modules do not form layers yet.
pub(crate) fn run(ws: &Workspace, names: &[String], check: bool) -> Result<()> {
    let mut crates = ws.crates()?;
    choose(&mut crates, names, "crate", Crate::is_called)?;
    let mut cycles = 0;
    for package in &crates {
        let roots = ["src/lib.rs", "src/main.rs"].into_iter().filter(|root| package.has(root));
        for root in roots {
            let found = report(&package.name, &Tree::read(package.dir.join(root))?);
            cycles += if NOT_LAYERED.contains(&&*package.name) { 0 } else { found };
        }
    }
    if check && cycles > 0 {
        return Err(Error::new(format!("{cycles} groups of modules import each other")));
    }
    Ok(())
}

/// Prints the groups of one crate with their imports. Returns the number of groups.
fn report(name: &str, tree: &Tree) -> usize {
    let edges = tree.edges();
    let files: BTreeSet<&str> = tree.modules.iter().map(|module| &*module.name).collect();
    let groups = groups(&files, &edges);
    println!("{name}: {} modules, {} imports, {} cycles", files.len(), edges.len(), groups.len());
    for group in &groups {
        println!("  {} modules import each other: {}", group.len(), group.join(", "));
        for ((from, to), lines) in &edges {
            if group.contains(&from.as_str()) && group.contains(&to.as_str()) {
                let lines: Vec<String> =
                    lines.iter().take(4).map(|(line, name)| format!(":{line} ({name})")).collect();
                println!("    {from} -> {to}: {}", lines.join(", "));
            }
        }
    }
    groups.len()
}

/// The lines with an import and the names there, by the two files.
type Edges = BTreeMap<(String, String), BTreeSet<(usize, String)>>;

/// One name of a `use` line.
struct Use {
    path: Vec<String>,
    /// `*` for all names, `_` for none.
    bound: String,
    public: bool,
    line: usize,
}

/// The names that the items of a module use.
#[derive(Default)]
struct Names {
    /// Items that are defined here.
    items: Vec<String>,
    uses: Vec<Use>,
    /// Paths of two names or more, and names of types, with their lines.
    paths: Vec<(Vec<String>, usize)>,
}

impl Names {
    fn read(items: &[Item]) -> Names {
        let mut names = Names::default();
        for item in items {
            names.items.extend(item.name());
            names.walk(&item.tokens);
        }
        names
    }

    fn walk(&mut self, tokens: &[TokenTree]) {
        let mut at = 0;
        while let Some(tree) = tokens.get(at) {
            let is =
                |back, mark| at.checked_sub(back).is_some_and(|at| is_punct(&tokens[at], mark));
            // Behind a dot stands a method, behind `::` a name of a type or of another crate.
            let is_part = is(1, '.') && !is(2, '.') || is(1, ':') && is(2, ':');
            at += 1;
            match tree {
                TokenTree::Ident(word) if word == "use" && !is_punct(&tokens[at], '<') => {
                    let uses = tokens[at..].split(|tree| is_punct(tree, ';')).next();
                    let public = source::word(&tokens[0]).is_some_and(|word| word == "pub");
                    self.add_use(uses.unwrap_or_default(), &[], public);
                    at += uses.map_or(0, <[_]>::len);
                }
                TokenTree::Ident(first) => {
                    let names = path(&tokens[at - 1..]);
                    at += 3 * (names.len() - 1);
                    let is_type = names.len() > 1 || names[0].starts_with(char::is_uppercase);
                    if is_type && !is_part {
                        self.paths.push((names, first.span().start().line));
                    }
                }
                TokenTree::Group(group) => {
                    self.walk(&group.stream().into_iter().collect::<Vec<_>>());
                }
                _ => {}
            }
        }
    }

    fn add_use(&mut self, tokens: &[TokenTree], prefix: &[String], public: bool) {
        for tree in tokens.split(|tree| is_punct(tree, ',')) {
            let Some(first) = tree.first().filter(|first| !is_punct(first, ':')) else {
                continue; // a global path is of another crate
            };
            let line = first.span().start().line;
            let names = tree.iter().filter_map(word).take_while(|word| word != "as");
            let mut path: Vec<String> = prefix.iter().cloned().chain(names).collect();
            if let Some(TokenTree::Group(group)) = tree.last() {
                let inner: Vec<TokenTree> = group.stream().into_iter().collect();
                self.add_use(&inner, &path, public);
                continue;
            }
            path.pop_if(|last| last == "self" && !prefix.is_empty());
            let bound = match tree.last() {
                Some(last) if is_punct(last, '*') => "*".to_string(),
                _ if tree.iter().any(|tree| word(tree).is_some_and(|word| word == "as")) => {
                    tree.last().and_then(word).unwrap_or_default()
                }
                _ => path.last().cloned().unwrap_or_default(),
            };
            self.uses.push(Use { path, bound, public, line });
        }
    }
}

/// The item that a path leads to.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Found {
    Module(usize),
    /// An item of this module.
    Item(usize),
}

/// A crate.
struct Tree {
    modules: Vec<Module>,
    names: Vec<Names>,
}

impl Tree {
    fn read(root: PathBuf) -> Result<Tree> {
        let modules = source::modules(&root, is_test)?;
        let names = modules.iter().map(|module| Names::read(&module.items)).collect();
        Ok(Tree { modules, names })
    }

    fn edges(&self) -> Edges {
        let mut edges = Edges::new();
        for (module, names) in self.names.iter().enumerate() {
            let mut add = |found: BTreeSet<Found>, line: usize, name: Option<&String>| {
                for found in found {
                    // The name of a module alone is no import: what is used through it is.
                    let Found::Item(to) = found else { continue };
                    let (from, to) = (&self.modules[module].name, &self.modules[to].name);
                    if from != to {
                        let edge = edges.entry((from.clone(), to.clone())).or_default();
                        edge.insert((line, name.cloned().unwrap_or_default()));
                    }
                }
            };
            for each in names.uses.iter().filter(|each| !each.public) {
                add(self.resolve(module, &each.path, 0), each.line, each.path.last());
            }
            for (path, line) in &names.paths {
                add(self.resolve(module, path, 0), *line, path.last());
            }
        }
        edges
    }

    /// Returns what a path in `module` leads to; nothing if that is in another crate.
    fn resolve(&self, module: usize, path: &[String], depth: usize) -> BTreeSet<Found> {
        let mut found = BTreeSet::from([Found::Module(module)]);
        for (at, name) in path.iter().enumerate() {
            let modules: Vec<usize> = found.iter().copied().filter_map(Found::module).collect();
            if modules.is_empty() {
                break; // a variant, or a function of a type
            }
            let inside = |module: &usize| match name.as_str() {
                "crate" => BTreeSet::from([Found::Module(0)]),
                "self" => BTreeSet::from([Found::Module(*module)]),
                "super" => BTreeSet::from([Found::Module(self.modules[*module].parent)]),
                name => self.lookup(*module, name, depth + 1),
            };
            found = modules.iter().flat_map(inside).collect();
            if found.is_empty() && at > 0 {
                found.extend(modules.into_iter().map(Found::Item)); // an item that a macro defines
            }
        }
        found
    }

    /// Returns what a name means in a module.
    fn lookup(&self, module: usize, name: &str, depth: usize) -> BTreeSet<Found> {
        let names = &self.names[module];
        if depth > MOST {
            return BTreeSet::new();
        }
        let children = self.modules[module].children.get(name).into_iter().flatten();
        let mut found: BTreeSet<Found> = children.map(|child| Found::Module(*child)).collect();
        // A function may have the name of a module; that name is used for the module far more often.
        if found.is_empty() && names.items.iter().any(|item| item == name) {
            found.insert(Found::Item(module));
        }
        if found.is_empty() {
            // `use name;` and `use name::b;` would find the very name that they bind.
            let is_other = |each: &&Use| each.path.first().is_some_and(|first| first != name);
            let uses = names.uses.iter().filter(|each| each.bound == name).filter(is_other);
            found.extend(uses.flat_map(|each| self.resolve(module, &each.path, depth + 1)));
        }
        found
    }
}

impl Found {
    fn module(self) -> Option<usize> {
        if let Found::Module(module) = self { Some(module) } else { None }
    }
}

/// Returns the groups of files of which each leads to each other one.
fn groups<'a>(files: &BTreeSet<&'a str>, edges: &Edges) -> BTreeSet<Vec<&'a str>> {
    let reachable = |start: &str| {
        let (mut seen, mut open) = (BTreeSet::new(), vec![start.to_string()]);
        while let Some(file) = open.pop() {
            let next = edges.keys().filter(|(from, _)| *from == file).map(|(_, to)| to.clone());
            open.extend(next.filter(|to| seen.insert(to.clone())));
        }
        seen
    };
    let reach: BTreeMap<&str, BTreeSet<String>> =
        files.iter().map(|file| (*file, reachable(file))).collect();
    let group = |file: &&str| -> Vec<&str> {
        let both = |other: &&&str| reach[*file].contains(**other) && reach[**other].contains(*file);
        files.iter().filter(both).copied().collect()
    };
    files.iter().map(group).filter(|group| group.len() > 1).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::process::write;
    use crate::workspace::scratch;

    #[test]
    fn names_are_followed_to_the_file_that_defines_them() {
        let files = [
            ("lib.rs", "mod a;\nmod b;\npub use self::a::{A, deep::D};\npub use std::sync::Arc;\n"),
            (
                "a/mod.rs",
                "mod deep;\npub(crate) mod other;\npub use self::deep::D as Renamed;\npub use deep::D;\npub struct A;\n",
            ),
            ("a/deep.rs", "use super::{A, other::O};\npub enum D { V }\n"),
            (
                "a/other.rs",
                "use super::D;\npub struct O;\n#[cfg(test)]\nmod tests { use crate::b::T; }\n",
            ),
            (
                "b.rs",
                "use crate::A;\nuse crate::a::Renamed;\nfn b() { crate::D::V; mac!(super::a::other::O); }\n",
            ),
        ];
        let scratch = scratch().unwrap();
        for (path, text) in files {
            write(scratch.path().join(path), text).unwrap();
        }
        let tree = Tree::read(scratch.path().join("lib.rs")).unwrap();
        let shown = |((from, to), lines): ((String, String), BTreeSet<(usize, String)>)| {
            lines.into_iter().map(move |(line, item)| format!("{from} -> {to}: {line} {item}"))
        };
        let expected = [
            "a::deep -> a: 1 A",
            "a::deep -> a::other: 1 O",
            "a::other -> a::deep: 1 D",
            "b -> a: 1 A",
            "b -> a::deep: 2 Renamed",
            "b -> a::deep: 3 V",
            "b -> a::other: 3 O",
        ];
        assert_eq!(tree.edges().into_iter().flat_map(shown).collect::<Vec<_>>(), expected);
        assert_eq!(report("followed", &tree), 1);
    }
}
