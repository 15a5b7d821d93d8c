//! Threads, seed, progress and stop flag of a measurement; timing and memory metering of plans.

use crate::Result;
use attlas::{Mat, Out, Plan, Qkv, RunInfo, Schedule, TensorMut, Workspace};
use attlas_num::linalg::matmul;
use std::fmt::{Debug, Formatter};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

/// Progress of a measurement.
#[derive(Clone, Copy, Debug)]
pub struct Progress<'a> {
    /// Steps done.
    pub done: usize,
    /// Steps in all.
    pub total: usize,
    /// The next step, or an intermediate figure.
    pub what: &'a str,
}

/// Threads, seed, progress and stop flag of a measurement, beside its own settings.
pub struct Run<'a> {
    /// Threads; 0 for all.
    pub threads: usize,
    /// Seed of all random numbers.
    pub seed: u64,
    /// Called as the measurement proceeds.
    pub progress: &'a mut dyn FnMut(Progress<'_>),
    /// Once set, the measurement ends with its finished parts.
    pub stop: &'a AtomicBool,
}

impl Debug for Run<'_> {
    fn fmt(&self, f: &mut Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Run")
            .field("threads", &self.threads)
            .field("seed", &self.seed)
            .finish_non_exhaustive()
    }
}

impl Run<'_> {
    /// Runs `work` without progress and to its end.
    pub fn silent<R>(threads: usize, seed: u64, work: impl FnOnce(&mut Run<'_>) -> R) -> R {
        work(&mut Run { threads, seed, progress: &mut |_| (), stop: &AtomicBool::new(false) })
    }

    /// Creates a workspace on its threads.
    pub(crate) fn workspace(&self) -> Result<Workspace> {
        Ok(Workspace::new(Schedule { threads: self.threads, ..Schedule::default() })?)
    }

    /// Reports progress.
    pub(crate) fn at(&mut self, done: usize, total: usize, what: &str) {
        (self.progress)(Progress { done, total, what });
    }

    /// Returns true if a stop was requested.
    pub(crate) fn stopped(&self) -> bool {
        self.stop.load(Ordering::Relaxed)
    }
}

/// Memory use of the process, measured by the owner of the allocator. [`Meter::NONE`] measures nothing.
#[derive(Clone, Copy, Debug)]
pub struct Meter {
    /// Most bytes allocated at one time since the last reset.
    pub peak: fn() -> usize,
    /// Resets the peak to the bytes allocated now.
    pub reset: fn(),
}

impl Meter {
    /// The meter that measures nothing.
    pub const NONE: Meter = Meter { peak: || 0, reset: || {} };

    /// Runs `work`, which may use the threads of `ws`; the second result is the rise of allocated bytes above their
    /// start.
    pub(crate) fn watch<R>(&self, ws: &mut Workspace, work: impl FnOnce(&mut Workspace) -> R) -> (R, usize) {
        // faer allocates a per-thread workspace on first use. This triggers it now and charges it to no method.
        let some = Mat::<f64>::identity(64);
        let multiply = || drop(matmul(some.as_ref(), some.as_ref()));
        multiply();
        ws.install(|_| rayon::broadcast(|_| multiply()));
        (self.reset)();
        // The peak's start, not the bytes allocated a moment later: threads that end may free some in between.
        let before = (self.peak)();
        let result = work(ws);
        (result, (self.peak)().saturating_sub(before))
    }
}

/// Runs `work` and returns its seconds.
pub(crate) fn timed<R>(work: impl FnOnce() -> R) -> (R, f64) {
    let start = Instant::now();
    let result = work();
    (result, start.elapsed().as_secs_f64())
}

/// Runs `work` once all threads of `ws` are awake; returns its result and the seconds from then on.
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
