//! Both parsers on good, damaged, hostile and arbitrary bytes; saving never loses a file.

use flashcore_core::{DType, Data};
use proptest::prelude::*;

use super::*;

const WANTED: Wanted<'static> = Wanted { tensor: None, usual: "q", dtype: None };

fn read(format: Format, bytes: &[u8]) -> Result<Header, FormatError> {
    read_header(&mut &bytes[..], format, bytes.len() as u64, WANTED)
}

fn npy_bytes(text: &str, data: usize) -> Vec<u8> {
    let mut bytes = b"\x93NUMPY\x01\x00".to_vec();
    bytes.extend((text.len() as u16).to_le_bytes());
    bytes.extend(text.bytes());
    bytes.resize(bytes.len() + data, 0);
    bytes
}

fn safetensors_bytes(json: &str, data: usize) -> Vec<u8> {
    let mut bytes = (json.len() as u64).to_le_bytes().to_vec();
    bytes.extend(json.bytes());
    bytes.resize(bytes.len() + data, 0);
    bytes
}

#[track_caller]
fn check_npy(text: &str, data: usize, expected: Result<(DType, &[usize]), &str>) {
    check(read(Format::Npy, &npy_bytes(text, data)), expected);
}

#[track_caller]
fn check_safetensors(json: &str, data: usize, expected: Result<(DType, &[usize]), &str>) {
    check(read(Format::Safetensors, &safetensors_bytes(json, data)), expected);
}

#[track_caller]
fn check(got: Result<Header, FormatError>, expected: Result<(DType, &[usize]), &str>) {
    match (got, expected) {
        (Ok(header), Ok((dtype, shape))) => assert_eq!((header.dtype, &header.shape[..]), (dtype, shape)),
        (Err(error), Err(words)) => assert!(error.to_string().contains(words), "{error} lacks `{words}`"),
        (got, expected) => panic!("{got:?} instead of {expected:?}"),
    }
}

#[test]
fn npy_headers_that_numpy_writes() {
    let f16 = "{'descr': '<f2', 'fortran_order': False, 'shape': (1, 2, 3, 4), }   \n";
    check_npy(f16, 48, Ok((DType::F16, &[1, 2, 3, 4])));
    check_npy("{'descr': '<f4', 'fortran_order': False, 'shape': (3,), }\n", 12, Ok((DType::F32, &[3])));
    check_npy("{'descr': '<f4', 'fortran_order': False, 'shape': (), }\n", 4, Ok((DType::F32, &[])));
    check_npy("{'shape':(0,7),'fortran_order':False,\"descr\":\"<f4\"}", 0, Ok((DType::F32, &[0, 7])));
    // One extent other than 1: both orders are the same.
    check_npy(
        "{'descr': '<f4', 'fortran_order': True, 'shape': (1, 5, 1), }",
        20,
        Ok((DType::F32, &[1, 5, 1])),
    );
}

#[test]
fn npy_headers_that_are_refused() {
    let with =
        |descr: &str, shape: &str| format!("{{'descr': {descr}, 'fortran_order': False, 'shape': {shape}}}");
    check_npy(&with("'<f8'", "(2,)"), 16, Err("convert to float16"));
    check_npy(&with("'>f4'", "(2,)"), 8, Err("newbyteorder"));
    check_npy(&with("'|V2'", "(2,)"), 4, Err("--dtype bf16"));
    check_npy(&with("[('x', '<f4')]", "(2,)"), 8, Err("record array"));
    check_npy(
        &with("'<f4'", "(1152921504606846976,)"),
        8,
        Err("needs 4611686018427387904 bytes of data but the file holds 8;"),
    );
    check_npy(&with("'<f4'", "(4294967296, 4294967296)"), 8, Err("more elements"));
    check_npy(&with("'<f4'", "(0, 4294967296, 4294967296)"), 0, Err("more elements"));
    check_npy(&with("'<f4'", "(72057594037927936,)"), 8, Err("damaged"));
    check_npy(&with("'<f4'", "(2,)"), 7, Err("needs 8 bytes of data but the file holds 7;"));
    check_npy(&with("'<f4'", "(2,)"), 9, Err("the file holds 9;"));
    for shape in ["(-2,)", "(2 3)", "(2.5,)", "{}", "2", "(2,", "(18446744073709551616,)"] {
        check_npy(&with("'<f4'", shape), 8, Err("not what numpy writes"));
    }
    for text in [
        "{'descr': '<f4', 'shape': (2,)}",
        "{'descr': '<f4', 'descr': '<f4'}",
        "{'descr': '<f4', 'more': 1}",
        "{'descr': '<f4\n'",
        "{'descr' '<f4'}",
        "{'descr': '<f4', 'fortran_order': 1, 'shape': (2,)}",
        &(with("'<f4'", "(2,)") + "x"),
    ] {
        check_npy(text, 8, Err("not what numpy writes"));
    }
    check_npy("{'descr': '<f4', 'fortran_order': True, 'shape': (2, 3)}", 24, Err("ascontiguousarray"));
}

