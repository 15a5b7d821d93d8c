//! Timing of one method.

use super::{LONG_RUN_SECONDS, PeerFigure, PeerRatio, Row, Settings};
use crate::Result;
use crate::compare::status_name;
use crate::machine::Machine;
use crate::run::{execute, timed, timed_on_running_threads};
use crate::select::Chosen;
use crate::stats::{Spread, median};
use crate::synthetic::{Kind, Synthetic};
use attlas::method::{Needs, Stream};
use attlas::metrics::Errors;
use attlas::{
    Calibration, DType, Inputs, Mask, Options, Out, Plan, Problem, Qkv, Status, TensorMut, TensorRef,
    Workspace,
};
use attlas_num::kernels::pages;
use attlas_num::par::*;
use attlas_num::rng::StreamKey;

/// Inputs of one shape.
pub(super) struct Data {
    pub(super) problem: Problem,
    q: Vec<f32>,
    k: Vec<f32>,
    v: Vec<f32>,
}

impl Data {
    pub(super) fn draw(problem: Problem, settings: &Settings, seed: u64) -> Result<Self> {
        let p = &problem;
        let what = format!("inputs of {} tokens", p.n_k);
        crate::machine::check_room(&what, &[p.n_heads + 2 * p.n_kv_heads, p.n_k, p.d, size_of::<f32>()])?;
        if settings.kind != Kind::Gaussian {
            let (kind, heads, kv_heads) = (settings.kind, p.n_heads, p.n_kv_heads);
            let source = Synthetic { kind, n: p.n_k, d: p.d, heads, kv_heads, seed };
            let drawn = source.generate()?.layers.swap_remove(0);
            // The last rows of every head.
            let tail = |x: &[f32], rows: usize, cols: usize| {
                let mut last = pages::zeros::<f32>(x.len() / p.n_k * rows);
                let heads = last.chunks_exact_mut(rows * cols).zip(x.chunks_exact(p.n_k * cols));
                heads.for_each(|(last, head)| last.copy_from_slice(&head[(p.n_k - rows) * cols..]));
                last
            };
            let (q, k) = (tail(&drawn.q, p.n_q, p.d), tail(&drawn.k, p.n_k, p.d));
            return Ok(Self { problem, q, k, v: tail(&drawn.v, p.n_k, p.d_v) });
        }
        let fill = |name: &str, heads: usize, rows: usize, cols: usize| {
            let mut x = pages::zeros::<f32>(heads * rows * cols);
            x.par_chunks_mut((rows * cols).max(1)).enumerate().for_each(|(h, part)| {
                let key = StreamKey::new(seed).named("bench").named(name).with(h as u64);
                key.rng().fill_normal(part);
            });
            x
        };
        let q = fill("q", p.n_heads, p.n_q, p.d);
        let k = fill("k", p.n_kv_heads, p.n_k, p.d);
        let v = fill("v", p.n_kv_heads, p.n_k, p.d_v);
        Ok(Self { problem, q, k, v })
    }

    fn inputs(&self) -> Result<Qkv<'_, f32>> {
        let p = &self.problem;
        Ok(Qkv::new(
            TensorRef::bhnd(&self.q, [1, p.n_heads, p.n_q, p.d])?,
            TensorRef::bhnd(&self.k, [1, p.n_kv_heads, p.n_k, p.d])?,
            TensorRef::bhnd(&self.v, [1, p.n_kv_heads, p.n_k, p.d_v])?,
        ))
    }
}

/// A warmed-up method that is being timed.
pub(super) struct Live<'a> {
    subject: &'a Chosen,
    options: Options,
    calibration: Option<Calibration>,
    stream: Option<Box<dyn Stream>>,
    /// Workspace of runs that start on threads that are already awake.
    inside: Workspace,
    output: Vec<f32>,
    setups: Vec<f64>,
    runs: Vec<f64>,
    warm_seconds: f64,
    cost: Option<attlas::Cost>,
    status: Status,
    scratch_bytes: usize,
    peak_bytes: usize,
}

