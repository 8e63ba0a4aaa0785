//! The suite tested: a right backend passes everything; each broken one is caught, at the step that names its fault.

use crate::mutants;
use flashcore_core::{Backend, BackendError, DType, HostCall, Ran};
use flashcore_testkit::{
    Case, NaiveBackend, Outcome, Tag,
    cases::{self, Cost},
    check_case, properties, random,
};

#[test]
fn a_right_backend_passes_every_case() {
    // Types take turns; one more at each third case, so that each of a family's masks meets all of them.
    for (n, case) in cases::up_to(Cost::Small).iter().enumerate() {
        let dtype = case.dtypes[(n + n / 3) % case.dtypes.len()];
        let report = check_case(&NaiveBackend, case, dtype, 1);
        assert_eq!(report.outcome, Outcome::Passed, "{report}");
    }
}

#[test]
fn a_right_backend_obeys_every_law() {
    for property in properties::ALL {
        for dtype in DType::COMMON {
            let outcome = property.check(&NaiveBackend, dtype, 1);
            assert_eq!(outcome, Outcome::Passed, "{} {dtype}", property.name);
        }
    }
}

#[test]
fn a_right_backend_passes_random_problems() {
    for index in 0..300 {
        let case = random::any(1, index, random::Limits::SMALL);
        let report = check_case(&NaiveBackend, &case, DType::COMMON[index as usize % 3], index);
        assert_eq!(report.outcome, Outcome::Passed, "{report}\n{case:?}");
    }
}

#[test]
fn every_mutant_is_caught_at_the_step_that_names_its_fault() {
    let affordable =
        |case: &Case| case.cost() == Cost::Tiny || matches!(case.tag, Tag::BigOffsets | Tag::ManyHeads);
    let cases: Vec<Case> = cases::all().into_iter().filter(affordable).collect();
    let by_properties_alone = ["depends on the batch size", "needs LSE"];
    for mutant in mutants::all().into_iter().filter(|m| !by_properties_alone.contains(&m.name)) {
        let caught = cases.iter().any(|case| {
            let outcome = check_case(&mutant, case, DType::F16, 1).outcome;
            matches!(outcome, Outcome::Failed { step, .. } if step == mutant.caught_at)
        });
        assert!(caught, "nothing caught the backend that {}", mutant.name);
    }
}

#[test]
fn every_law_is_broken_by_a_mutant() {
    let breaks = [
        "weights sum to 1.02",
        "forgets the last, partial tile of keys",
        "masks one key too few",
        "depends on the batch size",
        "gives LSE to the base 2",
        "gives LSE to the base 2",
        "gives every query head the first key head",
        "takes packed sequences for one",
        "reads beyond used lengths",
        "needs LSE",
        "leaves out more weights than it should",
        "ignores the seed",
        "does not scale the weights that stay",
        "ignores dropout",
        "keeps 8 bits",
        "weights sum to 1.02",
        "weights sum to 1.02",
        "takes pages in their order",
        "takes pages in their order",
        "depends on the batch size",
    ];
    let mutants = mutants::all();
    assert_eq!(properties::ALL.len(), breaks.len());
    for (property, name) in properties::ALL.iter().zip(breaks) {
        let mutant = mutants.iter().find(|mutant| mutant.name == name).expect("a mutant of that name");
        let outcome = property.check(mutant, DType::F16, 1);
        assert!(outcome.is_failure(), "`{}` holds for a backend that {name}", property.name);
    }
}

struct Choosy;

impl Backend for Choosy {
    fn name(&self) -> &'static str {
        "choosy"
    }

    fn forward(&self, _: &mut HostCall<'_>) -> Result<Ran, BackendError> {
        let (what, instead) = ("anything".to_owned(), "use another backend".to_owned());
        Err(BackendError::Unsupported { backend: "choosy", what, instead })
    }
}

#[test]
fn what_is_not_supported_is_skipped_and_never_passed() {
    let case = &cases::tagged(Tag::Named)[1];
    let outcome = check_case(&Choosy, case, DType::F32, 1).outcome;
    assert!(
        matches!(&outcome, Outcome::Skipped(reason) if reason.contains("use another backend")),
        "{outcome}"
    );
    let outcome = properties::ALL[0].check(&Choosy, DType::F32, 1);
    assert!(matches!(outcome, Outcome::Skipped(_)), "{outcome}");
}

#[test]
fn the_table_is_well_formed() {
    let all = cases::all();
    let mut names: Vec<&str> = all.iter().map(|case| case.name.as_str()).collect();
    names.sort_unstable();
    let repeated = names.windows(2).find(|pair| pair[0] == pair[1]);
    assert_eq!(repeated, None);
    for case in &all {
        for &dtype in case.dtypes {
            assert!(case.problem(dtype).is_ok(), "{case}: {:?}", case.problem(dtype));
        }
    }
    let tiny = cases::up_to(Cost::Tiny).len();
    assert!(tiny > 50 && tiny < all.len(), "{tiny} of {} cases are tiny", all.len());
}
