//! Tensor maps as arguments: what `cuTensorMapEncodeTiled` would be given, with what an array already says left out.

use std::str::FromStr;

use flashcore_ptx::{
    launch::{TensorElement, TensorMapSpec},
    layout::Swizzle,
};
use serde::Deserialize;

use super::request::Known;

/// What a tensor map says about its array; dimension 0 is the innermost.
#[derive(Deserialize, Clone, PartialEq, Default, Debug)]
#[serde(deny_unknown_fields, default)]
pub struct MapSettings {
    /// What an element is; else the array's own type.
    element: Option<String>,
    /// Extents; else those of the array, in reverse.
    dims: Option<Vec<u64>>,
    /// Bytes between neighbours along dimensions 1 and up; else those of a dense array.
    strides: Option<Vec<u64>>,
    /// Extents of the box that a copy moves.
    #[serde(rename = "box")]
    box_dims: Vec<u64>,
    /// 0, 32, 64 or 128.
    swizzle: u64,
}

const FORM: &str = "write tensormap:in:a.npy;box=64,8, then what differs from the array: ;dims=64,128;strides=128;\
                    swizzle=128;element=bf16";

/// Reads `box=64,8;swizzle=128`.
impl FromStr for MapSettings {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let mut settings = Self::default();
        for setting in text.split(';') {
            let (key, value) =
                setting.split_once('=').ok_or_else(|| format!("`{setting}` is not a setting; {FORM}"))?;
            let numbers = || -> Result<Vec<u64>, String> {
                let number = |n: &str| n.parse().map_err(|_| format!("`{n}` is not a number; {FORM}"));
                value.split([',', 'x']).map(number).collect()
            };
            match key {
                "element" => settings.element = Some(value.to_owned()),
                "dims" => settings.dims = Some(numbers()?),
                "strides" => settings.strides = Some(numbers()?),
                "box" => settings.box_dims = numbers()?,
                "swizzle" => settings.swizzle = numbers()?.first().copied().unwrap_or_default(),
                _ => return Err(format!("`{key}` is not part of a tensor map; {FORM}")),
            }
        }
        Ok(settings)
    }
}

impl MapSettings {
    /// The tensor map over an array.
    pub fn spec(&self, array: &Known<'_>) -> Result<TensorMapSpec, String> {
        let element = element(self.element.as_deref().unwrap_or(array.element))?;
        let shape = || array.shape.iter().rev().map(|&extent| extent as u64).collect();
        let dims: Vec<u64> = self.dims.clone().unwrap_or_else(shape);
        let strides = self.strides.clone().unwrap_or_else(|| dense(&dims, element));
        let small = |extent: &u64| u32::try_from(*extent).map_err(|_| format!("a box of {extent} elements"));
        let swizzle = match self.swizzle {
            0 => Swizzle::None,
            32 => Swizzle::B32,
            64 => Swizzle::B64,
            128 => Swizzle::B128,
            other => return Err(format!("{other} is not a swizzle; use 0, 32, 64 or 128")),
        };
        let box_dims = self.box_dims.iter().map(small).collect::<Result<_, _>>()?;
        Ok(TensorMapSpec { slot: array.slot, element, dims, strides, box_dims, swizzle })
    }
}

fn element(name: &str) -> Result<TensorElement, String> {
    Ok(match name {
        "u8" | "s8" => TensorElement::U8,
        "f16" => TensorElement::F16,
        "bf16" => TensorElement::BF16,
        "f32" => TensorElement::F32,
        "u16" | "s16" => TensorElement::U16,
        "u32" => TensorElement::U32,
        "s32" => TensorElement::S32,
        "u64" => TensorElement::U64,
        "s64" => TensorElement::S64,
        "f64" => TensorElement::F64,
        other => {
            return Err(format!(
                "`{other}` is not an element type of tensor maps; use u8, u16, u32, s32, u64, s64, f16, bf16, f32 or f64"
            ));
        }
    })
}

/// Strides of dimensions 1 and up where nothing lies between elements.
fn dense(dims: &[u64], element: TensorElement) -> Vec<u64> {
    let inner = dims.iter().take(dims.len().saturating_sub(1));
    let next = |bytes: &mut u64, extent: &u64| {
        *bytes = bytes.saturating_mul(*extent);
        Some(*bytes)
    };
    inner.scan(u64::from(element.bytes()), next).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use flashcore_ptx::launch::Slot;

    #[test]
    fn an_array_says_what_the_settings_leave_out() {
        let array = Known { slot: Slot(3), element: "bf16", shape: &[4, 8, 64] };
        let spec = |text: &str| text.parse::<MapSettings>().and_then(|settings| settings.spec(&array));
        let dense = spec("box=64,8,1;swizzle=128").unwrap();
        assert_eq!((dense.dims, dense.strides), (vec![64, 8, 4], vec![128, 1024]));
        assert_eq!((dense.box_dims, dense.swizzle), (vec![64, 8, 1], Swizzle::B128));
        let own = spec("box=16,2;dims=32,2;strides=256;element=u8").unwrap();
        assert_eq!((own.dims, own.strides, own.element), (vec![32, 2], vec![256], TensorElement::U8));
        for wrong in ["box", "box=a", "swizzle=7;box=1", "element=f8;box=1", "shape=1"] {
            assert!(spec(wrong).is_err(), "{wrong}");
        }
    }
}
