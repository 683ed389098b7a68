//! Which file each import leads to.

use std::collections::{BTreeMap, BTreeSet};

use super::parser::{Bound, Named, Use};
use super::tree::Tree;

/// The lines of an import, and the names in them.
pub(super) type Edge = BTreeSet<(usize, String)>;
/// From a file to a file.
pub(super) type Edges = BTreeMap<(usize, usize), Edge>;

/// How many re-exports are followed before a name is taken for a circle of them.
const MOST: usize = 16;

/// What a path leads to.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Found {
    Module(usize),
    /// An item, by the module that defines it.
    Item(usize),
}

impl Found {
    fn module(self) -> usize {
        match self {
            Found::Module(module) | Found::Item(module) => module,
        }
    }
}

/// Returns the imports among the files of a crate.
pub(super) fn edges(tree: &Tree) -> Edges {
    let mut edges = Edges::new();
    for module in 0..tree.modules.len() {
        Importer { tree, module, edges: &mut edges }.import();
    }
    edges
}

/// Adds the imports of one module.
struct Importer<'a> {
    tree: &'a Tree,
    module: usize,
    edges: &'a mut Edges,
}

impl Importer<'_> {
    fn import(&mut self) {
        let scope = &self.tree.modules[self.module].scope;
        for named in &scope.paths {
            self.path(named);
        }
        for each in &scope.uses {
            match &each.bound {
                Bound::Glob => self.glob(each),
                Bound::Name(name) if each.public => self.re_export(each, name),
                Bound::Name(name) => self.private(each, name),
                Bound::Nothing => self.whole(each),
            }
        }
    }

    /// A path of several names that begins with a module.
    fn path(&mut self, named: &Named) {
        let [first, _, ..] = &named.path[..] else { return };
        let keyword = ["crate", "self", "super"].contains(&first.as_str());
        let by_module = || {
            let found = lookup(self.tree, self.module, first, 0);
            found.iter().any(|found| matches!(found, Found::Module(_)))
        };
        if keyword || by_module() {
            let found = resolve(self.tree, self.module, &named.path, 0);
            self.add(&found, named.line, last(&named.path));
        }
    }

    /// `use a::b;` counts where it stands. If it names a module, the items that are used through it
    /// count instead, since the module may only re-export them.
    fn private(&mut self, each: &Use, name: &str) {
        let found = resolve(self.tree, self.module, &each.path, 0);
        let only_modules = found.iter().all(|found| matches!(found, Found::Module(_)));
        let scope = &self.tree.modules[self.module].scope;
        let through = scope.paths.iter().any(|named| named.path.len() > 1 && named.path[0] == name);
        if !each.local && only_modules && through {
            return;
        }
        self.add(&found, each.line, last(&each.path));
    }

    fn whole(&mut self, each: &Use) {
        let found = resolve(self.tree, self.module, &each.path, 0);
        self.add(&found, each.line, last(&each.path));
    }

    /// A re-export is no import, but the module may use the name itself.
    fn re_export(&mut self, each: &Use, name: &str) {
        let found = resolve(self.tree, self.module, &each.path, 0);
        let scope = &self.tree.modules[self.module].scope;
        for named in scope.paths.iter().filter(|named| named.path[0] == name && is_use(named)) {
            self.add(&found, named.line, name);
        }
    }

    /// `use a::*` imports the names that are used. If none is known, a private one counts where it
    /// stands: the names may be those of a trait's methods.
    fn glob(&mut self, each: &Use) {
        let tree = self.tree;
        let own = &tree.modules[self.module];
        let mut any = false;
        for from in resolve(tree, self.module, &each.path, 0) {
            let Found::Module(from) = from else { continue };
            for named in own.scope.paths.iter().filter(|named| is_use(named)) {
                let name = &named.path[0];
                let known_here = own.scope.items.contains(name)
                    || own.children.contains_key(name)
                    || own.scope.uses.iter().any(|each| each.bound == Bound::Name(name.clone()));
                if !known_here && name != "Self" {
                    let found = lookup(tree, from, name, 0);
                    any |= !found.is_empty();
                    self.add(&found, named.line, name);
                }
            }
        }
        if !any && !each.public {
            self.whole(each);
        }
    }

    fn add(&mut self, found: &BTreeSet<Found>, line: usize, name: &str) {
        let from = self.tree.modules[self.module].file;
        for found in found {
            let to = self.tree.modules[found.module()].file;
            if from != to {
                self.edges.entry((from, to)).or_default().insert((line, name.to_string()));
            }
        }
    }
}

