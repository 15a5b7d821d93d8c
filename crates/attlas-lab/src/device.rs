//! Methods on a GPU: those with device kernels, and their times beside the chip's ceilings.
//!
//! Needs the feature `cuda`; without it, opening a device is an error.

#[cfg(feature = "cuda")]
pub use with_cuda::Gpu;
#[cfg(not(feature = "cuda"))]
pub use without_cuda::Gpu;

use crate::select::Selection;
use attlas::Mask;
use std::path::PathBuf;

/// Paths for the set-up of a GPU.
#[derive(Clone, Debug, Default)]
pub struct GpuSetup {
    /// Cache folder of compiled kernels.
    pub cache: Option<PathBuf>,
    /// NVRTC: its file or its folder.
    pub nvrtc: Option<PathBuf>,
}

/// Settings of a benchmark on a GPU.
#[derive(Clone, Debug)]
pub struct GpuBench {
    /// Lengths.
    pub lengths: Vec<usize>,
    /// Widths of heads.
    pub widths: Vec<usize>,
    /// Query heads.
    pub heads: usize,
    /// Key heads.
    pub kv_heads: usize,
    /// Mask.
    pub mask: Mask,
    /// Timed runs.
    pub runs: usize,
}

#[cfg(not(feature = "cuda"))]
mod without_cuda {
    use super::{GpuBench, GpuSetup, Selection};
    use crate::compare::Comparison;
    use crate::table::Table;
    use crate::{Error, Result};

    /// A GPU, which this build does not support.
    #[derive(Debug)]
    pub struct Gpu(std::convert::Infallible);

    impl Gpu {
        /// Fails, and names the missing feature.
        pub fn open(_: &GpuSetup) -> Result<Self> {
            Err(Error::argument(
                "--device cuda",
                "a build with the feature cuda (cargo install … --features cuda)",
                "one without",
            ))
        }

        /// Name and ceilings.
        pub fn heading(&self) -> String {
            match self.0 {}
        }

        /// Returns the selection's device forms.
        pub fn select(&self, _: Selection) -> Result<(Selection, Vec<String>)> {
            match self.0 {}
        }

        /// Times methods on the device.
        pub fn bench(&self, _: &Selection, _: &GpuBench) -> Result<(Table, Vec<String>)> {
            match self.0 {}
        }

        /// Times the methods of a comparison on the device.
        pub fn times(&self, _: &Comparison) -> Table {
            match self.0 {}
        }
    }
}

#[cfg(feature = "cuda")]
mod with_cuda {
    use super::{GpuBench, GpuSetup, Selection};
    use crate::compare::Comparison;
    use crate::select::Chosen;
    use crate::table::{Table, number};
    use crate::{Error, Result};
    use attlas::Problem;
    use attlas_cuda::{
        Device, DeviceBuffer, DeviceMut, DeviceOut, DeviceQkv, DeviceRef, DeviceWorkspace, Element, Setup,
        on_host, plan, registry,
    };
    use attlas_num::rng::StreamKey;

    /// An open GPU.
    #[derive(Debug)]
    pub struct Gpu {
        device: Device,
    }

    fn failed(e: attlas_cuda::Error) -> Error {
        Error::Attlas(e.into())
    }

    impl Gpu {
        /// Opens the first GPU; the error names what is missing, in one line.
        pub fn open(setup: &GpuSetup) -> Result<Self> {
            let setup = Setup { cache: setup.cache.clone(), nvrtc: setup.nvrtc.clone(), family: None };
            Ok(Self { device: Device::open(0, &setup).map_err(failed)? })
        }

        /// Returns its name and ceilings.
        pub fn heading(&self) -> String {
            let info = self.device.info();
            let peak = info.peak_flops.map_or("unknown".into(), |x| format!("{} TF/s", number(x / 1e12)));
            format!(
                "{}, driver for CUDA {}.{}, NVRTC {}.{}\nceiling: {peak} bf16, {} TB/s",
                info.name,
                info.driver.0,
                info.driver.1,
                info.compiler.0,
                info.compiler.1,
                number(info.bandwidth / 1e12)
            )
        }

        /// Returns the device forms of a selection, and a line for each method that has none. A method that was named
        /// must have one.
        pub fn select(&self, selection: Selection) -> Result<(Selection, Vec<String>)> {
            let (mut kept, mut notes) = (Selection::new(), Vec::new());
            for chosen in selection {
                match registry::form(chosen.method.id) {
                    Ok(form) => kept.push(Chosen { method: on_host(form, &self.device), ..chosen }),
                    Err(e) if chosen.named => return Err(failed(e)),
                    Err(e) => notes.push(e.to_string()),
                }
            }
            Ok((kept, notes))
        }

