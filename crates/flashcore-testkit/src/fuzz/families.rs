//! The instruction families of random programs, as forms that [`super::Program`] fills with registers.
//!
//! Documented approximations, and results that depend on an unspecified order, are omitted.

/// The forms of all families but those of `mma.sync` and `wmma`.
const FORMS: &str = include_str!("forms.txt");

/// Every family.
pub const FAMILIES: [&str; 24] = [
    "integer", "bits", "wide", "float", "double", "half", "convert", "warp", "memory", "matrix", "control",
    "video", "carry", "truth", "halves", "vector", "atomic", "call", "wmma", "pairs", "bfloat", "copies",
    "product", "sparse",
];

/// The forms of a family; letters as [`super::Program`] says.
pub(super) fn forms(family: &str) -> Vec<String> {
    if family == "wmma" {
        return super::wmma::forms();
    }
    let products = super::mma::forms(family).into_iter();
    let section = FORMS.split("\n[").find_map(|part| part.strip_prefix(family)?.strip_prefix("]\n"));
    let lines = section.unwrap_or_default().lines().filter(|line| !line.is_empty() && !line.starts_with('#'));
    let (around, lines): (Vec<&str>, Vec<&str>) = lines.partition(|line| line.starts_with("around: "));
    let around = around.first().map_or("FORM", |line| &line["around: ".len()..]);
    products.chain(lines.into_iter().flat_map(expanded).map(|form| around.replace("FORM", &form))).collect()
}

fn expanded(line: &str) -> Vec<String> {
    let parts = line.split_once('<').and_then(|(head, rest)| Some((head, rest.split_once('>')?)));
    let Some((head, (words, tail))) = parts else { return vec![line.to_owned()] };
    words.split('/').flat_map(|word| expanded(&format!("{head}{word}{tail}"))).collect()
}
