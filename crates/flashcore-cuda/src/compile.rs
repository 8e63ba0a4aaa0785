//! PTX to machine code: from the cache, by ptxas if one is found, by the driver's JIT otherwise.
//!
//! A [`Compiler`] turns PTX text into a [`Cubin`], which `module.rs` loads. Only the JIT needs a GPU.

use crate::{
    cache::{Cache, Key, Stored, Use},
    driver::Device,
    error::Error,
    jit,
    module::Module,
    report::BuildReport,
    toolchain::{Input, Search, Tool, ToolPath},
};
use flashcore_ptx::target::Target;
use std::{ffi::OsString, fmt, time::Instant};

/// The architecture that machine code is made for: one of real devices, unlike the `.target` of PTX.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Arch {
    number: u32,
    specific: bool,
}

impl Arch {
    /// The architecture of `device` as PTX for `target` uses it.
    pub fn for_device(target: Target, device: Device) -> Result<Self, Error> {
        let capability @ (major, minor) = device.props().capability;
        if !target.runs_on(major, minor) {
            return Err(Error::WrongArchitecture { target: target.to_string(), capability });
        }
        Ok(Self { number: device.props().sm(), specific: target.is_arch_specific() })
    }
}

impl From<Target> for Arch {
    /// The oldest device that runs `target`.
    fn from(target: Target) -> Self {
        Self { number: target.number(), specific: target.is_arch_specific() }
    }
}

impl fmt::Display for Arch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "sm_{}{}", self.number, if self.specific { "a" } else { "" })
    }
}

/// How to compile.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BuildOptions {
    /// Optimisation level, 0 to 4.
    pub optimisation: u8,
    /// Most registers of a thread, where the PTX does not say.
    pub max_registers: Option<u16>,
    /// Whether profilers find source lines in the machine code.
    pub line_info: bool,
}

impl Default for BuildOptions {
    fn default() -> Self {
        Self { optimisation: 3, max_registers: None, line_info: false }
    }
}

impl BuildOptions {
    /// The options as ptxas takes them; also what distinguishes builds in the cache.
    fn arguments(&self) -> Vec<String> {
        let mut out = vec![format!("-O{}", self.optimisation)];
        out.extend(self.max_registers.map(|limit| format!("--maxrregcount={limit}")));
        out.extend(self.line_info.then(|| "--generate-line-info".to_owned()));
        out
    }
}

/// How a [`Cubin`] came about this time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Route {
    /// Read from the cache.
    Cache,
    /// Assembled by ptxas.
    Ptxas,
    /// Compiled by the driver.
    Jit,
}

/// Machine code of a module, whole and made by a compiler.
#[derive(Clone, Debug, PartialEq)]
pub struct Cubin {
    bytes: Vec<u8>,
    report: BuildReport,
    route: Route,
    notes: Vec<String>,
}

impl Cubin {
    /// Takes machine code from elsewhere.
    ///
    /// # Safety
    /// The driver trusts machine code: `bytes` must be a complete image made by NVIDIA's tools, from a source that
    /// may run code on this machine.
    pub unsafe fn from_bytes(bytes: Vec<u8>) -> Self {
        Self { bytes, report: BuildReport::default(), route: Route::Cache, notes: Vec::new() }
    }

    /// The image.
    pub fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// How it was built, be it now or when the cache entry was made.
    pub fn report(&self) -> &BuildReport {
        &self.report
    }

    /// How it was obtained now.
    pub fn route(&self) -> Route {
        self.route
    }

    /// What went wrong on the way without harm: an unusable cache, a damaged entry, a full disk.
    pub fn notes(&self) -> &[String] {
        &self.notes
    }
}

/// Who makes machine code.
#[derive(Clone, Copy)]
enum Maker<'a> {
    Ptxas(&'a ToolPath),
    Driver(Device),
}

impl Maker<'_> {
    fn route(self) -> Route {
        match self {
            Self::Ptxas(_) => Route::Ptxas,
            Self::Driver(_) => Route::Jit,
        }
    }

    /// Changes with its version.
    fn identity(self) -> String {
        match self {
            Self::Ptxas(ptxas) => format!("ptxas {}", ptxas.identity()),
            Self::Driver(device) => format!("driver {}", device.driver().cuda_version()),
        }
    }
}

impl fmt::Display for Maker<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Ptxas(ptxas) => write!(f, "{}", ptxas.path().display()),
            Self::Driver(_) => write!(f, "driver JIT"),
        }
    }
}

/// Compiles PTX, remembering results in a cache.
#[derive(Clone, Debug)]
pub struct Compiler {
    /// Where results are kept; `None` keeps none.
    pub cache: Option<Cache>,
    /// The assembler; without one the driver compiles.
    pub ptxas: Option<ToolPath>,
    /// How to compile.
    pub options: BuildOptions,
    /// Whether to compile even what the cache holds, and to compare: for those who doubt the cache.
    pub verify: bool,
    /// Why there is no cache, where one was wanted; repeated in every [`Cubin::notes`].
    pub notes: Vec<String>,
}

impl Compiler {
    /// The compiler that the environment asks for: `FLASHCORE_PTXAS` names a ptxas (`off`: none), `FLASHCORE_CACHE` is
    /// `off` or `verify`. A cache that cannot be used is left out with a note; a ptxas that the user named and that is
    /// not there is an error.
    pub fn from_env() -> Result<Self, Error> {
        let ptxas = Search::from_env(Tool::Ptxas).find(Tool::Ptxas)?;
        let verify = Use::from_env() == Ok(Use::Verify);
        let mut compiler = Self { verify, ..Self::new(None, ptxas) };
        if !Cache::is_off() {
            match Cache::open_default() {
                Ok(cache) => compiler.cache = Some(cache),
                Err(error) => compiler.notes.push(error.to_string()),
            }
        }
        Ok(compiler)
    }

