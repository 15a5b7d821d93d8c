//! Any attention method of attlas over candle's tensors, as a custom op:
//!
//! ```sh
//! cargo run --release --manifest-path examples/candle/Cargo.toml
//! ```

use attlas::{Options, Out, Problem, Qkv, Schedule, TensorMut, TensorRef, Workspace, registry};
use candle_core::{CpuStorage, CustomOp3, Device, Layout, Result, Shape, Tensor, bail};
use std::sync::Mutex;

/// Queries, keys and values `[batch, heads, rows, width]` in, attention out.
struct Attend {
    method: &'static str,
    options: Options,
    causal: bool,
    workspace: Mutex<Workspace>,
}

fn view<'a>(storage: &'a CpuStorage, layout: &Layout) -> Result<TensorRef<'a, f32>> {
    let (b, h, n, d) = layout.shape().dims4()?;
    let stride = layout.stride();
    if stride[3] != 1 {
        bail!("rows must be contiguous: call contiguous() first")
    }
    let data = &storage.as_slice::<f32>()?[layout.start_offset()..];
    TensorRef::new(data, [b, h, n, d], [stride[0], stride[1], stride[2]]).map_err(candle_core::Error::wrap)
}

impl CustomOp3 for Attend {
    fn name(&self) -> &'static str {
        "attlas"
    }

    fn cpu_fwd(
        &self,
        q: &CpuStorage,
        q_layout: &Layout,
        k: &CpuStorage,
        k_layout: &Layout,
        v: &CpuStorage,
        v_layout: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        let (q, k, v) = (view(q, q_layout)?, view(k, k_layout)?, view(v, v_layout)?);
        let [batch, heads, n_q, d] = q.dims();
        let [_, kv_heads, n_k, d_v] = v.dims();
        let mut problem = Problem::new(heads, n_q, d).with_lens(n_q, n_k).with_kv_heads(kv_heads).with_batch(batch);
        problem.d_v = d_v;
        if self.causal {
            problem = problem.causal();
        }
        let mut output = vec![0.0f32; batch * heads * n_q * d_v];
        let mut run = || {
            let plan = registry::method(self.method)?.plan(&problem, &self.options)?;
            let out = Out::new(TensorMut::bhnd(&mut output, [batch, heads, n_q, d_v])?);
            let mut workspace = self.workspace.lock().unwrap_or_else(|e| e.into_inner());
            plan.execute(&Qkv::new(q, k, v).into(), &mut out.into(), &mut workspace)
        };
        run().map_err(candle_core::Error::wrap)?;
        Ok((CpuStorage::F32(output), Shape::from((batch, heads, n_q, d_v))))
    }
}

/// The definition, with candle's own operations.
fn reference(q: &Tensor, k: &Tensor, v: &Tensor) -> Result<Tensor> {
    let n = q.dim(2)?;
    let scores = (q.matmul(&k.t()?)? * (q.dim(3)? as f64).powf(-0.5))?;
    let mask: Vec<f32> =
        (0..n * n).map(|i| if i % n > i / n { f32::NEG_INFINITY } else { 0.0 }).collect();
    let scores = scores.broadcast_add(&Tensor::from_vec(mask, (1, 1, n, n), q.device())?)?;
    let weights = scores.broadcast_sub(&scores.max_keepdim(3)?)?.exp()?;
    weights.broadcast_div(&weights.sum_keepdim(3)?)?.matmul(v)
}

fn main() -> Result<()> {
    let make = |heads| Tensor::randn(0f32, 1.0, (1, 512, heads, 64), &Device::Cpu)?.transpose(1, 2);
    let (q, k, v) = (make(8)?, make(8)?, make(8)?);
    let exact = reference(&q.contiguous()?, &k.contiguous()?, &v.contiguous()?)?;
    for (method, options) in [("exact", Options::new()), ("sink_window", Options::new().with("window", 128))] {
        let workspace = Workspace::new(Schedule::default()).map_err(candle_core::Error::wrap)?;
        let op = Attend { method, options, causal: true, workspace: Mutex::new(workspace) };
        // The strides of a transposed tensor are read as they are.
        let o = q.apply_op3_no_bwd(&k, &v, &op)?;
        let error = (o - &exact)?.sqr()?.sum_all()?.to_scalar::<f32>()?.sqrt();
        let norm = exact.sqr()?.sum_all()?.to_scalar::<f32>()?.sqrt();
        println!("{method}: relative error {:.2e}", error / norm);
    }
    Ok(())
}
