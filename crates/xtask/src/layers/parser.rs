//! One source file: the modules in it, what they define, import and name.

use super::lexer::{Kind, Token};

/// The body of a module: a file, or an inline module in it.
#[derive(Debug, Default)]
pub(super) struct Scope {
    /// Items that are defined here, exported macros among them.
    pub(super) items: Vec<String>,
    pub(super) exported_macros: Vec<String>,
    pub(super) uses: Vec<Use>,
    pub(super) children: Vec<Child>,
    pub(super) paths: Vec<Named>,
}

/// `mod name;` or `mod name { ... }`
#[derive(Debug)]
pub(super) struct Child {
    pub(super) name: String,
    /// What `#[path = "..."]` says.
    pub(super) path: Option<String>,
    /// `None` if the module is in a file of its own.
    pub(super) body: Option<Scope>,
}

/// One name of a `use` line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Use {
    pub(super) path: Vec<String>,
    pub(super) bound: Bound,
    pub(super) public: bool,
    /// Inside a function or an `impl`, where the name is in no module.
    pub(super) local: bool,
    pub(super) line: usize,
}

/// What a `use` line makes of a path.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Bound {
    Name(String),
    /// `as _`
    Nothing,
    /// `::*`
    Glob,
}

/// A path in the code, of one name or several.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Named {
    pub(super) path: Vec<String>,
    pub(super) line: usize,
    /// Whether a single lower-case name is called, so that it is no variable or field.
    pub(super) called: bool,
}

/// Reads a file. Returns `None` if all of it is under `cfg(test)`.
pub(super) fn parse(tokens: &[Token]) -> Option<Scope> {
    let mut scope = Scope::default();
    let mut parser = Parser { tokens, at: 0 };
    parser.module(&mut scope).then_some(scope)
}

/// What the attributes before an item say.
#[derive(Default)]
struct Attributes {
    test: bool,
    exported: bool,
    path: Option<String>,
}

struct Parser<'a> {
    tokens: &'a [Token],
    at: usize,
}

