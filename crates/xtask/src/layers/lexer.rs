//! Rust source as words and signs, without comments and the contents of strings.

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
    /// A number or a character; its value matters nowhere.
    Literal,
}

/// A token and the line that it is in, from 1.
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

/// Splits a source into tokens.
pub(super) fn tokens(source: &str) -> Vec<Token> {
    let mut lexer = Lexer { rest: source.chars().collect(), at: 0, line: 1, tokens: Vec::new() };
    while lexer.step() {}
    lexer.tokens
}

struct Lexer {
    rest: Vec<char>,
    at: usize,
    line: usize,
    tokens: Vec<Token>,
}

impl Lexer {
    fn peek(&self, ahead: usize) -> char {
        self.rest.get(self.at + ahead).copied().unwrap_or('\0')
    }

    fn bump(&mut self) -> char {
        let c = self.peek(0);
        self.at += 1;
        self.line += usize::from(c == '\n');
        c
    }

    fn step(&mut self) -> bool {
        if self.at >= self.rest.len() {
            return false;
        }
        let line = self.line;
        let kind = match (self.peek(0), self.peek(1)) {
            ('/', '/') => {
                while self.at < self.rest.len() && self.peek(0) != '\n' {
                    self.bump();
                }
                return true;
            }
            ('/', '*') => {
                self.block_comment();
                return true;
            }
            (c, _) if c.is_whitespace() => {
                self.bump();
                return true;
            }
            ('"', _) => Kind::Text(self.string()),
            ('\'', _) => match self.quote() {
                Some(kind) => kind,
                None => return true,
            },
            (c, _) if c.is_ascii_digit() => {
                self.number();
                Kind::Literal
            }
            (c, _) if c.is_alphabetic() || c == '_' => self.word_or_string(),
            (':', ':') => {
                self.bump();
                self.bump();
                Kind::Path
            }
            _ => Kind::Sign(self.bump()),
        };
        self.tokens.push(Token { kind, line });
        true
    }

    fn block_comment(&mut self) {
        let mut depth = 0;
        while self.at < self.rest.len() {
            match (self.peek(0), self.peek(1)) {
                ('/', '*') => depth += 1,
                ('*', '/') => depth -= 1,
                _ => {
                    self.bump();
                    continue;
                }
            }
            self.bump();
            self.bump();
            if depth == 0 {
                return;
            }
        }
    }

    fn string(&mut self) -> String {
        let mut text = String::new();
        self.bump();
        while self.at < self.rest.len() {
            match self.bump() {
                '"' => break,
                '\\' => {
                    self.bump();
                }
                c => text.push(c),
            }
        }
        text
    }

    fn raw_string(&mut self, hashes: usize) -> String {
        for _ in 0..=hashes {
            self.bump();
        }
        let mut text = String::new();
        while self.at < self.rest.len() {
            let c = self.bump();
            if c == '"' && (0..hashes).all(|ahead| self.peek(ahead) == '#') {
                for _ in 0..hashes {
                    self.bump();
                }
                break;
            }
            text.push(c);
        }
        text
    }

    /// A character, or a lifetime, which is nothing.
    fn quote(&mut self) -> Option<Kind> {
        self.bump();
        if self.peek(0) == '\\' {
            self.bump();
            self.bump();
            while self.at < self.rest.len() && self.bump() != '\'' {} // '\u{1F600}'
            return Some(Kind::Literal);
        }
        if self.peek(1) == '\'' {
            self.bump();
            self.bump();
            return Some(Kind::Literal);
        }
        while self.peek(0).is_alphanumeric() || self.peek(0) == '_' {
            self.bump();
        }
        None
    }

    /// `1.5e3_f64`, but of `0..n` and `t.0.x` only the number.
    fn number(&mut self) {
        while self.peek(0).is_alphanumeric() || self.peek(0) == '_' {
            self.bump();
        }
        if self.peek(0) == '.' && self.peek(1).is_ascii_digit() {
            self.bump();
            self.number();
        }
    }

    /// A word, or a string with a prefix: `r"..."`, `b"..."`, `br#"..."#`, `c"..."`.
    fn word_or_string(&mut self) -> Kind {
        let mut word = String::new();
        while self.peek(0).is_alphanumeric() || self.peek(0) == '_' {
            word.push(self.bump());
        }
        let hashes = (0..).take_while(|&ahead| self.peek(ahead) == '#').count();
        match word.as_str() {
            "r" | "br" | "cr" if self.peek(hashes) == '"' => Kind::Text(self.raw_string(hashes)),
            "b" | "c" if self.peek(0) == '"' => Kind::Text(self.string()),
            "b" if self.peek(0) == '\'' => self.quote().unwrap_or(Kind::Literal),
            "r" if hashes == 1 => {
                self.bump(); // a raw identifier
                self.word_or_string()
            }
            _ => Kind::Word(word),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(source: &str) -> Vec<String> {
        tokens(source).iter().filter_map(|token| token.word().map(str::to_string)).collect()
    }

    #[test]
    fn comments_and_strings_are_no_code() {
        let source = "a // b\n/* c /* d */ e */ f \"g \\\" h\" r#\"i \" j\"# b\"k\" c\"l\" m";
        assert_eq!(words(source), ["a", "f", "m"]);
        assert_eq!(words("/// use crate::a;\n//! b\nc"), ["c"]);
    }

    #[test]
    fn lifetimes_and_characters_are_told_apart() {
        assert_eq!(
            words("fn a<'b>(c: &'b str) { '\"'; '\\''; b'd'; '\\u{61}'; 'x' }"),
            ["fn", "a", "c", "str"]
        );
        assert_eq!(words("0..n; 1.5e3f64; t.0.x; 0x_ff; r#type"), ["n", "t", "x", "type"]);
    }

    #[test]
    fn tokens_know_their_lines() {
        let all = tokens("a\n  ::b\n\"x\ny\" c");
        let lines: Vec<usize> = all.iter().map(|token| token.line).collect();
        assert_eq!(lines, [1, 2, 2, 3, 4]);
        assert_eq!(all[1].kind, Kind::Path);
        assert_eq!(all[3].kind, Kind::Text("x\ny".to_string()));
    }
}
