//! Reads the comments of a PTX test into cases.

use super::{
    Bound, Case, Expected,
    values::{self, number},
};
use flashcore_ptx::{
    ident::Ident,
    launch::{LaunchSpec, Param, Slot, TensorElement, TensorMapSpec},
    layout::Swizzle,
    parse::{ParseError, Parsed, parse},
    types::ScalarType,
};
use std::{path::Path, sync::Arc};

/// A file that is not a PTX test.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LoadError {
    #[error("{0}: {1}")]
    Io(String, std::io::Error),
    #[error("{0}: {1}")]
    Parse(String, ParseError),
    #[error("{file}:{line}: {reason}")]
    Comment {
        file: String,
        line: usize,
        /// What is wrong with it.
        reason: String,
    },
}

/// Reads a file and the cases in it.
pub fn load(path: &Path) -> Result<Vec<Case>, LoadError> {
    let file = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let text = std::fs::read_to_string(path).map_err(|e| LoadError::Io(file.clone(), e))?;
    read(&file, &text)
}

/// Reads the cases in the text of a file of that name.
pub fn read(file: &str, text: &str) -> Result<Vec<Case>, LoadError> {
    let parsed = Arc::new(parse(text).map_err(|e| LoadError::Parse(file.to_owned(), e))?);
    let mut drafts: Vec<Draft> = Vec::new();
    for (line, comment) in comments(text) {
        let wrong = |reason: String| LoadError::Comment { file: file.to_owned(), line, reason };
        let (key, words) = comment.split_once(": ").unwrap_or_default();
        match (key, drafts.last_mut()) {
            ("run", _) => drafts.push(Draft::new(words).map_err(wrong)?),
            ("arg", Some(draft)) => draft.arg(words).map_err(wrong)?,
            ("finding" | "apart", Some(draft)) => {
                draft.findings = words.split_whitespace().map(Into::into).collect();
                draft.apart = key == "apart";
            }
            ("note", Some(draft)) => draft.notes = words.split_whitespace().map(Into::into).collect(),
            ("arg" | "finding" | "apart" | "note", None) => {
                return Err(wrong(format!("`{key}:` before `run:`")));
            }
            _ => {}
        }
    }
    Ok(drafts.into_iter().map(|draft| draft.finish(file, &parsed)).collect())
}

/// The comments of a text with their lines; `and:` continues the one before.
fn comments(text: &str) -> Vec<(usize, String)> {
    let mut comments: Vec<(usize, String)> = Vec::new();
    for (number, line) in text.lines().enumerate() {
        let Some(comment) = line.trim_start().strip_prefix("// ") else { continue };
        match (comment.strip_prefix("and: "), comments.last_mut()) {
            (Some(more), Some((_, last))) => *last = format!("{last} {more}"),
            _ => comments.push((number + 1, comment.to_owned())),
        }
    }
    comments
}

/// A case whose arguments are still being read.
struct Draft {
    spec: LaunchSpec,
    buffers: Vec<Bound>,
    findings: Vec<String>,
    apart: bool,
    notes: Vec<String>,
    ulps: u64,
}

impl Draft {
    fn new(words: &str) -> Result<Self, String> {
        let mut words = words.split_whitespace();
        let entry = Ident::new(words.next().ok_or("no entry")?).map_err(|e| e.to_string())?;
        let one = [1; 3];
        let spec = LaunchSpec {
            entry,
            grid: one,
            block: one,
            cluster: one,
            shared_bytes: 0,
            dependent: false,
            params: Vec::new(),
            workspace: Vec::new(),
        };
        let mut draft = Self {
            spec,
            buffers: Vec::new(),
            findings: Vec::new(),
            apart: false,
            notes: Vec::new(),
            ulps: 0,
        };
        words.try_for_each(|word| draft.setting(word))?;
        Ok(draft)
    }

    fn setting(&mut self, word: &str) -> Result<(), String> {
        let (key, value) = word.split_once('=').ok_or_else(|| format!("`{word}` is no `key=value`"))?;
        match key {
            "grid" => self.spec.grid = dims(value)?,
            "block" => self.spec.block = dims(value)?,
            "cluster" => self.spec.cluster = dims(value)?,
            "smem" => self.spec.shared_bytes = list(value)?[0],
            "within" => self.ulps = u64::from(list(value)?[0]),
            _ => return Err(format!("unknown setting `{key}`")),
        }
        Ok(())
    }

