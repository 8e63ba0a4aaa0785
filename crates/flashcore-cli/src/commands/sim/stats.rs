//! `--stats`: how fast a launch was simulated.

use serde_json::{Value, json};

use super::request::Ran;

/// Warp instructions a second.
fn rate(ran: &Ran) -> f64 {
    ran.outcome.counters.total_instructions() as f64 / ran.took.as_secs_f64().max(1e-9)
}

/// Time and rate as fields.
pub fn json(ran: &Ran) -> Value {
    json!({ "stats": { "seconds": ran.took.as_secs_f64(), "instructions_per_second": rate(ran).round() } })
}

/// Time and rate in words; a warp instruction is one instruction of up to 32 threads.
pub fn line(ran: &Ran) -> String {
    let instructions = ran.outcome.counters.total_instructions();
    format!(
        "{instructions} warp instructions in {:.3} s, {:.2} million a second",
        ran.took.as_secs_f64(),
        rate(ran) / 1e6
    )
}
