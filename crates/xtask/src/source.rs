//! The sources of a crate, as the tokens of one item after the other.

use std::collections::BTreeMap;
use std::iter::Peekable;
use std::path::{Path, PathBuf};

use proc_macro2::{Delimiter, Group, LexError, TokenStream, TokenTree};

use crate::process::{Error, Result, read};

/// Returns whether an attribute, `cfg(test)`, leaves out what it stands at.
pub(crate) type LeftOut = fn(&TokenStream) -> bool;

/// A file, or an inline module in it.
pub(crate) struct Module {
    pub(crate) file: PathBuf,
    /// The path of the module, such as `rcu::domain`; of the root, `crate`. An inline module has that of its file.
    pub(crate) name: String,
    pub(crate) parent: usize,
    /// More than one where a cfg decides between several.
    pub(crate) children: BTreeMap<String, Vec<usize>>,
    /// The items, without modules.
    pub(crate) items: Vec<Item>,
    /// Whether its documentation is hidden, or that of a module around it.
    pub(crate) hidden: bool,
}

/// An item of a module, or of an `impl`.
#[derive(Default)]
pub(crate) struct Item {
    /// `cfg(test)` of `#[cfg(test)]`.
    attributes: Vec<TokenStream>,
    /// The rest, with the visibility.
    pub(crate) tokens: Vec<TokenTree>,
}

/// Reads a crate, without what the attributes leave out. The first module is the root.
pub(crate) fn modules(root: &Path, left_out: LeftOut) -> Result<Vec<Module>> {
    let mut all = Vec::new();
    let name = "crate".to_string();
    let (file, children, items) = (root.to_path_buf(), BTreeMap::new(), Vec::new());
    let module = Module { file, name, parent: 0, children, items, hidden: false };
    add(&mut all, module, root.parent().unwrap_or(root), None, left_out)?;
    Ok(all)
}

/// Adds a module whose child modules are in the folder `below`, and these. Its content is in the file, or given.
/// Returns its number.
fn add(
    all: &mut Vec<Module>,
    module: Module,
    below: &Path,
    content: Option<TokenStream>,
    left_out: LeftOut,
) -> Result<usize> {
    let Module { file, name, hidden, .. } = &module;
    let (file, name, hidden) = (file.clone(), name.clone(), *hidden);
    let content = match content {
        Some(content) => content,
        None => {
            let content = read(&file)?.parse().map_err(|error: LexError| {
                Error::new(format!("{}:{}: {error}", file.display(), error.span().start().line))
            })?;
            kept(content, left_out)
        }
    };
    let this = all.len();
    all.push(module);
    for item in items(content) {
        let (true, Some(word)) = (item.is("mod"), item.name()) else {
            all[this].items.push(item);
            continue;
        };
        let folder = below.join(&word);
        let long = if name == "crate" { word.clone() } else { format!("{name}::{word}") };
        let path = item.attributes.iter().find_map(path_of);
        let content = item.body();
        let (file, name) = match (&content, path) {
            (Some(_), _) => (file.clone(), name.clone()),
            (None, Some(path)) => {
                (file.parent().unwrap_or(below).join(&path), format!("{long} ({path})"))
            }
            (None, None) if folder.join("mod.rs").exists() => (folder.join("mod.rs"), long),
            (None, None) => (folder.with_extension("rs"), long),
        };
        let hidden = hidden || item.is_hidden();
        let (children, items) = (BTreeMap::new(), Vec::new());
        let child = Module { file, name, parent: this, children, items, hidden };
        let child = add(all, child, &folder, content, left_out)?;
        all[this].children.entry(word).or_default().push(child);
    }
    Ok(this)
}

/// Splits the content of a module or an `impl`.
pub(crate) fn items(content: TokenStream) -> Vec<Item> {
    let (mut all, mut trees) = (Vec::new(), content.into_iter().peekable());
    let mut item = Item::default();
    while let Some(tree) = trees.next() {
        if item.tokens.is_empty() && is_punct(&tree, '#') {
            let of_all = trees.next_if(|next| is_punct(next, '!')).is_some();
            match trees.next() {
                Some(TokenTree::Group(group)) if !of_all => item.attributes.push(group.stream()),
                _ => {}
            }
            continue;
        }
        let is_last = is_punct(&tree, ';') || is_block(&tree) && !item.is("use");
        item.tokens.push(tree);
        if is_last {
            let item = std::mem::take(&mut item);
            all.extend((item.tokens.len() > 1).then_some(item)); // and not a `;` behind a block
        }
    }
    all
}

/// Removes what its attributes leave out, at all depths. Removes all if an attribute of the whole leaves it out.
fn kept(tokens: TokenStream, left_out: LeftOut) -> TokenStream {
    let is_bracket = |tree: &TokenTree| is_group(tree, Delimiter::Bracket);
    let (mut kept, mut trees) = (Vec::<TokenTree>::new(), tokens.into_iter().peekable());
    while let Some(tree) = trees.next() {
        let TokenTree::Group(group) = &tree else {
            kept.push(tree);
            continue;
        };
        let of_all =
            matches!(&kept[..], [.., mark, not] if is_punct(mark, '#') && is_punct(not, '!'));
        let of_next = kept.last().is_some_and(|mark| is_punct(mark, '#'));
        if of_all && left_out(&group.stream()) {
            return TokenStream::new();
        } else if of_next && is_bracket(&tree) && left_out(&group.stream()) {
            kept.pop();
            // With the attributes before this one.
            while matches!(&kept[..], [.., mark, last] if is_punct(mark, '#') && is_bracket(last)) {
                kept.truncate(kept.len() - 2);
            }
            skip(&mut trees);
        } else {
            let mut inner = Group::new(group.delimiter(), self::kept(group.stream(), left_out));
            inner.set_span(group.span());
            kept.push(inner.into());
        }
    }
    kept.into_iter().collect()
}

