//! Ceilings of this machine: peak arithmetic and bandwidth, shown beside every figure.

use crate::run::{timed, timed_on_running_threads};
use crate::{Error, Result};
use attlas::Workspace;
use attlas_num::kernels::{self, pages};
use attlas_num::rng::StreamKey;
use rayon::prelude::*;
use serde::Serialize;
use std::hint::black_box;

/// A machine with its measured ceilings, for a workspace's threads and instruction set.
#[derive(Clone, Debug, Serialize)]
pub struct Machine {
    /// Name of the processor.
    pub cpu: String,
    /// Architecture and operating system.
    pub platform: String,
    /// Threads used.
    pub threads: usize,
    /// Instruction set of the kernels.
    pub isa: String,
    /// Most billions of single-precision operations per second, all threads; a multiply-add counts two. None if a burst
    /// does not take longer with more work, because its time is then meaningless.
    pub fma_gflops: Option<f64>,
    /// Most billions of bytes per second that all threads read from memory, summing as floats or as integers: a
    /// float sum in strict order waits for its additions and not for memory.
    pub read_gbs: f64,
    /// Bandwidth of reading one run of 8 KiB in sixteen, at random: the access pattern of clusters in a long cache.
    pub scattered_gbs: f64,
    /// Most billions of bytes per second that all threads copy in memory; each byte counts twice, read and written.
    pub copy_gbs: f64,
}

/// Seconds of one burst of multiply-adds, and the number of bursts or passes; the best one counts.
const BURST_SECONDS: f64 = 0.04;
const BURSTS: usize = 7;
/// Number of short bursts, and the factor by which they are shorter.
const SHORT_BURSTS: u64 = 32;
/// Elements of a run; one of `RUNS` runs is read in scattered reading.
const RUN: usize = 8192 / size_of::<f32>();
const RUNS: usize = 16;

impl Machine {
    /// Measures the machine in about a second. Reads `bytes` of memory, which should be far more than any cache.
    pub fn measure(ws: &Workspace, bytes: usize) -> Self {
        let schedule = *ws.schedule();
        let fma = Self::fma_peak(ws);
        let len = (bytes / size_of::<f32>()).max(1024);
        let source = memory(ws, len);
        let read = read_peak(ws, &source);
        let scattered = scattered_peak(ws, &source);
        let mut target: Vec<f32> = pages::zeros(len / 2);
        let half = target.len();
        let piece = share(ws, half);
        let copy = best(|| {
            let ((), seconds) = timed(|| {
                ws.install(|_| {
                    let pairs = target.par_chunks_mut(piece).zip(source[..half].par_chunks(piece));
                    pairs.for_each(|(to, from)| kernels::copy(from, to));
                })
            });
            black_box(&target);
            (2 * half * size_of::<f32>()) as f64 / seconds
        });
        Self {
            cpu: cpu_name(),
            platform: format!("{} {}", std::env::consts::ARCH, std::env::consts::OS),
            threads: schedule.threads,
            isa: schedule.isa.to_string(),
            fma_gflops: fma,
            read_gbs: read,
            scattered_gbs: scattered,
            copy_gbs: copy * 1e-9,
        }
    }

    /// Measures only [`Self::fma_gflops`], in about a third of a second: clocks change, and a figure is best compared
    /// with the peak of the same moment.
    pub fn fma_peak(ws: &Workspace) -> Option<f64> {
        let isa = ws.schedule().isa;
        let burst = |iterations: u64| {
            let (flops, seconds) = timed(|| {
                ws.install(|_| {
                    let counts = rayon::broadcast(|_| {
                        let (flops, value) = kernels::fma_burn::<f32>(isa, iterations);
                        black_box(value);
                        flops
                    });
                    counts.into_iter().sum::<u64>()
                })
            });
            (flops as f64, seconds)
        };
        let iterations = enough_iterations(|iterations| burst(iterations).1)?;
        let rate = |iterations: u64| {
            let (flops, seconds) = burst(iterations);
            flops / seconds
        };
        // On a shared machine a short burst may find free processors when a long one does not.
        let short = (0..SHORT_BURSTS).map(|_| rate((iterations / SHORT_BURSTS).max(1))).fold(0.0, f64::max);
        Some(1e-9 * best(|| rate(iterations)).max(short))
    }

