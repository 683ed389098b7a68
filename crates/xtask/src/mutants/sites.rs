//! The places of a source file at which a random mutant can be planted.

use std::collections::BTreeSet;
use std::fmt;
use std::ops::Range;
use std::path::PathBuf;

use proc_macro2::{Ident, Span, TokenStream, TokenTree};
use syn::punctuated::Punctuated;
use syn::spanned::Spanned;
use syn::visit::{self, Visit};
use syn::{
    Attribute, BinOp, Expr, ImplItem, ImplItemFn, Item, Local, Macro, Meta, Pat, Stmt, Token,
    TraitItem,
};

use crate::error::{Error, Result};

/// What a mutant breaks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Kind {
    /// An ordering becomes weaker.
    Ordering,
    /// A fence goes.
    Fence,
    /// A comparison, a logical or an arithmetic operator becomes its neighbour.
    Operator,
    /// A statement goes.
    Statement,
}

impl Kind {
    pub(super) const ALL: [Kind; 4] =
        [Kind::Ordering, Kind::Fence, Kind::Operator, Kind::Statement];
}

/// A replacement of some bytes of a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Site {
    pub(super) kind: Kind,
    pub(super) bytes: Range<usize>,
    /// The statement, expression or macro call around `bytes`, in place of which another can stand.
    pub(super) whole: Range<usize>,
    /// A model that must fail without it is listed.
    pub(super) labelled: bool,
    /// From 1.
    pub(super) line: usize,
    pub(super) with: &'static str,
}

/// A site in a file.
pub(super) struct Mutant {
    pub(super) file: PathBuf,
    /// Below the crate's folder.
    pub(super) shown: String,
    pub(super) site: Site,
    pub(super) was: String,
}

impl fmt::Display for Mutant {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Mutant { shown, site, was, .. } = self;
        let was = was.split_whitespace().collect::<Vec<_>>().join(" ");
        write!(f, "{shown}:{}: `{was}` -> `{}`", site.line, site.with)
    }
}

pub(super) fn parse(source: &str) -> Result<syn::File> {
    syn::parse_file(source)
        .map_err(|error| Error::new(format!("line {}: {error}", error.span().start().line)))
}

/// Returns the sites of the files of a crate, in order.
///
/// Code for tests and for model checkers, assertions, `Debug` and `Display` have none, nor has a
/// call that does nothing but hint the processor or tell a model checker of an access.
pub(super) fn sites(files: &[syn::File]) -> Vec<Vec<Site>> {
    let mut methods = Methods::default();
    files.iter().for_each(|file| methods.visit_file(file));
    let reports = &methods.reports - &methods.others;
    let sites_of = |file: &syn::File| {
        let mut finder = Finder { reports: &reports, sites: Vec::new(), order: None };
        if !is_left_out(&file.attrs) {
            finder.visit_file(file);
        }
        finder.sites.sort_by_key(|site| (site.bytes.start, site.bytes.end));
        finder.sites
    };
    files.iter().map(sites_of).collect()
}

/// Returns the names of the modules in files of their own that are for tests or for model checkers.
pub(super) fn test_modules(files: &[syn::File]) -> BTreeSet<String> {
    let name = |item: &Item| match item {
        Item::Mod(module) if module.content.is_none() && is_left_out(&module.attrs) => {
            Some(module.ident.to_string())
        }
        _ => None,
    };
    files.iter().flat_map(|file| &file.items).filter_map(name).collect()
}

/// The names of the methods of a crate.
#[derive(Default)]
struct Methods {
    /// Those that only tell a model checker of an access.
    reports: BTreeSet<String>,
    others: BTreeSet<String>,
}

impl<'ast> Visit<'ast> for Methods {
    fn visit_impl_item_fn(&mut self, method: &'ast ImplItemFn) {
        if method.sig.receiver().is_some() {
            let names = if is_report(method) { &mut self.reports } else { &mut self.others };
            names.insert(method.sig.ident.to_string());
        }
        visit::visit_impl_item_fn(self, method);
    }
}