impl Parser<'_> {
    fn get(&self, ahead: usize) -> Option<&Token> {
        self.tokens.get(self.at + ahead)
    }

    fn is(&self, ahead: usize, sign: char) -> bool {
        self.get(ahead).is_some_and(|token| token.is(sign))
    }

    fn word(&self, ahead: usize) -> Option<&str> {
        self.get(ahead).and_then(Token::word)
    }

    fn is_path(&self, ahead: usize) -> bool {
        self.get(ahead).is_some_and(|token| token.kind == Kind::Path)
    }

    /// Reads up to the brace that closes the module, or to the end of the file. Returns false if an
    /// inner attribute says that the module is for tests.
    fn module(&mut self, scope: &mut Scope) -> bool {
        let mut depth = 0_usize; // of all brackets
        let mut attributes = Attributes::default();
        let mut public = false;
        while let Some(token) = self.get(0) {
            let line = token.line;
            match &token.kind {
                Kind::Sign('#') if self.is(1, '!') && self.is(2, '[') => {
                    self.at += 2;
                    if self.attribute(&mut Attributes::default()) {
                        return false;
                    }
                    continue;
                }
                Kind::Sign('#') if self.is(1, '[') => {
                    self.at += 1;
                    self.attribute(&mut attributes);
                    if attributes.test {
                        self.skip_item();
                        attributes = Attributes::default();
                        public = false;
                    }
                    continue;
                }
                Kind::Sign('{' | '(' | '[') => depth += 1,
                Kind::Sign('}') if depth == 0 => {
                    self.at += 1;
                    return true;
                }
                Kind::Sign('}' | ')' | ']') => depth = depth.saturating_sub(1),
                Kind::Word(word) => match word.as_str() {
                    "pub" => {
                        self.visibility();
                        public = true;
                        continue;
                    }
                    "use" if !self.is(1, '<') => {
                        self.at += 1;
                        self.use_tree(&mut Vec::new(), &mut |path, bound, line| {
                            scope.uses.push(Use { path, bound, public, local: depth > 0, line });
                        });
                    }
                    "mod" if depth == 0 && self.word(1).is_some() => {
                        self.child(scope, attributes.path.take());
                        attributes = Attributes::default();
                        public = false;
                        continue;
                    }
                    "macro_rules" if self.is(1, '!') => {
                        if let Some(name) = self.word(2).map(str::to_string) {
                            if attributes.exported {
                                scope.exported_macros.push(name.clone());
                            }
                            scope.items.push(name);
                        }
                        self.at += 2;
                    }
                    word if depth == 0 && is_item(word) && word != "impl" => {
                        let name =
                            if self.word(1) == Some("mut") { self.word(2) } else { self.word(1) };
                        let name = name.filter(|name| !is_item(name) && !MODIFIERS.contains(name));
                        scope.items.extend(name.map(str::to_string));
                    }
                    _ => {
                        self.path(scope, line);
                        continue;
                    }
                },
                Kind::Path => {
                    self.at += 1; // a global path, or one after a type in angle brackets: its names are no imports
                    self.at += usize::from(self.word(0).is_some());
                    continue;
                }
                Kind::Sign('.') if self.word(1).is_some() => {
                    self.at += 2; // a method or a field
                    continue;
                }
                _ => {}
            }
            attributes = Attributes::default();
            public = false;
            self.at += 1;
        }
        true
    }

    /// Reads `[...]`. Returns whether it says that what follows is for tests.
    fn attribute(&mut self, found: &mut Attributes) -> bool {
        let mut open: Vec<&str> = Vec::new();
        let mut brackets = 0_usize;
        let mut last = "";
        let mut test = false;
        while let Some(token) = self.tokens.get(self.at) {
            self.at += 1;
            match &token.kind {
                Kind::Sign('[') => brackets += 1,
                Kind::Sign(']') => brackets -= 1,
                Kind::Sign('(') => open.push(last),
                Kind::Sign(')') => drop(open.pop()),
                Kind::Word(word) => {
                    let required = open.first() == Some(&"cfg")
                        && !open.iter().any(|name| ["not", "any"].contains(name));
                    test |= word == "test" && (open.is_empty() || required);
                    found.exported |= word == "macro_export";
                    last = word;
                }
                Kind::Text(text) if last == "path" && open.is_empty() => {
                    found.path = Some(text.clone());
                }
                _ => {}
            }
            if brackets == 0 {
                break;
            }
        }
        found.test |= test;
        test
    }

    /// Passes `pub` and what is in parentheses after it.
    fn visibility(&mut self) {
        self.at += 1;
        let restricted = ["crate", "super", "self", "in"];
        if self.is(0, '(') && self.word(1).is_some_and(|word| restricted.contains(&word)) {
            while self.get(0).is_some() && !self.is(0, ')') {
                self.at += 1;
            }
            self.at += 1;
        }
    }

    /// Passes the item, field, variant or arm that stands here.
    fn skip_item(&mut self) {
        while self.is(0, '#') && self.is(1, '[') {
            self.at += 1;
            self.attribute(&mut Attributes::default());
        }
        if self.word(0) == Some("pub") {
            self.visibility();
        }
        let first = self.word(0).unwrap_or_default().to_string();
        let item = is_item(&first) || MODIFIERS.contains(&first.as_str());
        // `use a::{b};` and `let a = {};` go on after a brace.
        let to_semicolon = ["use", "let", "const", "static", "type"].contains(&first.as_str())
            && self.word(1) != Some("fn")
            && self.word(1) != Some("unsafe");
        let mut depth = 0_usize;
        while let Some(token) = self.get(0) {
            match token.kind {
                Kind::Sign('{' | '(' | '[') => depth += 1,
                Kind::Sign('}' | ')' | ']') if depth == 0 => return, // closes what is around
                Kind::Sign(sign @ ('}' | ')' | ']')) => {
                    depth -= 1;
                    if depth == 0 && sign == '}' && !to_semicolon {
                        self.at += 1;
                        return;
                    }
                }
                Kind::Sign(';') if depth == 0 => {
                    self.at += 1;
                    return;
                }
                Kind::Sign(',') if depth == 0 && !item => {
                    self.at += 1;
                    return;
                }
                _ => {}
            }
            self.at += 1;
        }
    }

    fn child(&mut self, scope: &mut Scope, path: Option<String>) {
        let Some(name) = self.word(1).map(str::to_string) else { return };
        self.at += 2;
        if !self.is(0, '{') {
            scope.children.push(Child { name, path, body: None });
            return;
        }
        self.at += 1;
        let mut body = Scope::default();
        if self.module(&mut body) {
            scope.children.push(Child { name, path, body: Some(body) });
        }
    }

    /// Reads a tree of a `use` line, after `prefix`.
    fn use_tree(
        &mut self,
        prefix: &mut Vec<String>,
        add: &mut dyn FnMut(Vec<String>, Bound, usize),
    ) {
        let length = prefix.len();
        if self.is_path(0) {
            self.at += 1; // a global path: of another crate
            prefix.push(String::new());
        }
        while let Some(token) = self.get(0) {
            let line = token.line;
            match &token.kind {
                Kind::Word(word) => {
                    let word = word.clone();
                    self.at += 1;
                    if word != "self" || prefix.is_empty() {
                        prefix.push(word);
                    }
                    if self.is_path(0) {
                        self.at += 1;
                        continue;
                    }
                    let mut bound = Bound::Name(prefix.last().cloned().unwrap_or_default());
                    if self.word(0) == Some("as") {
                        bound = match self.word(1) {
                            Some("_") | None => Bound::Nothing,
                            Some(name) => Bound::Name(name.to_string()),
                        };
                        self.at += 2;
                    }
                    add(prefix.clone(), bound, line);
                }
                Kind::Sign('*') => {
                    self.at += 1;
                    add(prefix.clone(), Bound::Glob, line);
                }
                Kind::Sign('{') => {
                    self.at += 1;
                    while self.get(0).is_some() && !self.is(0, '}') {
                        self.use_tree(prefix, add);
                        self.at += usize::from(self.is(0, ','));
                    }
                    self.at += 1;
                }
                _ => {}
            }
            break;
        }
        prefix.truncate(length);
    }

    /// Reads a path that begins here.
    fn path(&mut self, scope: &mut Scope, line: usize) {
        let mut path = Vec::new();
        while let Some(word) = self.word(0) {
            path.push(word.to_string());
            self.at += 1;
            if !(self.is_path(0) && self.word(1).is_some()) {
                break;
            }
            self.at += 1;
        }
        let called = self.is(0, '(') || self.is(0, '!') || self.is_path(0);
        scope.paths.push(Named { path, line, called });
    }
}

