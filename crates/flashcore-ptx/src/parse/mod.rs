//! Text to [`Module`]: our own output exactly, and as much of nvcc's and Triton's output as is cheap.
//!
//! Stages: `lexer` cuts tokens, `header` reads everything outside of kernels, `body` statements and scopes,
//! `operand` one operand. Every instruction is matched against [`crate::table`] at once, so a wrong one is
//! reported at its line. No input makes the parser panic.

mod body;
mod header;
mod inlined;
mod lexer;
mod operand;

use crate::{module::Module, op::Op, provenance::Provenance, table::FormError};
use lexer::{Token, TokenKind, tokens};

/// What a text says, and on which lines.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Parsed {
    /// The module.
    pub module: Module,
    /// For each statement its `.loc`, or else its line in the text.
    pub provenance: Provenance,
}

/// A text that is not PTX, or PTX beyond what is supported.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("{line}:{column}: {kind}")]
pub struct ParseError {
    /// Line, from 1.
    pub line: u32,
    /// Column, from 1.
    pub column: u32,
    /// What is wrong.
    pub kind: ParseErrorKind,
}

/// What is wrong with a text.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ParseErrorKind {
    /// Something else was expected here.
    #[error("expected {expected}, found `{found}`")]
    Expected {
        /// What would fit.
        expected: String,
        /// What stands there.
        found: String,
    },
    /// No instruction of the table has this name.
    #[error("unknown instruction `{0}`")]
    UnknownInstruction(String),
    /// No instruction of the table has this modifier.
    #[error("unknown modifier `{modifier}` of `{op}`")]
    UnknownModifier {
        /// The operation.
        op: Op,
        /// The word behind it.
        modifier: String,
    },
    /// The instruction has no row in the table.
    #[error("{0}")]
    Form(#[from] FormError),
    /// A register that no `.reg` declares.
    #[error("undeclared register `{0}`")]
    UndeclaredRegister(String),
    /// A register, variable or label declared twice in one scope.
    #[error("`{0}` is declared twice")]
    Duplicate(String),
    /// PTX that is not supported.
    #[error("{0} is not supported")]
    Unsupported(String),
    /// A number that does not fit.
    #[error("`{0}` is out of range")]
    Number(String),
    /// A comment without end.
    #[error("unterminated comment")]
    OpenComment,
    /// A string without end.
    #[error("unterminated string")]
    OpenString,
    /// A character PTX does not know.
    #[error("stray character `{0}`")]
    BadCharacter(char),
}

impl ParseErrorKind {
    /// Whether the text may be right and the table lacks what it says.
    const fn is_gap(&self) -> bool {
        matches!(
            self,
            Self::UnknownInstruction(_) | Self::UnknownModifier { .. } | Self::Form(_) | Self::Unsupported(_)
        )
    }

    /// Whether the table has what the text says, but with other operands.
    const fn is_fault(&self) -> bool {
        matches!(self, Self::Form(error) if !matches!(error, FormError::Modifiers { .. }))
    }
}

/// Reads a module from text.
pub fn parse(text: &str) -> Result<Parsed, ParseError> {
    parse_file("<ptx>", text)
}

/// Reads a module from the text of the file `name`, by which [`Provenance`] will call it.
pub fn parse_file(name: &str, text: &str) -> Result<Parsed, ParseError> {
    parse_all(name, text).map_err(|errors| errors.0)
}

/// The first error of a text, and those that follow it.
pub type ParseErrors = (ParseError, Vec<ParseError>);

/// Like [`parse_file`], but continues after a wrong instruction, so that all of them are reported at once.
pub fn parse_all(name: &str, text: &str) -> Result<Parsed, ParseErrors> {
    read(name, text, false)
}

/// As [`parse_all`], but instructions that the table lacks are kept as [`Statement::Unknown`](crate::module::Statement):
/// for whoever runs what others wrote, of which such an instruction may never be executed.
pub fn parse_lenient(name: &str, text: &str) -> Result<Parsed, ParseErrors> {
    read(name, text, true)
}

fn read(name: &str, text: &str, lenient: bool) -> Result<Parsed, ParseErrors> {
    let tokens = tokens(text).map_err(|error| (error, Vec::new()))?;
    let cursor = Cursor { tokens: &tokens, next: 0 };
    let (result, mut errors) = header::module(cursor, name, lenient);
    match result {
        Ok(parsed) if errors.is_empty() => Ok(parsed),
        Ok(_) => Err((errors.remove(0), errors)),
        Err(last) if errors.is_empty() => Err((last, errors)),
        Err(last) => {
            errors.push(last);
            Err((errors.remove(0), errors))
        }
    }
}

