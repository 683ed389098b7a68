//! The sources of a crate, parsed, one module after the other.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use proc_macro2::{TokenStream, TokenTree};
use syn::{Attribute, Expr, Item, Lit, Meta, Stmt};

use crate::process::{Error, Result, read};

/// A file, or an inline module in it.
pub(crate) struct Module {
    pub(crate) file: PathBuf,
    /// The path of the module, such as `rcu::domain`; of the root, `crate`.
    pub(crate) name: String,
    pub(crate) parent: usize,
    /// More than one where a cfg decides between several.
    pub(crate) children: BTreeMap<String, Vec<usize>>,
    /// The items, without modules.
    pub(crate) items: Vec<Item>,
    /// Whether its documentation is hidden, or that of a module around it.
    pub(crate) hidden: bool,
}

/// Reads a crate. The first module is the root. Leaves out the modules whose attributes `left_out` accepts.
pub(crate) fn modules(root: &Path, left_out: fn(&[Attribute]) -> bool) -> Result<Vec<Module>> {
    let mut all = Vec::new();
    let below = root.parent().unwrap_or(root);
    read_file(&mut all, root, below, "crate", 0, false, left_out)?;
    Ok(all)
}

/// Reads a file whose child modules are in the folder `below`.
fn read_file(
    all: &mut Vec<Module>,
    file: &Path,
    below: &Path,
    name: &str,
    parent: usize,
    hidden: bool,
    left_out: fn(&[Attribute]) -> bool,
) -> Result<Option<usize>> {
    let parsed = syn::parse_file(&read(file)?).map_err(|error| {
        Error::new(format!("{}:{}: {error}", file.display(), error.span().start().line))
    })?;
    if left_out(&parsed.attrs) {
        return Ok(None);
    }
    add(all, file, below, name, parent, hidden, left_out, parsed.items).map(Some)
}

#[expect(clippy::too_many_arguments, reason = "it recurs with one or two of them changed")]
fn add(
    all: &mut Vec<Module>,
    file: &Path,
    below: &Path,
    name: &str,
    parent: usize,
    hidden: bool,
    left_out: fn(&[Attribute]) -> bool,
    items: Vec<Item>,
) -> Result<usize> {
    let this = all.len();
    let (file, name) = (file.to_path_buf(), name.to_string());
    let (children, own) = (BTreeMap::new(), Vec::new());
    all.push(Module {
        file: file.clone(),
        name: name.clone(),
        parent,
        children,
        items: own,
        hidden,
    });
    for item in items {
        let Item::Mod(module) = item else {
            all[this].items.push(item);
            continue;
        };
        if left_out(&module.attrs) {
            continue;
        }
        let word = module.ident.to_string();
        let hidden = hidden || is_hidden(&module.attrs);
        let folder = below.join(&word);
        let child = match (module.content, module.attrs.iter().find_map(path_attribute)) {
            (Some((_, items)), _) => {
                Some(add(all, &file, &folder, &name, this, hidden, left_out, items)?)
            }
            (None, path) => {
                let long = if name == "crate" { word.clone() } else { format!("{name}::{word}") };
                let long = path.as_ref().map_or(long.clone(), |path| format!("{long} ({path})"));
                let beside = file.parent().unwrap_or(below);
                let path = match path {
                    Some(path) => beside.join(path),
                    None if folder.join("mod.rs").exists() => folder.join("mod.rs"),
                    None => folder.with_extension("rs"),
                };
                read_file(all, &path, &folder, &long, this, hidden, left_out)?
            }
        };
        all[this].children.entry(word).or_default().extend(child);
    }
    Ok(this)
}

/// Returns the path in `#[path = "..."]`.
fn path_attribute(attribute: &Attribute) -> Option<String> {
    let Meta::NameValue(meta) = &attribute.meta else { return None };
    match &meta.value {
        Expr::Lit(value) if meta.path.is_ident("path") => match &value.lit {
            Lit::Str(text) => Some(text.value()),
            _ => None,
        },
        _ => None,
    }
}

/// Returns whether an item has `#[doc(hidden)]`.
pub(crate) fn is_hidden(attributes: &[Attribute]) -> bool {
    attributes.iter().any(|attribute| match &attribute.meta {
        Meta::List(list) => list.path.is_ident("doc") && list.tokens.to_string() == "hidden",
        _ => false,
    })
}

/// Returns whether an item is compiled for tests only.
pub(crate) fn is_test(attributes: &[Attribute]) -> bool {
    has_cfg(attributes, &["test"], &["not", "any"])
}

/// Returns whether a `cfg` restricts the item to tests or to builds for model checkers.
pub(crate) fn is_test_or_model(attributes: &[Attribute]) -> bool {
    let names = ["test", "offlock_loom", "offlock_shuttle", "offlock_virtual_cpu", "offlock_model"];
    has_cfg(attributes, &names, &["not"])
}

/// Returns whether a `cfg` has one of the names outside the operators of `except`.
fn has_cfg(attributes: &[Attribute], names: &[&str], except: &[&str]) -> bool {
    fn has(condition: TokenStream, names: &[&str], except: &[&str]) -> bool {
        let mut trees = condition.into_iter();
        while let Some(tree) = trees.next() {
            match tree {
                TokenTree::Ident(word) if except.iter().any(|e| word == e) => drop(trees.next()),
                TokenTree::Ident(word) if names.iter().any(|name| word == name) => return true,
                TokenTree::Group(group) if has(group.stream(), names, except) => return true,
                _ => {}
            }
        }
        false
    }
    attributes.iter().any(|attribute| match &attribute.meta {
        Meta::Path(path) => path.is_ident("test"),
        Meta::List(list) if list.path.is_ident("cfg") => has(list.tokens.clone(), names, except),
        _ => false,
    })
}

pub(crate) fn attributes(item: &Item) -> &[Attribute] {
    match item {
        Item::Const(item) => &item.attrs,
        Item::Enum(item) => &item.attrs,
        Item::Fn(item) => &item.attrs,
        Item::Impl(item) => &item.attrs,
        Item::Macro(item) => &item.attrs,
        Item::Static(item) => &item.attrs,
        Item::Struct(item) => &item.attrs,
        Item::Trait(item) => &item.attrs,
        Item::Type(item) => &item.attrs,
        Item::Use(item) => &item.attrs,
        _ => &[],
    }
}

pub(crate) fn statement_attributes(stmt: &Stmt) -> &[Attribute] {
    match stmt {
        Stmt::Local(stmt) => &stmt.attrs,
        Stmt::Macro(stmt) => &stmt.attrs,
        Stmt::Expr(Expr::Block(expr), _) => &expr.attrs,
        Stmt::Expr(Expr::Call(expr), _) => &expr.attrs,
        Stmt::Expr(Expr::MethodCall(expr), _) => &expr.attrs,
        Stmt::Expr(Expr::If(expr), _) => &expr.attrs,
        Stmt::Item(item) => attributes(item),
        _ => &[],
    }
}