        /// Times methods on the device in bf16: medians of replayed graphs, as shares of the chip's ceilings and as
        /// speed-up over the device's exact attention.
        pub fn bench(&self, selection: &Selection, b: &GpuBench) -> Result<(Table, Vec<String>)> {
            let mut table =
                Table::new(&["<method", "n", "d", "ms", "TF/s", "of peak", "of memory", "faster"]);
            let mut notes = Vec::new();
            for &d in &b.widths {
                for &n in &b.lengths {
                    let p = Problem { mask: b.mask, ..Problem::new(b.heads, n, d).with_kv_heads(b.kv_heads) };
                    let exact = self.milliseconds("exact", &attlas::Options::new(), &p, b.runs)?;
                    for chosen in selection {
                        match self.milliseconds(chosen.method.id, &chosen.options, &p, b.runs) {
                            Ok(ran) => table.push(self.line(chosen.method.id, &p, ran, exact.0)),
                            Err(e) => notes.push(format!("{} at n = {n}, d = {d}: {e}", chosen.method.id)),
                        }
                    }
                }
            }
            Ok((table, notes))
        }

        fn line(&self, id: &str, p: &Problem, (ms, flops): (f64, f64), exact: f64) -> Vec<String> {
            let info = self.device.info();
            // Queries, keys, values and output once, two bytes an element.
            let rows = (p.batch * p.n_heads * p.n_q + p.batch * p.n_kv_heads * p.n_k) as f64;
            let bytes = 2.0 * rows * (p.d + p.d_v) as f64;
            let share = |x: f64| format!("{:.1}%", 100.0 * x);
            vec![
                id.into(),
                p.n_k.to_string(),
                p.d.to_string(),
                format!("{ms:.4}"),
                number(flops / ms / 1e9),
                info.peak_flops.map_or("-".into(), |peak| share(flops / ms * 1e3 / peak)),
                share(bytes / ms * 1e3 / info.bandwidth),
                format!("{:.2}", exact / ms),
            ]
        }

        /// Returns the median milliseconds of a run, and its counted operations.
        fn milliseconds(
            &self,
            id: &str,
            o: &attlas::Options,
            p: &Problem,
            runs: usize,
        ) -> Result<(f64, f64)> {
            self.measure(id, o, p, runs).map_err(failed)
        }

        fn measure(
            &self,
            id: &str,
            o: &attlas::Options,
            p: &Problem,
            runs: usize,
        ) -> attlas_cuda::Result<(f64, f64)> {
            let (device, e) = (&self.device, Element::Bf16);
            let planned = plan(id, p, o, None, e, device)?;
            let fill = |what: &str, dims: [usize; 4]| -> attlas_cuda::Result<DeviceBuffer> {
                let mut rng = StreamKey::new(0).named(what).rng();
                let data: Vec<f64> = (0..dims.iter().product()).map(|_| rng.normal()).collect();
                DeviceBuffer::from_host(device, e, &data)
            };
            let (dq, dk) = ([p.batch, p.n_heads, p.n_q, p.d], [p.batch, p.n_kv_heads, p.n_k, p.d]);
            let (dv, dims) = ([p.batch, p.n_kv_heads, p.n_k, p.d_v], [p.batch, p.n_heads, p.n_q, p.d_v]);
            let (q, k, v) = (fill("q", dq)?, fill("k", dk)?, fill("v", dv)?);
            let o = DeviceBuffer::new(device, e, dims.iter().product())?;
            let x = DeviceQkv {
                q: DeviceRef::bhnd(&q, dq)?,
                k: DeviceRef::bhnd(&k, dk)?,
                v: DeviceRef::bhnd(&v, dv)?,
                key_lens: None,
            };
            let mut out = DeviceOut { o: DeviceMut::bhnd(&o, dims)?, lse: None };
            let mut ws = DeviceWorkspace::new(device)?;
            ws.reserve(planned.workspace_bytes())?;
            planned.execute(&x, &mut out, &mut ws)?.wait()?;
            let graph = ws.capture(|ws| planned.execute(&x, &mut out, ws).map(|_| ()))?;
            ws.replay(&graph)?;
            let mut times = Vec::with_capacity(runs);
            for _ in 0..runs.max(1) {
                let start = ws.event()?;
                ws.replay(&graph)?;
                times.push(f64::from(ws.event()?.milliseconds_since(&start)?));
            }
            times.sort_by(f64::total_cmp);
            Ok((times[times.len() / 2], planned.cost().flops() as f64))
        }

        /// Returns the device times of a comparison's rows, beside the seconds of exact attention on the host.
        pub fn times(&self, c: &Comparison) -> Table {
            let mut table = Table::new(&["<method", "device ms", "<host's exact over it"]);
            for summary in &c.summary {
                // The heads of a layer run together and share one figure.
                let mut layers = std::collections::BTreeMap::new();
                for row in c.rows.iter().filter(|r| r.method == summary.method) {
                    if let Some(ms) = row.figures.get("device_milliseconds") {
                        layers.insert(row.layer, *ms);
                    }
                }
                let total: f64 = layers.values().sum();
                if total > 0.0 {
                    let faster = number(c.exact.run_seconds * 1e3 / total);
                    table.push(vec![summary.method.into(), format!("{total:.4}"), faster]);
                }
            }
            table
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn without_a_gpu_opening_says_in_one_line_what_is_missing() {
        if let Err(e) = Gpu::open(&GpuSetup::default()) {
            assert_eq!(e.to_string().lines().count(), 1, "{e}");
        }
    }
}
