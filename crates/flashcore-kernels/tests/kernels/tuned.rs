//! Tables of measured tiles: what they hold, whom they serve, and what is refused.

use flashcore_core::{DType, Dims, Layout, Mask, Problem, Sequences, Spec};
use flashcore_kernels::{
    Gpu, KernelConfig, Misfit, Plan, Tile, covering_set,
    forward_sm90::{Order, Shape},
    plan, plan_by, plan_tile,
    tuned::{Row, Table, TableError, key},
};
use serde_json::{Value, json};

fn spec([heads, seq, dim]: [usize; 3]) -> Spec {
    let layout = Layout::bshd(Dims::new(2, heads, seq, dim)).unwrap();
    Spec { mask: Mask::CAUSAL, ..Spec::new(DType::BF16, layout, layout, layout) }
}

fn problem() -> Problem {
    spec([16, 4096, 128]).parse().unwrap()
}

/// A shape that no rule chooses for head dim 128.
fn other_shape() -> Shape {
    let KernelConfig::Sm90(cfg) = *plan(&problem(), &Gpu::HOPPER, 256).unwrap().kernel() else {
        panic!("a Hopper kernel")
    };
    Shape { tile_n: 96, order: Order::Static, ..cfg.shape }
}

/// A table with that one row for [`problem`].
fn table(shape: Shape) -> Table {
    let row = Row { tile: Tile::Sm90(shape), evidence: "90.0 us instead of 100.0 us on an H200".to_owned() };
    let mut table = Table::default();
    table.insert(key(&problem(), &Gpu::HOPPER).unwrap(), row).unwrap();
    table
}

fn planned(problem: &Problem, gpu: &Gpu, alignment: u64, shape: Shape) -> Plan {
    plan_by(problem, gpu, alignment, &table(shape)).unwrap()
}

#[test]
fn tables_survive_the_way_through_json() {
    let table = table(other_shape());
    assert_eq!(Table::parse(table.to_json().unwrap().as_bytes()).unwrap(), table);
    for tile in [
        r#"{"forward_sm80":{"warps":4,"blocks":2,"tile_n":64,"step_n":32,"stages":2,"ctas_per_sm":2,"q_in_registers":false}}"#,
        r#"{"forward_sm90":{"consumers":2,"tile_n":128,"stages":2,"q_stages":1,"staging":{"cols":64,"places":2},"registers":[24,240],"order":"static","ctas_per_sm":1,"turn":2}}"#,
        r#"{"forward_sm90":{"consumers":1,"tile_n":64,"stages":4,"q_stages":1,"staging":{"cols":64,"places":1},"registers":null,"order":{"single":{"parts":2}},"ctas_per_sm":2,"turn":1}}"#,
    ] {
        let read: Tile = serde_json::from_str(tile).unwrap();
        assert_eq!(serde_json::to_string(&read).unwrap(), tile);
    }
}

#[test]
fn a_row_serves_its_problem_and_no_other() {
    let chosen = planned(&problem(), &Gpu::HOPPER, 256, other_shape());
    assert!(chosen.kernel().name().contains("n96") && chosen.explain().contains("90.0 us"), "{chosen}");
    let served = |problem: &Problem, gpu: &Gpu| planned(problem, gpu, 256, other_shape()).row().is_some();
    let plain = spec([16, 4096, 128]);
    let layout = |seq| Layout::bshd(Dims::new(2, 16, seq, 128)).unwrap();
    for other in [
        spec([16, 4097, 128]),
        spec([16, 4096, 64]),
        spec([32, 4096, 128]),
        Spec { k: layout(64), v: layout(64), ..plain.clone() },
        Spec { batch_invariant: true, ..plain.clone() },
        Spec { mask: Mask::NONE, ..plain.clone() },
        Spec { softcap: Some(20.0), ..plain.clone() },
        Spec { sinks: Some(DType::F32), ..plain.clone() },
        Spec { sequences: Sequences::Used { q: false, kv: true }, ..plain.clone() },
        Spec { dtype: DType::F16, ..plain },
    ] {
        assert!(!served(&other.clone().parse().unwrap(), &Gpu::HOPPER), "{other:?}");
    }
    let small = Gpu { sms: 114, ..Gpu::HOPPER };
    assert!(!served(&problem(), &small) && !served(&problem(), &Gpu::AMPERE));
}

