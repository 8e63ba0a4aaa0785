//! Tables of measured tiles: what they hold, whom they serve, and what is refused.

use flashcore_core::{DType, Dims, Layout, Mask, Problem, Sequences, Spec};
use flashcore_kernels::{
    CpuTile, Gpu, KernelConfig, Misfit, Tile, covering_set,
    forward_sm90::Order,
    plan, plan_by, plan_tile,
    tuned::{Class, Evidence, Row, Span, Subject, Table, TableError},
};
use serde_json::{Value, json};

fn spec([heads, seq, dim]: [usize; 3]) -> Spec {
    let layout = Layout::bshd(Dims::new(2, heads, seq, dim)).unwrap();
    Spec { mask: Mask::CAUSAL, ..Spec::new(DType::BF16, layout, layout, layout) }
}

fn problem(extents: [usize; 3]) -> Problem {
    spec(extents).parse().unwrap()
}

fn evidence() -> Evidence {
    Evidence {
        problem: "2x16x4096x128 bf16 causal".to_owned(),
        median_us: 90.0,
        interval_us: [89.0, 91.0],
        plan_us: 100.0,
        ratio: [0.89, 0.9, 0.91],
        tried: 40,
        device: "NVIDIA H200".to_owned(),
        driver: Some("580.0".to_owned()),
        flashcore: "0.1.0".to_owned(),
        commit: None,
        created: "2026-01-01T00:00:00Z".to_owned(),
    }
}

/// A tile that no rule chooses for head dim 128.
fn other_tile(problem: &Problem) -> Tile {
    let KernelConfig::Sm90(cfg) = *plan(problem, &Gpu::HOPPER, 256).unwrap().kernel() else {
        panic!("a Hopper kernel")
    };
    Tile::Sm90(flashcore_kernels::forward_sm90::Shape { tile_n: 96, order: Order::Static, ..cfg.shape })
}

fn class(problem: &Problem) -> Class {
    Subject::new("sm_90", Gpu::HOPPER.sms, problem).unwrap().class()
}

fn table() -> Table {
    let problem = problem([16, 4096, 128]);
    let mut table = Table::default();
    table.insert(Row { class: class(&problem), tile: other_tile(&problem), evidence: evidence() }).unwrap();
    table
}

#[test]
fn the_shipped_table_is_sound() {
    let text = include_bytes!("../src/plan/tuned.json");
    let shipped = Table::parse(text).unwrap();
    assert_eq!(&shipped, Table::shipped());
    assert_eq!(shipped.to_json().unwrap().as_bytes(), text, "rows are kept as `to_json` writes them");
}

#[test]
fn tables_survive_the_way_through_json() {
    let table = table();
    let text = table.to_json().unwrap();
    assert_eq!(Table::parse(text.as_bytes()).unwrap(), table);
    for tile in [
        r#"{"cpu":{"keys":128,"chunk":4}}"#,
        r#"{"forward_sm80":{"warps":4,"blocks":2,"tile_n":64,"step_n":32,"stages":2,"ctas_per_sm":2,"q_in_registers":false}}"#,
        r#"{"forward_sm90":{"consumers":2,"tile_n":128,"stages":2,"q_stages":1,"staging":{"cols":64,"places":2},"registers":[24,240],"order":"static","ctas_per_sm":1,"turn":2}}"#,
        r#"{"forward_sm90":{"consumers":1,"tile_n":64,"stages":4,"q_stages":1,"staging":{"cols":64,"places":1},"registers":null,"order":{"single":{"parts":2}},"ctas_per_sm":2,"turn":1}}"#,
    ] {
        let read: Tile = serde_json::from_str(tile).unwrap();
        assert_eq!(serde_json::to_string(&read).unwrap(), tile);
    }
}

#[test]
fn spans_tile_the_numbers_with_usual_sizes_in_the_middle() {
    let mut next = 1;
    while next < 1 << 20 {
        let span = Span::around(next);
        assert_eq!(span.least(), next, "{span:?}");
        assert_eq!((Span::around(span.most()), span.holds(next)), (span, true));
        next = span.most() + 1;
    }
    assert_eq!(Span::around(4096), Span::new(2897, 5792));
    assert_eq!(Span::around(0), Span::new(1, 1));
}

