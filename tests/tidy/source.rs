//! Rust sources, read well enough to measure functions: literals and comments blanked, braces matched.

use std::ops::Range;

/// Lines that a function may have besides its flat `match` or table.
const AROUND_FLAT: usize = 20;
/// Longest arm of a flat `match`, or row of a flat table, in lines.
const ARM_LINES: usize = 12;

/// A function with a body.
#[derive(Debug)]
pub struct Function {
    pub name: String,
    /// Line of its name, from 1.
    pub line: usize,
    /// Lines from its name to its closing brace.
    pub lines: usize,
    /// Whether it is little more than a `match` with short arms, or a table with short rows.
    pub flat: bool,
}

/// Every function of a source text.
pub fn functions(text: &str) -> Vec<Function> {
    let code = blank(text);
    keyword(&code, "fn").filter_map(|at| function(&code, at)).collect()
}

fn function(code: &str, at: usize) -> Option<Function> {
    let rest = code[at + 2..].trim_start();
    let name: String = rest.chars().take_while(|c| c.is_alphanumeric() || *c == '_').collect();
    let body = body(code, at)?;
    let lines = line_count(&code[at..body.end]);
    let flat = blocks(&code[body])
        .any(|block| line_count(block) + AROUND_FLAT >= lines && longest_arm(block) <= ARM_LINES);
    (!name.is_empty()).then(|| Function { name, line: line_count(&code[..at]), lines, flat })
}

/// The braces after `at`, unless a `;` outside of brackets comes first.
fn body(code: &str, at: usize) -> Option<Range<usize>> {
    let mut depth = 0i32;
    for (i, byte) in code.bytes().enumerate().skip(at) {
        match byte {
            b'(' | b'[' => depth += 1,
            b')' | b']' => depth -= 1,
            b'{' if depth == 0 => return Some(i..closing(code, i)?),
            b';' | b'}' if depth == 0 => return None,
            _ => {}
        }
    }
    None
}

/// One past the bracket that closes the one at `open`.
fn closing(code: &str, open: usize) -> Option<usize> {
    let mut depth = 0i32;
    for (i, byte) in code.bytes().enumerate().skip(open) {
        depth += nesting(byte);
        if depth == 0 {
            return Some(i + 1);
        }
    }
    None
}

fn nesting(byte: u8) -> i32 {
    match byte {
        b'{' | b'[' | b'(' => 1,
        b'}' | b']' | b')' => -1,
        _ => 0,
    }
}

/// The bodies of all `match` expressions, and all arrays.
fn blocks(code: &str) -> impl Iterator<Item = &str> {
    let matches = keyword(code, "match").filter_map(|at| body(code, at));
    let arrays = code.match_indices('[').filter_map(|(at, _)| Some(at..closing(code, at)?));
    matches.chain(arrays).map(|block| &code[block])
}

/// The longest run of lines that begin inside brackets within `block`.
fn longest_arm(block: &str) -> usize {
    let (mut depth, mut run, mut longest) = (0i32, 0, 0);
    for line in block.lines() {
        run = if depth > 1 { run + 1 } else { 0 };
        longest = longest.max(run);
        depth += line.bytes().map(nesting).sum::<i32>();
    }
    longest
}

fn line_count(code: &str) -> usize {
    code.matches('\n').count() + 1
}

/// Where `word` stands by itself.
fn keyword<'a>(code: &'a str, word: &'a str) -> impl Iterator<Item = usize> + 'a {
    let joins = |byte: Option<&u8>| byte.is_some_and(|b| b.is_ascii_alphanumeric() || *b == b'_');
    let bytes = code.as_bytes();
    let found = code.match_indices(word).map(|(at, _)| at);
    let joined = move |at: usize| at > 0 && joins(bytes.get(at - 1)) || joins(bytes.get(at + word.len()));
    found.filter(move |&at| !joined(at))
}

/// The text with every comment and literal replaced by blanks, line for line.
pub fn blank(text: &str) -> String {
    let bytes = text.as_bytes();
    let mut code = String::with_capacity(text.len());
    let mut at = 0;
    while at < bytes.len() {
        let skipped = literal_len(&bytes[at..], at.checked_sub(1).map(|i| bytes[i]));
        let len = skipped.unwrap_or(1).min(bytes.len() - at);
        let kept =
            |byte: u8| if byte == b'\n' || (skipped.is_none() && byte.is_ascii()) { byte } else { b' ' };
        code.extend(bytes[at..at + len].iter().map(|&byte| char::from(kept(byte))));
        at += len;
    }
    code
}

