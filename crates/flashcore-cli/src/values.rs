//! Flag values parsed into types that cannot be wrong; clap calls these, `commands` uses the results.

use std::str::FromStr;

use flashcore_core::{Dims, Mask, Problem};

/// A problem in words.
pub fn describe(problem: &Problem) -> String {
    let [batch, heads, seq, dim] = problem.q().dims().array();
    let mut text = format!("{batch}x{heads}x{seq}x{dim} {}", problem.dtype());
    let (kv, keys, values) = (problem.heads_kv(), problem.seq_kv(), problem.dim_v());
    for (other, usual, name) in [(kv, heads, "kv heads"), (keys, seq, "keys"), (values, dim, "value dim")] {
        if other != usual {
            text += &format!(", {other} {name}");
        }
    }
    if let Some(size) = problem.page_size() {
        text += &format!(", pages of {size}");
    }
    if problem.mask() != Mask::NONE {
        text += &format!(", {}", problem.mask());
    }
    if let Some(dropout) = problem.dropout() {
        text += &format!(", dropout {}", dropout.probability());
    }
    text
}

/// `--shape BxHxSxD`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Shape(pub Dims);

impl FromStr for Shape {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let fields: Vec<_> = text.split(['x', 'X', '×']).map(parse_extent).collect::<Result<_, _>>()?;
        let [batch, heads, seq, dim] = fields[..] else {
            return Err(format!(
                "{} extents, but 4 are needed: batch x heads x sequence x dim, as in 1x8x512x64",
                fields.len()
            ));
        };
        Ok(Self(Dims::new(batch, heads, seq, dim)))
    }
}

fn parse_extent(text: &str) -> Result<usize, String> {
    text.trim()
        .parse()
        .map_err(|_| format!("`{text}` is not an extent; write four numbers, as in 1x8x512x64"))
}

/// `--window L,R`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Window(pub Mask);

impl FromStr for Window {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let bounds = text.split_once(',').map(|(left, right)| (parse_bound(left), parse_bound(right)));
        match bounds {
            Some((Some(left), Some(right))) => Ok(Self(Mask::window(left, right))),
            _ => Err("write the keys visible before and after a query, as in 128,0 or 128,inf".to_owned()),
        }
    }
}

fn parse_bound(text: &str) -> Option<Option<u32>> {
    match text.trim() {
        "inf" => Some(None),
        number => number.parse().ok().map(Some),
    }
}

/// `X`, `X,Y` or `X,Y,Z`; what is left out is 1.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Triple(pub [u32; 3]);

impl FromStr for Triple {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let fields: Result<Vec<u32>, _> = text.split(',').map(|field| field.trim().parse()).collect();
        match fields.as_deref() {
            Ok(&[x]) => Ok(Self([x, 1, 1])),
            Ok(&[x, y]) => Ok(Self([x, y, 1])),
            Ok(&[x, y, z]) => Ok(Self([x, y, z])),
            _ => Err("write one to three numbers, as in 8 or 4,4 or 2,2,2".to_owned()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shapes() {
        let good = |text: &str| text.parse::<Shape>().unwrap().0.array();
        assert_eq!(good("1x8x512x64"), [1, 8, 512, 64]);
        assert_eq!(good("2 × 3 × 4 × 5"), [2, 3, 4, 5]);
        assert_eq!(good("0x1x0x1"), [0, 1, 0, 1]);
        let large = "1x8x99999999999999999999x64";
        for bad in ["", "1x8x512", "1x8x512x64x1", "1x8x-1x64", "1x8xSx64", "1,8,512,64", large] {
            let message = bad.parse::<Shape>().unwrap_err();
            assert!(message.contains("1x8x512x64"), "{bad}: {message}");
        }
    }

    #[test]
    fn windows() {
        let good = |text: &str| text.parse::<Window>().unwrap().0;
        assert_eq!(good("128,0"), Mask::window(128, 0));
        assert_eq!(good("inf, 0"), Mask::CAUSAL);
        assert_eq!(good("inf,inf"), Mask::NONE);
        for bad in ["", "128", "128,", "-1,0", "1,2,3", "4294967296,0", "nan,0"] {
            assert!(bad.parse::<Window>().is_err(), "{bad}");
        }
    }

    #[test]
    fn triples() {
        let good = |text: &str| text.parse::<Triple>().unwrap().0;
        assert_eq!((good("8"), good("4,5"), good("1, 2,3")), ([8, 1, 1], [4, 5, 1], [1, 2, 3]));
        for bad in ["", "1,2,3,4", "-1", "x", "1,,2", "4294967296"] {
            assert!(bad.parse::<Triple>().is_err(), "{bad}");
        }
    }
}