/// Returns whether the method does nothing without a model checker.
fn is_report(method: &ImplItemFn) -> bool {
    let discards = |stmt: &Stmt| matches!(stmt, Stmt::Local(Local { pat: Pat::Wild(_), .. }));
    let (left_out, rest): (Vec<&Stmt>, Vec<&Stmt>) =
        method.block.stmts.iter().partition(|stmt| is_left_out(attributes(stmt)));
    !left_out.is_empty() && rest.into_iter().all(discards)
}

struct Finder<'r> {
    /// Methods that only tell a model checker of an access.
    reports: &'r BTreeSet<String>,
    sites: Vec<Site>,
    /// The call of `order!` that is being visited, whose first argument is a name.
    order: Option<Range<usize>>,
}

impl Finder<'_> {
    fn add(&mut self, kind: Kind, span: Span, whole: Span, with: &'static str) {
        let labelled = self.order.is_some();
        let whole = self.order.clone().unwrap_or(whole.byte_range());
        let (bytes, line) = (span.byte_range(), span.start().line);
        self.sites.push(Site { kind, bytes, whole, labelled, line, with });
    }

    fn statement(&mut self, stmt: &Stmt) {
        let kind = match stmt {
            Stmt::Macro(stmt) if is_fence(&stmt.mac.path) => Kind::Fence,
            Stmt::Macro(stmt) if is_assertion(&stmt.mac) => return,
            Stmt::Macro(_) => Kind::Statement,
            Stmt::Expr(expr, Some(_)) => match expr {
                Expr::Call(call) if is_fence_call(&call.func) => Kind::Fence,
                Expr::Call(call) if is_hint_call(&call.func) => return,
                Expr::MethodCall(call) if self.is_without_effect(&call.method) => return,
                Expr::Call(_) | Expr::MethodCall(_) | Expr::Assign(_) => Kind::Statement,
                Expr::Binary(_) => Kind::Statement, // `+=` and the like
                _ => return,
            },
            _ => return,
        };
        self.add(kind, stmt.span(), stmt.span(), "();");
        if let (Stmt::Macro(_), Some(site)) = (stmt, self.sites.last_mut()) {
            site.labelled = true; // `fence!` or `step!`
        }
    }

    fn is_without_effect(&self, method: &Ident) -> bool {
        self.reports.contains(&method.to_string()) || is_hint(method)
    }
}

impl<'ast> Visit<'ast> for Finder<'_> {
    fn visit_item(&mut self, item: &'ast Item) {
        let attributes = match item {
            Item::Fn(item) => &item.attrs,
            Item::Impl(item) => {
                let shown = item.trait_.as_ref().and_then(|(_, path, _)| path.segments.last());
                if shown.is_some_and(|name| name.ident == "Debug" || name.ident == "Display") {
                    return;
                }
                &item.attrs
            }
            Item::Mod(item) => &item.attrs,
            Item::Const(item) => &item.attrs,
            Item::Static(item) => &item.attrs,
            Item::Trait(item) => &item.attrs,
            _ => return,
        };
        if !is_left_out(attributes) {
            visit::visit_item(self, item);
        }
    }

    fn visit_impl_item(&mut self, item: &'ast ImplItem) {
        if !matches!(item, ImplItem::Fn(item) if is_left_out(&item.attrs)) {
            visit::visit_impl_item(self, item);
        }
    }

    fn visit_trait_item(&mut self, item: &'ast TraitItem) {
        if !matches!(item, TraitItem::Fn(item) if is_left_out(&item.attrs)) {
            visit::visit_trait_item(self, item);
        }
    }

    fn visit_stmt(&mut self, stmt: &'ast Stmt) {
        if is_left_out(attributes(stmt)) {
            return;
        }
        self.statement(stmt);
        visit::visit_stmt(self, stmt);
    }

    fn visit_expr(&mut self, expr: &'ast Expr) {
        match expr {
            Expr::Call(call) if is_fence_call(&call.func) => {}
            Expr::Path(path) => {
                let last = path.path.segments.last();
                if let Some(name) =
                    last.filter(|name| ORDERINGS.contains(&&*name.ident.to_string()))
                {
                    let weaker = if name.ident == "AcqRel" { "Acquire" } else { "Relaxed" };
                    self.add(Kind::Ordering, name.ident.span(), path.span(), weaker);
                    if name.ident == "AcqRel" {
                        self.add(Kind::Ordering, name.ident.span(), path.span(), "Release");
                    }
                }
            }
            Expr::Binary(binary) => {
                if let Some(other) = neighbour(&binary.op) {
                    self.add(Kind::Operator, binary.op.span(), binary.span(), other);
                }
                visit::visit_expr(self, expr);
            }
            _ => visit::visit_expr(self, expr),
        }
    }

    /// Looks into macros whose arguments are expressions, such as `order!`, `check!` and `step!`.
    fn visit_macro(&mut self, mac: &'ast Macro) {
        if is_fence(&mac.path) || is_assertion(mac) {
            return;
        }
        let outer = self.order.take();
        self.order = mac.path.is_ident("order").then(|| mac.span().byte_range());
        let arguments = mac.parse_body_with(Punctuated::<Expr, Token![,]>::parse_terminated);
        for expr in arguments.iter().flatten() {
            <Self as Visit<'_>>::visit_expr(self, expr);
        }
        self.order = outer;
    }
}

