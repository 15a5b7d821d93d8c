//! Pools of threads and the workspaces on them, made on first use and reused.
//!
//! There is one pool per number of threads, each with a list of free workspaces: calls from several Python threads can
//! run at the same time. Threads do not survive a fork: pools belong to one process, and a child drops those of its
//! parent without joining their threads, which do not exist there.

use attlas::{Result, Schedule, Workspace};
use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::atomic::{AtomicPtr, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

/// Workspaces kept for the next call on one pool.
const KEPT: usize = 16;

#[derive(Default)]
struct Pools {
    process: u32,
    pools: HashMap<usize, Pool>,
}

struct Pool {
    base: Arc<Workspace>,
    free: Vec<Workspace>,
}

/// The lock is never freed: after a fork a thread that no longer exists may hold it, and it is replaced.
static POOLS: AtomicPtr<Mutex<Pools>> = AtomicPtr::new(std::ptr::null_mut());

fn fresh() -> *mut Mutex<Pools> {
    Box::into_raw(Box::new(Mutex::new(Pools { process: std::process::id(), pools: HashMap::new() })))
}

fn pools() -> &'static Mutex<Pools> {
    let mut current = POOLS.load(Ordering::Acquire);
    if current.is_null() {
        let made = fresh();
        current =
            match POOLS.compare_exchange(std::ptr::null_mut(), made, Ordering::AcqRel, Ordering::Acquire) {
                Ok(_) => made,
                Err(other) => {
                    // SAFETY: `made` came from `Box::into_raw` just above and was not shared.
                    drop(unsafe { Box::from_raw(made) });
                    other
                }
            };
    }
    // SAFETY: not null, made by `fresh`, and never freed once it is in `POOLS`.
    unsafe { &*current }
}

/// Replaces the pools; called in the child after a fork.
pub(crate) fn after_fork() {
    POOLS.store(fresh(), Ordering::Release);
}

/// Runs `work` on a pool of `threads` threads (0: all that the process may use), with its own scratch memory. Plans
/// made and executed inside start at once, and never on rayon's global pool.
pub(crate) fn run<R: Send>(threads: usize, work: impl FnOnce(&mut Workspace) -> R + Send) -> Result<R> {
    with(threads, |base, ws| base.install(|_| work(ws)))
}

/// Runs `work` on the calling thread, with a workspace of `threads` threads. Use it for a single plan that exists or is
/// cheap to make: the plan wakes the threads itself, or is done before they would wake.
pub(crate) fn run_here<R>(threads: usize, work: impl FnOnce(&mut Workspace) -> R) -> Result<R> {
    with(threads, |_, ws| work(ws))
}

fn with<R>(threads: usize, work: impl FnOnce(&Workspace, &mut Workspace) -> R) -> Result<R> {
    let (base, mut ws) = take(threads)?;
    let result = work(&base, &mut ws);
    let mut pools = pools().lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(pool) = pools.pools.get_mut(&threads)
        && Arc::ptr_eq(&pool.base, &base)
        && pool.free.len() < KEPT
    {
        pool.free.push(ws);
    }
    Ok(result)
}

fn take(threads: usize) -> Result<(Arc<Workspace>, Workspace)> {
    let mut pools = pools().lock().unwrap_or_else(PoisonError::into_inner);
    if pools.process != std::process::id() {
        // A fork that did not go through Python.
        std::mem::forget(std::mem::take(&mut pools.pools));
        pools.process = std::process::id();
    }
    let pool = match pools.pools.entry(threads) {
        Entry::Occupied(there) => there.into_mut(),
        Entry::Vacant(free) => {
            let base = Workspace::new(Schedule { threads, ..Schedule::default() })?;
            free.insert(Pool { base: Arc::new(base), free: Vec::new() })
        }
    };
    let ws = pool.free.pop().unwrap_or_else(|| pool.base.sibling());
    Ok((pool.base.clone(), ws))
}
