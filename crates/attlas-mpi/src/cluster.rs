//! Predicted times on more machines, from this machine's rates and the α–β model.
//!
//! A message of $b$ bytes takes $\alpha + b\beta$ (Hockney 1994). A process computes at the rates measured on this
//! machine.
//!
//! - **ring**, $P$ processes, blocks of $b$ bytes, $s = c(n/P)$ seconds for the rows of a process over one block of
//!   keys: the first block is local, and each of the other $P - 1$ travels while another is processed:
//!   $s + (P-1)\max(s, \alpha + b\beta)$. The communication is hidden if $s \ge \alpha + b\beta$; exact attention's
//!   work grows with the square of the length and a block with the length, so this is true from some length on. A
//!   method that reads a few of many keys for every row reads a share of them in every block, also $s = c/P^2$; one
//!   that reads equally many in every block has $s = c/P$, and a ring reduces only its memory.
//! - **sort**, in place of a ring if a method attends block by block over sorted rows: $b$ bytes of rows and results
//!   leave every process in $k$ steps, and only the first and the last wait: $k \max(c/(Pk), m) + 2m$ with
//!   $m = 2(P - 1)\alpha + \beta b/k$.
//! - **scan**, states of $b$ bytes: $c/P + \lceil\log_2 P\rceil(\alpha + b\beta)$ with a causal mask; without one, a
//!   broadcast takes the same number of messages.
//! - **gather**, $b$ bytes of representative keys from each: $c/P + (P-1)(\alpha + b\beta)$; the work includes each
//!   row's attention to the representatives of all.

use crate::ring::share;
use crate::sort;
use attlas::method::Cost;
use attlas::{Mask, Method, Options, Problem, Result, Spread};

/// Machines and their network.
#[derive(Clone, Copy, Debug, PartialEq, serde::Serialize)]
pub struct Cluster {
    /// Machines, one process on each.
    pub nodes: usize,
    /// Billions of bits per second that a machine sends while it receives as many.
    pub gbps: f64,
    /// Microseconds until the first byte of a message arrives.
    pub us: f64,
}

impl std::str::FromStr for Cluster {
    type Err = String;

    fn from_str(text: &str) -> std::result::Result<Self, String> {
        let expected = || format!("nodes=N,gbps=G,us=U such as nodes=64,gbps=100,us=2, not '{text}'");
        let mut cluster = Self { nodes: 0, gbps: 100.0, us: 2.0 };
        for part in text.split(',') {
            let (name, value) = part.split_once('=').ok_or_else(expected)?;
            let number: f64 = value.trim().parse().map_err(|_| expected())?;
            match name.trim() {
                "nodes" if number >= 1.0 && number.fract() == 0.0 && number <= 1e7 => {
                    cluster.nodes = number as usize
                }
                "gbps" if number > 0.0 && number.is_finite() => cluster.gbps = number,
                "us" if number >= 0.0 && number.is_finite() => cluster.us = number,
                _ => return Err(expected()),
            }
        }
        if cluster.nodes == 0 { Err(expected()) } else { Ok(cluster) }
    }
}

impl Cluster {
    /// Returns the seconds of a message of `bytes` bytes.
    pub fn message(&self, bytes: f64) -> f64 {
        self.us * 1e-6 + bytes * 8.0 / (self.gbps * 1e9)
    }
}

/// Measured rate of one machine: seconds of one run at one length.
#[derive(Clone, Copy, Debug, PartialEq, serde::Serialize)]
pub struct Measured {
    /// Length.
    pub n: usize,
    /// Seconds.
    pub seconds: f64,
}

/// Prediction for one length.
#[derive(Clone, Debug, serde::Serialize)]
pub struct Prediction {
    /// Id of the method.
    pub method: &'static str,
    /// `ring`, `sort` in place of one, `scan` or `gather`.
    pub schedule: &'static str,
    /// Machines.
    pub nodes: usize,
    /// Length.
    pub n: usize,
    /// Seconds on one machine.
    pub one: f64,
    /// Seconds on all of them.
    pub seconds: f64,
    /// Speed-up over one machine, divided by the number of machines.
    pub efficiency: f64,
    /// Bytes that a machine sends.
    pub bytes: f64,
    /// Length from which a ring hides its communication.
    pub hidden_from: Option<f64>,
}

/// Returns the seconds of `problem` at another length: its counted work over the rate of the measured run.
fn work(method: &Method, options: &Options, problem: &Problem, measured: &Measured, n: usize) -> Result<f64> {
    let flops = |n: usize| -> Result<f64> {
        let cost: Cost = method.plan(&problem.with_lens(n, n), options)?.cost();
        Ok(cost.flops() as f64)
    };
    Ok(measured.seconds * flops(n)? / flops(measured.n)?.max(1.0))
}

