//! The driver's JIT, through its linker: unlike loading PTX, that yields machine code which can be cached.

use crate::sys::{CUjit_option as Opt, CUjitInputType, CUlinkState};
use crate::{
    api::Status, cache::Stored, compile::BuildOptions, driver::Device, error::Error, report::BuildReport,
};
use std::{
    ffi::{CString, c_void},
    time::Instant,
};

const LOG_BYTES: usize = 64 << 10;
/// Codes by which the driver says that it did not accept the PTX, as opposed to failing itself.
const REFUSALS: [u32; 6] = [200, 209, 218, 221, 222, 300];

/// Compiles for the device's own architecture. The inner error is the driver's opinion of the PTX.
pub(crate) fn compile(
    device: Device,
    ptx: &str,
    options: &BuildOptions,
) -> Result<Result<Stored, String>, Error> {
    let Ok(text) = CString::new(ptx) else { return Ok(Err("the text holds a NUL byte".into())) };
    let _inside = device.enter()?;
    let start = Instant::now();
    let mut logs = Logs::new();
    let linked = Linker::begin(device, options, &mut logs).and_then(|linker| linker.finish(&text));
    match linked {
        Ok(cubin) => {
            let mut report = BuildReport::from_log(&text_of(&logs.info));
            report.seconds = start.elapsed().as_secs_f64();
            let version = device.driver().cuda_version();
            report.compiler = format!("driver JIT {}.{}", version / 1000, version % 1000 / 10);
            Ok(Ok(Stored { cubin, report }))
        }
        Err(status) => {
            if !REFUSALS.contains(&status.code) {
                device.check(status)?;
            }
            Ok(Err(format!("{}\n{}", device.api().name_of(status.code), text_of(&logs.error))))
        }
    }
}

/// Buffers that the driver writes to until the linker is destroyed.
struct Logs {
    info: Vec<u8>,
    error: Vec<u8>,
}

impl Logs {
    fn new() -> Self {
        Self { info: vec![0; LOG_BYTES], error: vec![0; LOG_BYTES] }
    }
}

fn text_of(log: &[u8]) -> String {
    let end = log.iter().position(|&byte| byte == 0).unwrap_or(log.len());
    String::from_utf8_lossy(&log[..end]).into_owned()
}

/// Options and their values, which the driver reads and partly writes during the whole link.
struct Settings {
    names: Vec<Opt>,
    values: Vec<*mut c_void>,
}

impl Settings {
    fn new(options: &BuildOptions, logs: &mut Logs) -> Self {
        // Small numbers travel in place of pointers, as the driver asks.
        let number = |value: usize| value as *mut c_void;
        let mut all = vec![
            (Opt::CU_JIT_INFO_LOG_BUFFER, logs.info.as_mut_ptr().cast()),
            (Opt::CU_JIT_INFO_LOG_BUFFER_SIZE_BYTES, number(LOG_BYTES)),
            (Opt::CU_JIT_ERROR_LOG_BUFFER, logs.error.as_mut_ptr().cast()),
            (Opt::CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES, number(LOG_BYTES)),
            (Opt::CU_JIT_LOG_VERBOSE, number(1)),
            (Opt::CU_JIT_OPTIMIZATION_LEVEL, number(options.optimisation.into())),
        ];
        all.extend(options.max_registers.map(|limit| (Opt::CU_JIT_MAX_REGISTERS, number(limit.into()))));
        all.extend(options.line_info.then(|| (Opt::CU_JIT_GENERATE_LINE_INFO, number(1))));
        let (names, values) = all.into_iter().unzip();
        Self { names, values }
    }
}

/// A link in progress, destroyed on drop.
struct Linker<'l> {
    device: Device,
    state: CUlinkState,
    _settings: Settings,
    _logs: &'l mut Logs,
}

impl<'l> Linker<'l> {
    fn begin(device: Device, options: &BuildOptions, logs: &'l mut Logs) -> Result<Self, Status> {
        let mut settings = Settings::new(options, logs);
        let mut state = std::ptr::null_mut();
        let (count, names) = (settings.names.len() as u32, settings.names.as_mut_ptr());
        // SAFETY: as many values as names; both and the logs outlive the linker, which holds them.
        let status =
            unsafe { device.api().link_create(count, names, settings.values.as_mut_ptr(), &mut state) };
        accept(status)?;
        Ok(Self { device, state, _settings: settings, _logs: logs })
    }

    fn finish(self, ptx: &CString) -> Result<Vec<u8>, Status> {
        let api = self.device.api();
        let bytes = ptx.as_bytes_with_nul();
        let (none, no_values) = (std::ptr::null_mut(), std::ptr::null_mut());
        let (kind, data) = (CUjitInputType::CU_JIT_INPUT_PTX, bytes.as_ptr().cast_mut().cast());
        // SAFETY: the driver only reads the text, which ends in NUL; the name is static.
        accept(unsafe {
            api.link_add_data(self.state, kind, data, bytes.len(), c"flashcore".as_ptr(), 0, none, no_values)
        })?;
        let (mut image, mut length) = (std::ptr::null_mut(), 0);
        // SAFETY: both are valid places.
        accept(unsafe { api.link_complete(self.state, &mut image, &mut length) })?;
        // SAFETY: the image belongs to the linker, which lives until this function returns.
        Ok(unsafe { std::slice::from_raw_parts(image.cast::<u8>(), length) }.to_vec())
    }
}

impl Drop for Linker<'_> {
    fn drop(&mut self) {
        // SAFETY: made by `begin`.
        self.device.check_in_drop(unsafe { self.device.api().link_destroy(self.state) });
    }
}

fn accept(status: Status) -> Result<(), Status> {
    if status.code == 0 { Ok(()) } else { Err(status) }
}