#[test]
fn a_row_serves_its_class_and_nobody_else() {
    let table = table();
    let row = |problem: &Problem, gpu: &Gpu| plan_by(problem, gpu, 256, &table).unwrap().row().is_some();
    let [h, s, d] = [16, 4096, 128];
    for (extents, served) in [
        ([h, s, d], true),
        ([h, 3000, d], true),
        ([h, 5000, d], true),
        ([h, 2800, d], false),
        ([h, 6000, d], false),
        ([h, s, 64], false),
        ([2 * h, s, d], false),
    ] {
        assert_eq!(row(&problem(extents), &Gpu::HOPPER), served, "{extents:?}");
    }
    let small = Gpu { sms: 114, ..Gpu::HOPPER };
    assert!(!row(&problem([h, s, d]), &small) && !row(&problem([h, s, d]), &Gpu::AMPERE));
    let plain = spec([h, s, d]);
    for other in [
        Spec { batch_invariant: true, ..plain.clone() },
        Spec { mask: Mask::NONE, ..plain.clone() },
        Spec { softcap: Some(20.0), ..plain.clone() },
        Spec { sinks: Some(DType::F32), ..plain.clone() },
        Spec { sequences: Sequences::Used { q: false, kv: true }, ..plain.clone() },
        Spec { dtype: DType::F16, ..plain },
    ] {
        assert!(!row(&other.parse().unwrap(), &Gpu::HOPPER));
    }
    let chosen = plan_by(&problem([h, s, d]), &Gpu::HOPPER, 256, &table).unwrap();
    assert!(chosen.kernel().name().contains("n96"), "{chosen}");
    assert!(
        chosen.explain().contains("row 0 of the table") && chosen.explain().contains("90.0 us"),
        "{chosen}"
    );
}

#[test]
fn a_row_that_does_not_fit_leaves_the_choice_to_the_rules() {
    let problem = problem([16, 4096, 128]);
    let Tile::Sm90(shape) = other_tile(&problem) else { unreachable!() };
    let heavy = Tile::Sm90(flashcore_kernels::forward_sm90::Shape { tile_n: 256, stages: 8, ..shape });
    let rules = plan_by(&problem, &Gpu::HOPPER, 256, &Table::default()).unwrap();
    for tile in [heavy, Tile::Cpu(CpuTile { keys: 128, chunk: 4 })] {
        let mut table = Table::default();
        table.insert(Row { class: class(&problem), tile, evidence: evidence() }).unwrap();
        assert_eq!(plan_by(&problem, &Gpu::HOPPER, 256, &table).unwrap(), rules, "{tile:?}");
    }
    // Addresses that tensor copies cannot take.
    let narrow = plan_by(&problem, &Gpu::HOPPER, 8, &table()).unwrap();
    assert!(narrow.row().is_none() && narrow.kernel().name().starts_with("fc_forward_sm_90_"), "{narrow}");
}

#[test]
fn every_shipped_tile_passes_the_gate() {
    for member in covering_set().unwrap() {
        let chosen = member.plan().unwrap();
        let again = plan_tile(&member.problem, &member.gpu, 16, chosen.kernel().tile());
        assert_eq!(again.as_ref().map(|plan| *plan.kernel()), Ok(*chosen.kernel()), "{chosen}");
        assert_eq!(again.unwrap().check_build(&member.problem), Ok(()));
    }
}

#[test]
fn impossible_tiles_are_refused_with_the_reason() {
    let problem = problem([16, 4096, 128]);
    let Tile::Sm90(good) = other_tile(&problem) else { unreachable!() };
    let refusal = |change: &dyn Fn(&mut flashcore_kernels::forward_sm90::Shape)| {
        let mut shape = good;
        change(&mut shape);
        plan_tile(&problem, &Gpu::HOPPER, 256, Tile::Sm90(shape)).unwrap_err()
    };
    let value = |misfit: Misfit| matches!(misfit, Misfit::Value { .. });
    assert!(value(refusal(&|shape| shape.consumers = 0)));
    assert!(value(refusal(&|shape| shape.consumers = u32::MAX)));
    assert!(value(refusal(&|shape| shape.tile_n = 100)));
    assert!(value(refusal(&|shape| shape.stages = 1)));
    assert!(value(refusal(&|shape| shape.staging.cols = 192)), "wider than the output");
    assert!(value(refusal(&|shape| shape.staging.places = 0)));
    assert!(value(refusal(&|shape| shape.ctas_per_sm = 0)));
    assert!(value(refusal(&|shape| shape.order = Order::Single { parts: 3 })));
    assert!(matches!(refusal(&|shape| shape.tile_n = 256), Misfit::Registers { .. }));
    assert!(matches!(refusal(&|shape| shape.stages = 8), Misfit::SharedMemory { .. }));
    let text = refusal(&|shape| shape.stages = 8).to_string();
    assert!(text.contains("bytes of shared memory"), "{text}");
}

