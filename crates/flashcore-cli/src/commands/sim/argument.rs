//! `--arg`: one kernel argument, a number or an array in a file.

use std::{fmt, path::PathBuf, str::FromStr};

use flashcore_ptx::launch::Param;

use super::{map::MapSettings, request::hexadecimal};
use crate::files::ElementType;

/// One argument, as it was given.
#[derive(Clone, PartialEq, Debug)]
pub enum Argument {
    /// A number.
    Number(Param),
    /// An array that the kernel reads.
    In(PathBuf),
    /// An array that the kernel reads and writes; its file is replaced.
    InOut(PathBuf),
    /// An array that the kernel writes.
    Out { path: PathBuf, element: ElementType, shape: Vec<usize> },
    /// A struct by value, by its members.
    Struct(Vec<Self>),
    /// A tensor map over an array.
    Map { array: Box<Argument>, map: MapSettings },
}

const FORMS: &str = "write u32:7, s32:-7, u64:9, s64:-9, f32:0.5, f64:0.5, bytes:00ff, in:a.npy, inout:b.npy, \
     out:c.npy:f32:1024, tensormap:in:a.npy;box=64,8 or struct:u32:7|in:a.npy";

impl FromStr for Argument {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (kind, value) =
            text.split_once(':').ok_or_else(|| format!("the argument has no kind; {FORMS}"))?;
        match kind {
            "in" => Ok(Self::In(value.into())),
            "inout" => Ok(Self::InOut(value.into())),
            "out" => out(value),
            "bytes" => hexadecimal(value).map(Param::Bytes).map(Self::Number),
            "tensormap" => tensor_map(value),
            "struct" => value.split('|').map(str::parse).collect::<Result<_, _>>().map(Self::Struct),
            _ => number(kind, value).map(Self::Number),
        }
    }
}

/// Arrays as they were given, as far as they tell one argument from another.
impl fmt::Display for Argument {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Number(_) => f.write_str("a number"),
            Self::In(path) => write!(f, "in:{}", path.display()),
            Self::InOut(path) => write!(f, "inout:{}", path.display()),
            Self::Out { path, .. } => write!(f, "out:{}", path.display()),
            Self::Struct(_) => f.write_str("a struct"),
            Self::Map { array, .. } => write!(f, "tensormap:{array}"),
        }
    }
}

/// `in:a.npy;box=64,8;swizzle=128`.
fn tensor_map(text: &str) -> Result<Argument, String> {
    let (array, settings) =
        text.split_once(';').ok_or_else(|| format!("the tensor map has no box; {FORMS}"))?;
    match array.parse()? {
        array @ (Argument::In(_) | Argument::InOut(_) | Argument::Out { .. }) => {
            Ok(Argument::Map { array: Box::new(array), map: settings.parse()? })
        }
        _ => Err(format!("a tensor map is over an array; {FORMS}")),
    }
}

fn number(kind: &str, value: &str) -> Result<Param, String> {
    let wrong = || format!("`{value}` is not a {kind}; {FORMS}");
    match kind {
        "u32" => unsigned(value).and_then(|v| u32::try_from(v).ok()).map(Param::U32).ok_or_else(wrong),
        "u64" => unsigned(value).map(Param::U64).ok_or_else(wrong),
        "s32" | "i32" => value.parse::<i32>().map(|v| Param::U32(v as u32)).map_err(|_| wrong()),
        "s64" | "i64" => value.parse::<i64>().map(|v| Param::U64(v as u64)).map_err(|_| wrong()),
        "f32" => value.parse().map(Param::F32).map_err(|_| wrong()),
        // Parameters are bytes: an f64 travels as the 64 bits it is.
        "f64" => value.parse::<f64>().map(|v| Param::U64(v.to_bits())).map_err(|_| wrong()),
        _ => Err(format!("`{kind}` is not a kind of argument; {FORMS}")),
    }
}

fn unsigned(text: &str) -> Option<u64> {
    match text.strip_prefix("0x") {
        Some(digits) => u64::from_str_radix(digits, 16).ok(),
        None => text.parse().ok(),
    }
}

/// `c.npy:f32:1024` or `c.npy:f32:32x32`; the path may contain colons.
fn out(text: &str) -> Result<Argument, String> {
    let mut fields = text.rsplitn(3, ':');
    let (Some(extents), Some(element), Some(path)) = (fields.next(), fields.next(), fields.next()) else {
        return Err(
            "an output needs a file, an element type and a length, as in out:c.npy:f32:1024".to_owned()
        );
    };
    let shape: Result<Vec<usize>, _> = extents.split('x').map(str::parse).collect();
    let shape = shape.map_err(|_| format!("`{extents}` is not a length; write 1024 or 32x32"))?;
    Ok(Argument::Out { path: path.into(), element: element.parse()?, shape })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_form_is_understood() {
        let good = |text: &str| text.parse::<Argument>().unwrap();
        assert_eq!(good("u32:7"), Argument::Number(Param::U32(7)));
        assert_eq!(good("u32:0xff"), Argument::Number(Param::U32(255)));
        assert_eq!(good("s32:-1"), Argument::Number(Param::U32(u32::MAX)));
        assert_eq!(good("u64:0"), Argument::Number(Param::U64(0)));
        assert_eq!(good("f32:0.5"), Argument::Number(Param::F32(0.5)));
        assert_eq!(good("f64:1"), Argument::Number(Param::U64(1f64.to_bits())));
        let members = vec![Argument::Number(Param::U32(7)), Argument::In("a.npy".into())];
        assert_eq!(good("struct:u32:7|in:a.npy"), Argument::Struct(members));
        assert_eq!(good("in:a:b.npy"), Argument::In("a:b.npy".into()));
        let (path, element, shape) = ("a:b.npy".into(), "s32".parse().unwrap(), vec![2, 3]);
        assert_eq!(good("out:a:b.npy:s32:2x3"), Argument::Out { path, element, shape });
        for name in ["out:c.npy:s32:4", "out:c.npy:i32:4", "out:c.npy:int32:4"] {
            assert_eq!(good(name), good("out:c.npy:s32:4"), "{name}");
        }
        assert_eq!(good("out:c.npy:bfloat16:4"), good("out:c.npy:bf16:4"));
        assert_eq!(good("out:c.npy:uint8:4"), good("out:c.npy:u8:4"));
        assert_eq!(good("i32:-1"), good("s32:-1"));
    }

    #[test]
    fn others_are_refused_with_advice() {
        for bad in [
            "7",
            "u32:",
            "u32:4294967296",
            "u32:-1",
            "i8:1",
            "f32:x",
            "out:c.npy",
            "out:c.npy:f32",
            "out:c:f3:1",
        ] {
            let message = bad.parse::<Argument>().unwrap_err();
            assert!(message.contains("f32") || message.contains("1024"), "{bad}: {message}");
        }
    }
}
