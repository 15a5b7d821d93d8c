//! How a plan is run: threads, tiles, instruction set and scratch memory. Never what is computed.

use crate::{Error, Result};
use attlas_num::Scratch;
use attlas_num::kernels::Isa;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

/// Settings that change speed and must not move results past rounding.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Schedule {
    /// Threads to use; 0 takes as many as the machine offers.
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

    /// One thread, everything else by default.
    pub fn single() -> Result<Self> {
        Self::new(Schedule { threads: 1, ..Schedule::default() })
    }

    /// The same with given scratch memory, such as one that hands out NaN.
    pub fn with_scratch(schedule: Schedule, scratch: Scratch) -> Result<Self> {
        let pool = rayon::ThreadPoolBuilder::new()
            .num_threads(schedule.threads)
            .thread_name(|i| format!("attlas-{i}"))
            .build()
            .map_err(|e| Error::Threads { threads: schedule.threads, reason: e.to_string() })?;
        let schedule = Schedule { threads: pool.current_num_threads(), ..schedule };
        Ok(Self { schedule, pool: Arc::new(pool), scratch })
    }

    /// A workspace with scratch memory of its own on the same threads. Code that runs on them can hand it to
    /// a plan, which then starts at once instead of waking the threads again.
    #[must_use]
    pub fn sibling(&self) -> Self {
        Self { schedule: self.schedule, pool: self.pool.clone(), scratch: Scratch::new() }
    }

    /// The schedule of this workspace; `threads` is the number started.
    pub fn schedule(&self) -> &Schedule {
        &self.schedule
    }

    /// The scratch memory.
    pub fn scratch(&self) -> &Scratch {
        &self.scratch
    }

    /// The context of code inside a plan.
    pub fn context(&self) -> Context<'_> {
        Context { schedule: self.schedule, scratch: &self.scratch, groups: 1 }
    }

    /// Runs `work` on this workspace's threads.
    pub fn install<R: Send>(&self, work: impl FnOnce(Context<'_>) -> R + Send) -> R {
        attlas_num::par::install(&self.pool, || work(self.context()))
    }

    /// The same, and threads without work stay awake until `work` ends. To wake a thread takes longer than many of the
    /// hundreds of small products of a single token; longer work had better let its threads sleep.
    pub fn install_awake<R: Send>(&self, work: impl FnOnce(Context<'_>) -> R + Send) -> R {
        let watch = Watch { others: self.schedule.threads - 1, ..Watch::default() };
        self.install(|cx| watch.over(watch.others, || work(cx)))
    }
}

/// Threads that look for work of their pool until a piece of work has ended.
#[derive(Debug, Default)]
struct Watch {
    others: usize,
    awake: AtomicUsize,
    ended: AtomicBool,
}

impl Watch {
    /// Runs `work` while `others` threads are awake.
    fn over<R: Send>(&self, others: usize, work: impl FnOnce() -> R + Send) -> R {
        if others == 0 {
            let _end = SetOnDrop(&self.ended);
            return work();
        }
        let own = rayon::current_thread_index();
        // The thread that works may come by the watch while it waits for others.
        let keep = || (rayon::current_thread_index() != own).then(|| self.keep());
        // Joined and not spawned: that allocates nothing.
        rayon::join(|| self.over(others - 1, work), keep).0
    }

    /// Takes part in whatever the pool has to do.
    fn keep(&self) {
        /// Idle rounds, some microseconds, after which a thread lets other programs run.
        const PATIENCE: u32 = 1 << 10;
        let awake = self.awake.fetch_add(1, Ordering::Relaxed) + 1;
        let mut idle = 0;
        while !self.ended.load(Ordering::Acquire) {
            // A thread that took all watches at once would let the others sleep.
            if idle < PATIENCE && awake < self.others && self.awake.load(Ordering::Relaxed) < self.others {
                idle += 1;
                std::hint::spin_loop();
                continue;
            }
            match rayon::yield_now() {
                Some(rayon::Yield::Executed) => idle = 0,
                _ if idle < PATIENCE => {
                    idle += 1;
                    std::hint::spin_loop();
                }
                _ => std::thread::yield_now(),
            }
        }
    }
}

/// Sets a flag when it goes out of scope, also by a panic.
struct SetOnDrop<'a>(&'a AtomicBool);

impl Drop for SetOnDrop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Release);
    }
}

/// A schedule and scratch memory, as seen from inside a plan that already runs on its threads.
#[derive(Clone, Copy, Debug)]
pub struct Context<'a> {
    /// How to run.
    pub schedule: Schedule,
    /// Where to take buffers from.
    pub scratch: &'a Scratch,
    /// Number of groups processed concurrently; with many groups, each can be split more coarsely.
    pub groups: usize,
}
