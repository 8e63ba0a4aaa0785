//! Numbers in the comments of a PTX test: how they are written, and when results match them.

use flashcore_ptx::types::ScalarType;

/// What must be in a buffer.
#[derive(Clone, PartialEq, Debug)]
pub struct Expected {
    ty: ScalarType,
    /// The bits of each element; `None` where anything will do.
    bits: Vec<Option<u64>>,
    /// Units in the last place by which results may differ.
    ulps: u64,
}

impl Expected {
    pub(super) const fn new(ty: ScalarType, bits: Vec<Option<u64>>, ulps: u64) -> Self {
        Self { ty, bits, ulps }
    }

    /// Size of the buffer.
    pub fn bytes(&self) -> usize {
        self.bits.len() * self.ty.bytes() as usize
    }

    /// Compares bytes with what must be there; the error names the first element that differs.
    pub fn check(&self, bytes: &[u8]) -> Result<(), String> {
        let width = self.ty.bytes() as usize;
        for (index, expected) in self.bits.iter().enumerate() {
            let mut word = [0; 8];
            let found = bytes.get(index * width..(index + 1) * width).ok_or("the buffer is too short")?;
            word[..width].copy_from_slice(found);
            let found = u64::from_le_bytes(word);
            if let Some(expected) = expected.filter(|&e| distance(e, found, self.ty) > self.ulps) {
                let digits = width * 2;
                return Err(format!(
                    "element {index} is {found:#0w$x}, not {expected:#0w$x}",
                    w = digits + 2
                ));
            }
        }
        Ok(())
    }
}

/// How many values lie between two, counted along the number line for floats.
fn distance(a: u64, b: u64, ty: ScalarType) -> u64 {
    let top = 1u64 << (ty.bits() - 1);
    let place = |bits: u64| match ty.is_float() && bits & top != 0 {
        true => -((bits & (top - 1)) as i128),
        false => i128::from(bits),
    };
    place(a).abs_diff(place(b)).min(u64::MAX.into()) as u64
}

/// Reads the words of a list of numbers.
pub(super) fn read(ty: ScalarType, words: &[&str]) -> Result<Vec<Option<u64>>, String> {
    let mut values = Vec::new();
    for word in words {
        let (word, times) = match word.split_once('*') {
            Some((word, times)) => (word, times.parse().map_err(|_| format!("`{times}` is no number"))?),
            None => (*word, 1),
        };
        let some = match word.split_once("..") {
            Some((low, high)) => range(ty, low, high)?,
            None if word == "_" => vec![None],
            None => vec![Some(number(ty, word)?)],
        };
        values.extend(std::iter::repeat_n(some, times).flatten());
    }
    Ok(values)
}

fn range(ty: ScalarType, low: &str, high: &str) -> Result<Vec<Option<u64>>, String> {
    let bound = |text: &str| text.parse::<i64>().map_err(|_| format!("`{text}` is no number"));
    (bound(low)?..bound(high)?).map(|i| number(ty, &i.to_string()).map(Some)).collect()
}

/// One number as bits.
pub(super) fn number(ty: ScalarType, word: &str) -> Result<u64, String> {
    let wrong = || format!("`{word}` is no .{ty}");
    if let Some(digits) = word.strip_prefix("0x") {
        return u64::from_str_radix(digits, 16).map_err(|_| wrong());
    }
    let mask = u64::MAX >> (64 - ty.bits());
    Ok(match ty {
        ScalarType::F32 => word.parse::<f32>().map_err(|_| wrong())?.to_bits().into(),
        ScalarType::F64 => word.parse::<f64>().map_err(|_| wrong())?.to_bits(),
        ScalarType::F16 => half::f16::from_f64(word.parse().map_err(|_| wrong())?).to_bits().into(),
        ScalarType::Bf16 => half::bf16::from_f64(word.parse().map_err(|_| wrong())?).to_bits().into(),
        _ => word.parse::<i128>().map_err(|_| wrong())? as u64 & mask,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_ranges_and_repetitions() {
        let words = ["-1", "0x10", "0..3", "7*2", "_"];
        let expected = [0xffff_ffff, 16, 0, 1, 2, 7, 7].map(Some).into_iter().chain([None]);
        assert_eq!(read(ScalarType::S32, &words), Ok(expected.collect()));
        assert_eq!(number(ScalarType::F32, "1.5"), Ok(0x3fc0_0000));
        assert_eq!(number(ScalarType::Bf16, "1"), Ok(0x3f80));
        assert!(number(ScalarType::U32, "one").is_err());
    }

    #[test]
    fn distances_are_counted_across_zero() {
        let near = |a: f32, b: f32| distance(a.to_bits().into(), b.to_bits().into(), ScalarType::F32);
        assert_eq!(near(1.0, 1.0 + f32::EPSILON), 1);
        assert_eq!(near(-0.0, 0.0), 0);
        assert_eq!(near(f32::from_bits(1), -f32::from_bits(1)), 2);
    }
}
