//! Checks for any transport and any number of processes: run by the tests on threads, and on the processes of `mpirun`.
//! All processes call every check, and each gets the first difference it found.

use crate::{Answer, Layout, Parts, Sharded, SpreadCache, Transport, Wire, attend_into, layouts, support};
use attlas::method::Budget;
use attlas::{
    Align, Mask, Method, Options, Out, Problem, Qkv, Spread, TensorMut, TensorRef, Workspace, registry,
};
use attlas_num::rng::StreamKey;
use half::bf16;

/// Result of a check.
pub type Found = Result<(), String>;

/// Queries, keys and values of a whole problem.
#[derive(Clone, Debug)]
struct Whole {
    p: Problem,
    q: Vec<f64>,
    k: Vec<f64>,
    v: Vec<f64>,
}

impl Whole {
    fn draw(p: Problem, seed: u64) -> Self {
        let fill = |what: &str, count: usize| {
            let mut rng = StreamKey::new(seed).named(what).rng();
            (0..count).map(|_| rng.normal()).collect()
        };
        Self {
            q: fill("queries", p.batch * p.n_heads * p.n_q * p.d),
            k: fill("keys", p.batch * p.n_kv_heads * p.n_k * p.d),
            v: fill("values", p.batch * p.n_kv_heads * p.n_k * p.d_v),
            p,
        }
    }

    fn tensors(&self) -> attlas::Result<[TensorRef<'_, f64>; 3]> {
        let p = &self.p;
        Ok([
            TensorRef::bhnd(&self.q, [p.batch, p.n_heads, p.n_q, p.d])?,
            TensorRef::bhnd(&self.k, [p.batch, p.n_kv_heads, p.n_k, p.d])?,
            TensorRef::bhnd(&self.v, [p.batch, p.n_kv_heads, p.n_k, p.d_v])?,
        ])
    }

    /// Computes the output on one process.
    fn alone(&self, method: &Method, options: &Options, lens: Option<&[usize]>) -> attlas::Result<Vec<f64>> {
        let p = &self.p;
        let [q, k, v] = self.tensors()?;
        let x = Qkv::new(q, k, v);
        let x = lens.map_or(x, |lens| x.padded(lens, Align::Start));
        let mut o = vec![f64::NAN; p.batch * p.n_heads * p.n_q * p.d_v];
        let out = Out::new(TensorMut::bhnd(&mut o, [p.batch, p.n_heads, p.n_q, p.d_v])?);
        let plan = method.plan(p, options)?;
        plan.execute(&x.into(), &mut out.into(), &mut Workspace::single()?)?;
        Ok(o)
    }

    /// Computes the output on all processes; returns the whole output and the bytes that this process sent.
    fn spread(
        &self,
        t: &dyn Transport,
        method: &Method,
        options: &Options,
        lens: Option<&[usize]>,
        wire: Wire,
    ) -> attlas::Result<(Vec<f64>, u64)> {
        let p = &self.p;
        let [q, k, v] = self.tensors()?;
        let [ql, kl] = layouts(p, method, options, t.size());
        let rank = t.rank();
        let (q, k, v) = (Sharded::cut(q, ql, rank)?, Sharded::cut(k, kl, rank)?, Sharded::cut(v, kl, rank)?);
        let parts = Parts { q: &q, k: &k, v: &v, key_lens: lens };
        // In memory whose numbers would show.
        let count = p.batch * p.n_heads * ql.rows(rank);
        let (o, lse) = (vec![f64::NAN; count * p.d_v], Some(vec![f64::NAN; count]));
        let mut answer = Answer { o, lse, ..Answer::default() };
        attend_into(t, p, method, options, &parts, wire, &mut answer, &mut Workspace::single()?)?;
        let o = Sharded::new(answer.o, [p.batch, p.n_heads, p.d_v], ql, rank)?;
        Ok((o.gather(t), answer.traffic.bytes))
    }
}

