//! The attlas side of `bench/peers/*.py`: reads one JSON request a line, runs it once, answers with seconds.

use attlas::{
    Inputs, Options, Out, Plan, Problem, Qkv, Schedule, TensorMut, TensorRef, Workspace, metrics, registry,
};
use attlas_num::rng::StreamKey;
use serde_json::{Value, json};
use std::collections::HashMap;
use std::io::{BufRead, Write};
use std::time::Instant;

/// A planned problem with its data, kept between requests so that only the run is timed.
struct Case {
    plan: Box<dyn Plan>,
    q: Vec<f32>,
    k: Vec<f32>,
    v: Vec<f32>,
    o: Vec<f32>,
}

impl Case {
    fn new(problem: &Problem, options: &Options) -> attlas::Result<Self> {
        let p = problem;
        let fill = |what: &str, n: usize| {
            let mut x = vec![0.0f32; n];
            StreamKey::new(0).named(what).rng().fill_normal(&mut x);
            x
        };
        Ok(Self {
            plan: registry::method("exact")?.plan(p, options)?,
            q: fill("q", p.n_heads * p.n_q * p.d),
            k: fill("k", p.n_kv_heads * p.n_k * p.d),
            v: fill("v", p.n_kv_heads * p.n_k * p.d_v),
            o: vec![0.0; p.n_heads * p.n_q * p.d_v],
        })
    }

    fn run(&mut self, ws: &mut Workspace) -> attlas::Result<f64> {
        let p = *self.plan.problem();
        let x = Qkv::new(
            TensorRef::bhnd(&self.q, [1, p.n_heads, p.n_q, p.d])?,
            TensorRef::bhnd(&self.k, [1, p.n_kv_heads, p.n_k, p.d])?,
            TensorRef::bhnd(&self.v, [1, p.n_kv_heads, p.n_k, p.d_v])?,
        );
        let out = Out::new(TensorMut::bhnd(&mut self.o, [1, p.n_heads, p.n_q, p.d_v])?);
        let start = Instant::now();
        self.plan.execute(&Inputs::F32(x), &mut out.into(), ws)?;
        Ok(start.elapsed().as_secs_f64())
    }
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
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
        let precision = request["precision"].as_str().unwrap_or("full").to_string();
        let options = Options::new().with("precision", precision);
        let answer = match request["kind"].as_str().unwrap_or_default() {
            "machine" => {
                let machine = attlas_lab::machine::Machine::measure(ws, 256 << 20);
                json!({"fma_gflops": machine.fma_gflops, "read_gbs": machine.read_gbs, "copy_gbs": machine.copy_gbs})
            }
            "bf16_error" => {
                let mut exact = Case::new(&Problem::new(1, 2048, d), &Options::new())?;
                let mut low =
                    Case::new(&Problem::new(1, 2048, d), &Options::new().with("precision", "bf16"))?;
                exact.run(ws)?;
                low.run(ws)?;
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
                    last = Some((line.clone(), Case::new(&problem, &options)?));
                }
                let Some((_, case)) = &mut last else { continue };
                json!({"seconds": case.run(ws)?})
            }
        };
        println!("{answer}");
        std::io::stdout().flush()?;
    }
    Ok(())
}