#[test]
fn npy_files_that_are_no_npy_files() {
    let check_bytes = |bytes: &[u8], words| check(read(Format::Npy, bytes), Err(words));
    check_bytes(b"", "numpy.save");
    check_bytes(b"\x93", "numpy.save");
    check_bytes(b"\x93NUMPY", "cut short");
    check_bytes(b"\x93NUMPY\x09\x00", "version 9.0");
    check_bytes(b"\x93NUMPY\x01\x00\x10", "cut short");
    check_bytes(b"\x93NUMPY\x01\x00\x10\x00{", "cut short");
    check_bytes(b"\x93NUMPY\x02\x00\xff\xff\xff\xff{", "more than the 10000 allowed");
}

#[test]
fn bf16_in_npy_must_be_named() {
    let text = "{'descr': '<V2', 'fortran_order': False, 'shape': (4,), }";
    let bytes = npy_bytes(text, 8);
    let wanted = Wanted { dtype: Some(DType::BF16), ..WANTED };
    let header = read_header(&mut &bytes[..], Format::Npy, bytes.len() as u64, wanted);
    check(header, Ok((DType::BF16, &[4])));
}

#[test]
fn safetensors_headers() {
    let one = r#"{"x":{"dtype":"BF16","shape":[2,2],"data_offsets":[0,8]}}"#;
    check_safetensors(one, 8, Ok((DType::BF16, &[2, 2])));
    let two = r#"{"k":{"dtype":"F16","shape":[1],"data_offsets":[0,2]},"q":{"dtype":"F32","shape":[1],"data_offsets":[2,6]}}"#;
    check_safetensors(two, 6, Ok((DType::F32, &[1])));
    let other = two.replace("\"q\"", "\"w\"");
    check_safetensors(&other, 6, Err("no tensor is called `q`; the file has k, w"));
    check_safetensors(one, 7, Err("describes"));
    check_safetensors(one, 9, Err("describes"));
    check_safetensors(&one.replace("BF16", "F64"), 8, Err("safetensors.save_file"));
    check_safetensors(&one.replace("BF16", "I16"), 8, Err("convert"));
    check_safetensors("{}", 0, Err("the file has none"));
    check_safetensors("[1]", 0, Err("not valid"));
    let huge =
        r#"{"q":{"dtype":"F32","shape":[1152921504606846976],"data_offsets":[0,4611686018427387904]}}"#;
    check_safetensors(huge, 4, Err("not valid"));
    let overflow = r#"{"q":{"dtype":"F32","shape":[4294967296,4294967296],"data_offsets":[0,0]}}"#;
    check_safetensors(overflow, 0, Err("not valid"));
    check(read(Format::Safetensors, b"1"), Err("cut short"));
    check(read(Format::Safetensors, &u64::MAX.to_le_bytes()), Err("more than"));
    check(read(Format::Safetensors, &9u64.to_le_bytes()), Err("cut short"));
}

#[test]
fn what_is_saved_is_read_back() {
    let folder = tempfile::tempdir().unwrap();
    let values = [1.0f32, -2.5, 3.25, 0.0, 7.0, f32::MIN_POSITIVE];
    for name in ["x.npy", "x.safetensors", "y.safetensors#other"] {
        let path: TensorPath = folder.path().join(name).to_str().unwrap().parse().unwrap();
        let target = Target::check(&path, "out", DType::F32, false).unwrap();
        target.save(&[1, 2, 3, 1], Data::F32(&values)).unwrap();
        let mut file = ArrayFile::open(&path, "out", None).unwrap();
        assert_eq!(file.dims().unwrap(), Dims::new(1, 2, 3, 1));
        assert_eq!(file.read().unwrap(), Buffer::F32(values.to_vec()));
    }
}

