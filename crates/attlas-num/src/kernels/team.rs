//! Threads that stay awake through many short loops.
//!
//! rayon hands out the parts of a loop through queues and lets idle threads sleep. That costs some microseconds per
//! loop, as much as the loop itself takes for a single token of a small model. Within [`awake`], the calling thread
//! announces its loops in one place that the other threads watch, and one counter hands out their ranges. Inner loops
//! go through rayon, and threads that find no announcement also look for rayon's work.

use std::any::Any;
use std::cell::{Cell, UnsafeCell};
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};

/// Body of a loop, called with a range of indices.
type Body<'a> = &'a (dyn Fn(Range<usize>) + Sync);

thread_local! {
    /// Team to which this thread announces its loops; none while it runs one.
    static LED: Cell<Option<&'static Team>> = const { Cell::new(None) };
}

/// Idle rounds, some microseconds, after which a thread lets other programs run.
const PATIENCE: u32 = 1 << 10;
/// Idle rounds between two checks for rayon's work; a check takes longer than a round.
const ROUNDS: u32 = 8;

/// Runs `work` on the current thread of a pool while `threads - 1` others of the pool wait for its loops.
pub fn awake<R: Send>(threads: usize, work: impl FnOnce() -> R + Send) -> R {
    let team = Team { others: threads.saturating_sub(1), ..Team::default() };
    team.over(team.others, || {
        let _end = SetOnDrop(&team.ended);
        // SAFETY: `Then` withdraws the reference before the team is dropped, even if `work` panics.
        let led = unsafe { std::mem::transmute::<&Team, &'static Team>(&team) };
        let _then = Then(LED.replace(Some(led)));
        work()
    })
}

/// Runs a loop over `0..n` with the team that this thread leads, in ranges of at least `min` and, unless `min` is
/// larger, at most `max` indices. Returns false without running anything if it leads none.
pub(super) fn lead(n: usize, min: usize, max: usize, body: Body<'_>) -> bool {
    let Some(team) = LED.take() else { return false };
    let _then = Then(Some(team));
    let step = (n / (4 * (team.others + 1))).clamp(1, max.max(1)).max(min);
    if n <= step || team.others == 0 {
        body(0..n)
    } else {
        team.run(n, step, body)
    }
    true
}

/// Threads that watch for loops, and the announced loop.
#[derive(Default)]
struct Team {
    others: usize,
    awake: AtomicUsize,
    ended: AtomicBool,
    announced: UnsafeCell<Option<Loop>>,
    /// Length of the announced loop; 0 while there is none or no further thread may join.
    numbers: AtomicUsize,
    /// First index that no thread has taken.
    next: AtomicUsize,
    /// Number of threads that may read `announced`.
    inside: AtomicUsize,
    panic: Mutex<Option<Box<dyn Any + Send>>>,
}

// SAFETY: `announced` is written only by the leading thread, while `numbers` is 0 and no thread is `inside`; others
// read it only after they have counted themselves `inside` and then seen that `numbers` is not 0. These accesses are
// sequentially consistent, so one of the two sides sees the other.
unsafe impl Sync for Team {}

struct Loop {
    body: Body<'static>,
    step: usize,
}

impl Team {
    /// Runs `work` while `others` threads stay awake.
    fn over<R: Send>(&self, others: usize, work: impl FnOnce() -> R + Send) -> R {
        if others == 0 {
            return work();
        }
        let own = rayon::current_thread_index();
        // The working thread may pick up a watch job itself while it waits for others.
        let watch = || (rayon::current_thread_index() != own).then(|| self.watch());
        // Unlike `spawn`, `join` allocates nothing.
        rayon::join(|| self.over(others - 1, work), watch).0
    }

    /// Takes part in announced loops, and in the other work of the pool.
    fn watch(&self) {
        let awake = self.awake.fetch_add(1, Ordering::Relaxed) + 1;
        let mut idle = Idle(0);
        while !self.ended.load(Ordering::Acquire) {
            // One thread must not take all watch jobs, or the others would sleep.
            let must_wait = awake < self.others && self.awake.load(Ordering::Relaxed) < self.others;
            if self.take_part() || idle.0.is_multiple_of(ROUNDS) && !must_wait && found_work() {
                idle = Idle(0);
            } else {
                idle.round();
            }
        }
    }

    /// Runs ranges of the announced loop, if there is one with ranges left.
    fn take_part(&self) -> bool {
        if self.next.load(Ordering::Relaxed) >= self.numbers.load(Ordering::Relaxed) {
            return false;
        }
        self.inside.fetch_add(1, Ordering::SeqCst);
        let numbers = self.numbers.load(Ordering::SeqCst);
        if numbers > 0
            && let Err(panic) = catch_unwind(AssertUnwindSafe(|| self.take_ranges(numbers)))
        {
            self.next.store(numbers, Ordering::Relaxed);
            self.panic.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(panic);
        }
        self.inside.fetch_sub(1, Ordering::Release);
        numbers > 0
    }

    /// Runs ranges until none is left. Call only while a loop is announced and cannot end.
    fn take_ranges(&self, numbers: usize) {
        // SAFETY: whoever comes here is the leader, or inside and has seen `numbers`.
        let Some(Loop { body, step }) = (unsafe { &*self.announced.get() }) else { return };
        loop {
            let from = self.next.fetch_add(*step, Ordering::Relaxed);
            if from >= numbers {
                return;
            }
            body(from..(from + step).min(numbers));
        }
    }

    /// Announces a loop, takes part in it, and returns when all of it has run.
    fn run(&self, numbers: usize, step: usize, body: Body<'_>) {
        // SAFETY: nobody uses the body after `Closing` is dropped, which happens before `body` ends.
        let body = unsafe { std::mem::transmute::<Body<'_>, Body<'static>>(body) };
        // SAFETY: `numbers` is 0 and nobody is inside: the last loop was closed.
        unsafe { *self.announced.get() = Some(Loop { body, step }) };
        self.next.store(0, Ordering::Relaxed);
        self.numbers.store(numbers, Ordering::SeqCst);
        let closing = Closing(self);
        self.take_ranges(numbers);
        drop(closing);
        if let Some(panic) = self.panic.lock().unwrap_or_else(PoisonError::into_inner).take() {
            resume_unwind(panic);
        }
    }
}

/// Guard that closes the announced loop to further threads and waits for those inside.
struct Closing<'a>(&'a Team);

