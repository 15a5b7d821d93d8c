//! Methods with a near field on the heads of the demo, beside windows of as many scores.
//!
//! `cargo test --release -p attlas-lab --test near_field -- --ignored --nocapture` prints the table (some minutes).

use attlas::method::{Family, Needs};
use attlas::metrics::relative_frobenius;
use attlas::{Inputs, Options, Out, RunInfo, TensorMut, Workspace, registry};
use attlas_lab::LayerData;

/// Output rows of the first key head of a layer.
fn run(id: &str, options: &Options, layer: &LayerData, ws: &mut Workspace) -> Option<(Vec<f32>, RunInfo)> {
    let p = layer.group_problem(attlas::Mask::Causal);
    let plan = registry::method(id).unwrap().plan(&p, options).ok()?;
    let mut o = vec![0.0f32; p.n_heads * p.n_q * p.d_v];
    let out = Out::new(TensorMut::bhnd(&mut o, [1, p.n_heads, p.n_q, p.d_v]).unwrap());
    let info = plan.execute(&Inputs::F32(layer.group(0).unwrap()), &mut out.into(), ws).unwrap();
    Some((o, info))
}

/// Mean error over the heads of the demo, and scores of a query.
struct Bench {
    layers: Vec<LayerData>,
    exact: Vec<Vec<f32>>,
    ws: Workspace,
}

impl Bench {
    fn new() -> Self {
        let layers = attlas_lab::demo::load().unwrap().layers;
        let mut ws = Workspace::single().unwrap();
        let exact = layers.iter().map(|l| run("exact", &Options::new(), l, &mut ws).unwrap().0).collect();
        Self { layers, exact, ws }
    }

    fn measure(&mut self, id: &str, options: &Options) -> Option<(f64, f64, u64)> {
        let (mut error, mut heads, mut visited, mut rows, mut replaced) = (0.0, 0.0, 0.0, 0.0, 0);
        for (layer, exact) in self.layers.iter().zip(&self.exact) {
            let p = layer.group_problem(attlas::Mask::Causal);
            let (o, info) = run(id, options, layer, &mut self.ws)?;
            let len = p.n_q * p.d_v;
            for (got, want) in o.chunks_exact(len).zip(exact.chunks_exact(len)) {
                let wide = |x: &[f32]| x.iter().map(|&x| f64::from(x)).collect::<Vec<f64>>();
                error += relative_frobenius(&wide(got), &wide(want));
                heads += 1.0;
            }
            visited += info.keys_visited as f64;
            rows += (p.n_heads * p.n_q) as f64;
            replaced += info.fallback_rows;
        }
        Some((error / heads, visited / rows, replaced))
    }
}

fn options(pairs: &[(&str, &str)]) -> Options {
    pairs.iter().fold(Options::new(), |o, (k, v)| o.with(k, *v))
}

/// Settings that read about a hundred far keys a query.
const SETTINGS: [(&str, &[(&str, &str)]); 16] = [
    ("reformer", &[("rounds", "4"), ("block", "32")]),
    ("routing", &[("clusters", "32"), ("window", "64")]),
    ("smyrf", &[("rounds", "4"), ("block", "16"), ("min_len", "64")]),
    ("kdeformer", &[("block", "32"), ("samples", "32"), ("n_min", "64")]),
    ("multipole", &[("budget", "32"), ("interval", "16"), ("sinks", "0")]),
    ("anna", &[("weights", "softmax")]),
    ("hyper", &[("block", "64"), ("samples", "0"), ("n_min", "64"), ("near.rest", "mean")]),
    ("hyper", &[("block", "32"), ("samples", "32"), ("n_min", "64")]),
    ("prescored_hyper", &[("keys", "256"), ("block", "64"), ("n_min", "64")]),
    ("lifted_nystrom", &[("landmarks", "64"), ("block", "64")]),
    ("wildcat", &[("rank", "64"), ("block", "64")]),
    ("linformer", &[("rank", "64")]),
    ("performer", &[]),
    ("crt", &[]),
    ("hybrid_features", &[]),
    ("scatterbrain", &[]),
];

#[test]
#[ignore = "minutes; prints a table"]
fn methods_with_a_near_field_are_no_worse_than_the_near_field_alone() {
    let mut bench = Bench::new();
    let near = [("near.sinks", "4"), ("near.window", "128")];
    let heavy = [near[0], near[1], ("near.heavy", "64")];
    let nothing = [("sinks", "0"), ("window", "1"), ("near.rest", "none"), ("near.guard", "false")];
    let mut worse = Vec::new();
    for (what, field) in [("sinks and window", &near[..]), ("and 64 heavy keys", &heavy[..])] {
        let alone = bench.measure("sink_window", &options(&[field, &nothing].concat())).unwrap();
        println!("{what} alone: {:.3} at {:.0} scores", alone.0, alone.1);
        for (id, settings) in SETTINGS {
            let published = bench.measure(id, &options(settings)).map_or(f64::NAN, |m| m.0);
            let Some((error, scores, replaced)) = bench.measure(id, &options(&[settings, field].concat()))
            else {
                println!("  {id}: refused");
                continue;
            };
            let window = format!("{}", scores as usize - 4);
            let window =
                bench.measure("sink_window", &options(&[("sinks", "4"), ("window", &window)])).unwrap().0;
            println!(
                "  {id:16} {error:.3} at {scores:.0} scores ({published:.3} as published; window of as many {window:.3}; {replaced} rows replaced)"
            );
            if error > alone.0 {
                worse.push(format!("{id} with {what}: {error:.3}, alone {:.3}", alone.0));
            }
        }
    }
    let known = |m: &&attlas::Method| {
        m.claims.lse && m.family != Family::Exact && m.claims.needs != Needs::Calibration && m.id != "linear"
    };
    for method in registry::METHODS.iter().copied().filter(|m| known(m)) {
        assert!(SETTINGS.iter().any(|(id, _)| *id == method.id), "{} is not measured", method.id);
    }
    assert!(worse.is_empty(), "{worse:?}");
}