const ORDERINGS: [&str; 4] = ["Acquire", "Release", "AcqRel", "SeqCst"];
const FENCES: [&str; 4] = ["fence", "light", "heavy", "heavy_rseq"];

fn is_fence(path: &syn::Path) -> bool {
    path.segments.last().is_some_and(|name| FENCES.contains(&&*name.ident.to_string()))
}

fn is_fence_call(function: &Expr) -> bool {
    matches!(function, Expr::Path(path) if is_fence(&path.path))
}

/// Returns whether no run shows that a call of the function is missing: it changes how fast the program runs and
/// nothing else, or forbids the compiler what today's does not do.
fn is_hint(function: &Ident) -> bool {
    ["spin_loop", "prefetch", "_mm_prefetch", "compiler_fence"].contains(&&*function.to_string())
}

fn is_hint_call(function: &Expr) -> bool {
    let Expr::Path(path) = function else { return false };
    path.path.segments.last().is_some_and(|name| is_hint(&name.ident))
}

fn is_assertion(mac: &Macro) -> bool {
    mac.path.segments.last().is_some_and(|name| {
        let name = name.ident.to_string();
        name.contains("assert") || ["panic", "unreachable", "write", "println"].contains(&&*name)
    })
}

fn attributes(stmt: &Stmt) -> &[Attribute] {
    match stmt {
        Stmt::Local(stmt) => &stmt.attrs,
        Stmt::Macro(stmt) => &stmt.attrs,
        Stmt::Expr(Expr::Block(expr), _) => &expr.attrs,
        Stmt::Expr(Expr::Call(expr), _) => &expr.attrs,
        Stmt::Expr(Expr::MethodCall(expr), _) => &expr.attrs,
        Stmt::Expr(Expr::If(expr), _) => &expr.attrs,
        _ => &[],
    }
}

/// Returns whether a `cfg` restricts the item to tests or to builds for model checkers.
fn is_left_out(attributes: &[Attribute]) -> bool {
    attributes.iter().any(|attribute| match &attribute.meta {
        Meta::Path(path) => path.is_ident("test"),
        Meta::List(list) if list.path.is_ident("cfg") => names_a_test(list.tokens.clone()),
        _ => false,
    })
}

/// Returns whether the condition of a `cfg` names tests or a model checker outside `not(..)`.
fn names_a_test(condition: TokenStream) -> bool {
    let tests = ["test", "offlock_loom", "offlock_shuttle", "offlock_model", "offlock_virtual_cpu"];
    let mut trees = condition.into_iter();
    while let Some(tree) = trees.next() {
        match tree {
            TokenTree::Ident(word) if word == "not" => drop(trees.next()),
            TokenTree::Ident(word) if tests.contains(&&*word.to_string()) => return true,
            TokenTree::Group(group) if names_a_test(group.stream()) => return true,
            _ => {}
        }
    }
    false
}