    /// Measures only [`Self::read_gbs`].
    pub fn read_peak(ws: &Workspace, bytes: usize) -> f64 {
        read_peak(ws, &memory(ws, (bytes / size_of::<f32>()).max(1024)))
    }
}

/// Describes a machine in one line: processor, platform, processors, instruction set and threads in use.
pub fn name(ws: &Workspace) -> String {
    let schedule = ws.schedule();
    format!(
        "{}, {} {}, {} processors, {}, {} threads",
        cpu_name(),
        std::env::consts::ARCH,
        std::env::consts::OS,
        processors(),
        schedule.isa,
        schedule.threads
    )
}

/// Returns the number of processors of the machine, not only of those this process may use: a launcher that binds
/// processes must not make it look like another machine.
fn processors() -> usize {
    let text = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    match text.lines().filter(|l| l.starts_with("processor")).count() {
        0 => std::thread::available_parallelism().map_or(1, usize::from),
        n => n,
    }
}

/// Returns the largest of several measurements.
fn best(mut rate: impl FnMut() -> f64) -> f64 {
    (0..BURSTS).map(|_| rate()).fold(0.0, f64::max)
}

/// Returns memory to read, in large pages like a long cache. Each thread writes its own share, which places the pages
/// near it.
fn memory(ws: &Workspace, len: usize) -> Vec<f32> {
    let mut source: Vec<f32> = pages::zeros(len);
    let piece = share(ws, len);
    ws.install(|_| source.par_chunks_mut(piece).for_each(|part| part.fill(1.0)));
    source
}

fn share(ws: &Workspace, len: usize) -> usize {
    len.div_ceil(ws.schedule().threads.max(1)).max(1)
}

fn read_peak(ws: &Workspace, source: &[f32]) -> f64 {
    let piece = share(ws, source.len());
    let size = size_of_val(source) as f64;
    let floats = best(|| {
        let (sum, seconds) =
            timed(|| ws.install(|_| source.par_chunks(piece).map(kernels::read_sum).sum::<f32>()));
        black_box(sum);
        size / seconds
    });
    let integers = best(|| {
        let (sum, seconds) = timed(|| {
            ws.install(|_| source.par_chunks(piece).map(sum_of_bits).reduce(|| 0, u32::wrapping_add))
        });
        black_box(sum);
        size / seconds
    });
    1e-9 * floats.max(integers)
}

/// Measures [`Machine::scattered_gbs`]; every pass reads other runs, which are in no cache.
fn scattered_peak(ws: &Workspace, source: &[f32]) -> f64 {
    let runs: Vec<&[f32]> = source.chunks_exact(RUN).collect();
    let mut passes = 0;
    1e-9 * best(|| {
        let mut rng = StreamKey::new(passes).named("scattered").rng();
        passes += 1;
        let chosen: Vec<&[f32]> = runs.chunks(RUNS).map(|few| few[rng.below(few.len())]).collect();
        let piece = share(ws, chosen.len());
        let sum_of = |runs: &[&[f32]]| runs.iter().map(|run| kernels::read_sum(run)).sum::<f32>();
        let (sum, seconds) =
            timed_on_running_threads(ws, || chosen.par_chunks(piece).map(sum_of).sum::<f32>());
        black_box(sum);
        (chosen.len() * RUN * size_of::<f32>()) as f64 / seconds
    })
}

/// Returns the number of iterations that take [`BURST_SECONDS`]; none if even an impossible number is faster, because
/// the work was then optimised away.
fn enough_iterations(mut seconds: impl FnMut(u64) -> f64) -> Option<u64> {
    (12..=34).map(|power| 1 << power).find(|&iterations| seconds(iterations) >= BURST_SECONDS)
}

/// Reads every element. Integer addition is associative: the sum vectorises and keeps up with memory.
fn sum_of_bits(x: &[f32]) -> u32 {
    x.iter().fold(0, |sum, v| sum.wrapping_add(v.to_bits()))
}

/// Returns processor and platform, for the head of a page.
pub fn processor() -> String {
    format!("{} ({} {})", cpu_name(), std::env::consts::ARCH, std::env::consts::OS)
}

