//! Running plans under the clock and the memory meter.

use crate::Result;
use attlas::{Mat, Out, Plan, Qkv, RunInfo, TensorMut, Workspace};
use attlas_num::linalg::matmul;
use std::time::Instant;

/// Memory use of the process, measured by the owner of the allocator. [`Meter::NONE`] measures nothing.
#[derive(Clone, Copy, Debug)]
pub struct Meter {
    /// Most bytes allocated at one time since the last reset.
    pub peak: fn() -> usize,
    /// Starts a new peak from what is allocated now.
    pub reset: fn(),
}

impl Meter {
    /// Measures nothing.
    pub const NONE: Meter = Meter { peak: || 0, reset: || {} };

    /// Runs `work`, which may use the threads of `ws`; the second result is how far allocations rose above where they
    /// began.
    pub(crate) fn watch<R>(&self, ws: &mut Workspace, work: impl FnOnce(&mut Workspace) -> R) -> (R, usize) {
        // faer allocates a per-thread workspace on first use. Trigger it now, so that no method is charged for it.
        let some = Mat::<f64>::identity(64);
        let multiply = || drop(matmul(some.as_ref(), some.as_ref()));
        multiply();
        ws.install(|_| rayon::broadcast(|_| multiply()));
        (self.reset)();
        // Where the peak began, not what is allocated a moment later: threads that end may free something in between.
        let before = (self.peak)();
        let result = work(ws);
        (result, (self.peak)().saturating_sub(before))
    }
}

/// Runs `work` and the clock beside it.
pub(crate) fn timed<R>(work: impl FnOnce() -> R) -> (R, f64) {
    let start = Instant::now();
    let result = work();
    (result, start.elapsed().as_secs_f64())
}

/// Runs `work` on all threads of `ws` once every one of them is awake; the result and the seconds from there.
pub(crate) fn timed_on_running_threads<R: Send>(ws: &Workspace, work: impl FnOnce() -> R + Send) -> (R, f64) {
    ws.install(|_| {
        rayon::broadcast(|_| ());
        timed(work)
    })
}

/// Runs a plan on single-precision inputs into contiguous `[heads, n_q, d_v]` rows.
pub(crate) fn execute(
    plan: &dyn Plan,
    x: Qkv<'_, f32>,
    rows: &mut [f32],
    lse: Option<&mut [f32]>,
    ws: &mut Workspace,
) -> Result<RunInfo> {
    let p = plan.problem();
    let tensor = TensorMut::bhnd(rows, [p.batch, p.n_heads, p.n_q, p.d_v])?;
    let out = match lse {
        Some(lse) => Out::with_lse(tensor, lse),
        None => Out::new(tensor),
    };
    Ok(plan.execute(&x.into(), &mut out.into(), ws)?)
}
