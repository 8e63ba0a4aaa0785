//! Random PTX programs: straight-line, branching and looping code of one instruction family each, from a seed.
//!
//! `gpu_fuzz`, an example of `flashcore`, runs them on a GPU and keeps the results under `tests/ptx/fuzz`; the
//! simulator's tests replay those, and run other seeds to check that no schedule changes their bits.

pub mod corpus;
mod families;
mod mma;
mod wmma;

pub use families::FAMILIES;

use crate::rng::Rng;

/// Registers that a program computes with.
const REGISTERS: usize = 8;
/// Threads: one warp.
pub const THREADS: usize = 32;
/// Forms of a program.
const LENGTH: usize = 28;
/// One in so many forms brings back an input, so that registers do not decay to zeros and NaNs.
const REFRESH: usize = 5;
/// One in so many programs mixes all families.
const MIXTURES: u64 = 6;
/// Programs share so many sets of inputs.
const INPUT_SETS: u64 = 16;
/// Functions of programs that call any.
const FUNCTIONS: &str = include_str!("functions.txt");

/// A program and what it reads.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Program {
    /// The family's name and the seed.
    pub name: String,
    /// The text; its only entry is `fuzz`, which takes the addresses of inputs and outputs.
    pub text: String,
    /// What is particular in the text.
    body: String,
    /// Which inputs it has.
    set: u64,
    /// One word for each register and thread; there are as many outputs.
    pub inputs: Vec<u32>,
}

impl Program {
    /// The program of a seed.
    pub fn new(seed: u64) -> Self {
        let mut rng = Rng::new(seed);
        let family = FAMILIES[(seed / MIXTURES * (MIXTURES - 1) + seed % MIXTURES) as usize % FAMILIES.len()];
        let mixed = seed % MIXTURES == MIXTURES - 1;
        let forms: Vec<Vec<String>> = match mixed {
            true => FAMILIES.into_iter().map(families::forms).collect(),
            false => vec![families::forms(family)],
        };
        let body = (0..LENGTH).map(|number| line(&mut rng, &forms, number)).collect();
        let name = format!("{}-{seed:03}", if mixed { "mixed" } else { family });
        let set = seed % INPUT_SETS;
        Self::framed(name, body, set, inputs(set))
    }

    fn framed(name: String, body: String, set: u64, inputs: Vec<u32>) -> Self {
        Self { name, text: framed(&body), body, set, inputs }
    }

    /// The program as a test whose outputs are `answers`.
    pub fn with_answers(&self, who: &str, answers: &[u32]) -> String {
        let numbers = |values: &[u32]| {
            let row = |row: &[u32]| row.iter().map(|v| format!("{v:#x}")).collect::<Vec<_>>().join(" ");
            values.chunks(THREADS).map(row).collect::<Vec<_>>().join("\n// and: ")
        };
        let (inputs, answers) = (numbers(&self.inputs), numbers(answers));
        let head = format!("// Random instructions ({}) with the answers of {who}.", self.name);
        let run = format!("// run: fuzz block={THREADS}\n// arg: in u32 {inputs}\n// arg: out u32 {answers}");
        format!("{head}\n{run}\n{}", self.text)
    }
}

/// The inputs of that number.
fn inputs(set: u64) -> Vec<u32> {
    let mut rng = Rng::new(set);
    (0..REGISTERS * THREADS).map(|_| word(&mut rng)).collect()
}

/// Numbers of all kinds: small, large, floats, and the edges of f32, f16 and bf16.
fn word(rng: &mut Rng) -> u32 {
    const EDGES: [u32; 12] = [
        0,
        0x8000_0000,
        0x3f80_0000,
        0x7f80_0000,
        0xff80_0000,
        0x0000_0001,
        0x7f7f_ffff,
        0xffff_ffff,
        0x7c00_fc00,
        0x0001_8001,
        0x7bff_3c00,
        0x7fc0_0000,
    ];
    let half = |rng: &mut Rng| u32::from(half::f16::from_f32(rng.normal() * 8.0).to_bits());
    match rng.next_u64() % 6 {
        0 => rng.pick(&EDGES),
        1 => (rng.normal() * 100.0).to_bits(),
        2 => (rng.next_u64() % 64) as u32,
        3 => half(rng) << 16 | half(rng),
        _ => rng.next_u64() as u32,
    }
}

fn line(rng: &mut Rng, families: &[Vec<String>], number: usize) -> String {
    if rng.one_in(REFRESH) {
        let (to, from) = (rng.range(0..=REGISTERS - 1), rng.range(0..=REGISTERS - 1));
        return format!("    ld.global.b32 %r{to}, [%in+{}];\n", from * THREADS * 4);
    }
    let forms = &families[rng.range(0..=families.len() - 1)];
    let form = &forms[rng.range(0..=forms.len() - 1)];
    format!("    {}\n", placed(rng, form, number))
}