impl<'a> Live<'a> {
    /// Plans the method and runs it once.
    pub(super) fn new(
        subject: &'a Chosen,
        data: &Data,
        settings: &Settings,
        seed: u64,
        ws: &mut Workspace,
    ) -> Result<Self> {
        let p = data.problem;
        let options = subject.options_for(seed);
        let calibration = match (subject.method.claims.needs, subject.method.calibrate) {
            (Needs::Calibration, Some(learn)) => {
                let x = data.inputs()?;
                let rows = p.n_k.div_ceil(4);
                let queries = p.n_q.min(rows);
                let part = Qkv::new(x.q.rows(0..queries), x.k.rows(0..rows), x.v.rows(0..rows));
                Some(learn(&p.with_lens(queries, rows), &options, &[Inputs::from(part)])?)
            }
            _ => None,
        };
        let mut live = Self {
            subject,
            options,
            calibration,
            stream: None,
            inside: ws.sibling(),
            output: pages::zeros(p.n_heads * p.n_q * p.d_v),
            setups: Vec::new(),
            runs: Vec::new(),
            warm_seconds: 0.0,
            cost: None,
            status: Status::Complete,
            scratch_bytes: 0,
            peak_bytes: 0,
        };
        ws.scratch().trim();
        ws.scratch().reset_peak();
        let (warm, peak) = settings.meter.watch(ws, |ws| {
            if settings.decode && subject.method.claims.decode {
                live.fill_stream(data, ws)?;
            }
            live.once(data, ws)
        });
        let (setup, run) = warm?;
        live.warm_seconds = setup + run;
        live.scratch_bytes = ws.scratch().peak_bytes().max(live.inside.scratch().peak_bytes());
        live.peak_bytes = peak.max(live.scratch_bytes);
        Ok(live)
    }

    fn plan(&self, problem: &Problem) -> Result<Box<dyn Plan>> {
        Ok(self.subject.method.plan_with(problem, &self.options, self.calibration.as_ref())?)
    }

    /// Feeds all tokens to a stream; this is its set-up.
    fn fill_stream(&mut self, data: &Data, ws: &mut Workspace) -> Result<()> {
        let x = data.inputs()?;
        let n = data.problem.n_k;
        let (stream, seconds) = timed(|| -> Result<_> {
            let Some(mut stream) = self.plan(&data.problem.with_lens(n, n))?.stream(DType::F32) else {
                return Ok(None);
            };
            stream.push(x.k.into(), x.v.into(), ws)?;
            Ok(Some(stream))
        });
        self.stream = stream?;
        if self.stream.is_some() {
            self.setups.push(seconds);
        }
        Ok(())
    }

    /// Returns the seconds of set-up (0 for a stream) and of one run. The clock starts when all threads are awake, as
    /// in a model, whose layers wake them once: waking a thread takes as long as some methods need for a token.
    pub(super) fn once(&mut self, data: &Data, ws: &mut Workspace) -> Result<(f64, f64)> {
        let p = data.problem;
        let x = data.inputs()?;
        if let Some(stream) = &mut self.stream {
            let mut out = Out::new(TensorMut::bhnd(&mut self.output, [1, p.n_heads, 1, p.d_v])?).into();
            let inside = &mut self.inside;
            let (done, seconds) = timed_on_running_threads(ws, || {
                stream.push(x.k.rows(0..1).into(), x.v.rows(0..1).into(), inside)?;
                stream.attend(x.q.into(), &mut out, inside)
            });
            self.status = done?.status;
            return Ok((0.0, seconds));
        }
        let (plan, setup) = timed(|| self.plan(&p));
        let plan = plan?;
        let (output, inside) = (&mut self.output, &mut self.inside);
        let (info, run) = timed_on_running_threads(ws, || execute(&*plan, x, output, None, inside));
        self.status = info?.status;
        self.cost = Some(plan.cost());
        Ok((setup, run))
    }

