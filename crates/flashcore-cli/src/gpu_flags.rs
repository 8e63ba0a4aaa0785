//! `--gpu`: the GPU that kernels are planned and built for, there or not; `inspect`, `warm` and `run` flatten it.

use clap::{
    Args,
    builder::{PossibleValuesParser, TypedValueParser},
};
use flashcore_cuda::{Arch, Compiler, Cubin, Device, Driver, Error};
use flashcore_kernels::{Gpu, KernelConfig};
use flashcore_ptx::target::Target;
use flashcore_tile::shared_limit;

/// Which GPU.
#[derive(Args, Clone, Debug)]
#[command(next_help_heading = "Which GPU")]
pub struct GpuFlags {
    /// Architecture to plan for; need not be in this machine [default: the GPU found, else sm_90]
    #[arg(long, value_name = "SM", value_parser = models())]
    gpu: Option<Chosen>,
}

/// A GPU to plan and build for.
#[derive(Clone, Copy, Debug)]
pub struct Chosen {
    pub gpu: Gpu,
    /// The device, where it is in this machine.
    pub device: Option<Device>,
    name: &'static str,
}

/// Architectures that can be named, each with the multiprocessors and the name of a usual GPU.
const MODELS: [(&str, Target, u32, &str); 7] = [
    ("sm_75", Target::Sm75, 40, "T4"),
    ("sm_80", Target::Sm80, 108, "A100"),
    ("sm_86", Target::Sm86, 82, "RTX 3090"),
    ("sm_89", Target::Sm89, 128, "RTX 4090"),
    ("sm_90", Target::Sm90, 132, "H100 or H200"),
    ("sm_100", Target::Sm100, 148, "B200"),
    ("sm_120", Target::Sm120, 170, "RTX 5090"),
];
/// Where none is there and none is named.
const USUAL: &str = "sm_90";

fn models() -> impl TypedValueParser<Value = Chosen> {
    PossibleValuesParser::new(MODELS.map(|model| model.0)).map(|name| Chosen::model(&name))
}

impl GpuFlags {
    /// Whether one was named.
    pub const fn is_named(&self) -> bool {
        self.gpu.is_some()
    }

    /// The GPU named, else the one found, else a usual one.
    pub fn choose(&self) -> Chosen {
        self.gpu.unwrap_or_else(|| Chosen::usual(true))
    }
}

impl Chosen {
    fn model(name: &str) -> Self {
        let (_, target, sms, name) = *MODELS.iter().find(|model| model.0 == name).unwrap_or(&MODELS[0]);
        let (capability, shared_bytes) = (target.capability(), shared_limit(target));
        Self { gpu: Gpu { capability, sms, shared_bytes }, device: None, name }
    }

    /// The GPU found, if one may be looked for, else a usual one.
    pub fn usual(look: bool) -> Self {
        Some(()).filter(|()| look).and_then(|()| Self::found()).unwrap_or_else(|| Self::model(USUAL))
    }

    fn found() -> Option<Self> {
        let device = Driver::get().ok()?.device(0).ok()?;
        let props = device.props();
        let gpu = Gpu { capability: props.capability, sms: props.sms, shared_bytes: props.shared_optin };
        Some(Self { gpu, device: Some(device), name: "" })
    }

    /// A GPU of which only this is known.
    pub const fn assumed(gpu: Gpu) -> Self {
        Self { gpu, device: None, name: "assumed" }
    }

    /// The GPU in words.
    pub fn describe(&self) -> String {
        let (major, minor) = self.gpu.capability;
        let name = self.device.map_or(self.name, |device| &device.props().name);
        let there = if self.device.is_some() { "" } else { ", not in this machine" };
        format!("{name}: sm_{major}{minor}, {} SMs{there}", self.gpu.sms)
    }

    /// Machine code for a kernel: such as the driver loads where the GPU is there, by cache and ptxas alone where not.
    pub fn compile(&self, compiler: &Compiler, config: &KernelConfig, ptx: &str) -> Result<Cubin, Error> {
        match self.device {
            Some(device) => Ok(compiler.load(ptx, config.target(), device)?.1),
            None => compiler.compile_offline(ptx, self.arch(config.target())),
        }
    }

    /// What machine code is for: the kernel's own architecture where it runs on no other, else that of the GPU.
    fn arch(&self, target: Target) -> Arch {
        let (major, minor) = self.gpu.capability;
        let own = Target::parse(&format!("sm_{major}{minor}"));
        own.filter(|_| !target.is_arch_specific()).unwrap_or(target).into()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn machine_code_is_for_the_gpu_that_was_named() {
        let arch = |name, target| Chosen::model(name).arch(target).to_string();
        assert_eq!(arch("sm_90", Target::Sm90a), "sm_90a");
        assert_eq!(arch("sm_120", Target::Sm80), "sm_120");
        assert_eq!(arch("sm_86", Target::Sm80), "sm_86");
    }

    #[test]
    fn models_are_what_plans_know() {
        assert_eq!(Chosen::model("sm_90").gpu, Gpu::HOPPER);
        assert_eq!(Chosen::model("sm_80").gpu, Gpu::AMPERE);
        assert_eq!(Chosen::model("sm_86").gpu, Gpu::CONSUMER);
        assert_eq!(Chosen::model("sm_100").gpu, Gpu::BLACKWELL);
        assert_eq!(Chosen::model("sm_75").gpu, Gpu::TURING);
        assert_eq!(Chosen::model("sm_89").gpu, Gpu::ADA);
        assert_eq!(Chosen::model("sm_120").gpu, Gpu::BLACKWELL_RTX);
    }
}