impl Drop for Closing<'_> {
    fn drop(&mut self) {
        self.0.numbers.store(0, Ordering::SeqCst);
        let mut idle = Idle(0);
        while self.0.inside.load(Ordering::SeqCst) > 0 {
            // Inner loops of those threads may have parts to give away.
            match idle.0 > 0 && idle.0.is_multiple_of(ROUNDS) && found_work() {
                true => idle = Idle(0),
                false => idle.round(),
            }
        }
        // This thread's own panic propagates; one from another thread must not surface in the next loop.
        if std::thread::panicking() {
            *self.0.panic.lock().unwrap_or_else(PoisonError::into_inner) = None;
        }
    }
}

/// Runs one piece of rayon's queued work; returns false if there was none.
fn found_work() -> bool {
    rayon::yield_now() == Some(rayon::Yield::Executed)
}

/// Number of rounds without work.
struct Idle(u32);

impl Idle {
    fn round(&mut self) {
        self.0 = self.0.wrapping_add(1);
        if self.0 < PATIENCE { std::hint::spin_loop() } else { std::thread::yield_now() }
    }
}

/// Guard that restores the team that the thread leads.
struct Then(Option<&'static Team>);

impl Drop for Then {
    fn drop(&mut self) {
        LED.set(self.0);
    }
}

/// Guard that sets a flag when dropped, also on a panic.
struct SetOnDrop<'a>(&'a AtomicBool);

impl Drop for SetOnDrop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use super::super::par::*;
    use super::awake;
    use std::sync::atomic::{AtomicUsize, Ordering};

    fn on_threads<R: Send>(threads: usize, work: impl FnOnce() -> R + Sync + Send) -> R {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        install(&pool, || awake(threads, work))
    }

    #[test]
    fn many_short_loops_take_every_number_once() {
        for threads in [1, 2, 3, 5] {
            on_threads(threads, || {
                for n in (0..40).chain([1000]).cycle().take(2000) {
                    let taken: Vec<AtomicUsize> = (0..n).map(|_| AtomicUsize::new(0)).collect();
                    (0..n).into_par_iter().with_max_len(1 + n % 7).for_each(|i| {
                        taken[i].fetch_add(1, Ordering::Relaxed);
                    });
                    assert!(taken.iter().all(|t| t.load(Ordering::Relaxed) == 1), "{threads} {n}");
                    (0..n).into_par_iter().for_each_in_runs(|i| {
                        taken[i].fetch_add(1, Ordering::Relaxed);
                    });
                    assert!(taken.iter().all(|t| t.load(Ordering::Relaxed) == 2), "{threads} {n}");
                }
            });
        }
    }

    #[test]
    fn loops_inside_loops_and_teams_inside_teams_end() {
        for threads in [1, 2, 4] {
            let sum = on_threads(threads, || {
                let of_row = |i: usize| (0..100).into_par_iter().map(|j| i * j).sum::<usize>();
                let inner = || (0..20).into_par_iter().with_max_len(1).map(of_row).sum::<usize>();
                inner() + awake(threads, inner) + inner()
            });
            assert_eq!(sum, 3 * 190 * 4950, "{threads} threads");
        }
    }

    #[test]
    fn a_panic_of_any_thread_arrives_and_the_team_goes_on() {
        for unlucky in [0, 3, 63] {
            on_threads(3, || {
                let run = |panics: bool| {
                    (0..64).into_par_iter().with_max_len(1).for_each(|i| {
                        assert!(!panics || i != unlucky, "number {i}");
                    });
                };
                for _ in 0..20 {
                    let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| run(true)));
                    let text = *result.unwrap_err().downcast::<String>().unwrap();
                    assert_eq!(text, format!("number {unlucky}"));
                    run(false);
                    // Several threads panic, and the caller receives one panic.
                    let all = || (0..64).into_par_iter().with_max_len(1).for_each(|i| panic!("number {i}"));
                    assert!(std::panic::catch_unwind(std::panic::AssertUnwindSafe(all)).is_err());
                    run(false);
                }
            });
        }
    }
}
