//! Llama of candle-transformers with random weights, its attention by candle's own operations and by FlashCore: the logits
//! of a prompt and of the tokens after it, side by side.

#![forbid(unsafe_code)]

use anyhow::{Result, ensure};
use candle_core::{DType, Device, Tensor};
use candle_nn::{VarBuilder, VarMap};
use candle_transformers::models::llama::{Cache, Config, Llama};

const PROMPT: [u32; 12] = [7, 41, 3, 99, 12, 5, 64, 33, 2, 71, 18, 90];
const STEPS: usize = 8;

fn main() -> Result<()> {
    let on_cpu = std::env::args().nth(1).is_some_and(|device| device == "cpu");
    let (device, dtype) = match on_cpu {
        true => (Device::Cpu, DType::F32),
        false => (Device::new_cuda(0)?, DType::F16),
    };
    let weights = VarMap::new();
    let [candle, flashcore] = [false, true].map(|flash| run(&config(flash), &weights, dtype, &device));
    let (candle, flashcore) = (candle?, flashcore?);
    let off = (&candle - &flashcore)?.abs()?.max_all()?.to_scalar::<f32>()?;
    let tolerance = if on_cpu { 1e-4 } else { 2e-2 };
    println!("logits of {} steps on {device:?} differ by {off:.1e} at most", STEPS + 1);
    ensure!(off <= tolerance, "logits differ by {off:e}, more than {tolerance:e}");
    Ok(())
}

fn config(use_flash_attn: bool) -> Config {
    Config {
        hidden_size: 256,
        intermediate_size: 512,
        vocab_size: 128,
        num_hidden_layers: 4,
        num_attention_heads: 8,
        num_key_value_heads: 2,
        ..Config::config_7b_v2(use_flash_attn)
    }
}

/// The logits of the prompt's last token and of each token that the model then takes.
fn run(config: &Config, weights: &VarMap, dtype: DType, device: &Device) -> Result<Tensor> {
    // The same weights both times: those of a name are made once.
    let model = Llama::load(VarBuilder::from_varmap(weights, dtype, device), config)?;
    let mut cache = Cache::new(true, dtype, config, device)?;
    let mut logits = vec![model.forward(&Tensor::new(&PROMPT, device)?.unsqueeze(0)?, 0, &mut cache)?];
    for (step, token) in PROMPT.into_iter().cycle().take(STEPS).enumerate() {
        let input = Tensor::new(&[token], device)?.unsqueeze(0)?;
        logits.push(model.forward(&input, PROMPT.len() + step, &mut cache)?);
    }
    Ok(Tensor::cat(&logits, 0)?.to_dtype(DType::F32)?)
}