#[test]
fn an_existing_file_is_kept() {
    let folder = tempfile::tempdir().unwrap();
    let place = folder.path().join("o.npy");
    let path: TensorPath = place.to_str().unwrap().parse().unwrap();
    let target = Target::check(&path, "out", DType::F32, false).unwrap();
    // Somebody else writes the file while attention is computed.
    std::fs::write(&place, "precious").unwrap();
    assert!(matches!(target.save(&[0], Data::F32(&[])), Err(FileError::Exists { .. })));
    assert!(matches!(Target::check(&path, "out", DType::F32, false), Err(FileError::Exists { .. })));
    assert_eq!(std::fs::read(&place).unwrap(), b"precious");
    Target::check(&path, "out", DType::F32, true).unwrap().save(&[0], Data::F32(&[])).unwrap();
    assert!(std::fs::read(&place).unwrap().starts_with(b"\x93NUMPY"));
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1, "no temporary file is left");
}

#[test]
fn names_tell_the_format() {
    let parsed: TensorPath = "a#b/x.safetensors#layer.0.q".parse().unwrap();
    assert_eq!((parsed.format, parsed.tensor.as_deref()), (Format::Safetensors, Some("layer.0.q")));
    assert_eq!("dir#1/x.npy".parse::<TensorPath>().unwrap().path, PathBuf::from("dir#1/x.npy"));
    for bad in ["", "x", "x.npz", "x.pt", ".npy#x"] {
        assert!(bad.parse::<TensorPath>().is_err(), "{bad}");
    }
}

/// A header that was accepted tells the truth about the bytes it came from.
fn accepted_is_consistent(format: Format, bytes: &[u8]) {
    if let Ok(header) = read(format, bytes) {
        let size = header.len * header.dtype.bytes();
        assert_eq!(header.shape.iter().product::<usize>(), header.len);
        assert!(header.start + size as u64 <= bytes.len() as u64, "{header:?} reaches beyond the file");
    }
}

fn valid_files() -> [(Format, Vec<u8>); 2] {
    let npy = npy::header(DType::F16, &[1, 2, 3, 4]).unwrap();
    let safetensors = safetensors::header("q", DType::BF16, &[1, 2, 3, 4]).unwrap();
    [(Format::Npy, npy), (Format::Safetensors, safetensors)].map(|(format, mut bytes)| {
        bytes.resize(bytes.len() + 48, 7);
        (format, bytes)
    })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2000, ..ProptestConfig::default() })]

    #[test]
    fn arbitrary_bytes_are_refused_or_consistent(bytes in prop::collection::vec(any::<u8>(), 0..400)) {
        for format in [Format::Npy, Format::Safetensors] {
            accepted_is_consistent(format, &bytes);
        }
    }

    #[test]
    fn arbitrary_headers_are_refused_or_consistent(text in "[{}()\\[\\]'\",:<>|a-zA-Z0-9 _#]{0,120}", data in 0usize..64) {
        accepted_is_consistent(Format::Npy, &npy_bytes(&text, data));
        accepted_is_consistent(Format::Safetensors, &safetensors_bytes(&text, data));
    }

    #[test]
    fn damaged_files_are_refused_or_consistent(
        edits in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..6),
        keep in any::<prop::sample::Index>(),
        cut in any::<bool>(),
    ) {
        for (format, mut bytes) in valid_files() {
            for (place, value) in &edits {
                let at = place.index(bytes.len());
                bytes[at] = *value;
            }
            if cut {
                bytes.truncate(keep.index(bytes.len()));
            }
            accepted_is_consistent(format, &bytes);
        }
    }

    #[test]
    fn extents_of_any_size_are_refused_or_consistent(shape in prop::collection::vec(any::<u64>(), 0..6), data in 0usize..64) {
        let tuple: String = shape.iter().map(|extent| format!("{extent}, ")).collect();
        let text = format!("{{'descr': '<f4', 'fortran_order': False, 'shape': ({tuple})}}");
        accepted_is_consistent(Format::Npy, &npy_bytes(&text, data));
        let json = format!(r#"{{"q":{{"dtype":"F32","shape":{shape:?},"data_offsets":[0,{data}]}}}}"#);
        accepted_is_consistent(Format::Safetensors, &safetensors_bytes(&json, data));
    }
}
