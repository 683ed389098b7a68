//! The import cycles among the modules of a crate.
//!
//! A module is a file. A file imports another if it has a `use` line or a path that leads to an item
//! of the other. Names are followed through re-exports to the file that defines them. Declaring a
//! module and re-exporting its items is no import; using them is. Code under `cfg(test)` is left
//! out. Imports that only the expansion of a macro has, and methods, which need no path, are not seen.
//!
//! ```text
//! syn -> Scope of each module -> Tree -> edges between files -> groups of files that import each other
//! ```

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

use proc_macro2::{TokenStream, TokenTree};
use syn::ext::IdentExt;
use syn::visit::{self, Visit};
use syn::{Attribute, Expr, Item, Meta, UseTree, Visibility};

use crate::error::{Error, Result};
use crate::workspace::Workspace;

/// Lines of one import that are shown.
const SHOWN: usize = 4;
/// How many re-exports are followed before a name is taken for a circle of them.
const MOST: usize = 16;

/// Prints the groups of modules that import each other, of these crates or of all.
pub(crate) fn run(ws: &Workspace, names: &[String], check: bool) -> Result<()> {
    let known = roots(ws)?;
    if let Some(name) = names.iter().find(|name| !known.iter().any(|(known, _)| known == *name)) {
        return Err(Error::with_status(format!("no crate is called {name}"), 2));
    }
    let mut cycles = 0;
    for (name, root) in &known {
        if names.is_empty() || names.contains(name) {
            cycles += report(ws, name, root)?;
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
    Ok(roots)
}

/// Prints the groups of one crate with their imports. Returns the number of groups.
fn report(ws: &Workspace, name: &str, root: &Path) -> Result<usize> {
    let tree = Tree::read(root)?;
    let edges = edges(&tree);
    let groups = groups(tree.files.len(), &edges);
    let (modules, imports) = (tree.files.len(), edges.len());
    println!("{name}: {modules} modules, {imports} imports, {} cycles", groups.len());
    for group in &groups {
        let names: Vec<&str> = group.iter().map(|&file| tree.files[file].name.as_str()).collect();
        println!("  {} modules import each other: {}", group.len(), names.join(", "));
        let inside =
            edges.iter().filter(|((from, to), _)| group.contains(from) && group.contains(to));
        for (&(from, to), edge) in inside {
            let path = &tree.files[from].path;
            let path = path.strip_prefix(&ws.root).unwrap_or(path).display();
            let (from, to) = (&tree.files[from].name, &tree.files[to].name);
            let places: Vec<String> =
                edge.iter().take(SHOWN).map(|(line, name)| format!(":{line} ({name})")).collect();
            println!("    {from} -> {to}: {path}{}", places.join(", "));
        }
    }
    Ok(groups.len())
}

/// The body of a module: a file, or an inline module in it.
#[derive(Default)]
struct Scope {
    /// Items that are defined here, macros among them.
    items: Vec<String>,
    exported_macros: Vec<String>,
    uses: Vec<Use>,
    children: Vec<Child>,
    paths: Vec<Named>,
}

/// `mod name;` or `mod name { ... }`
struct Child {
    name: String,
    /// What `#[path = "..."]` says.
    path: Option<String>,
    /// `None` if the module is in a file of its own.
    body: Option<Scope>,
}

/// One name of a `use` line.
struct Use {
    path: Vec<String>,
    bound: Bound,
    public: bool,
    /// Inside a function or an `impl`, where the name is in no module.
    local: bool,
    line: usize,
}

/// What a `use` line makes of a path.
#[derive(PartialEq, Eq)]
enum Bound {
    Name(String),
    /// `as _`
    Nothing,
    /// `::*`
    Glob,
}

/// A path in the code, of one name or several.
struct Named {
    path: Vec<String>,
    line: usize,
    /// Whether the name is called, so that a single lower-case one is no variable or field.
    called: bool,
}

impl Named {
    /// Returns whether the first name is that of an item, as far as its spelling says so.
    fn is_item(&self) -> bool {
        let upper = self.path[0].starts_with(char::is_uppercase);
        upper || self.called || self.path.len() > 1
    }
}

impl Scope {
    fn read(items: &[Item]) -> Scope {
        let mut scope = Scope::default();
        for item in items.iter().filter(|item| !is_test(attributes(item))) {
            scope.add(item);
        }
        scope
    }

    fn add(&mut self, item: &Item) {
        let name = match item {
            Item::Mod(module) => {
                let body = module.content.as_ref().map(|(_, items)| Scope::read(items));
                let path = module.attrs.iter().find_map(path_attribute);
                self.children.push(Child { name: module.ident.unraw().to_string(), path, body });
                return;
            }
            Item::Use(item) => {
                let public = !matches!(item.vis, Visibility::Inherited);
                self.add_use(item, public, false);
                return;
            }
            Item::Macro(item) => {
                let name = item.ident.as_ref();
                if item.attrs.iter().any(|each| each.path().is_ident("macro_export")) {
                    self.exported_macros.extend(name.map(ToString::to_string));
                }
                name
            }
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
        self.items.extend(name.map(|name| name.unraw().to_string()));
        Paths { scope: self }.visit_item(item);
    }

    fn add_use(&mut self, item: &syn::ItemUse, public: bool, local: bool) {
        // A global path is of another crate: its first name is empty.
        let mut prefix =
            if item.leading_colon.is_some() { vec![String::new()] } else { Vec::new() };
        self.add_use_tree(&item.tree, &mut prefix, public, local);
    }

    fn add_use_tree(
        &mut self,
        tree: &UseTree,
        prefix: &mut Vec<String>,
        public: bool,
        local: bool,
    ) {
        let (name, bound) = match tree {
            UseTree::Path(path) => {
                prefix.push(path.ident.unraw().to_string());
                self.add_use_tree(&path.tree, prefix, public, local);
                prefix.pop();
                return;
            }
            UseTree::Group(group) => {
                group.items.iter().for_each(|tree| self.add_use_tree(tree, prefix, public, local));
                return;
            }
            UseTree::Name(name) => (Some(&name.ident), None),
            UseTree::Rename(name) if name.rename == "_" => {
                (Some(&name.ident), Some(Bound::Nothing))
            }
            UseTree::Rename(name) => {
                (Some(&name.ident), Some(Bound::Name(name.rename.unraw().to_string())))
            }
            UseTree::Glob(_) => (None, Some(Bound::Glob)),
        };
        let line = syn::spanned::Spanned::span(tree).start().line;
        let mut path = prefix.clone();
        path.extend(
            name.filter(|name| *name != "self" || prefix.is_empty())
                .map(|name| name.unraw().to_string()),
        );
        let bound = bound.unwrap_or_else(|| Bound::Name(path.last().cloned().unwrap_or_default()));
        self.uses.push(Use { path, bound, public, local, line });
    }
}

/// Adds the paths in the code of an item to its module's scope.
struct Paths<'a> {
    scope: &'a mut Scope,
}

impl Paths<'_> {
    fn add(&mut self, path: &syn::Path, called: bool) {
        let Some(first) = path.segments.first() else { return };
        if path.leading_colon.is_none() {
            let line = first.ident.span().start().line;
            let path = path.segments.iter().map(|each| each.ident.unraw().to_string()).collect();
            self.scope.paths.push(Named { path, line, called });
        }
    }

    /// Adds the paths in the arguments or the rules of a macro, which are tokens.
    fn tokens(&mut self, tokens: TokenStream) {
        let mut trees = tokens.into_iter().peekable();
        let (mut path, mut line) = (Vec::new(), 0); // the path that is being read
        let mut before = ' '; // the sign before it: after a dot comes a field or a method
        while let Some(tree) = trees.next() {
            match tree {
                TokenTree::Ident(name) => {
                    if path.is_empty() {
                        line = name.span().start().line;
                    }
                    path.push(name.unraw().to_string());
                    let is_colon = |tree: Option<&TokenTree>| matches!(tree, Some(TokenTree::Punct(sign)) if sign.as_char() == ':');
                    let mut ahead = trees.clone();
                    if is_colon(ahead.next().as_ref())
                        && is_colon(ahead.next().as_ref())
                        && matches!(ahead.peek(), Some(TokenTree::Ident(_)))
                    {
                        trees.nth(1);
                        continue;
                    }
                    let called = match trees.peek() {
                        Some(TokenTree::Group(_)) => true,
                        Some(TokenTree::Punct(sign)) => [':', '!'].contains(&sign.as_char()),
                        _ => false,
                    };
                    let path = std::mem::take(&mut path);
                    if !['.', '\'', ':'].contains(&before) {
                        self.scope.paths.push(Named { path, line, called });
                    }
                    before = ' ';
                }
                TokenTree::Punct(sign) => before = sign.as_char(),
                TokenTree::Group(group) => {
                    self.tokens(group.stream());
                    before = ' ';
                }
                TokenTree::Literal(_) => before = ' ',
            }
        }
    }
}

impl<'ast> Visit<'ast> for Paths<'_> {
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
        self.scope.add_use(item, false, true);
    }

    fn visit_expr_call(&mut self, call: &'ast syn::ExprCall) {
        if let Expr::Path(function) = &*call.func {
            self.add(&function.path, true);
        }
        visit::visit_expr_call(self, call);
    }

    fn visit_path(&mut self, path: &'ast syn::Path) {
        self.add(path, false);
        visit::visit_path(self, path);
    }

    fn visit_macro(&mut self, mac: &'ast syn::Macro) {
        self.add(&mac.path, true);
        self.tokens(mac.tokens.clone());
    }

    fn visit_attribute(&mut self, _: &'ast Attribute) {}
    fn visit_visibility(&mut self, _: &'ast Visibility) {}
}

fn attributes(item: &Item) -> &[Attribute] {
    match item {
        Item::Const(item) => &item.attrs,
        Item::Enum(item) => &item.attrs,
        Item::Fn(item) => &item.attrs,
        Item::Impl(item) => &item.attrs,
        Item::Macro(item) => &item.attrs,
        Item::Mod(item) => &item.attrs,
        Item::Static(item) => &item.attrs,
        Item::Struct(item) => &item.attrs,
        Item::Trait(item) => &item.attrs,
        Item::Type(item) => &item.attrs,
        Item::Use(item) => &item.attrs,
        _ => &[],
    }
}

/// Returns whether the item is compiled for tests only.
fn is_test(attributes: &[Attribute]) -> bool {
    attributes.iter().any(|attribute| match &attribute.meta {
        Meta::Path(path) => path.is_ident("test"),
        Meta::List(list) if list.path.is_ident("cfg") => requires_test(list.tokens.clone()),
        _ => false,
    })
}

/// Returns whether the condition of a `cfg` names `test` outside `not(..)` and `any(..)`.
fn requires_test(condition: TokenStream) -> bool {
    let mut trees = condition.into_iter();
    while let Some(tree) = trees.next() {
        match tree {
            TokenTree::Ident(word) if word == "not" || word == "any" => drop(trees.next()),
            TokenTree::Ident(word) if word == "test" => return true,
            TokenTree::Group(group) if requires_test(group.stream()) => return true,
            _ => {}
        }
    }
    false
}

/// What `#[path = "..."]` says.
fn path_attribute(attribute: &Attribute) -> Option<String> {
    let Meta::NameValue(meta) = &attribute.meta else { return None };
    match &meta.value {
        Expr::Lit(syn::ExprLit { lit: syn::Lit::Str(text), .. }) if meta.path.is_ident("path") => {
            Some(text.value())
        }
        _ => None,
    }
}

/// A crate.
#[derive(Default)]
struct Tree {
    files: Vec<File>,
    /// The first is the root.
    modules: Vec<Module>,
    /// The macros that the root has from other modules, and where they are defined.
    exported_macros: BTreeMap<String, usize>,
}

struct File {
    path: PathBuf,
    /// The path of its module, such as `rcu::domain`; of the root, `crate`.
    name: String,
}

/// A file, or an inline module in it.
struct Module {
    file: usize,
    parent: usize,
    /// More than one where a cfg decides between several.
    children: BTreeMap<String, Vec<usize>>,
    scope: Scope,
}

/// Reads a file. Returns `None` if all of it is for tests.
fn parse(path: &Path) -> Result<Option<Scope>> {
    let text = fs::read_to_string(path).map_err(|error| Error::io(path.display(), error))?;
    let file = syn::parse_file(&text).map_err(|error| {
        Error::new(format!("{}:{}: {error}", path.display(), error.span().start().line))
    })?;
    Ok((!is_test(&file.attrs)).then(|| Scope::read(&file.items)))
}

impl Tree {
    /// Reads a crate from its root file.
    fn read(root: &Path) -> Result<Tree> {
        let mut tree = Tree::default();
        let scope = parse(root)?.unwrap_or_default();
        tree.files.push(File { path: root.to_path_buf(), name: "crate".to_string() });
        tree.add(scope, 0, 0, root.parent().unwrap_or(Path::new("")))?;
        Ok(tree)
    }

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
        for Child { name, path, body } in children {
            let added = match body {
                Some(body) => Some(self.add(body, file, id, &folder.join(&name))?),
                None => self.add_file(&name, path.as_deref(), file, id, folder)?,
            };
            self.modules[id].children.entry(name).or_default().extend(added);
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
        let below = path.with_file_name(if stem == "mod" { "" } else { &stem });
        let above = &self.files[declared_in].name;
        let full = if above == "crate" { name.to_string() } else { format!("{above}::{name}") };
        // Two files may take turns as one module.
        let full = if stem == name || stem == "mod" { full } else { format!("{full} ({stem}.rs)") };
        self.files.push(File { path, name: full });
        self.add(scope, self.files.len() - 1, parent, &below).map(Some)
    }
}

/// From a file to a file: the lines of the import, and the names in them.
type Edges = BTreeMap<(usize, usize), BTreeSet<(usize, String)>>;

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
fn edges(tree: &Tree) -> Edges {
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
        for named in scope.paths.iter().filter(|named| named.path[0] == name && named.is_item()) {
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
            for named in own.scope.paths.iter().filter(|named| named.is_item()) {
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

/// Returns the groups of files of which each leads to each other one, among `count` files.
fn groups(count: usize, edges: &Edges) -> Vec<Vec<usize>> {
    let reachable = |from: usize| {
        let mut seen = vec![false; count];
        let mut open = vec![from];
        while let Some(file) = open.pop() {
            for &(_, to) in edges.keys().filter(|(from, to)| *from == file && !seen[*to]) {
                open.push(to);
            }
            open.iter().for_each(|&to| seen[to] = true);
        }
        seen
    };
    let reach: Vec<Vec<bool>> = (0..count).map(reachable).collect();
    let mut groups: Vec<Vec<usize>> = Vec::new();
    for (file, reached) in reach.iter().enumerate() {
        let group: Vec<usize> =
            (0..count).filter(|&other| reached[other] && reach[other][file]).collect();
        if group.len() > 1 && !groups.contains(&group) {
            groups.push(group);
        }
    }
    groups
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::workspace::Scratch;

    fn scope(source: &str) -> Scope {
        Scope::read(&syn::parse_file(source).unwrap().items)
    }

    /// `path as bound`, with `pub` and the line.
    fn uses(source: &str) -> Vec<String> {
        let shown = |each: &Use| {
            let bound = match &each.bound {
                Bound::Name(name) => name.as_str(),
                Bound::Nothing => "_",
                Bound::Glob => "*",
            };
            let public = if each.public { "pub " } else { "" };
            format!("{public}{} as {bound}:{}", each.path.join("::"), each.line)
        };
        scope(source).uses.iter().map(shown).collect()
    }

    #[test]
    fn a_use_line_is_one_import_per_name() {
        assert_eq!(
            uses("pub(crate) use super::{\n    a,\n    b::{self, C as D, *},\n    e as _,\n};"),
            [
                "pub super::a as a:2",
                "pub super::b as b:3",
                "pub super::b::C as D:3",
                "pub super::b as *:3",
                "pub super::e as _:4"
            ]
        );
        assert_eq!(
            uses("use self::a; pub use b; use ::c::d;"),
            ["self::a as a:1", "pub b as b:1", "::c::d as d:1"]
        );
        assert_eq!(uses("fn a() -> impl B + use<'_> { use crate::c; }"), ["crate::c as c:1"]);
    }

    #[test]
    fn code_for_tests_is_left_out() {
        let source = "#[cfg(test)]\nuse crate::{a, b};\n#[cfg(test)]\nmod tests { use crate::c; }\n\
                      #[cfg(all(test, unix))]\nmod common;\n#[test]\nfn it() { crate::d() }\n\
                      struct E { #[cfg(test)] f: crate::f::G<H, I>, j: K }\n\
                      #[cfg(not(test))]\nuse crate::n;\n#[cfg(any(test, a))]\nuse crate::o;";
        assert_eq!(uses(source), ["crate::n as n:11", "crate::o as o:13"]);
        let scope = scope(source);
        assert!(scope.children.is_empty());
        assert!(!scope.paths.iter().any(|each| each.path[0] == "crate"));
    }

    #[test]
    fn paths_in_code_and_in_macros_are_read_whole() {
        let source = "fn a(b: crate::c::D) -> super::E { f::g::<H>(i.j::<K>()); crate::l!(); ::std::m();\n\
                      n!(crate::o::p(), q.r, s::T { u: 1 }) }";
        let shown: Vec<String> =
            scope(source).paths.iter().map(|each| each.path.join("::")).collect();
        for path in ["crate::c::D", "super::E", "f::g", "crate::l", "H", "K", "crate::o::p", "s::T"]
        {
            assert!(shown.iter().any(|each| each == path), "{path} in {shown:?}");
        }
        assert!(!shown.iter().any(|each| ["j", "r", "m"].contains(&&**each)), "{shown:?}");
    }

    #[test]
    fn files_that_lead_to_each_other_are_a_group() {
        let edges = |pairs: &[(usize, usize)]| -> Edges {
            pairs.iter().map(|&pair| (pair, BTreeSet::new())).collect()
        };
        assert!(groups(4, &edges(&[(0, 1), (0, 2), (1, 3), (2, 3)])).is_empty());
        let two = edges(&[(0, 1), (1, 2), (2, 0), (2, 3), (3, 4), (4, 3), (5, 0)]);
        assert_eq!(groups(6, &two), [vec![0, 1, 2], vec![3, 4]]);
    }

    /// The imports of a crate of these files, as `from -> to: line name`.
    fn imports(name: &str, files: &[(&str, &str)]) -> Vec<String> {
        let scratch = Scratch::new(&format!("layers-{name}")).unwrap();
        for (path, text) in files {
            let path = scratch.path.join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        let tree = Tree::read(&scratch.path.join("lib.rs")).unwrap();
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