    /// Makes one timed run.
    pub(super) fn round(&mut self, data: &Data, ws: &mut Workspace) -> Result<()> {
        let (setup, run) = self.once(data, ws)?;
        if self.stream.is_none() {
            self.setups.push(setup);
        }
        self.runs.push(run);
        Ok(())
    }

    /// Returns the number of runs that the time allows: all, or fewer if a run is long.
    pub(super) fn runs_allowed(&self, settings: &Settings) -> usize {
        if self.warm_seconds <= LONG_RUN_SECONDS {
            return settings.runs;
        }
        ((settings.max_seconds / self.warm_seconds) as usize).clamp(1, settings.runs)
    }

    pub(super) fn run(&self) -> f64 {
        median(&self.runs)
    }

    pub(super) fn setup(&self) -> f64 {
        median(&self.setups)
    }

    /// Returns the seconds of a length; set-up counts unless it was a prompt.
    pub(super) fn total(&self) -> f64 {
        if self.stream.is_some() { self.run() } else { self.setup() + self.run() }
    }

    pub(super) fn row(
        &self,
        subject: &Chosen,
        data: &Data,
        settings: &Settings,
        machine: &Machine,
        beside: Option<&Live<'_>>,
    ) -> Option<Row> {
        let p = &data.problem;
        let (setup_seconds, run_seconds) = (Spread::new(&self.setups)?, Spread::new(&self.runs)?);
        let total = self.total();
        let exact_seconds =
            beside.map(|exact| if settings.decode { exact.run() } else { exact.setup() + exact.run() });
        let judged = beside.filter(|_| settings.kind != Kind::Gaussian && !settings.decode);
        let elements = p.n_heads * p.n_q * (p.d + p.d_v) + p.n_kv_heads * p.n_k * (p.d + p.d_v);
        let bytes = match &self.stream {
            Some(stream) => stream.state_bytes(),
            None => elements * size_of::<f32>(),
        } as u64;
        let flops = self.cost.map(|c| c.flops());
        let gflops = flops.map(|f| f as f64 / total * 1e-9);
        let peers = settings.peers.iter().flat_map(|peer| {
            let fits = |f: &&PeerFigure| {
                (f.method.as_str(), f.n, f.d, f.heads) == (subject.method.id, p.n_k, p.d, p.n_heads)
                    && f.kv_heads.unwrap_or(f.heads) == p.n_kv_heads
                    && f.decode == settings.decode
                    && (f.decode || f.causal == (p.mask == Mask::Causal))
                    && f.threads.is_none_or(|t| t == machine.threads)
            };
            peer.figures.iter().filter(fits).map(|f| PeerRatio {
                peer: peer.peer.clone(),
                seconds: f.seconds,
                ratio: f.seconds / total,
            })
        });
        Some(Row {
            method: subject.method.id,
            family: subject.method.family.name(),
            params: subject.params(&self.options),
            n: p.n_k,
            d: p.d,
            setup_seconds,
            run_seconds,
            exact_seconds,
            speedup: exact_seconds.map(|e| e / total),
            error: judged.map(|exact| Errors::new(&self.output, &exact.output, p.d_v, None).rel_fro),
            flops,
            gflops,
            flop_share: gflops.zip(machine.fma_gflops).map(|(g, peak)| g / peak),
            bytes,
            read_share: bytes as f64 / total * 1e-9 / machine.read_gbs,
            scratch_bytes: self.scratch_bytes,
            peak_bytes: self.peak_bytes,
            mode: match (settings.decode, &self.stream) {
                (false, _) => "run",
                (true, Some(_)) => "stream",
                (true, None) => "one_query",
            },
            status: status_name(self.status),
            peers: peers.collect(),
        })
    }
}
