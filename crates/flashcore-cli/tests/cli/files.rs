//! Tensors from and to files: what is read, what is written, that nothing is lost.

use crate::workplace::{Workplace, expect, npy, npy_file};

const INPUTS: &str = "run --q q.npy --k k.npy --v v.npy";

#[track_caller]
fn passes(place: &Workplace, args: &str) {
    expect(&place.run(args), 0, "");
}

/// The header and the numbers of an npy file of f32.
fn parse_npy(bytes: &[u8]) -> (String, Vec<f32>) {
    let len = usize::from(u16::from_le_bytes([bytes[8], bytes[9]]));
    let (header, data) = bytes[10..].split_at(len);
    let numbers = data.chunks_exact(4).map(|c| f32::from_le_bytes(c.try_into().unwrap())).collect();
    (String::from_utf8(header.to_vec()).unwrap(), numbers)
}

#[test]
fn results_are_written_in_the_shape_of_the_queries() {
    let place = Workplace::with_tensors();
    passes(&place, &format!("{INPUTS} --out o.npy --lse lse.npy --iters 1"));
    let (header, numbers) = parse_npy(&place.read("o.npy"));
    assert!(header.contains("'<f4'") && header.contains("(1, 2, 5, 4,)"), "{header}");
    assert_eq!(numbers.len(), 40);
    assert!(numbers.iter().all(|x| x.abs() <= 1.5), "averages of values: {numbers:?}");
    let (header, lse) = parse_npy(&place.read("lse.npy"));
    assert!(header.contains("(1, 2, 5,)") && lse.len() == 10, "{header}");
    assert_eq!(place.names(), ["k.npy", "lse.npy", "o.npy", "q.npy", "v.npy"], "no temporary files");
}

#[test]
fn arrays_without_a_batch_dimension() {
    let place = Workplace::with_tensors();
    passes(&place, &format!("{INPUTS} --out batched.npy --iters 1"));
    for (name, seq) in [("q.npy", 5), ("k.npy", 7), ("v.npy", 7)] {
        let whole = place.read(name);
        let text = format!("{{'descr': '<f4', 'fortran_order': False, 'shape': (2, {seq}, 4), }}\n");
        place.write(name, &npy_file(&text, &whole[whole.len() - 2 * seq * 4 * 4..]));
    }
    passes(&place, &format!("{INPUTS} --out plain.npy --iters 1"));
    let (batched, plain) = (parse_npy(&place.read("batched.npy")), parse_npy(&place.read("plain.npy")));
    assert!(plain.0.contains("(2, 5, 4,)"), "{}", plain.0);
    assert_eq!(batched.1, plain.1);
}

#[test]
fn a_seed_says_what_dropout_leaves_out_of_files() {
    let place = Workplace::with_tensors();
    let result = |name: &str, seed: &str| {
        let ended = place.run(&format!("{INPUTS} --out {name} --dropout 0.5 {seed} --json --iters 1"));
        (ended.json()["dropout_seed"].clone(), parse_npy(&place.read(name)).1)
    };
    let (seed, usual) = result("usual.npy", "");
    assert_eq!(seed, 0);
    assert_eq!(result("zero.npy", "--dropout-seed 0").1, usual);
    let (seed, other) = result("other.npy", "--dropout-seed 18446744073709551615");
    assert_eq!(seed, u64::MAX);
    assert_ne!(other, usual);
}

#[test]
fn every_element_type_goes_through_safetensors() {
    for (descr, element, dtype) in [("<f4", 4, "f32"), ("<f2", 2, "f16"), ("|V2", 2, "bf16")] {
        let place = Workplace::new();
        for (name, seq) in [("q.npy", 5), ("k.npy", 7), ("v.npy", 7)] {
            place.write(name, &npy(descr, "False", &[1, 2, seq, 4], element));
        }
        let ended = place.run(&format!("{INPUTS} --out o.safetensors --dtype {dtype} --json --iters 1"));
        assert_eq!(ended.json()["dtype"], dtype, "{}", ended.stderr);
        assert_eq!(ended.json()["wrote"][0], "o.safetensors");
        // The result is a good input, and its tensor is found by its name or as the only one.
        let again =
            "run --q o.safetensors#out --k o.safetensors --v o.safetensors --out p.safetensors#x --iters 1";
        passes(&place, again);
        let header = String::from_utf8_lossy(&place.read("p.safetensors")[8..]).into_owned();
        assert!(header.starts_with("{\"x\":"), "{header}");
    }
}

#[test]
fn force_replaces_and_only_force_does() {
    let place = Workplace::with_tensors();
    place.write("o.npy", b"precious");
    assert_eq!(place.run(&format!("{INPUTS} --out o.npy")).code, 2);
    assert_eq!(place.read("o.npy"), b"precious");
    passes(&place, &format!("{INPUTS} --out o.npy --force --iters 1"));
    assert_eq!(parse_npy(&place.read("o.npy")).1.len(), 40);
}