/// Returns whether a path's first name is that of an item, as far as its spelling says so.
fn is_use(named: &Named) -> bool {
    let upper = named.path[0].starts_with(char::is_uppercase);
    upper || named.called || named.path.len() > 1
}

fn last(path: &[String]) -> &str {
    path.last().map_or("", String::as_str)
}

/// Returns what a path in `module` leads to; nothing if that is in another crate.
fn resolve(tree: &Tree, module: usize, path: &[String], depth: usize) -> BTreeSet<Found> {
    let Some((first, rest)) = path.split_first() else { return BTreeSet::new() };
    let mut found = match first.as_str() {
        "crate" => BTreeSet::from([Found::Module(0)]),
        "self" => BTreeSet::from([Found::Module(module)]),
        "super" => BTreeSet::from([Found::Module(tree.modules[module].parent)]),
        name => lookup(tree, module, name, depth + 1),
    };
    for name in rest {
        let modules: Vec<usize> = found
            .iter()
            .filter_map(|found| match found {
                Found::Module(module) => Some(*module),
                Found::Item(_) => None,
            })
            .collect();
        if modules.is_empty() {
            break; // a variant, or a function of a type
        }
        let mut next = BTreeSet::new();
        for &module in &modules {
            if name == "super" {
                next.insert(Found::Module(tree.modules[module].parent));
            } else {
                next.extend(lookup(tree, module, name, depth + 1));
            }
        }
        if next.is_empty() {
            // An item that a macro defines.
            next.extend(modules.into_iter().map(Found::Item));
        }
        found = next;
    }
    found
}

/// Returns what a name means in a module.
fn lookup(tree: &Tree, module: usize, name: &str, depth: usize) -> BTreeSet<Found> {
    let mut found = BTreeSet::new();
    if depth > MOST {
        return found;
    }
    let this = &tree.modules[module];
    for &child in this.children.get(name).into_iter().flatten() {
        found.insert(Found::Module(child));
    }
    // A function may have the name of a module; that name is used for the module far more often.
    if !found.is_empty() {
        return found;
    }
    if this.scope.items.iter().any(|item| item == name) {
        found.insert(Found::Item(module));
        return found;
    }
    let named = this.scope.uses.iter().filter(|each| !each.local);
    for each in named.clone().filter(|each| each.bound == Bound::Name(name.to_string())) {
        let target = resolve_use(tree, module, each, depth);
        if target.is_empty() {
            found.insert(Found::Item(module)); // of another crate: this module is where it comes in
        }
        found.extend(target);
    }
    if found.is_empty() && module == 0 {
        found.extend(tree.exported_macros.get(name).map(|&module| Found::Item(module)));
    }
    if found.is_empty() {
        for each in named.filter(|each| each.bound == Bound::Glob) {
            for from in resolve_use(tree, module, each, depth) {
                if from != Found::Module(module) {
                    found.extend(lookup(tree, from.module(), name, depth + 1));
                }
            }
        }
    }
    found
}

