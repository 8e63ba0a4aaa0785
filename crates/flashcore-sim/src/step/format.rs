//! How `printf` formats one value: flags, width, precision and kind, as in C.

/// One `%…` of a format.
#[derive(Clone, Default, Debug)]
pub(super) struct Directive {
    left: bool,
    plus: bool,
    space: bool,
    alternate: bool,
    zeros: bool,
    width: usize,
    precision: Option<usize>,
    /// Whether a number has 64 bits.
    pub(super) wide: bool,
    pub(super) kind: char,
}

/// Widest field and longest fraction that are printed.
const MOST: usize = 1024;

impl Directive {
    /// Reads what follows a `%`, and the rest of the text; `next` gives the numbers that stand for `*`.
    pub(super) fn read(text: &str, mut next: impl FnMut() -> i32) -> Option<(Self, &str)> {
        let mut directive = Self::default();
        let flags = text.len() - text.trim_start_matches(['-', '+', ' ', '#', '0']).len();
        for flag in text[..flags].chars() {
            match flag {
                '-' => directive.left = true,
                '+' => directive.plus = true,
                ' ' => directive.space = true,
                '#' => directive.alternate = true,
                _ => directive.zeros = true,
            }
        }
        let (width, rest) = number(&text[flags..], &mut next);
        let width = width.unwrap_or(0);
        directive.left |= width < 0;
        directive.width = (width.unsigned_abs() as usize).min(MOST);
        let rest = match rest.strip_prefix('.') {
            Some(rest) => {
                let (precision, rest) = number(rest, &mut next);
                // A negative precision is as none.
                directive.precision = usize::try_from(precision.unwrap_or(0)).ok().map(|p| p.min(MOST));
                rest
            }
            None => rest,
        };
        let end = rest.find(|c: char| !"hlLqjzt".contains(c))?;
        directive.kind = rest[end..].chars().next()?;
        directive.wide =
            rest[..end].contains(['l', 'j', 'z', 't', 'q']) || "speEfFgGaA".contains(directive.kind);
        let behind = &rest[end + directive.kind.len_utf8()..];
        Some((directive, behind))
    }

    /// A text, of which the precision says how much.
    pub(super) fn text(&self, text: &str) -> String {
        let most = self.precision.unwrap_or(usize::MAX);
        self.padded("", &text.chars().take(most).collect::<String>(), false)
    }

    /// A number of any kind, as the bits that were passed.
    pub(super) fn number(&self, bits: u64) -> String {
        let value = if self.wide { bits as i64 } else { i64::from(bits as i32) };
        let prefix = |text: &'static str| if self.alternate && bits != 0 { text } else { "" };
        match self.kind {
            'd' | 'i' => self.integer(self.sign(value < 0), &value.unsigned_abs().to_string()),
            'o' => self.integer(prefix("0"), &format!("{bits:o}")),
            'x' => self.integer(prefix("0x"), &format!("{bits:x}")),
            'X' => self.integer(prefix("0X"), &format!("{bits:X}")),
            'p' => self.padded("", &format!("{bits:#x}"), false),
            'c' => self.padded("", &char::from(bits as u8).to_string(), false),
            'e' | 'E' | 'f' | 'F' | 'g' | 'G' | 'a' | 'A' => self.float(f64::from_bits(bits)),
            _ => self.integer("", &bits.to_string()),
        }
    }

