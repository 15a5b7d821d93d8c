//! Errors of the device.

/// Result of anything in this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Reason why a call failed. If planning or preparing a launch fails, no output has been written.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The driver's library is missing.
    #[error("no NVIDIA driver: {reason}")]
    NoDriver {
        /// Message of the loader.
        reason: String,
    },
    /// The driver sees no GPU with that number.
    #[error("no GPU {ordinal}: the driver sees {count}")]
    NoDevice {
        /// The requested GPU.
        ordinal: usize,
        /// GPUs that exist.
        count: usize,
    },
    /// The GPU is older than the kernels.
    #[error("{name} has compute capability {}.{}, kernels need 8.0 or later", capability.0, capability.1)]
    OldDevice {
        /// Its name.
        name: String,
        /// Its compute capability.
        capability: (i32, i32),
    },
    /// NVRTC is missing.
    #[error(
        "no NVRTC: looked for {}; install the Python package nvidia-cuda-nvrtc or a CUDA toolkit of version 13",
        looked_for.join(", ")
    )]
    NoCompiler {
        /// Files and names that were tried.
        looked_for: Vec<String>,
    },
    /// A kernel did not compile.
    #[error("kernel {kernel} does not compile: {log}")]
    Compile {
        /// The program.
        kernel: String,
        /// Log of NVRTC.
        log: String,
    },
    /// The driver is too old.
    #[error("the NVIDIA driver supports CUDA {}.{}, needed is {}.{}", have / 1000, have % 1000 / 10, need / 1000, need % 1000 / 10)]
    OldDriver {
        /// Version of CUDA it supports, as 1000 · major + 10 · minor.
        have: i32,
        /// The required version.
        need: i32,
    },
    /// The device is out of memory.
    #[error("{asked} bytes of device memory are needed, {free} are free")]
    OutOfMemory {
        /// Bytes requested.
        asked: usize,
        /// Bytes that were free.
        free: usize,
    },
    /// A call of the driver failed.
    #[error("{call}: {text} ({code})")]
    Driver {
        /// The call.
        call: &'static str,
        /// Its result.
        code: u32,
        /// Message of the driver.
        text: String,
    },
    /// The method refused, or the arguments do not fit the problem.
    #[error(transparent)]
    Method(#[from] attlas::Error),
}

impl From<Error> for attlas::Error {
    fn from(e: Error) -> Self {
        match e {
            Error::Method(e) => e,
            e => attlas::Error::Device { device: "cuda".into(), reason: e.to_string() },
        }
    }
}