fn neighbour(op: &BinOp) -> Option<&'static str> {
    Some(match op {
        BinOp::Lt(_) => "<=",
        BinOp::Le(_) => "<",
        BinOp::Gt(_) => ">=",
        BinOp::Ge(_) => ">",
        BinOp::Eq(_) => "!=",
        BinOp::Ne(_) => "==",
        BinOp::And(_) => "||",
        BinOp::Or(_) => "&&",
        BinOp::Add(_) => "-",
        BinOp::Sub(_) => "+",
        BinOp::AddAssign(_) => "-=",
        BinOp::SubAssign(_) => "+=",
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The mutated text of each site, and what replaces it.
    fn found(source: &str) -> Vec<(Kind, String, &'static str)> {
        let text = |site: &Site| source[site.bytes.clone()].to_string();
        let found = sites(&[parse(source).unwrap()]).remove(0);
        found.iter().map(|site| (site.kind, text(site), site.with)).collect()
    }

    #[test]
    fn each_kind_of_site_is_found() {
        let source = "fn a() { b.store(1, Release); fence(SeqCst); if c < d && e() { f += 1; } }";
        let expected = [
            (Kind::Statement, "b.store(1, Release);", "();"),
            (Kind::Ordering, "Release", "Relaxed"),
            (Kind::Fence, "fence(SeqCst);", "();"),
            (Kind::Operator, "<", "<="),
            (Kind::Operator, "&&", "||"),
            (Kind::Statement, "f += 1;", "();"),
            (Kind::Operator, "+=", "-="),
        ];
        let expected = expected.map(|(kind, text, with)| (kind, text.to_string(), with));
        assert_eq!(found(source), expected);
    }

    #[test]
    fn labelled_operations_have_sites() {
        let source = "fn a() { fence!(SeqCst, \"x\"); b(order!(AcqRel, \"y\"));\n\
                      if check!(\"z\", c == d) {} step!(\"w\", e.f(Acquire)); }";
        let found = found(source);
        for (kind, text) in [
            (Kind::Fence, "fence!(SeqCst, \"x\");"),
            (Kind::Ordering, "AcqRel"),
            (Kind::Operator, "=="),
            (Kind::Ordering, "Acquire"),
            (Kind::Statement, "step!(\"w\", e.f(Acquire));"),
        ] {
            assert!(found.iter().any(|site| site.0 == kind && site.1 == text), "{text}: {found:?}");
        }
    }

    #[test]
    fn tests_models_and_assertions_have_none() {
        let source = "#[cfg(test)] mod t { fn a() { b(); } }\n#[test] fn c() { d(); }\n\
                      #[cfg(offlock_model)] fn e() { f(); }\n\
                      fn g() { assert!(h < i); debug_assert_eq!(j(), k); }\n\
                      impl fmt::Debug for L { fn m() { n(); } }\n\
                      #[cfg(all(test, not(offlock_loom)))] mod q { fn r() { s(); } }\n\
                      #[cfg(not(offlock_loom))] fn o() { p(); }";
        assert_eq!(found(source), [(Kind::Statement, "p();".to_string(), "();")]);
    }
    #[test]
    fn hints_and_reports_to_a_model_checker_have_none() {
        let source = "impl F { fn read(&self, f: F) { #[cfg(offlock_loom)] self.s.with(g); let _ = f; }\n\
                      fn write(&self) { #[cfg(offlock_loom)] t(); u(); } fn move_on(&self) { v(); } }\n\
                      fn a(f: &F) { f.read(1); f.write(); f.move_on(); hint::spin_loop(); }";
        let expected = ["u();", "v();", "f.write();", "f.move_on();"];
        assert_eq!(found(source).iter().map(|site| &site.1).collect::<Vec<_>>(), expected);
        // Another type's method has the same name.
        let other = "impl G { fn read(&self) -> u64 { 7 } }";
        let both = [source, other].map(|source| parse(source).unwrap());
        assert_eq!(sites(&both)[0].len(), expected.len() + 1);
    }
}
