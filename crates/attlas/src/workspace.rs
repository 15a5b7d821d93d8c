//! Threads, tiles, instruction set and scratch memory: how a plan runs, never what it computes.

use crate::{Error, Result};
use attlas_num::Scratch;
use attlas_num::kernels::Isa;
use std::sync::Arc;

/// Settings that change speed, and results by rounding at most.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Schedule {
    /// Number of threads; 0 uses all that the machine offers.
    pub threads: usize,
    /// Query rows that are processed together; 0 lets the kernels decide. Never changes a bit of a result.
    pub tile_q: usize,
    /// Keys that are processed together; 0 lets the kernels decide. Changes results by rounding only.
    pub tile_k: usize,
    /// Instruction set. Changes results by rounding only.
    pub isa: Isa,
}

impl Default for Schedule {
    fn default() -> Self {
        Self { threads: 0, tile_q: 0, tile_k: 0, isa: Isa::best() }
    }
}

/// Threads and scratch memory, owned by the caller and reused from call to call.
#[derive(Debug)]
pub struct Workspace {
    schedule: Schedule,
    pool: Arc<rayon::ThreadPool>,
    scratch: Scratch,
}

impl Workspace {
    /// Starts the threads of `schedule`.
    pub fn new(schedule: Schedule) -> Result<Self> {
        Self::with_scratch(schedule, Scratch::new())
    }

    /// Starts one thread, with defaults otherwise.
    pub fn single() -> Result<Self> {
        Self::new(Schedule { threads: 1, ..Schedule::default() })
    }

    /// Starts the threads of `schedule` with given scratch memory, such as one that hands out NaN.
    pub fn with_scratch(schedule: Schedule, scratch: Scratch) -> Result<Self> {
        let pool = rayon::ThreadPoolBuilder::new()
            .num_threads(schedule.threads)
            .thread_name(|i| format!("attlas-{i}"))
            .build()
            .map_err(|e| Error::Threads { threads: schedule.threads, reason: e.to_string() })?;
        let schedule = Schedule { threads: pool.current_num_threads(), ..schedule };
        Ok(Self { schedule, pool: Arc::new(pool), scratch })
    }

    /// Returns a workspace with its own scratch memory on the same threads. Code that runs on them can hand it to a
    /// plan, which then starts at once instead of waking the threads again.
    #[must_use]
    pub fn sibling(&self) -> Self {
        Self { schedule: self.schedule, pool: self.pool.clone(), scratch: Scratch::new() }
    }

    /// Returns the schedule of this workspace; `threads` is the number started.
    pub fn schedule(&self) -> &Schedule {
        &self.schedule
    }

    /// Returns the scratch memory.
    pub fn scratch(&self) -> &Scratch {
        &self.scratch
    }

    /// Returns the context for code inside a plan.
    pub fn context(&self) -> Context<'_> {
        Context { schedule: self.schedule, scratch: &self.scratch, groups: 1 }
    }

    /// Runs `work` on this workspace's threads.
    pub fn install<R: Send>(&self, work: impl FnOnce(Context<'_>) -> R + Send) -> R {
        attlas_num::par::install(&self.pool, || work(self.context()))
    }

    /// Runs `work` on this workspace's threads and keeps idle ones awake until it ends ([`attlas_num::par::awake`]).
    /// Waking a thread takes longer than many of the hundreds of small products of a single token; in longer work, idle
    /// threads should sleep.
    pub fn install_awake<R: Send>(&self, work: impl FnOnce(Context<'_>) -> R + Send) -> R {
        self.install(|cx| attlas_num::par::awake(self.schedule.threads, || work(cx)))
    }
}

/// A schedule and scratch memory, as seen from inside a plan that already runs on its threads.
#[derive(Clone, Copy, Debug)]
pub struct Context<'a> {
    /// The schedule of the run.
    pub schedule: Schedule,
    /// The source of buffers.
    pub scratch: &'a Scratch,
    /// Number of groups processed concurrently; with many groups, each can be split more coarsely.
    pub groups: usize,
}