/// Returns the largest difference of two lists, relative to the larger of one and the number; NaN matches NaN.
fn difference(a: &[f64], b: &[f64]) -> f64 {
    let one = |(a, b): (&f64, &f64)| {
        if a.to_bits() == b.to_bits() || a.is_nan() && b.is_nan() {
            0.0
        } else if a.is_nan() || b.is_nan() {
            f64::INFINITY
        } else {
            (a - b).abs() / b.abs().max(1.0)
        }
    };
    a.iter().zip(b).map(one).fold(if a.len() == b.len() { 0.0 } else { f64::INFINITY }, f64::max)
}

fn words(error: attlas::Error) -> String {
    error.to_string()
}

/// Returns lengths that are awkward for `size` processes.
fn lengths(size: usize) -> Vec<usize> {
    let mut all = vec![1, size.saturating_sub(1).max(1), 2 * size + 1, 61, 130];
    all.dedup();
    all
}

fn sizes(n: usize, mask: Mask) -> Problem {
    Problem { d_v: 6, mask, batch: 2, ..Problem::new(4, n, 8).with_kv_heads(2) }
}

fn masks(method: &Method) -> impl Iterator<Item = Mask> {
    let causal = method.claims.causal;
    [Mask::None, Mask::Causal].into_iter().filter(move |m| *m == Mask::None || causal)
}

/// Returns the settings to try: the defaults and the probes.
fn settings(method: &Method) -> Vec<Options> {
    let probe =
        |list: &&[(&str, &str)]| list.iter().fold(Options::new(), |o, (name, value)| o.with(name, *value));
    std::iter::once(Options::new()).chain(method.probes.iter().map(probe)).collect()
}

/// Returns the methods with a schedule.
pub fn scheduled() -> impl Iterator<Item = &'static Method> {
    registry::METHODS.iter().copied().filter(|m| m.claims.spread.name().is_some())
}

/// Every method with a deterministic result equals one process: exact attention and methods that choose keys by
/// position to 1e-12, sums over keys and blocks of jointly sorted rows to 1e-9.
pub fn one_process(t: &dyn Transport) -> Found {
    let mut compared = Vec::new();
    for method in scheduled() {
        let scan = matches!(method.claims.spread, Spread::Scan { .. });
        let determined = scan || ["exact", "naive", "sink_window"].contains(&method.id);
        for (options, mask) in
            settings(method).into_iter().flat_map(|o| masks(method).map(move |m| (o.clone(), m)))
        {
            for n in lengths(t.size()) {
                let x = Whole::draw(sizes(n, mask), n as u64);
                let name =
                    format!("{} {options}, mask {mask}, {n} tokens, {} processes", method.id, t.size());
                let sorted = || method.plan(&x.p, &options).is_ok_and(|plan| plan.sorted_rule().is_some());
                if !support(&x.p, method, &options, false).is_yes() || !determined && !sorted() {
                    continue;
                }
                let (found, _) = match x.spread(t, method, &options, None, Wire::Full) {
                    // Under these settings the method is no sum over keys.
                    Err(attlas::Error::Unsupported { .. }) if scan => continue,
                    other => other.map_err(|e| format!("{name}: {e}"))?,
                };
                let want = x.alone(method, &options, None).map_err(words)?;
                let limit = if scan || !determined { 1e-9 } else { 1e-12 };
                let bf16 = options.get("precision").is_some();
                let gap = difference(&found, &want);
                if gap > if bf16 { 1e-2 } else { limit } {
                    return Err(format!("{name}: {gap:e} from one process"));
                }
                compared.push(method.id);
            }
        }
    }
    for id in [
        "exact",
        "sink_window",
        "hyper",
        "linear",
        "performer",
        "polaformer",
        "polysketch",
        "tensor_sketch",
        "polynomial",
    ] {
        if !compared.contains(&id) {
            return Err(format!("{id} was never compared"));
        }
    }
    Ok(())
}