/// Returns the date in universal time, as `2026-01-31`.
pub fn date() -> String {
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    let (year, month, day) = civil(now.map_or(0, |d| d.as_secs() / 86400));
    format!("{year:04}-{month:02}-{day:02}")
}

/// Converts days after 1970-01-01 to year, month and day, by eras of 400 years that begin in March.
fn civil(days: u64) -> (u64, u64, u64) {
    let days = days + 719_468;
    let (era, of_era) = (days / 146_097, days % 146_097);
    let year = (of_era - of_era / 1460 + of_era / 36_524 - of_era / 146_096) / 365;
    let of_year = of_era - (365 * year + year / 4 - year / 100);
    let shifted = (5 * of_year + 2) / 153;
    let day = of_year - (153 * shifted + 2) / 5 + 1;
    let month = if shifted < 10 { shifted + 3 } else { shifted - 9 };
    (era * 400 + year + u64::from(month <= 2), month, day)
}

/// Fails if the product of `sizes` is more bytes than this machine has, or, if that is unknown, than can be allocated:
/// the system would kill a process that used them.
pub(crate) fn check_room(what: &str, sizes: &[usize]) -> Result<()> {
    let needed = sizes.iter().fold(1usize, |n, &size| n.saturating_mul(size));
    let fits = match memory_of(&std::fs::read_to_string("/proc/meminfo").unwrap_or_default()) {
        Some(there) => needed <= there,
        None => Vec::<u8>::new().try_reserve_exact(needed).is_ok(),
    };
    if fits { Ok(()) } else { Err(Error::NoRoom { what: what.into(), needed }) }
}

/// Parses the bytes of memory from Linux's `/proc/meminfo`.
fn memory_of(text: &str) -> Option<usize> {
    let line = text.lines().find_map(|l| l.strip_prefix("MemTotal:"))?;
    line.trim().strip_suffix("kB")?.trim().parse::<usize>().ok()?.checked_mul(1024)
}

/// Returns the name of the processor, if the system reports it.
fn cpu_name() -> String {
    let text = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let line = text.lines().find(|l| l.starts_with("model name") || l.starts_with("Model"));
    line.and_then(|l| l.split_once(':')).map_or("unknown".into(), |(_, name)| name.trim().into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_no_machine_holds_is_refused() {
        assert_eq!(memory_of("MemTotal:       4021120 kB\nMemFree: 1 kB\n"), Some(4_021_120 << 10));
        assert_eq!(memory_of("MemFree: 1 kB\n"), None);
        check_room("a page", &[4, 1024]).unwrap();
        for sizes in [&[1 << 40, 1 << 10][..], &[usize::MAX, usize::MAX]] {
            let message = check_room("inputs", sizes).unwrap_err().to_string();
            assert!(
                message.starts_with("inputs would take") && message.contains("this machine"),
                "{message}"
            );
        }
    }

    #[test]
    fn every_ceiling_is_possible() {
        let ws = Workspace::single().unwrap();
        let m = Machine::measure(&ws, 1 << 20);
        // Two 512-bit multiply-adds in each cycle of a 6 GHz core are 384 billion operations per second.
        assert!(m.fma_gflops.is_none_or(|g| g > 0.0 && g < 400.0), "{m:?}");
        assert!(m.read_gbs > 0.0 && m.scattered_gbs > 0.0 && m.copy_gbs > 0.0, "{m:?}");
        assert_eq!(m.threads, 1);
    }

    #[test]
    fn days_are_dates() {
        for (days, date) in
            [(0, (1970, 1, 1)), (11_016, (2000, 2, 29)), (20_454, (2026, 1, 1)), (20_819, (2027, 1, 1))]
        {
            assert_eq!(civil(days), date);
        }
        assert!(date().starts_with("20") && date().len() == 10);
    }

    #[test]
    fn work_that_was_optimised_away_gives_no_peak() {
        assert_eq!(enough_iterations(|_| 2e-8), None);
        let found = enough_iterations(|iterations| iterations as f64 * 1e-9).unwrap();
        assert!((1e-9 * found as f64) >= BURST_SECONDS && 1e-9 * found as f64 <= 2.0 * BURST_SECONDS);
    }
}