    const fn sign(&self, negative: bool) -> &'static str {
        match (negative, self.plus, self.space) {
            (true, ..) => "-",
            (_, true, _) => "+",
            (_, _, true) => " ",
            _ => "",
        }
    }

    fn integer(&self, sign: &str, digits: &str) -> String {
        let digits = format!("{digits:0>width$}", width = self.precision.unwrap_or(1));
        self.padded(sign, &digits, self.precision.is_none())
    }

    fn float(&self, value: f64) -> String {
        let sign = self.sign(value.is_sign_negative() && !value.is_nan());
        let (size, precision) = (value.abs(), self.precision.unwrap_or(6));
        let text = match self.kind.to_ascii_lowercase() {
            _ if !value.is_finite() => if value.is_nan() { "nan" } else { "inf" }.to_owned(),
            'f' => format!("{size:.precision$}"),
            'e' => scientific(size, precision),
            'g' => self.shortest(size, precision.max(1)),
            _ => hexadecimal(size),
        };
        let text = if self.kind.is_ascii_uppercase() { text.to_uppercase() } else { text };
        self.padded(sign, &text, value.is_finite())
    }

    fn shortest(&self, size: f64, digits: usize) -> String {
        let long = scientific(size, digits - 1);
        let exponent = long.split_once('e').and_then(|(_, e)| e.parse::<i32>().ok()).unwrap_or(0);
        let in_place = exponent >= -4 && exponent < digits as i32;
        let text = match in_place {
            true => format!("{size:.*}", (digits as i32 - 1 - exponent) as usize),
            false => long,
        };
        let (mantissa, tail) = text.split_at(text.find('e').unwrap_or(text.len()));
        match mantissa.contains('.') && !self.alternate {
            true => format!("{}{tail}", mantissa.trim_end_matches('0').trim_end_matches('.')),
            false => text,
        }
    }

    fn padded(&self, sign: &str, body: &str, numeric: bool) -> String {
        let missing = self.width.saturating_sub(sign.len() + body.chars().count());
        match () {
            () if self.left => format!("{sign}{body}{}", " ".repeat(missing)),
            () if self.zeros && numeric => format!("{sign}{}{body}", "0".repeat(missing)),
            () => format!("{}{sign}{body}", " ".repeat(missing)),
        }
    }
}

/// A number, or the one that `*` stands for, and the text behind it.
fn number<'t>(text: &'t str, next: &mut impl FnMut() -> i32) -> (Option<i32>, &'t str) {
    if let Some(rest) = text.strip_prefix('*') {
        return (Some(next()), rest);
    }
    let digits = text.len() - text.trim_start_matches(|c: char| c.is_ascii_digit()).len();
    (text[..digits].parse().ok(), &text[digits..])
}

/// C writes at least two digits of an exponent, and its sign.
fn scientific(size: f64, precision: usize) -> String {
    let text = format!("{size:.precision$e}");
    let (mantissa, exponent) = text.split_once('e').unwrap_or((&text, "0"));
    let exponent: i32 = exponent.parse().unwrap_or(0);
    let sign = if exponent < 0 { '-' } else { '+' };
    format!("{mantissa}e{sign}{:02}", exponent.unsigned_abs())
}

fn hexadecimal(size: f64) -> String {
    let bits = size.to_bits();
    let (biased, mantissa) = ((bits >> 52) as i32, format!("{:013x}", bits & ((1 << 52) - 1)));
    let mantissa = mantissa.trim_end_matches('0');
    let dot = if mantissa.is_empty() { "" } else { "." };
    let (first, exponent) = match (biased, size == 0.0) {
        (_, true) => (0, 0),
        (0, _) => (0, -1022),
        _ => (1, biased - 1023),
    };
    format!("0x{first}{dot}{mantissa}p{exponent:+}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_shown_as_by_c() {
        let double = f64::to_bits;
        let cases: [(&str, u64, &str); 24] = [
            ("d", (-7i32) as u32 as u64, "-7"),
            ("5d|", 42, "   42"),
            ("-5d|", 42, "42   "),
            ("05d", (-42i32) as u32 as u64, "-0042"),
            ("+d", 3, "+3"),
            (".3d", 7, "007"),
            ("lld", u64::MAX, "-1"),
            ("u", 7, "7"),
            ("#x", 255, "0xff"),
            ("08X", 48879, "0000BEEF"),
            ("o", 8, "10"),
            ("c", 65, "A"),
            ("f", double(1.25), "1.250000"),
            ("5.2f", double(1.255), " 1.25"),
            (".0f", double(2.5), "2"),
            ("+.1f", double(0.05), "+0.1"),
            ("e", double(12345.678), "1.234568e+04"),
            (".2E", double(0.000_12), "1.20E-04"),
            ("g", double(0.0001), "0.0001"),
            ("g", double(1e20), "1e+20"),
            ("g", double(123_456.75), "123457"),
            ("8g|", double(f64::NEG_INFINITY), "    -inf"),
            ("a", double(1.5), "0x1.8p+0"),
            ("*d", 9, "   9"),
        ];
        for (format, bits, shown) in cases {
            let (directive, _) = Directive::read(format, || 4).expect("a directive");
            assert_eq!(directive.number(bits), shown, "{format}");
        }
        let (directive, rest) = Directive::read("-6.2s|", || 0).expect("a directive");
        assert_eq!((directive.text("abc").as_str(), rest), ("ab    ", "|"));
    }
}