    fn arg(&mut self, words: &str) -> Result<(), String> {
        let words: Vec<&str> = words.split_whitespace().collect();
        let [kind, rest @ ..] = words.as_slice() else { return Err("an empty argument".into()) };
        match (*kind, rest) {
            ("u32" | "u64" | "f32", values @ [_, ..]) => {
                let scalars: Result<Vec<_>, _> = values.iter().map(|v| scalar(kind, v)).collect();
                self.spec.params.extend(scalars?);
            }
            ("map", [buffer, element, settings @ ..]) => {
                let map = self.tensor_map(buffer, element, settings)?;
                self.spec.params.push(map);
            }
            ("in" | "out" | "inout", [ty, values @ ..]) => {
                let buffer = self.buffer(kind, ty, values)?;
                self.spec.params.push(buffer);
            }
            _ => return Err(format!("unknown argument `{kind}`")),
        }
        Ok(())
    }

    fn buffer(&mut self, kind: &str, ty: &str, words: &[&str]) -> Result<Param, String> {
        let ty = ScalarType::parse(ty).ok_or_else(|| format!("unknown type `{ty}`"))?;
        let arrow = words.iter().position(|w| *w == "->").unwrap_or(words.len());
        let first = values::read(ty, &words[..arrow])?;
        let second = values::read(ty, words.get(arrow + 1..).unwrap_or_default())?;
        let expect = |bits| Some(Expected::new(ty, bits, self.ulps));
        let slot = Slot(self.buffers.len() as u8);
        let (input, expected) = match kind {
            "in" => (Some(to_bytes(ty, &first)), None),
            "out" => (None, expect(first)),
            _ => (Some(to_bytes(ty, &first)), expect(second)),
        };
        self.buffers.push(Bound { slot, input, expected });
        Ok(Param::Buffer(slot))
    }

    fn tensor_map(&self, buffer: &str, element: &str, settings: &[&str]) -> Result<Param, String> {
        let slot = Slot(buffer.parse().map_err(|_| format!("`{buffer}` is no buffer number"))?);
        let element = match element {
            "u8" => TensorElement::U8,
            "f16" => TensorElement::F16,
            "bf16" => TensorElement::BF16,
            "f32" => TensorElement::F32,
            other => return Err(format!("`{other}` is no tensor element")),
        };
        let get = |key: &str| {
            let found = settings.iter().find_map(|s| s.strip_prefix(key)?.strip_prefix('='));
            found.map_or(Ok(Vec::new()), list)
        };
        let wide = |values: Vec<u32>| values.into_iter().map(u64::from).collect();
        let swizzle = match get("swizzle")?.as_slice() {
            [] => Swizzle::None,
            [32] => Swizzle::B32,
            [64] => Swizzle::B64,
            [128] => Swizzle::B128,
            other => return Err(format!("{other:?} is no swizzle")),
        };
        let (dims, strides) = (wide(get("dims")?), wide(get("strides")?));
        let box_dims = get("box")?;
        Ok(Param::TensorMap(TensorMapSpec { slot, element, dims, strides, box_dims, swizzle }))
    }

    fn finish(self, file: &str, parsed: &Arc<Parsed>) -> Case {
        Case {
            name: format!("{file} {}", self.spec.entry),
            parsed: Arc::clone(parsed),
            spec: self.spec,
            buffers: self.buffers,
            findings: self.findings,
            apart: self.apart,
            notes: self.notes,
        }
    }
}

fn scalar(kind: &str, value: &str) -> Result<Param, String> {
    Ok(match kind {
        "u32" => Param::U32(number(ScalarType::U32, value)? as u32),
        "u64" => Param::U64(number(ScalarType::U64, value)?),
        _ => Param::F32(f32::from_bits(number(ScalarType::F32, value)? as u32)),
    })
}

/// `x`, `x,y` or `x,y,z`.
fn dims(text: &str) -> Result<[u32; 3], String> {
    let list = list(text)?;
    Ok(std::array::from_fn(|i| list.get(i).copied().unwrap_or(1)))
}

fn list(text: &str) -> Result<Vec<u32>, String> {
    text.split(',').map(|n| n.parse().map_err(|_| format!("`{n}` is no number"))).collect()
}

fn to_bytes(ty: ScalarType, values: &[Option<u64>]) -> Vec<u8> {
    let width = ty.bytes() as usize;
    values.iter().flat_map(|v| v.unwrap_or(0).to_le_bytes().into_iter().take(width)).collect()
}