/// A form with registers and numbers in place of its capital letters.
///
/// `A`, `B`, `C` are read and differ: assemblers fold `min x, x` and the like, and then keep bits of a NaN that hardware
/// would not. `D` and `E` are written and differ; `N` is a number below 32; `L` and `M` are labels.
fn placed(rng: &mut Rng, form: &str, number: usize) -> String {
    let (read, written) = (rng.permutation(REGISTERS), rng.permutation(REGISTERS));
    let small = rng.range(0..=31);
    let word = |letter: char| match letter {
        'A' | 'B' | 'C' => Some(format!("%r{}", read[letter as usize - 'A' as usize])),
        'D' | 'E' => Some(format!("%r{}", written[letter as usize - 'D' as usize])),
        'N' => Some(small.to_string()),
        'L' | 'M' => Some(format!("{}_{number}", letter.to_ascii_lowercase())),
        _ => None,
    };
    let letters: Vec<char> = form.chars().collect();
    let is_part = |at: Option<&char>| at.is_some_and(|c| c.is_ascii_alphanumeric() || "._%$".contains(*c));
    let mut text = String::new();
    for (at, &letter) in letters.iter().enumerate() {
        let alone = !is_part(at.checked_sub(1).and_then(|before| letters.get(before)))
            && !is_part(letters.get(at + 1));
        match word(letter).filter(|_| alone) {
            Some(word) => text += &word,
            None => text.push(letter),
        }
    }
    text
}

/// A whole program: registers are loaded before `body` and stored after it. `%s` is the lane's own 16 bytes of shared
/// memory and `%b` where those of lane 0 are; `%m` and `%k` are the same for 32 bytes of another array; `%x`, `%y`, `%w`,
/// `%z`, `%h`, `%p` and `%q` are for forms to use as they like.
fn framed(body: &str) -> String {
    let each = |f: &dyn Fn(usize) -> String| (0..REGISTERS).map(f).collect::<String>();
    let loads = each(&|r| format!("    ld.global.b32 %r{r}, [%in+{}];\n", r * THREADS * 4));
    let stores = each(&|r| format!("    st.global.b32 [%out+{}], %r{r};\n", r * THREADS * 4));
    let functions = if body.contains("call") { FUNCTIONS } else { "" };
    let version = if body.contains("ordered_metadata") { "8.5" } else { "8.4" };
    format!(
        ".version {version}\n.target sm_90\n.address_size 64\n\n{functions}\
         .visible .entry fuzz(.param .u64 source, .param .u64 target)\n{{\n    \
         .shared .align 128 .b32 cells[{}];\n    .shared .align 128 .b32 room[{}];\n    \
         .reg .b32 %r<{REGISTERS}>, %x<16>, %y<24>, %t, %s, %b, %m, %k; .reg .b64 %w<4>, %z<16>, %in, %out, %at;\n    \
         .reg .b16 %h<4>; .reg .pred %p, %q;\n    \
         mov.u32 %t, %tid.x; mul.wide.u32 %at, %t, 4; mov.u32 %b, cells; mad.lo.u32 %s, %t, 16, %b;\n    \
         mov.u32 %k, room; mad.lo.u32 %m, %t, 32, %k;\n    \
         ld.param.u64 %in, [source]; add.u64 %in, %in, %at; ld.param.u64 %out, [target]; add.u64 %out, %out, %at;\n\
         {loads}{body}{stores}    ret;\n}}\n",
        THREADS * 4,
        THREADS * 8,
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn letters_alone_are_placed() {
        let text =
            placed(&mut Rng::new(3), "mad.wide.u32 %w0, A, B, %w1; L: @%p bra L; {D, E}, [%s+N], C;", 7);
        assert!(!text.contains(['A', 'B', 'C', 'D', 'E', 'N', 'L']), "{text}");
        assert!(text.contains("l_7: @%p bra l_7;") && text.contains("[%s+"), "{text}");
    }

    #[test]
    fn every_family_has_its_turn_and_seeds_repeat() {
        let names: std::collections::BTreeSet<_> = (0..180)
            .map(|seed| Program::new(seed).name)
            .map(|name| name.rsplit_once('-').map(|(family, _)| family.to_owned()))
            .collect();
        assert_eq!(names.len(), FAMILIES.len() + 1, "{names:?}");
        assert_eq!(Program::new(5), Program::new(5));
    }
}
