//! A GPU, its context and its compiled kernels.

use crate::compile::{Compiler, Program, chip};
use crate::driver::{self, Context, Kernel, Module};
use crate::{Element, Result};
use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};

/// Families of attention kernels.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum KernelFamily {
    /// The portable form: any width, any element type.
    Any,
    /// `mma.sync` and `cp.async`: sm_80 and later.
    Mma,
    /// `wgmma` and the copy engine: sm_90a.
    Wgmma,
}

/// Paths and options for opening a device. Nothing is read from the environment.
#[derive(Clone, Debug, Default)]
pub struct Setup {
    /// Cache folder of cubins.
    pub cache: Option<PathBuf>,
    /// NVRTC: its file, or its folder.
    pub nvrtc: Option<PathBuf>,
    /// Upper limit of the kernel family; if absent, the best one of the chip.
    pub family: Option<KernelFamily>,
}

/// Properties of a GPU.
#[derive(Clone, Debug)]
pub struct DeviceInfo {
    /// Its name.
    pub name: String,
    /// Compute capability.
    pub capability: (i32, i32),
    /// Multiprocessors.
    pub multiprocessors: usize,
    /// Bytes of memory.
    pub memory: usize,
    /// Peak memory bandwidth, bytes per second.
    pub bandwidth: f64,
    /// Peak bf16 rate of its tensor cores, operations per second, if known.
    pub peak_flops: Option<f64>,
    /// Version of CUDA that the driver supports.
    pub driver: (i32, i32),
    /// Version of NVRTC.
    pub compiler: (i32, i32),
    /// The best family that may be used.
    pub family: KernelFamily,
}

impl DeviceInfo {
    /// Returns the family of attention kernels for these widths.
    pub fn family_for(&self, element: Element, d: usize, d_v: usize) -> KernelFamily {
        let half = matches!(element, Element::Bf16 | Element::F16);
        match self.family {
            KernelFamily::Wgmma if half && d == d_v && [64, 128, 256].contains(&d) => KernelFamily::Wgmma,
            KernelFamily::Wgmma | KernelFamily::Mma if half && d == d_v && [64, 128].contains(&d) => {
                KernelFamily::Mma
            }
            _ => KernelFamily::Any,
        }
    }
}

/// A GPU, its context and its compiled kernels. Clones share them.
#[derive(Clone, Debug)]
pub struct Device {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    info: DeviceInfo,
    compiler: Compiler,
    modules: Mutex<HashMap<Program, Arc<Module>>>,
    // Last field: modules are unloaded before the context is released.
    context: Arc<Context>,
}

impl Device {
    /// Returns the number of usable GPUs; 0 without a driver. Never panics.
    pub fn count() -> usize {
        driver::count()
    }

    /// Opens a GPU. Its primary context is shared with other libraries of the process.
    pub fn open(ordinal: usize, setup: &Setup) -> Result<Self> {
        let (context, facts) = Context::open(ordinal)?;
        let compiler = Compiler::new(setup.nvrtc.as_deref(), setup.cache.as_deref())?;
        let best = if facts.capability == (9, 0) { KernelFamily::Wgmma } else { KernelFamily::Mma };
        let family = match setup.family {
            Some(KernelFamily::Any) => KernelFamily::Any,
            Some(KernelFamily::Mma) => KernelFamily::Mma,
            _ => best,
        };
        // Dense bf16 operations per cycle and multiprocessor, by generation.
        let per_cycle = match facts.capability {
            (8, 0) => Some(2048.0),
            (8, _) => Some(1024.0),
            (9, 0) => Some(4096.0),
            _ => None,
        };
        let info = DeviceInfo {
            bandwidth: 2e3 * facts.memory_clock_khz as f64 * facts.bus_bits as f64 / 8.0,
            peak_flops: per_cycle.map(|x| x * facts.multiprocessors as f64 * facts.clock_khz as f64 * 1e3),
            name: facts.name,
            capability: facts.capability,
            multiprocessors: facts.multiprocessors,
            memory: facts.memory,
            driver: (facts.driver / 1000, facts.driver % 1000 / 10),
            compiler: compiler.version(),
            family,
        };
        Ok(Self { inner: Arc::new(Inner { info, compiler, modules: Mutex::new(HashMap::new()), context }) })
    }

    /// Returns its properties.
    pub fn info(&self) -> &DeviceInfo {
        &self.inner.info
    }

    /// Returns the bytes of free memory.
    pub fn free_bytes(&self) -> usize {
        self.inner.context.free_bytes()
    }

    pub(crate) fn context(&self) -> &Arc<Context> {
        &self.inner.context
    }

    /// Returns a kernel of a program, compiled on first use.
    pub(crate) fn kernel(&self, program: &Program, name: &str, shared: usize) -> Result<Kernel> {
        let mut modules = self.inner.modules.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(module) = modules.get(program) {
            return module.kernel(name, shared);
        }
        let chip = chip(self.inner.info.capability);
        let cubin = self.inner.compiler.cubin(program, &chip, false)?;
        let module = match Module::load(&self.inner.context, &cubin) {
            Ok(module) => module,
            // The cached file is corrupt or of another chip.
            Err(_) => Module::load(&self.inner.context, &self.inner.compiler.cubin(program, &chip, true)?)?,
        };
        let module = Arc::new(module);
        modules.insert(program.clone(), module.clone());
        module.kernel(name, shared)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Error;

    #[test]
    fn without_a_gpu_opening_says_what_is_missing() {
        if Device::count() > 0 {
            return;
        }
        let error = Device::open(0, &Setup::default()).unwrap_err();
        assert!(
            matches!(error, Error::NoDriver { .. } | Error::NoDevice { .. } | Error::OldDriver { .. }),
            "{error}"
        );
        assert_eq!(error.to_string().lines().count(), 1);
    }

    #[test]
    fn a_family_is_chosen_by_widths_and_element() {
        let mut info = DeviceInfo {
            name: "none".into(),
            capability: (9, 0),
            multiprocessors: 1,
            memory: 0,
            bandwidth: 0.0,
            peak_flops: None,
            driver: (13, 0),
            compiler: (13, 0),
            family: KernelFamily::Wgmma,
        };
        assert_eq!(info.family_for(Element::Bf16, 256, 256), KernelFamily::Wgmma);
        assert_eq!(info.family_for(Element::Bf16, 80, 80), KernelFamily::Any);
        assert_eq!(info.family_for(Element::F32, 64, 64), KernelFamily::Any);
        info.family = KernelFamily::Mma;
        assert_eq!(info.family_for(Element::F16, 128, 128), KernelFamily::Mma);
        assert_eq!(info.family_for(Element::F16, 128, 64), KernelFamily::Any);
    }
}
