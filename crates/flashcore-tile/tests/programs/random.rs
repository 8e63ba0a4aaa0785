//! Random programs are accepted, read back from their text as the same module, and are built the same twice.

use flashcore_ptx::{ident::Ident, parse::parse, target::Target};
use flashcore_tile::{Builder, Cmp, F32, Params, Program, Reg, S32, U32, U64};
use proptest::prelude::*;

/// One step of a random kernel; numbers choose among the values at hand.
#[derive(Clone, Debug)]
enum Step {
    Integer(u8, usize, usize),
    Constant(u32),
    Float(u8, usize, usize),
    Wide(usize, i32),
    Signed(usize, i32),
    Branch(usize, u32, Vec<Step>),
    Loop(u32, Vec<Step>),
    Predicated(usize, f32, Vec<Step>),
    Exchange(usize),
}

/// The values that a random kernel may use.
#[derive(Clone)]
struct Values {
    integers: Vec<Reg<U32>>,
    floats: Vec<Reg<F32>>,
    memory: Reg<U64>,
    /// Whether all lanes are here, as exchange among them needs.
    together: bool,
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let pick = 0usize..64;
    let leaf = prop_oneof![
        (any::<u8>(), pick.clone(), pick.clone()).prop_map(|(op, x, y)| Step::Integer(op, x, y)),
        any::<u32>().prop_map(Step::Constant),
        (any::<u8>(), pick.clone(), pick.clone()).prop_map(|(op, x, y)| Step::Float(op, x, y)),
        (pick.clone(), -64i32..64).prop_map(|(x, offset)| Step::Wide(x, 4 * offset)),
        (pick.clone(), any::<i32>()).prop_map(|(x, y)| Step::Signed(x, y)),
        pick.clone().prop_map(Step::Exchange),
    ];
    let step = leaf.prop_recursive(3, 40, 6, move |inner| {
        let body = prop::collection::vec(inner, 0..6);
        prop_oneof![
            (0usize..64, any::<u32>(), body.clone()).prop_map(|(x, y, body)| Step::Branch(x, y, body)),
            (1u32..9, body.clone()).prop_map(|(turns, body)| Step::Loop(turns, body)),
            (0usize..64, any::<f32>(), body).prop_map(|(x, y, body)| Step::Predicated(x, y, body)),
        ]
    });
    prop::collection::vec(step, 0..24)
}

fn pick<T: Copy>(values: &[T], number: usize) -> T {
    values[number % values.len()]
}

/// A block under a condition: values made inside are not known outside of it.
fn block<'a>(b: &mut Builder, values: &Values, steps: impl IntoIterator<Item = &'a Step>) {
    let mut values = Values { together: false, ..values.clone() };
    steps.into_iter().for_each(|step| emit(b, &mut values, step));
}

fn emit(b: &mut Builder, values: &mut Values, step: &Step) {
    match *step {
        Step::Integer(op, x, y) => {
            let (x, y) = (pick(&values.integers, x), pick(&values.integers, y));
            values.integers.push(integer(b, op, x, y));
        }
        Step::Constant(value) => values.integers.push(b.var(value)),
        Step::Float(op, x, y) => {
            let (x, y) = (pick(&values.floats, x), pick(&values.floats, y));
            values.floats.push(float(b, op, x, y));
        }
        Step::Wide(x, offset) => {
            let step = b.mul_wide(pick(&values.integers, x), 4);
            let at = b.add(values.memory, step);
            let [loaded] = b.load_global::<F32, 1>(flashcore_tile::Global { base: at, offset });
            values.floats.push(loaded);
        }
        Step::Signed(x, y) => {
            let x = pick(&values.integers, x).signed();
            let larger: Reg<S32> = b.max(x, y);
            values.integers.push(larger.unsigned());
        }
        Step::Branch(x, y, ref body) => {
            let cond = b.test(Cmp::Lt, pick(&values.integers, x), y);
            b.if_(cond, |b| block(b, values, body));
        }
        Step::Loop(turns, ref body) => {
            let count = b.var_in(flashcore_tile::Scope::Lane, 0);
            b.while_(
                |b| b.test(Cmp::Lt, count, turns),
                |b| {
                    block(b, values, body);
                    b.add_to(count, 1);
                },
            );
        }
        Step::Predicated(x, y, ref body) => {
            let cond = b.test(Cmp::Ge, pick(&values.floats, x), y);
            b.predicated(cond, |b| block(b, values, body.iter().filter(|step| is_plain(step))));
        }
        Step::Exchange(x) if values.together => {
            values.floats.push(b.shuffle_xor(pick(&values.floats, x), 1));
        }
        Step::Exchange(_) => {}
    }
}

/// Blocks do not stand under a predicate.
fn is_plain(step: &Step) -> bool {
    !matches!(step, Step::Branch(..) | Step::Loop(..) | Step::Predicated(..))
}

fn integer(b: &mut Builder, op: u8, x: Reg<U32>, y: Reg<U32>) -> Reg<U32> {
    match op % 8 {
        0 => b.add(x, y),
        1 => b.sub(x, y),
        2 => b.mad(x, y, 3),
        3 => b.and(x, y),
        4 => b.xor(x, y),
        5 => b.min(x, y),
        6 => b.shl(x, u32::from(op / 8)),
        _ => b.div_ceil(x, 1 + u32::from(op)),
    }
}

fn float(b: &mut Builder, op: u8, x: Reg<F32>, y: Reg<F32>) -> Reg<F32> {
    match op % 6 {
        0 => b.add(x, y),
        1 => b.fma(x, y, f32::from_bits(u32::from(op) << 20)),
        2 => b.max(x, y),
        3 => b.exp2(x),
        4 => b.rcp(y),
        _ => b.tanh(x),
    }
}

/// A kernel of these steps.
fn program(steps: &[Step]) -> Program<()> {
    let name = Ident::new("fc_random").unwrap();
    let (mut b, mut params) = (Builder::new(Target::Sm80, &name, 96, 2), Params::default());
    let memory = params.u64(&mut b, "memory", |()| 0);
    let (thread, one) = (b.thread(), b.var(1.0));
    let mut values = Values { integers: vec![thread], floats: vec![one], memory, together: true };
    steps.iter().for_each(|step| emit(&mut b, &mut values, step));
    b.finish(&name, params).unwrap_or_else(|refused| panic!("{refused}"))
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(96))]

    #[test]
    fn programs_read_back(steps in steps()) {
        let (built, again) = (program(&steps), program(&steps));
        let parsed = parse(built.text()).unwrap();
        prop_assert_eq!(&parsed.module, built.module());
        prop_assert_eq!(parsed.module.to_string(), built.text());
        prop_assert_eq!(again.text(), built.text());
    }
}