/// Approximate methods: with a budget that covers every key they equal exact attention, and constant values are
/// preserved if weights sum to one.
pub fn approximations(t: &dyn Transport) -> Found {
    let mut tried = Vec::new();
    for method in scheduled().filter(|m| !matches!(m.claims.spread, Spread::Scan { .. })) {
        for mask in masks(method) {
            for n in [2 * t.size() + 1, 97] {
                let x = Whole::draw(sizes(n, mask), 5);
                let exact = x.alone(registry::baseline(), &Options::new(), None).map_err(words)?;
                for (param, budget) in method.claims.exact_at {
                    let options = match budget {
                        Budget::Value(value) => Options::new().with(param, *value),
                        _ => Options::new().with(param, n),
                    };
                    let name = format!("{} {options}, mask {mask}, {n} tokens", method.id);
                    if !support(&x.p, method, &options, false).is_yes() {
                        continue;
                    }
                    let (found, _) = x
                        .spread(t, method, &options, None, Wire::Full)
                        .map_err(|e| format!("{name}: {e}"))?;
                    let gap = difference(&found, &exact);
                    if gap > 1e-9 {
                        return Err(format!("{name}: {gap:e} from exact attention"));
                    }
                    tried.push(method.id);
                }
                let constant = Whole { v: vec![0.75; x.v.len()], ..x.clone() };
                for options in settings(method) {
                    let kept = method.claims_with(&options).row_stochastic;
                    if !kept || !support(&x.p, method, &options, false).is_yes() {
                        continue;
                    }
                    let name = format!("{} {options}, mask {mask}, {n} tokens", method.id);
                    let (found, _) = constant
                        .spread(t, method, &options, None, Wire::Full)
                        .map_err(|e| format!("{name}: {e}"))?;
                    // Rows without a key in their bucket are zero.
                    let off = found.iter().any(|&o| o != 0.0 && (o - 0.75).abs() > 1e-9);
                    if off {
                        return Err(format!("{name}: constant values did not come back"));
                    }
                    tried.push(method.id);
                }
            }
        }
        if !tried.contains(&method.id) {
            return Err(format!("{} was never tried", method.id));
        }
    }
    Ok(())
}

/// No later token changes a bit of a row, across the borders of processes, even if it is NaN or infinite.
pub fn leaks(t: &dyn Transport) -> Found {
    let n = 8 * t.size() + 3;
    for method in scheduled().filter(|m| m.claims.causal) {
        for options in settings(method) {
            let x = Whole::draw(sizes(n, Mask::Causal), 3);
            if !support(&x.p, method, &options, false).is_yes() {
                continue;
            }
            let before = match x.spread(t, method, &options, None, Wire::Full) {
                Err(attlas::Error::Unsupported { .. }) => continue,
                other => other.map_err(|e| format!("{} {options}: {e}", method.id))?.0,
            };
            let layout = layouts(&x.p, method, &options, t.size())[1];
            let borders: Vec<usize> = (0..t.size()).flat_map(|r| layout.pieces(r)).map(|r| r.start).collect();
            for token in borders.into_iter().filter(|&b| b > 0) {
                for bad in [17.0, f64::NAN, f64::INFINITY] {
                    let mut changed = x.clone();
                    for (data, cols) in [(&mut changed.k, x.p.d), (&mut changed.v, x.p.d_v)] {
                        for head in data.chunks_exact_mut(n * cols) {
                            head[token * cols..(token + 1) * cols].fill(bad);
                        }
                    }
                    let after = changed.spread(t, method, &options, None, Wire::Full);
                    let (after, _) = after.map_err(|e| format!("{} {options}: {e}", method.id))?;
                    let heads = before.chunks_exact(n * x.p.d_v).zip(after.chunks_exact(n * x.p.d_v));
                    for (a, b) in heads {
                        let early = token * x.p.d_v;
                        let same =
                            a[..early].iter().zip(&b[..early]).all(|(a, b)| a.to_bits() == b.to_bits());
                        if !same {
                            return Err(format!(
                                "{} {options}: token {token} as {bad} moved an earlier row on {} processes",
                                method.id,
                                t.size()
                            ));
                        }
                    }
                }
            }
        }
    }
    Ok(())
}