/// The table with one value replaced.
fn with(path: &str, value: Value) -> Vec<u8> {
    let mut table: Value = serde_json::from_str(&table().to_json().unwrap()).unwrap();
    *table.pointer_mut(path).unwrap_or_else(|| panic!("no {path}")) = value;
    table.to_string().into_bytes()
}

#[test]
fn hostile_tables_are_refused() {
    let tile = |field: &str| format!("/rows/0/tile/forward_sm90/{field}");
    let cases: Vec<(&str, Vec<u8>)> = vec![
        ("damaged", b"".to_vec()),
        ("damaged", b"[]".to_vec()),
        ("damaged", "[".repeat(100_000).into_bytes()),
        ("damaged", format!("{{\"schema\":{}", "[".repeat(5000)).into_bytes()),
        ("larger than", vec![b' '; 2 << 20]),
        ("not a table", with("/schema", json!("flashcore-bench"))),
        ("version 1", with("/version", json!(1))),
        ("damaged", with("/version", json!(-1))),
        ("damaged", with("/rows", json!([{ "class": 1 }]))),
        ("damaged", with("/rows/0/evidence", json!({}))),
        ("rows are more", with("/rows", many_rows())),
        ("tile_n", with(&tile("tile_n"), json!(u32::MAX))),
        ("damaged", with(&tile("tile_n"), json!(1e30))),
        ("damaged", with(&tile("order"), json!("random"))),
        ("parts", with(&tile("order"), json!({ "single": { "parts": 7 } }))),
        ("damaged", with("/rows/0/tile", json!({ "run": "rm" }))),
        ("damaged", with("/rows/0/tile/forward_sm90", json!({ "tile_n": 64 }))),
        ("sizes", with("/rows/0/class/queries", json!([10, 5]))),
        ("sizes", with("/rows/0/class/tiles", json!([0, u64::MAX]))),
        ("head dims", with("/rows/0/class/dim_qk", json!(0))),
        ("f64", with("/rows/0/class/dtype", json!("f64"))),
        ("GPU kernels take no f32", with("/rows/0/class/dtype", json!("f32"))),
        ("control characters", with("/rows/0/evidence/device", json!("\u{1b}[31mH200"))),
        ("control characters", with("/rows/0/evidence/commit", json!("x".repeat(1000)))),
        ("not a time", with("/rows/0/evidence/median_us", json!(-1))),
        ("not a time", with("/rows/0/evidence/ratio/2", json!(0))),
    ];
    for (words, bytes) in cases {
        let error = Table::parse(&bytes).unwrap_err().to_string();
        let shown = String::from_utf8_lossy(&bytes[..bytes.len().min(200)]).into_owned();
        assert!(error.contains(words), "`{error}` instead of `{words}` for {shown}");
    }
    let extra = String::from_utf8(with("/version", json!(2))).unwrap().replacen('{', "{\"code\":1,", 1);
    assert!(matches!(Table::parse(extra.as_bytes()), Err(TableError::Json(_))), "unknown fields");
    assert!(matches!(Table::load("/no/such/table".as_ref()), Err(TableError::Io(_))));
}

fn many_rows() -> Value {
    let row: Value = serde_json::from_str(&table().to_json().unwrap()).unwrap();
    let row = json!({ "class": row["rows"][0]["class"], "tile": { "cpu": { "keys": 128, "chunk": 4 } },
        "evidence": row["rows"][0]["evidence"] });
    json!(vec![row; 1001])
}