    /// A compiler with these parts.
    pub fn new(cache: Option<Cache>, ptxas: Option<ToolPath>) -> Self {
        Self { cache, ptxas, options: BuildOptions::default(), verify: false, notes: Vec::new() }
    }

    /// Compiles for `device`.
    pub fn compile(&self, ptx: &str, target: Target, device: Device) -> Result<Cubin, Error> {
        self.build(ptx, Arch::for_device(target, device)?, Some(device))
    }

    /// Compiles for `arch` without a GPU, by cache or ptxas.
    pub fn compile_offline(&self, ptx: &str, arch: Arch) -> Result<Cubin, Error> {
        self.build(ptx, arch, None)
    }

    /// Compiles for `device` and loads; what ptxas made and the driver refuses (that of a newer release, say) the driver
    /// compiles itself.
    pub fn load(&self, ptx: &str, target: Target, device: Device) -> Result<(Module, Cubin), Error> {
        let cubin = self.compile(ptx, target, device)?;
        match Module::load(device, &cubin) {
            Err(Error::Driver(refusal)) if self.ptxas.is_some() => {
                let mut cubin = Self { ptxas: None, ..self.clone() }.compile(ptx, target, device)?;
                cubin.notes.push(format!("the driver rejected the output of ptxas: {refusal}"));
                Ok((Module::load(device, &cubin)?, cubin))
            }
            loaded => Ok((loaded?, cubin)),
        }
    }

    fn build(&self, ptx: &str, arch: Arch, device: Option<Device>) -> Result<Cubin, Error> {
        let (mut notes, mut log) = (self.notes.clone(), String::new());
        let makers = self.ptxas.iter().map(Maker::Ptxas).chain(device.map(Maker::Driver));
        for maker in makers {
            match self.made_by(maker, ptx, arch, &mut notes)? {
                Ok((Stored { cubin, report }, route)) => {
                    return Ok(Cubin { bytes: cubin, report, route, notes });
                }
                Err(reason) => {
                    notes.push(format!("{maker} failed: {reason}"));
                    log += &format!("{maker}: {reason}\n");
                }
            }
        }
        if device.is_none() {
            log += "the driver's JIT was not tried: no GPU was given";
        }
        Err(Error::Compile { arch: arch.to_string(), log })
    }

    /// What the cache holds of `maker`, or what it makes now; the inner error is its opinion of the PTX.
    fn made_by(
        &self,
        maker: Maker<'_>,
        ptx: &str,
        arch: Arch,
        notes: &mut Vec<String>,
    ) -> Result<Result<(Stored, Route), String>, Error> {
        let key = self.key(maker, ptx, arch);
        let kept = match self.look_up(&key, notes) {
            Some(kept) if !self.verify => return Ok(Ok((kept, Route::Cache))),
            kept => kept,
        };
        let made = match maker {
            Maker::Ptxas(ptxas) => self.assemble(ptxas, ptx, arch)?,
            Maker::Driver(device) => jit::compile(device, ptx, &self.options)?,
        };
        let stored = match made {
            Ok(stored) => stored,
            Err(reason) => return Ok(Err(reason)),
        };
        if kept.is_some_and(|kept| kept.cubin != stored.cubin) {
            notes.push(format!("cache entry {key} differed from a fresh build and was replaced"));
        }
        if let Some(error) = self.cache.as_ref().and_then(|cache| cache.put(&key, &stored).err()) {
            notes.push(error.to_string());
        }
        Ok(Ok((stored, maker.route())))
    }

    fn look_up(&self, key: &Key, notes: &mut Vec<String>) -> Option<Stored> {
        self.cache.as_ref()?.get(key).unwrap_or_else(|damage| {
            notes.push(format!("cache entry {key} is not used: {damage}"));
            None
        })
    }

    /// Everything that changes the machine code.
    fn key(&self, maker: Maker<'_>, ptx: &str, arch: Arch) -> Key {
        let options = self.options.arguments().join(" ");
        Key::of(&[ptx, &arch.to_string(), &options, &maker.identity(), env!("CARGO_PKG_VERSION")])
    }

    /// Runs ptxas through pipes: no temporary file that anybody could tamper with. The inner error is what it says of the
    /// PTX, or why it cannot be run.
    fn assemble(&self, ptxas: &ToolPath, ptx: &str, arch: Arch) -> Result<Result<Stored, String>, Error> {
        let start = Instant::now();
        let fixed =
            ["-v", "--gpu-name", &arch.to_string(), "/dev/stdin", "-o", "/dev/stdout"].map(OsString::from);
        let options = self.options.arguments().into_iter().map(OsString::from);
        let arguments: Vec<OsString> = fixed.into_iter().chain(options).collect();
        let output = match ptxas.run(&arguments, Input::Text(ptx)) {
            Err(interrupted @ Error::Interrupted { .. }) => return Err(interrupted),
            Err(error) => return Ok(Err(error.to_string())),
            Ok(output) => output,
        };
        const ELF: &[u8] = b"\x7fELF";
        if !output.success || !output.stdout.starts_with(ELF) {
            return Ok(Err(output.log));
        }
        let mut report = BuildReport::from_log(&output.log);
        report.seconds = start.elapsed().as_secs_f64();
        report.compiler =
            format!("ptxas {}", ptxas.version().unwrap_or_else(|_| "of unknown version".into()));
        Ok(Ok(Stored { cubin: output.stdout, report }))
    }
}
