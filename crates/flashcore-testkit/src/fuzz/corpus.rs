//! Many random programs with a GPU's results in one compressed text: bodies, shared inputs, outputs.
//!
//! The text is self-contained: changes to the generator change no program of a corpus.

use std::io::{self, Read, Write};

use flate2::{Compression, read::GzDecoder, write::GzEncoder};

use super::{INPUT_SETS, Program, THREADS, inputs};

/// Begins a line that says what the lines behind it are.
const MARK: &str = "= ";

/// Programs, each with the words that came out, as a compressed text.
pub fn write(who: &str, programs: &[(Program, Vec<u32>)]) -> io::Result<Vec<u8>> {
    let mut text = format!("{MARK}answers of {who}\n");
    for set in 0..INPUT_SETS {
        text += &format!("{MARK}inputs {set}\n{}", rows(&inputs(set)));
    }
    for (program, answers) in programs {
        let Program { name, body, set, .. } = program;
        text += &format!("{MARK}program {name} of {set}\n{body}{MARK}result\n{}", rows(answers));
    }
    let mut packed = GzEncoder::new(Vec::new(), Compression::best());
    packed.write_all(text.as_bytes())?;
    packed.finish()
}

fn rows(words: &[u32]) -> String {
    let row = |row: &[u32]| row.iter().map(|word| format!("{word:x} ")).collect::<String>() + "\n";
    words.chunks(THREADS).map(row).collect()
}

/// The programs of a compressed text as tests: name and text of each.
pub fn read(packed: &[u8]) -> io::Result<Vec<(String, String)>> {
    let mut text = String::new();
    GzDecoder::new(packed).read_to_string(&mut text)?;
    let wrong = |what: &str| io::Error::new(io::ErrorKind::InvalidData, what.to_owned());
    let mut who = String::new();
    let (mut sets, mut tests, mut open) = (Vec::new(), Vec::new(), None);
    for section in text.split(MARK).filter(|section| !section.is_empty()) {
        let (head, lines) = section.split_once('\n').ok_or_else(|| wrong("a section without lines"))?;
        match head.split(' ').collect::<Vec<_>>().as_slice() {
            ["answers", "of", name @ ..] => who = name.join(" "),
            ["inputs", _] => sets.push(words(lines).ok_or_else(|| wrong("bad inputs"))?),
            ["program", name, "of", set] => open = Some(((*name).to_owned(), *set, lines)),
            ["result"] => {
                let (name, set, body) = open.take().ok_or_else(|| wrong("a result without a program"))?;
                let set = set.parse::<usize>().ok().and_then(|set| sets.get(set));
                let inputs: &Vec<u32> = set.ok_or_else(|| wrong("a program without inputs"))?;
                let answers = words(lines).ok_or_else(|| wrong("bad answers"))?;
                let program = Program::framed(name.clone(), body.to_owned(), 0, inputs.clone());
                tests.push((name, program.with_answers(&who, &answers)));
            }
            _ => return Err(wrong(head)),
        }
    }
    Ok(tests)
}

fn words(lines: &str) -> Option<Vec<u32>> {
    lines.split_whitespace().map(|word| u32::from_str_radix(word, 16).ok()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_is_read() {
        let programs: Vec<_> = (0..40).map(|seed| (Program::new(seed), vec![seed as u32; 256])).collect();
        let tests = read(&write("a GPU", &programs).unwrap()).unwrap();
        for ((program, answers), (name, text)) in programs.iter().zip(&tests) {
            assert_eq!((&program.name, &program.with_answers("a GPU", answers)), (name, text));
        }
        assert_eq!(programs.len(), tests.len());
        assert!(read(b"not gzip").is_err());
    }
}
