//! Text to tokens. Called by [`super::parse`]; every token knows its line and column.

use super::{ParseError, ParseErrorKind};

/// What a token is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum TokenKind {
    /// A name or mnemonic.
    Word,
    /// `.word`, dot included; also `.shared::cta` and `.1d`.
    Dotted,
    /// An integer or float literal.
    Number,
    /// `"…"`, quotes included.
    String,
    /// One character of punctuation.
    Punct,
    /// The end of the text.
    End,
}

/// A token: a piece of the text.
#[derive(Clone, Copy, Debug)]
pub(super) struct Token<'t> {
    pub(super) kind: TokenKind,
    pub(super) text: &'t str,
    pub(super) line: u32,
    pub(super) column: u32,
}

struct Lexer<'t> {
    rest: &'t str,
    line: u32,
    column: u32,
    /// Whether LLVM's comments mark this as the author's inline assembly.
    is_inline: bool,
}

/// Cuts `text` into tokens; the last one is [`TokenKind::End`].
pub(super) fn tokens(text: &str) -> Result<Vec<Token<'_>>, ParseError> {
    let mut lexer = Lexer { rest: text, line: 1, column: 1, is_inline: false };
    let mut tokens = Vec::new();
    loop {
        lexer.skip_blank()?;
        let token = lexer.next()?;
        if lexer.is_inline && token.text == ".loc" {
            // LLVM counts lines of the assembly on from the line of the source that it stands in.
            lexer.advance(lexer.rest.find('\n').unwrap_or(lexer.rest.len()));
            continue;
        }
        tokens.push(token);
        if token.kind == TokenKind::End {
            return Ok(tokens);
        }
    }
}

fn is_start(c: char) -> bool {
    c.is_ascii_alphabetic() || matches!(c, '_' | '$' | '%')
}

fn is_follow(c: char) -> bool {
    c.is_ascii_alphanumeric() || matches!(c, '_' | '$')
}

/// Length of the longest prefix of letters, digits, `_` and `$`.
fn follow_len(text: &str) -> usize {
    text.find(|c| !is_follow(c)).unwrap_or(text.len())
}

/// Length of the word behind a dot, `::` included.
fn dotted_len(text: &str) -> usize {
    let mut len = 1 + follow_len(&text[1..]);
    while text[len..].starts_with("::") {
        len += 2 + follow_len(&text[len + 2..]);
    }
    len
}

/// Length of a number: digits and letters, a fraction, a signed exponent.
fn number_len(text: &str) -> usize {
    let mut len = follow_len(text);
    let hexadecimal = text.starts_with("0x") || text.starts_with("0X");
    let fraction = &text[len..];
    if !hexadecimal && fraction.starts_with('.') && fraction[1..].starts_with(|c: char| c.is_ascii_digit()) {
        len += 1 + follow_len(&fraction[1..]);
    }
    let exponent = matches!(text[..len].chars().last(), Some('e' | 'E')) && text[..len].contains('.');
    if exponent && text[len..].starts_with(['+', '-']) {
        len += 1 + follow_len(&text[len + 1..]);
    }
    len
}

impl<'t> Lexer<'t> {
    fn error(&self, kind: ParseErrorKind) -> ParseError {
        ParseError { line: self.line, column: self.column, kind }
    }

    /// Moves over `len` bytes and returns them.
    fn advance(&mut self, len: usize) -> &'t str {
        let (taken, rest) = self.rest.split_at(len);
        self.rest = rest;
        match taken.rfind('\n') {
            Some(last) => {
                self.line += taken.matches('\n').count() as u32;
                self.column = 1 + taken[last + 1..].chars().count() as u32;
            }
            None => self.column += taken.chars().count() as u32,
        }
        taken
    }

    fn skip_blank(&mut self) -> Result<(), ParseError> {
        loop {
            let blank = self.rest.find(|c: char| !c.is_whitespace()).unwrap_or(self.rest.len());
            self.advance(blank);
            if self.rest.starts_with("//") {
                match self.advance(self.rest.find('\n').unwrap_or(self.rest.len())).trim_end() {
                    "// begin inline asm" => self.is_inline = true,
                    "// end inline asm" => self.is_inline = false,
                    _ => {}
                }
            } else if self.rest.starts_with("/*") {
                let end = self.rest.find("*/").ok_or_else(|| self.error(ParseErrorKind::OpenComment))?;
                self.advance(end + 2);
            } else {
                return Ok(());
            }
        }
    }

    fn next(&mut self) -> Result<Token<'t>, ParseError> {
        let (line, column) = (self.line, self.column);
        let (kind, len) = self.classify()?;
        Ok(Token { kind, text: self.advance(len), line, column })
    }

    fn classify(&self) -> Result<(TokenKind, usize), ParseError> {
        let text = self.rest;
        let Some(first) = text.chars().next() else { return Ok((TokenKind::End, 0)) };
        Ok(match first {
            c if is_start(c) => (TokenKind::Word, c.len_utf8() + follow_len(&text[c.len_utf8()..])),
            '.' if text[1..].starts_with(is_follow) => (TokenKind::Dotted, dotted_len(text)),
            '0'..='9' => (TokenKind::Number, number_len(text)),
            '"' => {
                let end = text[1..].find('"').ok_or_else(|| self.error(ParseErrorKind::OpenString))?;
                (TokenKind::String, end + 2)
            }
            c if c.is_ascii_punctuation() => (TokenKind::Punct, 1),
            other => return Err(self.error(ParseErrorKind::BadCharacter(other))),
        })
    }
}