/// The keywords that a name follows.
fn is_item(word: &str) -> bool {
    ["fn", "struct", "enum", "union", "trait", "type", "const", "static", "mod", "use", "impl"]
        .contains(&word)
}

const MODIFIERS: [&str; 5] = ["unsafe", "async", "extern", "macro_rules", "let"];

#[cfg(test)]
mod tests {
    use super::super::lexer::tokens;
    use super::*;

    fn scope(source: &str) -> Scope {
        parse(&tokens(source).unwrap()).unwrap()
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
        assert_eq!(uses("use crate::a::B;"), ["crate::a::B as B:1"]);
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
                      #[cfg(all(test, unix))]\n#[path = \"x.rs\"]\nmod common;\n\
                      #[test]\nfn it() { crate::d() }\n\
                      struct E { #[cfg(test)] f: crate::f::G<H, I>, j: K }\n\
                      #[cfg(test)]\nfn generic<A, B>() { crate::l() }\n\
                      #[cfg(test)]\nconst A: [B; 2] = [{ crate::m() }, 3];\n\
                      #[cfg(not(test))]\nuse crate::n;\n#[cfg(any(test, a))]\nuse crate::o;";
        assert_eq!(uses(source), ["crate::n as n:16", "crate::o as o:18"]);
        let scope = scope(source);
        assert!(scope.children.is_empty());
        assert!(!scope.paths.iter().any(|each| each.path[0] == "crate"), "{:?}", scope.paths);
        assert!(parse(&tokens("#![cfg(test)]\nuse crate::a;").unwrap()).is_none());
        assert!(parse(&tokens("#![cfg(not(test))]\nuse crate::a;").unwrap()).is_some());
    }

    #[test]
    fn items_and_modules_of_each_scope_are_known() {
        let source = "mod a;\n#[path = \"c/d.rs\"]\npub(crate) mod b;\nmod e { pub fn f() {} mod g; }\n\
                      pub(crate) const fn h() {}\npub static mut I: u8 = 1;\nunsafe impl J for K { fn l() {} }\n\
                      #[macro_export]\nmacro_rules! m { () => {} }\npub trait N { type O; }\nenum P { Q }";
        let scope = scope(source);
        assert_eq!(scope.items, ["h", "I", "m", "N", "P"]);
        assert_eq!(scope.exported_macros, ["m"]);
        let names: Vec<_> = scope.children.iter().map(|child| child.name.as_str()).collect();
        assert_eq!(names, ["a", "b", "e"]);
        assert_eq!(scope.children[1].path.as_deref(), Some("c/d.rs"));
        let inline = scope.children[2].body.as_ref().unwrap();
        assert_eq!(inline.items, ["f"]);
        assert_eq!(inline.children[0].name, "g");
    }

    #[test]
    fn paths_in_code_are_read_whole() {
        let source =
            "fn a(b: crate::c::D) -> super::E { f::g::<H>(i.j::<K>()); $crate::l!(); ::std::m() }";
        let shown: Vec<String> =
            scope(source).paths.iter().map(|each| each.path.join("::")).collect();
        for path in ["crate::c::D", "super::E", "f::g", "crate::l", "H", "K"] {
            assert!(shown.iter().any(|each| each == path), "{path} in {shown:?}");
        }
        assert!(!shown.iter().any(|each| each.contains('j') || each == "m"), "{shown:?}");
    }
}