/// Length of the comment or literal that `rest` begins with.
fn literal_len(rest: &[u8], before: Option<u8>) -> Option<usize> {
    match rest {
        [b'/', b'/', ..] => Some(find(rest, b"\n", 2)),
        [b'/', b'*', ..] => Some(find(rest, b"*/", 2) + 2),
        [b'"', ..] => Some(string_len(rest)),
        [b'r', b'"' | b'#', ..] if !before.is_some_and(|b| b.is_ascii_alphanumeric() && b != b'b') => {
            raw_len(rest)
        }
        [b'\'', b'\\', ..] => Some(find(rest, b"'", 3) + 1),
        [b'\'', ..] => char_len(rest),
        _ => None,
    }
}

fn find(rest: &[u8], what: &[u8], from: usize) -> usize {
    let places = rest.windows(what.len()).enumerate().skip(from);
    places.into_iter().find(|(_, window)| *window == what).map_or(rest.len(), |(at, _)| at)
}

fn string_len(rest: &[u8]) -> usize {
    let mut at = 1;
    while at < rest.len() && rest[at] != b'"' {
        at += if rest[at] == b'\\' { 2 } else { 1 };
    }
    at + 1
}

fn raw_len(rest: &[u8]) -> Option<usize> {
    let hashes = rest[1..].iter().take_while(|&&b| b == b'#').count();
    let mut end = vec![b'"'];
    end.extend(vec![b'#'; hashes]);
    (rest.get(1 + hashes) == Some(&b'"')).then(|| find(rest, &end, 2 + hashes) + end.len())
}

/// A character literal, as opposed to a lifetime.
fn char_len(rest: &[u8]) -> Option<usize> {
    let close = rest.iter().skip(2).take(4).position(|&b| b == b'\'')? + 2;
    let one = std::str::from_utf8(&rest[1..close]).is_ok_and(|inner| inner.chars().count() == 1);
    one.then_some(close + 1)
}

/// Names of environment variables of ours that a line has as texts.
pub fn variables(line: &str) -> impl Iterator<Item = String> {
    let ends = |c: char| !c.is_ascii_uppercase() && c != '_';
    let names =
        line.split("\"FLASHCORE_").skip(1).map(move |rest| rest.split(ends).next().unwrap_or_default());
    names.map(|name| format!("FLASHCORE_{name}"))
}

#[test]
fn variables_are_found() {
    let line = r#"var("FLASHCORE_A_B").or(env("FLASHCORE_C=1 D"))"#;
    assert_eq!(variables(line).collect::<Vec<_>>(), ["FLASHCORE_A_B", "FLASHCORE_C"]);
}

#[test]
fn literals_and_comments_are_blanked() {
    let text =
        r##"fn a<'x>(c: char) { let s = "}\"{"; /* } */ let r = r#"}"#; if c == '}' || c == '\'' {} } // }"##;
    let code = blank(text);
    assert_eq!(code.matches('{').count(), 2, "{code}");
    assert_eq!(code.matches('}').count(), 2, "{code}");
    assert!(code.contains("<'x>"), "{code}");
}

#[test]
fn functions_are_measured() {
    let text = "trait T { fn none(&self) -> [u8; 2]; }\nfn two(f: fn(u8) -> u8) {\n}\n\nfn one() {}\n";
    let found: Vec<_> = functions(text).into_iter().map(|f| (f.name, f.line, f.lines)).collect();
    assert_eq!(found, [("two".to_owned(), 2, 2), ("one".to_owned(), 5, 1)]);
}

#[test]
fn flat_functions_are_told_from_long_ones() {
    let flat = format!("fn f() {{\n match x {{\n{} }}\n}}", "  1 => {\n   a\n  }\n".repeat(40));
    let table = format!("fn f() {{\n let rows = [\n{} ];\n}}", "  (1, \"a\"),\n".repeat(80));
    let long_arm = format!("fn f() {{\n match x {{\n 1 => {{\n{}  }}\n }}\n}}", "   a;\n".repeat(80));
    let small_match = format!("fn f() {{\n{} match x {{\n 1 => a,\n }}\n}}", " a;\n".repeat(80));
    let verdicts = [flat, table, long_arm, small_match].map(|text| functions(&text)[0].flat);
    assert_eq!(verdicts, [true, true, false, false]);
}
