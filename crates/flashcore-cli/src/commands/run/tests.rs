//! Wrong backends are found out, and their results reach no file.

use std::sync::atomic::{AtomicU32, Ordering::Relaxed};

use clap::Parser;
use flashcore::{Backend, BackendError, Ran};
use flashcore_core::{DataMut, HostCall};
use flashcore_cpu::Cpu;

use super::*;
use crate::cli::Style;

#[derive(Parser)]
struct Line {
    #[command(flatten)]
    flags: Flags,
}

fn request(args: &str) -> Request {
    let args = format!("run --iters 2 {args}");
    Request::parse(Line::parse_from(args.split_whitespace()).flags).unwrap()
}

/// Calls the CPU and then spoils its f32 output, knowing how often it was called.
struct Spoiled<F: Fn(&mut [f32], u32)> {
    spoil: F,
    calls: AtomicU32,
}

impl<F: Fn(&mut [f32], u32) + Send + Sync> Backend for Spoiled<F> {
    fn name(&self) -> &'static str {
        "spoiled"
    }

    fn forward(&self, call: &mut HostCall<'_>) -> Result<Ran, BackendError> {
        let ran = Cpu::new().forward(call)?;
        if let (DataMut::F32(out), _) = call.outputs() {
            (self.spoil)(out, self.calls.fetch_add(1, Relaxed));
        }
        Ok(ran)
    }
}

#[track_caller]
fn check(expected: Verdict, spoil: impl Fn(&mut [f32], u32) + Send + Sync + 'static) {
    let backend = Spoiled { spoil, calls: AtomicU32::new(0) };
    let output = Output::new(Style { quiet: true, ..Style::default() });
    let verdict = run(request("--shape 1x2x17x8 --dtype f32"), &[Arc::new(backend)], &output).unwrap();
    assert_eq!(verdict, expected);
}

#[test]
fn wrong_results_fail() {
    check(Verdict::Pass, |_, _| ());
    check(Verdict::Fail, |out, _| out[100] += 0.01);
    check(Verdict::Fail, |out, _| out.fill(0.0));
    check(Verdict::Fail, |out, _| out[3] = f32::NAN);
    // Right within tolerance, but not the same twice.
    check(Verdict::Fail, |out, call| out[0] = f32::from_bits(out[0].to_bits() ^ call));
}

#[test]
fn a_row_that_is_never_written_fails() {
    struct Idle;
    impl Backend for Idle {
        fn name(&self) -> &'static str {
            "idle"
        }

        fn forward(&self, _: &mut HostCall<'_>) -> Result<Ran, BackendError> {
            Ok(Ran { kernel: "none".to_owned() })
        }
    }
    for dtype in ["f16", "bf16", "f32"] {
        let request = request(&format!("--shape 1x1x4x8 --dtype {dtype}"));
        let output = Output::new(Style { quiet: true, ..Style::default() });
        assert_eq!(run(request, &[Arc::new(Idle)], &output).unwrap(), Verdict::Fail, "{dtype}");
    }
}

#[test]
fn a_wrong_result_reaches_no_file() {
    let folder = tempfile::tempdir().unwrap();
    let name = |file: &str| folder.path().join(file).to_str().unwrap().to_owned();
    let tensor = name("x.npy");
    let target =
        crate::files::Target::check(&tensor.parse().unwrap(), "x", flashcore::DType::F32, false).unwrap();
    let numbers: Vec<f32> = (0..64).map(|i| (i % 7) as f32).collect();
    target.save(&[1, 2, 4, 8], flashcore_core::Data::F32(&numbers)).unwrap();
    let args =
        format!("--q {tensor} --k {tensor} --v {tensor} --out {} --lse {}", name("o.npy"), name("l.npy"));
    let backend = Spoiled { spoil: |out: &mut [f32], _| out[0] = 1e3, calls: AtomicU32::new(0) };
    let output = Output::new(Style { quiet: true, ..Style::default() });
    assert_eq!(run(request(&args), &[Arc::new(backend)], &output).unwrap(), Verdict::Fail);
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1, "only the input is there");
}

/// What a launch with a fault, or without one, comes to.
fn simulated(body: &str) -> flashcore_sim::Outcome {
    let text =
        format!(".version 7.8\n.target sm_80\n.address_size 64\n.visible .entry k()\n{{ {body} ret; }}");
    let parsed = flashcore_ptx::parse::parse(&text).unwrap();
    let spec = flashcore_ptx::launch::LaunchSpec {
        entry: flashcore_ptx::ident::Ident::new("k").unwrap(),
        grid: [1; 3],
        block: [32, 1, 1],
        cluster: [1; 3],
        shared_bytes: 0,
        dependent: false,
        params: Vec::new(),
        workspace: Vec::new(),
    };
    let launch =
        flashcore_sim::Launch { module: &parsed.module, provenance: None, spec: &spec, buffers: vec![] };
    launch.run(&flashcore_sim::Options::new()).unwrap()
}

/// Results that are right do not excuse a finding, and no further run hides it.
#[test]
fn findings_of_the_simulator_fail_a_run() {
    let check = |body: &str, expected, runs| {
        let mut calls = 0;
        let launch = |call: &mut HostCall<'_>| {
            calls += 1;
            Cpu::new().forward(call).map(|_| Some(simulated(body)))
        };
        let output = Output::new(Style { quiet: true, ..Style::default() });
        let request = request("--shape 1x1x8x8");
        assert_eq!(launches(request, 2, "k".to_owned(), launch, &output).unwrap(), expected);
        assert_eq!(calls, runs);
    };
    check("", Verdict::Pass, 2);
    check(".reg .b32 %a; .reg .pred %p; setp.eq.u32 %p, %a, 1; @%p bra done; done:", Verdict::Fail, 1);
}