fn resolve_use(tree: &Tree, module: usize, each: &Use, depth: usize) -> BTreeSet<Found> {
    // `use name;` and `use name::b;` would find the very name that they bind.
    if let [first, ..] = &each.path[..]
        && each.bound == Bound::Name(first.clone())
        && !tree.modules[module].children.contains_key(first)
    {
        return BTreeSet::new();
    }
    resolve(tree, module, &each.path, depth + 1)
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::super::tree;
    use super::*;
    use crate::workspace::Scratch;

    /// The imports of a crate of these files, as `from -> to: line name`.
    fn imports(name: &str, files: &[(&str, &str)]) -> Vec<String> {
        let scratch = Scratch::new(&format!("layers-{name}")).unwrap();
        for (path, text) in files {
            let path = scratch.path.join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        let tree = tree::read(&scratch.path.join("lib.rs")).unwrap();
        let mut shown = Vec::new();
        for ((from, to), edge) in edges(&tree) {
            for (line, item) in edge {
                let (from, to) = (&tree.files[from].name, &tree.files[to].name);
                shown.push(format!("{from} -> {to}: {line} {item}"));
            }
        }
        shown.sort();
        shown
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
            ("a/other.rs", "use super::D;\npub struct O;\n"),
            (
                "b.rs",
                "use crate::A;\nuse crate::a::Renamed;\nuse crate::Arc;\nfn b() { crate::D::V; super::a::other::O; }\n",
            ),
        ];
        let expected = [
            "a::deep -> a: 1 A",
            "a::deep -> a::other: 1 O",
            "a::other -> a::deep: 1 D",
            "b -> a: 1 A",
            "b -> a::deep: 2 Renamed",
            "b -> a::deep: 4 V",
            "b -> a::other: 4 O",
            "b -> crate: 3 Arc",
        ];
        assert_eq!(imports("followed", &files), expected);
    }

    #[test]
    fn a_parent_imports_the_child_whose_items_it_uses() {
        let files = [
            ("lib.rs", "mod a;\nmod b;\nmod c;\nmod d;\n"),
            // Only declared and re-exported.
            ("a.rs", "mod one;\npub use one::One;\n"),
            ("a/one.rs", "pub struct One;\n"),
            // Re-exported, and used as well.
            ("b.rs", "mod two;\npub use two::{Two, three};\nfn b(three: Two) {}\n"),
            ("b/two.rs", "pub struct Two;\npub fn three() {}\n"),
            ("c.rs", "mod four;\nfn c() { four::four() }\n"),
            ("c/four.rs", "pub fn four() {}\n"),
            ("d.rs", "mod five;\nuse five::*;\npub use crate::a::One;\nfn d() -> Five {}\n"),
            ("d/five.rs", "use super::*;\npub struct Five(One);\n"),
        ];
        let expected = [
            "b -> b::two: 3 Two",
            "c -> c::four: 2 four",
            "d -> d::five: 4 Five",
            "d::five -> a::one: 2 One",
        ];
        assert_eq!(imports("parents", &files), expected);
    }

    #[test]
    fn items_of_an_imported_module_count_instead_of_it() {
        let files = [
            ("lib.rs", "mod a;\nmod b;\nmod c;\nmod m;\n"),
            ("a/mod.rs", "mod inner;\npub use inner::Inner;\n"),
            ("a/inner.rs", "pub struct Inner;\n"),
            ("b.rs", "use crate::a;\nfn b() -> a::Inner {}\n"),
            ("c.rs", "use crate::a;\nfn c() { local!(a) }\nfn d() { crate::mac!() }\n"),
            ("m.rs", "#[macro_export]\nmacro_rules! mac { () => { $crate::c::made() } }\n"),
        ];
        let expected = ["b -> a::inner: 2 Inner", "c -> a: 1 a", "c -> m: 3 mac", "m -> c: 2 made"];
        assert_eq!(imports("modules", &files), expected);
    }

    #[test]
    fn inline_modules_belong_to_their_file() {
        let files = [
            ("lib.rs", "mod a;\nmod b;\n"),
            (
                "a.rs",
                "use self::imp::B;\nmod imp { use super::C; pub use super::super::b::B; }\nstruct C;\n#[cfg(test)]\nmod tests { use crate::b::T; }\n",
            ),
            (
                "b.rs",
                "pub struct B;\nmod x { pub mod y { fn z() { super::super::super::a::C } } }\n",
            ),
        ];
        assert_eq!(imports("inline", &files), ["a -> b: 1 B", "b -> a: 2 C"]);
    }

    #[test]
    fn files_that_take_turns_are_both_known() {
        let files = [
            (
                "lib.rs",
                "#[cfg(a)]\n#[path = \"one.rs\"]\nmod imp;\n#[cfg(not(a))]\n#[path = \"two.rs\"]\nmod imp;\nmod user;\n",
            ),
            ("one.rs", "pub fn f() {}\n"),
            ("two.rs", "pub fn f() {}\n"),
            ("user.rs", "fn g() { crate::imp::f() }\n"),
        ];
        let expected = ["user -> imp (one.rs): 1 f", "user -> imp (two.rs): 1 f"];
        assert_eq!(imports("turns", &files), expected);
    }
}
