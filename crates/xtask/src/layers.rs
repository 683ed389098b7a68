//! The import cycles among the modules of a crate.
//!
//! A module is a file. A file imports another if it has a `use` line or a path that leads to an item
//! of the other. Names are followed through re-exports to the file that defines them. Declaring a
//! module and re-exporting its items is no import; using them is. Code under `cfg(test)` is left
//! out. Imports that only the expansion of a macro has, and methods, which need no path, are not seen.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;

use proc_macro2::{Group, TokenStream, TokenTree};
use syn::visit::{self, Visit};
use syn::{Attribute, Item, UseTree, Visibility};

use crate::process::{Error, Result};
use crate::source::{self, Module, attributes, is_test};
use crate::workspace::{Crate, Workspace, choose};

/// The number of re-exports that are followed before a name is taken for a circle of them.
const MOST: usize = 16;

/// Prints the groups of modules that import each other, of these crates or of all.
pub(crate) fn run(ws: &Workspace, names: &[String], check: bool) -> Result<()> {
    let mut crates = ws.crates()?;
    choose(&mut crates, names, "crate", Crate::is_called)?;
    let mut cycles = 0;
    for package in &crates {
        let roots = ["src/lib.rs", "src/main.rs"].into_iter().filter(|root| package.has(root));
        for root in roots {
            cycles += report(&package.name, &Tree::read(package.dir.join(root))?);
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
    /// Items that are defined here, macros among them.
    items: Vec<String>,
    /// Macros that `#[macro_export]` puts into the root.
    exported: Vec<String>,
    uses: Vec<Use>,
    /// Paths of two names or more, and names of types, with their lines.
    paths: Vec<(Vec<String>, usize)>,
}

impl Names {
    fn read(items: &[Item]) -> Names {
        let mut names = Names::default();
        for item in items.iter().filter(|item| !is_test(attributes(item))) {
            let name = match item {
                Item::Macro(item) => item.ident.as_ref(),
                Item::Const(item) => Some(&item.ident),
                Item::Enum(item) => Some(&item.ident),
                Item::Fn(item) => Some(&item.sig.ident),
                Item::Static(item) => Some(&item.ident),
                Item::Struct(item) => Some(&item.ident),
                Item::Trait(item) => Some(&item.ident),
                Item::Type(item) => Some(&item.ident),
                Item::Union(item) => Some(&item.ident),
                _ => None,
            };
            if attributes(item).iter().any(|each| each.path().is_ident("macro_export")) {
                names.exported.extend(name.map(ToString::to_string));
            }
            names.items.extend(name.map(ToString::to_string));
            names.visit_item(item);
        }
        names
    }

    fn add_use(&mut self, tree: &UseTree, prefix: &[String], public: bool) {
        let line = syn::spanned::Spanned::span(tree).start().line;
        let (name, bound) = match tree {
            UseTree::Path(path) => {
                let prefix = [prefix, &[path.ident.to_string()]].concat();
                return self.add_use(&path.tree, &prefix, public);
            }
            UseTree::Group(group) => {
                return group.items.iter().for_each(|tree| self.add_use(tree, prefix, public));
            }
            UseTree::Name(name) => (Some(name.ident.to_string()), None),
            UseTree::Rename(name) => (Some(name.ident.to_string()), Some(name.rename.to_string())),
            UseTree::Glob(_) => (None, Some("*".to_string())),
        };
        let mut path = prefix.to_vec();
        path.extend(name.filter(|name| name != "self" || prefix.is_empty()));
        let bound = bound.or_else(|| path.last().cloned()).unwrap_or_default();
        self.uses.push(Use { path, bound, public, line });
    }

    fn add_path(&mut self, path: Vec<String>, line: usize) {
        if path.len() > 1 || path[0].starts_with(char::is_uppercase) {
            self.paths.push((path, line));
        }
    }

    /// Returns the names that are used here and that no item and no `use` line of this module has.
    fn unbound(&self) -> impl Iterator<Item = &(Vec<String>, usize)> {
        self.paths.iter().filter(|(path, _)| {
            let bound = self.uses.iter().any(|each| each.bound == path[0]);
            !bound && !self.items.contains(&path[0])
        })
    }
}

impl<'ast> Visit<'ast> for Names {
    fn visit_item(&mut self, item: &'ast Item) {
        if !is_test(attributes(item)) {
            visit::visit_item(self, item);
        }
    }

    fn visit_impl_item_fn(&mut self, item: &'ast syn::ImplItemFn) {
        if !is_test(&item.attrs) {
            visit::visit_impl_item_fn(self, item);
        }
    }

    fn visit_field(&mut self, field: &'ast syn::Field) {
        if !is_test(&field.attrs) {
            visit::visit_field(self, field);
        }
    }

    fn visit_local(&mut self, local: &'ast syn::Local) {
        if !is_test(&local.attrs) {
            visit::visit_local(self, local);
        }
    }

    fn visit_item_use(&mut self, item: &'ast syn::ItemUse) {
        // A global path is of another crate.
        if item.leading_colon.is_none() {
            self.add_use(&item.tree, &[], !matches!(item.vis, Visibility::Inherited));
        }
    }

    fn visit_path(&mut self, path: &'ast syn::Path) {
        if let (Some(first), None) = (path.segments.first(), &path.leading_colon) {
            let names = path.segments.iter().map(|each| each.ident.to_string()).collect();
            self.add_path(names, first.ident.span().start().line);
        }
        visit::visit_path(self, path);
    }

    /// The arguments or the rules of a macro are tokens, in which words with `::` between them are paths.
    fn visit_macro(&mut self, mac: &'ast syn::Macro) {
        self.visit_path(&mac.path);
        let line = mac.path.segments[0].ident.span().start().line;
        let text = without_literals(mac.tokens.clone()).to_string();
        let text = text.replace(" :: ", "::").replace("$ crate", "crate");
        for word in text.split(|c: char| !c.is_alphanumeric() && c != '_' && c != ':') {
            let path: Vec<String> = word.split("::").map(str::to_string).collect();
            if path.iter().all(|name| name.starts_with(|c: char| c.is_alphabetic() || c == '_')) {
                self.add_path(path, line);
            }
        }
    }

    fn visit_attribute(&mut self, _: &'ast Attribute) {}
    fn visit_visibility(&mut self, _: &'ast Visibility) {}
}

/// The tokens without texts, which have words of the documentation among them.
fn without_literals(tokens: TokenStream) -> TokenStream {
    let trees = tokens.into_iter().filter_map(|tree| match tree {
        TokenTree::Literal(_) => None,
        TokenTree::Group(group) => {
            let inner = without_literals(group.stream());
            Some(TokenTree::Group(Group::new(group.delimiter(), inner)))
        }
        tree => Some(tree),
    });
    trees.collect()
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
            let mut add = |found: BTreeSet<Found>, line: usize, name: &str| {
                for found in found {
                    // The name of a module alone is no import: what is used through it is.
                    let Found::Item(to) = found else { continue };
                    let (from, to) = (&self.modules[module].name, &self.modules[to].name);
                    if from != to {
                        let edge = edges.entry((from.clone(), to.clone())).or_default();
                        edge.insert((line, name.to_string()));
                    }
                }
            };
            for each in names.uses.iter().filter(|each| !each.public) {
                let found = self.resolve(module, &each.path, 0);
                if each.bound != "*" {
                    let last = each.path.last().map_or("", String::as_str);
                    add(found, each.line, last);
                    continue;
                }
                for from in found.into_iter().filter_map(Found::module) {
                    for (path, line) in names.unbound() {
                        add(self.lookup(from, &path[0], 0), *line, &path[0]);
                    }
                }
            }
            for (path, line) in &names.paths {
                let last = path.last().map_or("", String::as_str);
                add(self.resolve(module, path, 0), *line, last);
            }
        }
        edges
    }

    /// Returns what a path in `module` leads to; nothing if that is in another crate.
    fn resolve(&self, module: usize, path: &[String], depth: usize) -> BTreeSet<Found> {
        let Some((first, rest)) = path.split_first() else { return BTreeSet::new() };
        let mut found = match first.as_str() {
            "crate" => BTreeSet::from([Found::Module(0)]),
            "self" => BTreeSet::from([Found::Module(module)]),
            "super" => BTreeSet::from([Found::Module(self.modules[module].parent)]),
            name => self.lookup(module, name, depth + 1),
        };
        for name in rest {
            let modules: Vec<usize> = found.iter().copied().filter_map(Found::module).collect();
            if modules.is_empty() {
                break; // a variant, or a function of a type
            }
            let mut next = BTreeSet::new();
            for &module in &modules {
                match name.as_str() {
                    "super" => drop(next.insert(Found::Module(self.modules[module].parent))),
                    name => next.extend(self.lookup(module, name, depth + 1)),
                }
            }
            if next.is_empty() {
                next.extend(modules.into_iter().map(Found::Item)); // an item that a macro defines
            }
            found = next;
        }
        found
    }

    /// Returns what a name means in a module.
    fn lookup(&self, module: usize, name: &str, depth: usize) -> BTreeSet<Found> {
        let mut found = BTreeSet::new();
        let names = &self.names[module];
        if depth > MOST {
            return found;
        }
        let children = self.modules[module].children.get(name).into_iter().flatten();
        found.extend(children.map(|child| Found::Module(*child)));
        // A function may have the name of a module; that name is used for the module far more often.
        if found.is_empty() && names.items.iter().any(|item| item == name) {
            found.insert(Found::Item(module));
        }
        if found.is_empty() {
            for each in names.uses.iter().filter(|each| each.bound == name) {
                // `use name;` and `use name::b;` would find the very name that they bind.
                let target = match each.path.first() {
                    Some(first) if first == name => BTreeSet::new(),
                    _ => self.resolve(module, &each.path, depth + 1),
                };
                found.extend(target);
            }
        }
        if found.is_empty() && module == 0 {
            let exports = |at: &usize| self.names[*at].exported.iter().any(|item| item == name);
            found.extend((0..self.names.len()).filter(exports).map(Found::Item));
        }
        if found.is_empty() {
            for each in names.uses.iter().filter(|each| each.bound == "*" && each.public) {
                for from in self
                    .resolve(module, &each.path, depth + 1)
                    .into_iter()
                    .filter_map(Found::module)
                {
                    if from != module {
                        found.extend(self.lookup(from, name, depth + 1));
                    }
                }
            }
        }
        found
    }
}

impl Found {
    fn module(self) -> Option<usize> {
        match self {
            Found::Module(module) => Some(module),
            Found::Item(_) => None,
        }
    }
}

/// Returns the groups of files of which each leads to each other one.
fn groups<'a>(files: &BTreeSet<&'a str>, edges: &Edges) -> Vec<Vec<&'a str>> {
    let reachable = |start: &str| {
        let (mut seen, mut open) = (BTreeSet::new(), vec![start.to_string()]);
        while let Some(file) = open.pop() {
            for (_, to) in edges.keys().filter(|(from, _)| *from == file) {
                if seen.insert(to.clone()) {
                    open.push(to.clone());
                }
            }
        }
        seen
    };
    let reach: BTreeMap<&str, BTreeSet<String>> =
        files.iter().map(|file| (*file, reachable(file))).collect();
    let mut groups: Vec<Vec<&str>> = Vec::new();
    for file in files {
        let both = |other: &&&str| reach[*file].contains(**other) && reach[**other].contains(*file);
        let group: Vec<&str> = files.iter().filter(both).copied().collect();
        if group.len() > 1 && !groups.contains(&group) {
            groups.push(group);
        }
    }
    groups
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::process::write;
    use crate::workspace::Scratch;

    /// The imports of a crate of these files, as `from -> to: line name`, and the number of its cycles.
    fn imports(name: &str, files: &[(&str, &str)]) -> (Vec<String>, usize) {
        let scratch = Scratch::new(&format!("layers-{name}")).unwrap();
        for (path, text) in files {
            write(scratch.path.join(path), text).unwrap();
        }
        let tree = Tree::read(scratch.path.join("lib.rs")).unwrap();
        let shown = |((from, to), lines): ((String, String), BTreeSet<(usize, String)>)| {
            lines.into_iter().map(move |(line, item)| format!("{from} -> {to}: {line} {item}"))
        };
        (tree.edges().into_iter().flat_map(shown).collect(), report(name, &tree))
    }

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
        let expected = [
            "a::deep -> a: 1 A",
            "a::deep -> a::other: 1 O",
            "a::other -> a::deep: 1 D",
            "b -> a: 1 A",
            "b -> a::deep: 2 Renamed",
            "b -> a::deep: 3 V",
            "b -> a::other: 3 O",
        ];
        assert_eq!(imports("followed", &files), (expected.map(String::from).to_vec(), 1));
    }
}