/// Predicts the time of `problem` on a cluster. `state` is the number of bytes that a process sends in a scan or a
/// gather.
pub fn predict(
    cluster: &Cluster,
    method: &'static Method,
    options: &Options,
    problem: &Problem,
    measured: &Measured,
    state: f64,
) -> Result<Option<Prediction>> {
    let p = cluster.nodes as f64;
    let n = problem.n_k;
    let one = work(method, options, problem, measured, n)?;
    let Some(mut schedule) = method.claims.spread.name() else { return Ok(None) };
    let token = (problem.batch * problem.n_kv_heads * (problem.d + problem.d_v) * size_of::<f32>()) as f64;
    let sorted = sorts(method, problem, options, cluster.nodes)?;
    let (seconds, bytes, hidden_from) = match (method.claims.spread, sorted) {
        (Spread::Ring { .. }, Some((steps, bytes))) => {
            schedule = "sort";
            let message = 2.0 * (p - 1.0) * cluster.us * 1e-6 + bytes / steps * 8.0 / (cluster.gbps * 1e9);
            (steps * (one / p / steps).max(message) + 2.0 * message, bytes, None)
        }
        (Spread::Ring { .. }, None) => {
            let block = token * n as f64 / p;
            // If the method reads a few of many keys, a row reads its share of every block.
            let step = step(cluster, method, options, problem, measured, n)?;
            let message = cluster.message(block);
            let seconds = step + (p - 1.0) * step.max(message);
            (seconds, (p - 1.0) * block, hidden(cluster, method, options, problem, measured, token)?)
        }
        (Spread::Scan { .. }, _) => {
            let rounds = p.log2().ceil() * if problem.mask == Mask::Causal { 1.0 } else { 2.0 };
            (one / p + rounds * cluster.message(state), rounds * state, None)
        }
        (Spread::Gather, _) => (one / p + (p - 1.0) * cluster.message(state), (p - 1.0) * state, None),
        (Spread::Refused { .. }, _) => return Ok(None),
    };
    let efficiency = one / (seconds * p);
    let nodes = cluster.nodes;
    Ok(Some(Prediction {
        method: method.id,
        schedule,
        nodes,
        n,
        one,
        seconds,
        efficiency,
        bytes,
        hidden_from,
    }))
}

/// Returns the steps of a sort over all processes and the bytes that each process sends, if the method sorts.
fn sorts(
    method: &Method,
    problem: &Problem,
    options: &Options,
    processes: usize,
) -> Result<Option<(f64, f64)>> {
    let plan = method.plan(problem, options)?;
    let rule = plan.sorted_rule().filter(|_| processes > 1);
    Ok(rule.map(|rule| {
        let element = size_of::<f32>();
        let each = sort::steps(problem, rule.cut().blocks(), processes, element).1;
        ((problem.batch * problem.n_kv_heads * each) as f64, sort::bytes(problem, processes, element))
    }))
}

/// Returns the seconds of a ring step: the rows of one machine and the keys of one.
fn step(
    cluster: &Cluster,
    method: &Method,
    options: &Options,
    problem: &Problem,
    measured: &Measured,
    n: usize,
) -> Result<f64> {
    let rows = n.div_ceil(cluster.nodes);
    let flops = |n: usize, options: &Options| -> Result<f64> {
        Ok(method.plan(&problem.with_lens(n, n), options)?.cost().flops() as f64)
    };
    let part = share(method, options, rows, n);
    Ok(measured.seconds * flops(rows, &part)? / flops(measured.n, options)?.max(1.0))
}

/// Returns the length from which a ring step takes longer than its message; none if there is none below 2⁵⁰.
fn hidden(
    cluster: &Cluster,
    method: &Method,
    options: &Options,
    problem: &Problem,
    measured: &Measured,
    token: f64,
) -> Result<Option<f64>> {
    let p = cluster.nodes as f64;
    if cluster.nodes < 2 {
        return Ok(Some(0.0));
    }
    // Counted work at two lengths gives its growth: c(n) = a n^g.
    let (low, high) = (1 << 16, 1 << 18);
    let (a, b) =
        (work(method, options, problem, measured, low)?, work(method, options, problem, measured, high)?);
    let growth = (b / a).log2() / 2.0;
    let hides = |n: f64| b * (n / p / high as f64).powf(growth) >= cluster.message(token * n / p);
    let (mut from, mut to) = (1.0f64, (1u64 << 50) as f64);
    if !hides(to) {
        return Ok(None);
    }
    for _ in 0..200 {
        let middle = (from * to).sqrt();
        if hides(middle) { to = middle } else { from = middle }
    }
    Ok(Some(to))
}

