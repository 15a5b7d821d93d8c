//! The attlas side of `bench/peers/*.py`: reads one JSON request per line, runs it once, answers with seconds.

use attlas::methods::low_rank::linformer;
use attlas::{
    Calibration, Inputs, Method, Options, Out, Plan, Problem, Qkv, Schedule, TensorMut, TensorRef, Workspace,
    metrics, registry,
};
use attlas_lab::machine::Machine;
use attlas_num::Mat;
use attlas_num::rng::StreamKey;
use serde_json::{Value, json};
use std::collections::HashMap;
use std::io::{BufRead, Write};
use std::time::Instant;

/// Bytes read to measure memory: far more than any cache.
const MEMORY: usize = 256 << 20;

type Outcome<T> = Result<T, Box<dyn std::error::Error>>;

/// A problem with its data, kept between requests; planned once, or in every run if set-up is timed.
struct Case {
    method: &'static Method,
    options: Options,
    calibration: Option<Calibration>,
    plan: Box<dyn Plan>,
    q: Vec<f32>,
    k: Vec<f32>,
    v: Vec<f32>,
    o: Vec<f32>,
}

impl Case {
    /// `learn` replaces parameters of a trained layer: `centroids` from the data, or a random matrix for `projections`.
    fn new(id: &str, problem: &Problem, options: Options, learn: &str) -> Outcome<Self> {
        let p = problem;
        let method = registry::method(id)?;
        let fill = |what: &str, n: usize| {
            let mut x = vec![0.0f32; n];
            StreamKey::new(0).named(what).rng().fill_normal(&mut x);
            x
        };
        let mut case = Self {
            method,
            options,
            calibration: None,
            plan: registry::method("exact")?.plan(p, &Options::new())?,
            q: fill("q", p.n_heads * p.n_q * p.d),
            k: fill("k", p.n_kv_heads * p.n_k * p.d),
            v: fill("v", p.n_kv_heads * p.n_k * p.d_v),
            o: vec![0.0; p.n_heads * p.n_q * p.d_v],
        };
        case.calibration = match learn {
            "" => None,
            "centroids" => {
                let calibrate = method.calibrate.ok_or_else(|| format!("{id} learns nothing from data"))?;
                Some(calibrate(p, &case.options, &[Inputs::F32(case.inputs()?)])?)
            }
            "projections" => {
                let rank = case.options.get("rank").and_then(|x| x.to_string().parse().ok()).unwrap_or(256);
                let random = |what: &str| {
                    let mut x = vec![0.0; p.n_k * rank];
                    StreamKey::new(1).named(what).rng().fill_normal(&mut x);
                    Mat::from_vec(x, p.n_k, rank)
                };
                Some(linformer::with_projections(p, &[random("e")], &[random("f")])?)
            }
            other => return Err(format!("learn = {other}: expected centroids or projections").into()),
        };
        case.plan()?;
        Ok(case)
    }

    fn plan(&mut self) -> attlas::Result<()> {
        self.plan =
            self.method.plan_with(&{ *self.plan.problem() }, &self.options, self.calibration.as_ref())?;
        Ok(())
    }

    fn inputs(&self) -> attlas::Result<Qkv<'_, f32>> {
        let p = self.plan.problem();
        Ok(Qkv::new(
            TensorRef::bhnd(&self.q, [1, p.n_heads, p.n_q, p.d])?,
            TensorRef::bhnd(&self.k, [1, p.n_kv_heads, p.n_k, p.d])?,
            TensorRef::bhnd(&self.v, [1, p.n_kv_heads, p.n_k, p.d_v])?,
        ))
    }

    fn run(&mut self, with_setup: bool, ws: &mut Workspace) -> attlas::Result<f64> {
        let mut o = std::mem::take(&mut self.o);
        let start = Instant::now();
        if with_setup {
            self.plan()?;
        }
        let p = *self.plan.problem();
        let out = Out::new(TensorMut::bhnd(&mut o, [1, p.n_heads, p.n_q, p.d_v])?);
        self.plan.execute(&Inputs::F32(self.inputs()?), &mut out.into(), ws)?;
        let seconds = start.elapsed().as_secs_f64();
        self.o = o;
        Ok(seconds)
    }
}

fn main() -> Outcome<()> {
    let mut workspaces: HashMap<usize, Workspace> = HashMap::new();
    let mut last: Option<(String, Case)> = None;
    for line in std::io::stdin().lock().lines() {
        let line = line?;
        let request: Value = serde_json::from_str(&line)?;
        let number = |name: &str, default: u64| request[name].as_u64().unwrap_or(default) as usize;
        let (threads, heads, n, d) =
            (number("threads", 1), number("heads", 1), number("n", 1024), number("d", 64));
        let ws = match workspaces.entry(threads) {
            std::collections::hash_map::Entry::Occupied(e) => e.into_mut(),
            std::collections::hash_map::Entry::Vacant(e) => {
                e.insert(Workspace::new(Schedule { threads, ..Schedule::default() })?)
            }
        };
        let id = request["method"].as_str().unwrap_or("exact");
        let mut options = Options::new();
        for (name, value) in request["set"].as_object().into_iter().flatten() {
            options.set(name, value.as_str().map_or_else(|| value.to_string(), str::to_owned));
        }
        let answer = match request["kind"].as_str().unwrap_or_default() {
            "machine" => {
                let machine = Machine::measure(ws, MEMORY);
                json!({"fma_gflops": machine.fma_gflops, "read_gbs": machine.read_gbs, "copy_gbs": machine.copy_gbs})
            }
            "fma_peak" => json!({"gflops": Machine::fma_peak(ws)}),
            "read_peak" => json!({"gbs": Machine::read_peak(ws, MEMORY)}),
            "bf16_error" => {
                let problem = Problem::new(1, 2048, d);
                let mut exact = Case::new(id, &problem, Options::new(), "")?;
                let mut low = Case::new(id, &problem, Options::new().with("precision", "bf16"), "")?;
                exact.run(false, ws)?;
                low.run(false, ws)?;
                json!({"rel_fro": metrics::Errors::new(&low.o, &exact.o, d, None).rel_fro})
            }
            kind => {
                let mut problem = Problem::new(heads, n, d).with_kv_heads(number("kv_heads", heads as u64));
                if kind == "decode" {
                    problem = problem.with_lens(1, n);
                } else if request["causal"].as_bool().unwrap_or(false) {
                    problem = problem.causal();
                }
                if last.as_ref().is_none_or(|(key, _)| *key != line) {
                    last = Some((
                        line.clone(),
                        Case::new(id, &problem, options, request["learn"].as_str().unwrap_or_default())?,
                    ));
                }
                let Some((_, case)) = &mut last else { continue };
                json!({"seconds": case.run(request["setup"].as_bool().unwrap_or(false), ws)?, "flops": case.plan.cost().flops()})
            }
        };
        println!("{answer}");
        std::io::stdout().flush()?;
    }
    Ok(())
}