/// Drops the item, statement, field, argument or arm that the trees begin with.
fn skip(trees: &mut Peekable<impl Iterator<Item = TokenTree>>) {
    let mut is_item = false;
    while let Some(tree) = trees.next() {
        is_item |= word(&tree).is_some_and(|word| KEYWORDS.contains(&&*word));
        let goes_on = trees.peek().and_then(word).is_some_and(|word| word == "else");
        let is_end = is_punct(&tree, ';') || is_block(&tree) && !goes_on;
        if is_end || is_punct(&tree, ',') && !is_item {
            return;
        }
    }
}

/// The keywords before the name of an item.
const KEYWORDS: [&str; 10] =
    ["mod", "fn", "struct", "enum", "union", "trait", "type", "const", "static", "macro_rules"];

impl Item {
    /// The words, without those that may stand before the keyword.
    fn words(&self) -> impl Iterator<Item = String> {
        let mut words: Vec<String> = self.tokens.iter().filter_map(word).collect();
        let is_function = words.iter().any(|word| word == "fn");
        let before = ["pub", "unsafe", "async", "extern", "default", "mut"];
        words.retain(|word| !(before.contains(&&**word) || is_function && word == "const"));
        words.into_iter()
    }

    /// Returns whether the item begins with this keyword.
    pub(crate) fn is(&self, keyword: &str) -> bool {
        self.words().next().is_some_and(|word| word == keyword)
    }

    /// Returns the name of what the item defines; of an `impl` or a `use`, none.
    pub(crate) fn name(&self) -> Option<String> {
        let is_keyword = |word: &String| KEYWORDS.contains(&word.as_str());
        let mut words = self.words();
        words.next().filter(is_keyword).and_then(|_| words.next())
    }

    /// Returns whether every crate can use it: `pub` without parentheses.
    pub(crate) fn is_public(&self) -> bool {
        let is_pub = self.tokens.first().and_then(word).is_some_and(|word| word == "pub");
        is_pub && !matches!(self.tokens.get(1), Some(TokenTree::Group(_)))
    }

    /// Returns whether it has `#[doc(hidden)]`.
    pub(crate) fn is_hidden(&self) -> bool {
        self.attributes.iter().any(|each| each.to_string().replace(' ', "") == "doc(hidden)")
    }

    /// The content of its braces.
    pub(crate) fn body(&self) -> Option<TokenStream> {
        let last = self.tokens.last().filter(|last| is_block(last))?;
        if let TokenTree::Group(group) = last { Some(group.stream()) } else { None }
    }
}

pub(crate) fn word(tree: &TokenTree) -> Option<String> {
    if let TokenTree::Ident(word) = tree { Some(word.to_string()) } else { None }
}

pub(crate) fn is_punct(tree: &TokenTree, mark: char) -> bool {
    matches!(tree, TokenTree::Punct(punct) if punct.as_char() == mark)
}

/// Returns whether these are braces with their content.
pub(crate) fn is_block(tree: &TokenTree) -> bool {
    is_group(tree, Delimiter::Brace)
}

fn is_group(tree: &TokenTree, delimiter: Delimiter) -> bool {
    matches!(tree, TokenTree::Group(group) if group.delimiter() == delimiter)
}

/// Returns the path in `#[path = "..."]`.
fn path_of(attribute: &TokenStream) -> Option<String> {
    let text = attribute.to_string();
    Some(text.strip_prefix("path = \"")?.strip_suffix('"')?.to_string())
}

/// Leaves out what is compiled for tests only.
pub(crate) fn is_test(attribute: &TokenStream) -> bool {
    has_cfg(attribute, &["test"], &["not", "any"])
}

/// Leaves out what a `cfg` restricts to tests or to builds for model checkers.
pub(crate) fn is_test_or_model(attribute: &TokenStream) -> bool {
    let names = ["test", "offlock_loom", "offlock_shuttle", "offlock_virtual_cpu", "offlock_model"];
    has_cfg(attribute, &names, &["not"])
}

/// Returns whether the attribute is `test`, or a `cfg` that has one of the names outside the operators of
/// `except`.
fn has_cfg(attribute: &TokenStream, names: &[&str], except: &[&str]) -> bool {
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
    let trees: Vec<TokenTree> = attribute.clone().into_iter().collect();
    match (trees.first().and_then(word).as_deref(), trees.get(1)) {
        (Some("test"), None) => true,
        (Some("cfg"), Some(TokenTree::Group(group))) => has(group.stream(), names, except),
        _ => false,
    }
}

/// Returns the names of the path that these tokens begin with.
pub(crate) fn path(mut tokens: &[TokenTree]) -> Vec<String> {
    let mut names = Vec::new();
    while let [TokenTree::Ident(name), rest @ ..] = tokens {
        names.push(name.to_string());
        match rest {
            [one, two, rest @ ..] if is_punct(one, ':') && is_punct(two, ':') => tokens = rest,
            _ => break,
        }
    }
    names
}