#[cfg(test)]
mod tests {
    use super::*;
    use attlas::registry;

    fn cluster(nodes: usize) -> Cluster {
        Cluster { nodes, gbps: 100.0, us: 2.0 }
    }

    #[test]
    fn clusters_are_read_from_text() {
        assert_eq!("nodes=64,gbps=100,us=2".parse(), Ok(cluster(64)));
        assert_eq!("nodes=8".parse(), Ok(cluster(8)));
        for bad in
            ["", "nodes=0", "nodes=1.5", "gbps=10", "nodes=4,gbps=0", "nodes=4,us=-1", "nodes=x", "n=4"]
        {
            assert!(bad.parse::<Cluster>().is_err(), "{bad}");
        }
    }

    #[test]
    fn a_ring_hides_its_messages_from_the_length_that_is_said() {
        let exact = registry::baseline();
        let problem = Problem::new(8, 1 << 20, 64);
        let measured = Measured { n: 32768, seconds: 20.0 };
        let at = |n: usize| {
            predict(&cluster(64), exact, &Options::new(), &problem.with_lens(n, n), &measured, 0.0)
                .unwrap()
                .unwrap()
        };
        let from = at(1 << 20).hidden_from.unwrap();
        // Lengths that divide evenly among the processes.
        let even = |n: f64| at((n as usize).next_multiple_of(64));
        let (below, above) = (even(0.5 * from), even(2.0 * from));
        assert!(above.efficiency > 0.999 && below.efficiency < 0.99, "{from}: {below:?} {above:?}");
        // Work of exact attention is a n², a block of keys β n / P: both meet at n = βP/a.
        let a = 20.0 / 32768f64.powi(2);
        let token = (8 * 128 * 4) as f64;
        let slope = token * 8.0 / 100e9 / 64.0;
        let latency = 2e-6;
        let n = from;
        let gap = a * n * n / (64.0 * 64.0) - latency - slope * n;
        assert!(gap.abs() < 1e-6 * a * n * n / 4096.0, "{gap}");
    }

    #[test]
    fn blocks_share_what_a_row_reads_or_a_ring_repeats_the_work() {
        let hyper = registry::method("hyper").unwrap();
        let smyrf = registry::method("smyrf").unwrap();
        let problem = Problem::new(8, 1 << 20, 64);
        let measured = Measured { n: 32768, seconds: 1.0 };
        let options = Options::new();
        let on = |method| predict(&cluster(8), method, &options, &problem, &measured, 0.0).unwrap().unwrap();
        // Each process attends to an eighth of the blocks, and all messages but the first and the last are hidden.
        assert!((on(hyper).efficiency - 1.0).abs() < 0.15, "{:?}", on(hyper));
        // A row reads the same number of keys from one block as from all.
        assert!((on(smyrf).seconds / on(smyrf).one - 1.0).abs() < 0.1, "{:?}", on(smyrf));
        let exact = registry::baseline();
        let exact = predict(&cluster(8), exact, &options, &problem, &measured, 0.0).unwrap().unwrap();
        assert!((exact.efficiency - 1.0).abs() < 0.01, "{exact:?}");
    }

    #[test]
    fn bytes_of_a_scan_do_not_depend_on_the_length() {
        let linear = registry::method("linear").unwrap();
        let measured = Measured { n: 32768, seconds: 0.5 };
        let at = |n: usize| {
            let problem = Problem::new(8, n, 64).causal();
            predict(&cluster(8), linear, &Options::new(), &problem, &measured, 1e5).unwrap().unwrap()
        };
        assert_eq!(at(1 << 20).bytes, at(1 << 24).bytes);
        assert!(at(1 << 24).efficiency > at(1 << 16).efficiency);
        assert_eq!(at(1 << 20).schedule, "scan");
    }

    #[test]
    fn one_machine_is_as_fast_as_itself() {
        for id in ["exact", "linear", "wildcat"] {
            let method = registry::method(id).unwrap();
            let problem = Problem::new(8, 1 << 16, 64).causal();
            let measured = Measured { n: 1 << 14, seconds: 1.0 };
            let alone =
                predict(&cluster(1), method, &Options::new(), &problem, &measured, 1e5).unwrap().unwrap();
            assert!((alone.efficiency - 1.0).abs() < 1e-9, "{id}: {alone:?}");
        }
        let top = registry::method("top_k").unwrap();
        let problem = Problem::new(1, 4096, 64);
        let measured = Measured { n: 1024, seconds: 1.0 };
        assert!(predict(&cluster(4), top, &Options::new(), &problem, &measured, 0.0).unwrap().is_none());
    }
}