#[test]
fn a_row_that_does_not_fit_leaves_the_choice_to_the_rules() {
    let heavy = Shape { tile_n: 256, stages: 8, ..other_shape() };
    let rules = plan(&problem(), &Gpu::HOPPER, 256).unwrap();
    assert_eq!(planned(&problem(), &Gpu::HOPPER, 256, heavy), rules);
    // Addresses that tensor copies cannot take.
    let narrow = planned(&problem(), &Gpu::HOPPER, 8, other_shape());
    assert!(narrow.row().is_none() && narrow.kernel().name().starts_with("fc_forward_sm_90_"), "{narrow}");
}

#[test]
fn every_tile_of_the_rules_passes_the_gate() {
    for member in covering_set().unwrap() {
        let chosen = member.plan().unwrap();
        let again = plan_tile(&member.problem, &member.gpu, 16, chosen.kernel().tile());
        // One tile computes everything, also where a plan lets two kernels share a batch.
        assert_eq!(again.as_ref().map(|plan| plan.kernel().tile()), Ok(chosen.kernel().tile()), "{chosen}");
        assert_eq!(again.unwrap().check_build(&member.problem), Ok(()));
    }
}

#[test]
fn impossible_tiles_are_refused_with_the_reason() {
    let refusal = |change: &dyn Fn(&mut Shape)| {
        let mut shape = other_shape();
        change(&mut shape);
        plan_tile(&problem(), &Gpu::HOPPER, 256, Tile::Sm90(shape)).unwrap_err()
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

/// The table with one value of its row replaced.
fn with(field: &str, value: Value) -> Vec<u8> {
    let mut table: Value = serde_json::from_str(&table(other_shape()).to_json().unwrap()).unwrap();
    let row = table["rows"].as_object_mut().unwrap().values_mut().next().unwrap();
    *row.pointer_mut(field).unwrap_or_else(|| panic!("no {field}")) = value;
    table.to_string().into_bytes()
}

#[test]
fn hostile_tables_are_refused() {
    let tile = |field: &str, value| with(&format!("/tile/forward_sm90/{field}"), value);
    let row = json!({ "tile": { "forward_sm90": other_shape() }, "evidence": "" });
    let cases: Vec<(&str, Vec<u8>)> = vec![
        ("damaged", b"".to_vec()),
        ("damaged", b"{}".to_vec()),
        ("damaged", "[".repeat(100_000).into_bytes()),
        ("damaged", format!("{{\"format\":{}", "[".repeat(5000)).into_bytes()),
        ("damaged", br#"{"format":"flashcore-table-3","rows":{},"code":1}"#.to_vec()),
        ("larger than", vec![b' '; 2 << 20]),
        ("not a table", br#"{"format":"flashcore-table-9","rows":{}}"#.to_vec()),
        ("damaged", with("/tile", json!({ "run": "rm" }))),
        ("damaged", with("/tile/forward_sm90", json!({ "tile_n": 64 }))),
        ("damaged", tile("tile_n", json!(1e30))),
        ("damaged", tile("order", json!("random"))),
        ("tile_n", tile("tile_n", json!(u32::MAX))),
        ("parts", tile("order", json!({ "single": { "parts": 7 } }))),
        ("control characters", with("/evidence", json!("\u{1b}[31mH200"))),
        ("too long", with("/evidence", json!("x".repeat(1000)))),
        (
            "too long",
            json!({ "format": "flashcore-table-3", "rows": { "x".repeat(1000): row } })
                .to_string()
                .into_bytes(),
        ),
    ];
    for (words, bytes) in cases {
        let error = Table::parse(&bytes).unwrap_err().to_string();
        let shown = String::from_utf8_lossy(&bytes[..bytes.len().min(200)]).into_owned();
        assert!(error.contains(words) && error.len() < 300, "`{error}` instead of `{words}` for {shown}");
    }
    assert!(matches!(Table::load("/no/such/table".as_ref()), Err(TableError::Io(_))));
}