/// A position in the tokens.
#[derive(Clone)]
struct Cursor<'a, 't> {
    tokens: &'a [Token<'t>],
    next: usize,
}

impl<'t> Cursor<'_, 't> {
    /// The token `ahead` places on; past the end, the end.
    fn peek(&self, ahead: usize) -> Token<'t> {
        let last = self.tokens.len() - 1;
        self.tokens[self.next.saturating_add(ahead).min(last)]
    }

    fn bump(&mut self) -> Token<'t> {
        let token = self.peek(0);
        self.next = (self.next + 1).min(self.tokens.len() - 1);
        token
    }

    fn error_here<T>(&self, kind: ParseErrorKind) -> Result<T, ParseError> {
        error_at(self.peek(0), kind)
    }

    fn expected<T>(&self, expected: &str) -> Result<T, ParseError> {
        self.error_here(ParseErrorKind::Expected { expected: expected.into(), found: shown(self.peek(0)) })
    }

    fn is(&self, text: &str) -> bool {
        self.peek(0).text == text && !matches!(self.peek(0).kind, TokenKind::End | TokenKind::String)
    }

    fn eat(&mut self, text: &str) -> bool {
        let found = self.is(text);
        if found {
            self.bump();
        }
        found
    }

    fn expect(&mut self, text: &str) -> Result<(), ParseError> {
        if self.eat(text) { Ok(()) } else { self.expected(&format!("`{text}`")) }
    }

    fn expect_kind(&mut self, kind: TokenKind, what: &str) -> Result<Token<'t>, ParseError> {
        if self.peek(0).kind == kind { Ok(self.bump()) } else { self.expected(what) }
    }

    /// A non-negative integer that fits in 32 bits.
    fn number(&mut self) -> Result<u32, ParseError> {
        let token = self.expect_kind(TokenKind::Number, "a number")?;
        let value = operand::integer(token.text).and_then(|v| u32::try_from(v).ok());
        value.map_or_else(|| error_at(token, ParseErrorKind::Number(token.text.into())), Ok)
    }

    /// Skips the rest of the line of `token`.
    fn skip_line(&mut self, token: Token<'t>) {
        while self.peek(0).line == token.line && self.peek(0).kind != TokenKind::End {
            self.bump();
        }
    }

    /// The text up to the next semicolon, spaced as instructions are.
    fn instruction_text(&mut self) -> String {
        let mut text = String::new();
        let mut before: Option<Token<'t>> = None;
        while !self.is(";") && self.peek(0).kind != TokenKind::End {
            let token = self.bump();
            let apart = match before {
                Some(Token { text: ",", .. }) => true,
                // The mnemonic is one word; what follows it stands apart.
                Some(last) => {
                    matches!(last.kind, TokenKind::Word | TokenKind::Dotted)
                        && token.kind != TokenKind::Dotted
                        && (matches!(token.text, "{" | "[" | "-")
                            || matches!(token.kind, TokenKind::Word | TokenKind::Number))
                }
                None => false,
            };
            text += if apart { " " } else { "" };
            text += token.text;
            before = Some(token);
        }
        text
    }

    /// Skips past the next `end` on this level of braces.
    fn skip_past(&mut self, end: &str) -> Result<(), ParseError> {
        let mut depth = 0u32;
        loop {
            match self.bump() {
                Token { kind: TokenKind::End, .. } => return self.expected(&format!("`{end}`")),
                Token { text, .. } if depth == 0 && text == end => return Ok(()),
                Token { text: "{", .. } => depth += 1,
                Token { text: "}", .. } => {
                    depth = depth.saturating_sub(1);
                    if depth == 0 && end == "}" {
                        return Ok(());
                    }
                }
                _ => {}
            }
        }
    }
}

fn shown(token: Token<'_>) -> String {
    let text = if token.kind == TokenKind::End { "end of text" } else { token.text };
    text.chars().take(80).collect()
}

fn error_at<T>(token: Token<'_>, kind: ParseErrorKind) -> Result<T, ParseError> {
    Err(ParseError { line: token.line, column: token.column, kind })
}