/// Sequences of different lengths in one batch.
pub fn padding(t: &dyn Transport) -> Found {
    for id in ["exact", "sink_window"] {
        let method = registry::method(id).map_err(words)?;
        for mask in [Mask::None, Mask::Causal] {
            let options = if id == "exact" {
                Options::new()
            } else {
                Options::new().with("sinks", 2).with("window", 5)
            };
            // Without a mask, the window of a padded sequence is aligned to its own end.
            if id == "sink_window" && mask == Mask::None {
                continue;
            }
            let x = Whole::draw(sizes(37, mask), 8);
            for lens in [[37, 20], [1, 37], [5, 0]] {
                let (found, _) = x.spread(t, method, &options, Some(&lens), Wire::Full).map_err(words)?;
                let want = x.alone(method, &options, Some(&lens)).map_err(words)?;
                let gap = difference(&found, &want);
                if gap > 1e-12 {
                    return Err(format!("{id}, mask {mask}, lengths {lens:?}: {gap:e} from one process"));
                }
            }
        }
    }
    Ok(())
}

/// Different numbers of queries and keys, and refused problems.
pub fn shapes(t: &dyn Transport) -> Found {
    let exact = registry::baseline();
    for (n_q, n_k) in [(1, 40), (40, 1), (7, 23)] {
        let x = Whole::draw(sizes(1, Mask::None).with_lens(n_q, n_k), 4);
        let (found, _) = x.spread(t, exact, &Options::new(), None, Wire::Full).map_err(words)?;
        let gap = difference(&found, &x.alone(exact, &Options::new(), None).map_err(words)?);
        if gap > 1e-12 {
            return Err(format!("{n_q} queries and {n_k} keys: {gap:e}"));
        }
    }
    let x = Whole::draw(sizes(20, Mask::None), 4);
    for method in registry::METHODS.iter().filter(|m| m.claims.spread.name().is_none()) {
        match x.spread(t, method, &Options::new(), None, Wire::Full) {
            Err(attlas::Error::Unsupported { reasons, .. }) if !reasons.is_empty() => {}
            other => {
                return Err(format!("{}: expected a refusal, found {:?}", method.id, other.map(|x| x.1)));
            }
        }
    }
    Ok(())
}

/// Runs repeat bit for bit, keys can be rounded on the wire, and the bytes of a scan do not depend on the length.
pub fn wires(t: &dyn Transport) -> Found {
    let exact = registry::baseline();
    let x = Whole::draw(sizes(101, Mask::Causal), 6);
    let run = |x: &Whole, wire| x.spread(t, exact, &Options::new(), None, wire).map_err(words);
    let (first, full) = run(&x, Wire::Full)?;
    let (again, _) = run(&x, Wire::Full)?;
    if first.iter().zip(&again).any(|(a, b)| a.to_bits() != b.to_bits()) {
        return Err("a second run gave other bits".into());
    }
    let (found, short) = run(&x, Wire::Bf16)?;
    let round = |data: &[f64]| data.iter().map(|&x| bf16::from_f64(x).to_f64()).collect::<Vec<f64>>();
    let rounded = Whole { k: round(&x.k), v: round(&x.v), ..x.clone() };
    let gap = difference(&found, &rounded.alone(exact, &Options::new(), None).map_err(words)?);
    if gap > 1e-12 {
        return Err(format!("rounded keys: {gap:e} from one process with rounded keys"));
    }
    if t.size() > 1 && short * 4 != full {
        return Err(format!("{short} bytes of bf16 for {full} of f64"));
    }
    let linear = registry::method("linear").map_err(words)?;
    let bytes = |n| {
        let x = Whole::draw(sizes(n, Mask::Causal), 6);
        x.spread(t, linear, &Options::new(), None, Wire::Full).map(|r| r.1).map_err(words)
    };
    let (short, long) = (bytes(64)?, bytes(640)?);
    if short != long {
        return Err(format!("a scan sent {short} bytes for 64 tokens and {long} for 640"));
    }
    Ok(())
}

