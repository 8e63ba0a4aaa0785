//! How answers are shown: tables for people, one JSON object for programs, nothing when quiet.
//!
//! Commands hand a JSON value and a page to [`Output`]; no command prints by itself. A reader that went away
//! (`flashcore … | head`) is not an error.

use std::io::{self, IsTerminal, Write};

use comfy_table::{Attribute, Cell, Color, ContentArrangement, Table, presets};
use serde::Serialize;

use crate::{cli::Style, error::CliError};

/// Widest table where the terminal's width is not known.
const WIDTH: u16 = 80;

/// Where and how answers go.
#[derive(Clone, Copy, Debug)]
pub struct Output {
    style: Style,
    colour: bool,
}

impl Output {
    /// Output in the style asked for; colours only on a terminal, and not against `NO_COLOR`.
    pub fn new(style: Style) -> Self {
        let colour = io::stdout().is_terminal() && std::env::var_os("NO_COLOR").is_none();
        Self { style, colour }
    }

    /// Shows an answer: one JSON object for programs, a page for people.
    pub fn answer(&self, json: &impl Serialize, page: impl FnOnce() -> Page) -> Result<(), CliError> {
        if self.style.json {
            return self.raw(&(serde_json::to_string_pretty(json)? + "\n"));
        }
        if self.style.quiet { Ok(()) } else { self.raw(&page().render(self.colour)) }
    }

    /// Whether people see what is going on meanwhile.
    pub fn is_talkative(&self) -> bool {
        !self.style.quiet
    }

    /// Whether a program reads the answer.
    pub fn is_json(&self) -> bool {
        self.style.json
    }

    /// Prints a line ahead of the answer: beside it for people, on standard error where a program reads the answer.
    pub fn remark(&self, line: &Text) -> Result<(), CliError> {
        if self.style.quiet {
            return Ok(());
        }
        if !self.style.json {
            return self.raw(&(line.painted(self.colour) + "\n"));
        }
        // Nobody need read it.
        let _ = writeln!(io::stderr(), "{}", line.words);
        Ok(())
    }

    /// Prints text as it is.
    pub fn raw(&self, text: &str) -> Result<(), CliError> {
        let mut stdout = io::stdout().lock();
        match stdout.write_all(text.as_bytes()).and_then(|()| stdout.flush()) {
            Err(error) if error.kind() != io::ErrorKind::BrokenPipe => Err(CliError::Print(error)),
            _ => Ok(()),
        }
    }

    /// Shows why a command could not run and returns the exit code; with `--json`, standard output still gets its one object.
    pub fn failure(&self, error: &CliError) -> u8 {
        let message = error.chain();
        if self.style.json {
            let object = serde_json::json!({ "error": message, "exit_code": CliError::EXIT });
            // The message below still reaches the user if standard output is gone.
            let _ = self.raw(&format!("{object:#}\n"));
        }
        let _ = writeln!(io::stderr(), "error: {message}");
        CliError::EXIT
    }
}

/// How a word should look.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Tone {
    Plain,
    Good,
    Bad,
    Faint,
}

/// A piece of text with a tone.
#[derive(Clone, Debug)]
pub struct Text {
    words: String,
    tone: Tone,
}

impl Text {
    fn new(words: impl Into<String>, tone: Tone) -> Self {
        Self { words: words.into(), tone }
    }

    /// The words outside of a table.
    fn painted(&self, colour: bool) -> String {
        let code = match self.tone {
            Tone::Good => 32,
            Tone::Bad => 31,
            Tone::Faint => 2,
            Tone::Plain => 0,
        };
        if colour && code > 0 { format!("\u{1b}[{code}m{}\u{1b}[0m", self.words) } else { self.words.clone() }
    }

    fn cell(&self) -> Cell {
        let cell = Cell::new(&self.words);
        match self.tone {
            Tone::Plain => cell,
            Tone::Good => cell.fg(Color::Green),
            Tone::Bad => cell.fg(Color::Red),
            Tone::Faint => cell.add_attribute(Attribute::Dim),
        }
    }
}

/// Good news.
pub fn good(words: impl Into<String>) -> Text {
    Text::new(words, Tone::Good)
}

/// Bad news.
pub fn bad(words: impl Into<String>) -> Text {
    Text::new(words, Tone::Bad)
}

/// A remark.
pub fn faint(words: impl Into<String>) -> Text {
    Text::new(words, Tone::Faint)
}

impl<S: Into<String>> From<S> for Text {
    fn from(words: S) -> Self {
        Self::new(words, Tone::Plain)
    }
}

/// A sequence of aligned tables.
#[derive(Debug, Default)]
pub struct Page {
    parts: Vec<Vec<Vec<Text>>>,
}

impl Page {
    /// Adds a table of rows whose columns line up; nothing where there are none.
    pub fn table(mut self, rows: impl IntoIterator<Item = Vec<Text>>) -> Self {
        let rows: Vec<_> = rows.into_iter().collect();
        self.parts.extend((!rows.is_empty()).then_some(rows));
        self
    }

    /// Adds a table with a heading for each column.
    pub fn headed(self, heading: &[&str], rows: impl IntoIterator<Item = Vec<Text>>) -> Self {
        let mut rows: Vec<_> = rows.into_iter().collect();
        if !rows.is_empty() {
            rows.insert(0, heading.iter().map(|word| faint(*word)).collect());
        }
        self.table(rows)
    }

    /// Adds a line for each text.
    pub fn lines<T: Into<Text>>(self, texts: impl IntoIterator<Item = T>) -> Self {
        texts.into_iter().fold(self, Self::line)
    }

    /// Adds a line of text.
    pub fn line(self, text: impl Into<Text>) -> Self {
        self.table([vec![text.into()]])
    }

    /// Adds a table of names and values.
    pub fn facts<V: Into<Text>>(self, rows: impl IntoIterator<Item = (&'static str, V)>) -> Self {
        self.table(rows.into_iter().map(|(name, value)| vec![faint(name), value.into()]))
    }

    pub(crate) fn render(&self, colour: bool) -> String {
        let parts: Vec<_> = self.parts.iter().map(|rows| render_table(rows, colour)).collect();
        parts.join("\n")
    }
}

fn render_table(rows: &[Vec<Text>], colour: bool) -> String {
    let mut table = Table::new();
    table.load_preset(presets::NOTHING).set_content_arrangement(ContentArrangement::Dynamic);
    if colour {
        table.enforce_styling();
    } else {
        table.force_no_tty();
    }
    // Terminals that do not know how wide they are say 0.
    if table.width().is_none_or(|width| width == 0) {
        table.set_width(WIDTH);
    }
    table.add_rows(rows.iter().map(|row| row.iter().map(Text::cell).collect::<Vec<_>>()));
    table.lines().map(|line| line.trim_end().to_owned() + "\n").collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tables_fit_the_page() {
        let long = "words ".repeat(60);
        let page = Page::default().facts([("a", "1"), ("long", &long)]).table([vec!["x".into(), "y".into()]]);
        let text = page.render(false);
        assert!(text.lines().all(|line| line.chars().count() <= usize::from(WIDTH)), "{text}");
        assert!(!text.contains('\u{1b}'), "no colours off a terminal: {text:?}");
        assert!(text.contains("\n\n"), "parts are set apart: {text:?}");
    }

    #[test]
    fn colours_mark_the_verdict() {
        let page = Page::default().facts([("verdict", bad("FAIL"))]);
        assert!(page.render(true).contains('\u{1b}'));
    }
}
