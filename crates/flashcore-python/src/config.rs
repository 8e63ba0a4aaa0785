//! What this installation can do, as pairs of words, for `flashcore.show_config()`.

use flashcore::cuda::driver::{Driver, Error};
use pyo3::prelude::*;

use crate::host;

/// Version, CPU instructions, threads, and every GPU or why there is none.
#[pyfunction]
pub(crate) fn config() -> PyResult<Vec<(String, String)>> {
    let cpu = host::cpu()?;
    let threads = cpu.threads();
    let mut rows = vec![
        ("version".to_owned(), env!("CARGO_PKG_VERSION").to_owned()),
        ("cpu".to_owned(), format!("{}, {threads} threads", cpu.simd())),
    ];
    match gpus() {
        Ok(gpus) => rows.extend(gpus),
        Err(error) => rows.push(("cuda".to_owned(), error.to_string())),
    }
    Ok(rows)
}

fn gpus() -> Result<Vec<(String, String)>, Error> {
    let driver = Driver::get()?;
    let version = driver.cuda_version();
    let served = format!("driver for CUDA {}.{}", version / 1000, version % 1000 / 10);
    let mut rows = vec![("cuda".to_owned(), served)];
    for index in 0..driver.device_count()? {
        let props = driver.device(index)?.props();
        let (major, minor) = props.capability;
        let text = format!("{}, compute capability {major}.{minor}, {} SMs", props.name, props.sms);
        rows.push((format!("gpu {index}"), text));
    }
    Ok(rows)
}