/// A cache that grows, is truncated and grows again.
pub fn decoding(t: &dyn Transport) -> Found {
    let p = Problem { batch: 2, ..sizes(1, Mask::None) };
    let n = 3000;
    let all = Whole::draw(p.with_lens(1, n), 9);
    let [_, k, v] = all.tensors().map_err(words)?;
    let mut ws = Workspace::single().map_err(words)?;
    let mut cache = SpreadCache::<f64>::new(t, &p).map_err(words)?;
    let mut at = 0;
    for (step, tokens) in [1, 1, 254, 1, 900, 3, 700].into_iter().enumerate() {
        cache.push(k.rows(at..at + tokens), v.rows(at..at + tokens)).map_err(words)?;
        at += tokens;
        if step == 4 {
            at = 300;
            cache.truncate(at);
        }
        let x = Whole::draw(p.with_lens(1, at), step as u64);
        let cut = |data: &[f64], cols: usize| -> Vec<f64> {
            data.chunks_exact(n * cols).flat_map(|head| head[..at * cols].to_vec()).collect()
        };
        let x = Whole { k: cut(&all.k, p.d), v: cut(&all.v, p.d_v), ..x };
        let want = x.alone(registry::baseline(), &Options::new(), None).map_err(words)?;
        let q = TensorRef::bhnd(&x.q, [p.batch, p.n_heads, 1, p.d]).map_err(words)?;
        let (o, _, _) = cache.attend(t, q, &mut ws).map_err(words)?;
        let gap = difference(&o, &want);
        if gap > 1e-12 || cache.len() != at {
            return Err(format!("{at} tokens on {} processes: {gap:e} from one process", t.size()));
        }
        let everywhere = t.gather_all(bytemuck::cast_slice(&o));
        if everywhere.iter().any(|other| other != &everywhere[0]) {
            return Err(format!("{at} tokens: processes got different bits"));
        }
    }
    let cached: usize = t.gather_all(&(cache.cached() as u64).to_le_bytes()).iter().map(|b| number(b)).sum();
    if cached != cache.len() {
        return Err(format!("{cached} tokens cached for {}", cache.len()));
    }
    Ok(())
}

fn number(bytes: &[u8]) -> usize {
    bytes.try_into().map_or(0, |b| u64::from_le_bytes(b) as usize)
}

/// Tensors that process 0 scatters and every process gathers.
pub fn scattering(t: &dyn Transport) -> Found {
    for n in [0, 1, 7, 40] {
        for layout in [Layout::striped(n, t.size(), 1), Layout::contiguous(n, t.size())] {
            let data: Vec<f64> = (0..2 * 3 * n * 5).map(|i| i as f64).collect();
            let whole = TensorRef::bhnd(&data, [2, 3, n, 5]).map_err(words)?;
            let root = (t.rank() == 0).then_some(whole);
            let part = Sharded::scatter(t, 0, root, [2, 3, 5], layout).map_err(words)?;
            if part.gather(t) != data {
                return Err(format!("{n} tokens did not come back from {layout:?}"));
            }
        }
    }
    Ok(())
}

/// All checks by name.
pub const ALL: [(&str, fn(&dyn Transport) -> Found); 8] = [
    ("scattering", scattering),
    ("one_process", one_process),
    ("approximations", approximations),
    ("leaks", leaks),
    ("padding", padding),
    ("shapes", shapes),
    ("wires", wires),
    ("decoding", decoding),
];
