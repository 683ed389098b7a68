//! Rust source as a flat list of tokens, without comments. `proc_macro2` reads the source.

use proc_macro2::{Delimiter, Spacing, TokenStream, TokenTree};

use crate::error::{Error, Result};

/// What a token is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// An identifier or a keyword.
    Word(String),
    /// `::`
    Path,
    /// Another sign, one character.
    Sign(char),
    /// The text of a string literal; `#[path = "..."]` needs it.
    Text(String),
    /// Another literal; its value matters nowhere.
    Literal,
}

/// A token and its line, from 1.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Token {
    pub(super) kind: Kind,
    pub(super) line: usize,
}

impl Token {
    pub(super) fn word(&self) -> Option<&str> {
        match &self.kind {
            Kind::Word(word) => Some(word),
            _ => None,
        }
    }

    pub(super) fn is(&self, sign: char) -> bool {
        self.kind == Kind::Sign(sign)
    }
}

/// Splits a source into tokens. A doc comment becomes an attribute. Lifetimes are left out.
pub(super) fn tokens(source: &str) -> Result<Vec<Token>> {
    let stream: TokenStream = source.parse().map_err(|error| {
        let error: proc_macro2::LexError = error;
        Error::new(format!("line {}: {error}", error.span().start().line))
    })?;
    let mut tokens = Vec::new();
    flatten(stream, &mut tokens);
    Ok(tokens)
}

fn flatten(stream: TokenStream, tokens: &mut Vec<Token>) {
    let mut trees = stream.into_iter().peekable();
    while let Some(tree) = trees.next() {
        let line = tree.span().start().line;
        let kind = match tree {
            TokenTree::Group(group) => {
                let signs = match group.delimiter() {
                    Delimiter::Parenthesis => Some(('(', ')')),
                    Delimiter::Brace => Some(('{', '}')),
                    Delimiter::Bracket => Some(('[', ']')),
                    Delimiter::None => None,
                };
                let sign = |(sign, line)| Token { kind: Kind::Sign(sign), line };
                tokens.extend(signs.map(|(open, _)| sign((open, line))));
                flatten(group.stream(), tokens);
                let end = group.span_close().start().line;
                tokens.extend(signs.map(|(_, close)| sign((close, end))));
                continue;
            }
            TokenTree::Ident(word) => {
                let word = word.to_string();
                Kind::Word(word.strip_prefix("r#").unwrap_or(&word).to_string())
            }
            TokenTree::Punct(sign) => match sign.as_char() {
                '\'' => {
                    trees.next(); // the name of the lifetime
                    continue;
                }
                ':' if sign.spacing() == Spacing::Joint && is_colon(trees.peek()) => {
                    trees.next();
                    Kind::Path
                }
                other => Kind::Sign(other),
            },
            TokenTree::Literal(literal) => {
                let literal = literal.to_string();
                let text = literal.strip_prefix('"').and_then(|text| text.strip_suffix('"'));
                text.map_or(Kind::Literal, |text| Kind::Text(text.to_string()))
            }
        };
        tokens.push(Token { kind, line });
    }
}

fn is_colon(tree: Option<&TokenTree>) -> bool {
    matches!(tree, Some(TokenTree::Punct(sign)) if sign.as_char() == ':')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_signs_and_lines_are_read() {
        let source = "a<'b> // c\n  ::d /* e */ : r#type\n(\"x\", 'y',\n1.5) \"g ::h\"";
        let tokens = tokens(source).unwrap();
        let words: Vec<&str> = tokens.iter().filter_map(Token::word).collect();
        assert_eq!(words, ["a", "d", "type"]);
        let expected = [1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3, 3, 4, 4, 4];
        assert!(tokens.iter().map(|token| token.line).eq(expected), "{tokens:?}");
        assert_eq!(tokens[3].kind, Kind::Path);
        assert_eq!(tokens[5].kind, Kind::Sign(':'));
        assert_eq!(tokens[8].kind, Kind::Text("x".to_string()));
        assert!(super::tokens("fn a( {").is_err());
    }
}
