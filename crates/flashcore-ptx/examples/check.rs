//! Reads PTX files, prints what is wrong with them, and checks that printing and parsing agree.
//! `cargo run -p flashcore-ptx --example check -- FILE.ptx…`

use flashcore_ptx::{
    parse::{Parsed, parse, parse_file},
    verify::verify,
};

fn check(path: &str) -> Result<Parsed, String> {
    let text = std::fs::read_to_string(path).map_err(|e| format!("{path}: {e}"))?;
    let parsed = parse_file(path, &text).map_err(|e| format!("{path}:{e}"))?;
    let again = parse(&parsed.module.to_string()).map_err(|e| format!("{path}: printed text: {e}"))?;
    if again.module == parsed.module { Ok(parsed) } else { Err(format!("{path}: printing lost something")) }
}

fn main() {
    for path in std::env::args().skip(1) {
        match check(&path) {
            Ok(parsed) => {
                let findings = verify(&parsed.module, &parsed.provenance);
                println!("{path}: {} kernels, {} findings", parsed.module.kernels.len(), findings.len());
                findings.iter().for_each(|finding| println!("{finding}"));
            }
            Err(error) => println!("{error}"),
        }
    }
}
