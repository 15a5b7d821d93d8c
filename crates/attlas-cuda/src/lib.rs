//! Attention methods of the registry on NVIDIA GPUs: same ids, same options, same claims, same checks.
//!
//! Kernels are CUDA C++ sources of this crate, compiled by NVRTC when a plan first needs them; the driver is loaded on
//! its first call. Building needs nothing of CUDA, and without a GPU every call returns an error that names what is
//! missing.
//!
//! [`plan`] plans a method for tensors on the device; [`on_host`] turns a device form into an [`attlas::Method`] over
//! host tensors, which runs wherever methods run.
//!
//! ```
//! use attlas_cuda::{Device, Setup};
//!
//! match Device::open(0, &Setup::default()) {
//!     Ok(device) => println!("{}", device.info().name),
//!     Err(reason) => println!("{reason}"),
//! }
//! ```

#![deny(unsafe_code)]

mod compile;
mod device;
#[allow(unsafe_code)]
mod driver;
mod error;
mod host;
mod methods;
#[allow(unsafe_code)]
mod nvrtc;
mod plan;
mod prims;
pub mod programs;
pub mod registry;
mod tensor;
mod workspace;

pub use compile::{CHIPS, Compiler};
pub use device::{Device, DeviceInfo, KernelFamily, Setup};
pub use driver::{Event, Graph};
pub use error::{Error, Result};
pub use host::on_host;
pub use plan::{DeviceOut, DevicePlan, DeviceQkv, DeviceStream, Form, Pending, plan};
pub use tensor::{DeviceBuffer, DeviceMut, DeviceRef, Element};
pub use workspace::DeviceWorkspace;
