//! Following a chain of repetitions: k-hop induction.
//!
//! Token $i$ points to the latest $j \le i$ whose predecessor equals it, $x_{j-1} = x_i$; $k$ hops follow that pointer
//! $k$ times and read the token there (sanford2024). Heads with weights written by hand solve it in
//! $\lfloor \log_2 k \rfloor + 3$ layers: one looks up the previous token, one finds the latest match, each further one
//! follows pointers of pointers and so doubles their reach, the last reads the token. Look-ups are nearest-neighbour
//! searches, which ANNA (liu2025) answers from hash tables (with `weights = softmax` among the keys in a query's
//! buckets); any method of the registry with a causal form can do them. The head that finds the *latest* of several
//! matches attends exactly.
//!
//! Positions and tokens are coded as $\pm 1$ for the bits of their number: the inner product with a wrong key is lower
//! by at least 2. Outputs are rounded to the nearest code, as a feed-forward layer could.

use crate::{Error, Result};
use attlas::{
    Inputs, Method, Options, Out, Output, Problem, Qkv, Real, Schedule, TensorMut, TensorRef, Workspace,
    registry,
};
use attlas_num::rng::StreamKey;
use serde::Serialize;

/// A run of the task.
#[derive(Clone, Debug)]
pub struct KHop {
    /// Tokens of a sequence.
    pub n: usize,
    /// Hops.
    pub k: usize,
    /// Different tokens.
    pub vocabulary: usize,
    /// Sequences.
    pub count: usize,
    /// The method for the look-ups.
    pub method: &'static Method,
    /// Its settings.
    pub options: Options,
    /// Seed of the sequences.
    pub seed: u64,
}

/// Results of the heads.
#[derive(Clone, Debug, Serialize)]
pub struct KHopRun {
    /// Tokens of a sequence.
    pub n: usize,
    /// Hops.
    pub k: usize,
    /// Different tokens.
    pub vocabulary: usize,
    /// The method for the look-ups.
    pub method: &'static str,
    /// Its settings.
    pub params: Options,
    /// Layers of attention.
    pub layers: usize,
    /// Tokens that were answered.
    pub answers: usize,
    /// Share of tokens whose chain has at least `k` hops.
    pub reached: f64,
    /// Share of tokens answered correctly, including those without a chain.
    pub accuracy: f64,
    /// Keys visited by look-ups, as a share of all visible keys.
    pub keys_visited: f64,
}

/// Computes the answers by their definition; `None` if the chain ends earlier.
pub fn hops(x: &[usize], k: usize) -> Vec<Option<usize>> {
    let find = |i: usize| (1..=i).rev().find(|&j| x[j - 1] == x[i]);
    (0..x.len())
        .map(|i| {
            let mut at = Some(i);
            for _ in 0..k {
                at = at.and_then(find);
            }
            at.map(|i| x[i])
        })
        .collect()
}

/// Largest total probability of a head on wrong keys.
const LEAK: f64 = 1e-3;

/// Returns the number of bits of the numbers below `n`.
fn bits(n: usize) -> usize {
    (usize::BITS - n.max(2).saturating_sub(1).leading_zeros()) as usize
}

/// Returns ±1 for each bit.
fn code<T: Real>(x: usize, bits: usize) -> impl Iterator<Item = T> {
    (0..bits).map(move |b| if x >> b & 1 == 1 { T::ONE } else { -T::ONE })
}

/// Returns the number whose code is nearest.
fn number<T: Real>(row: &[T]) -> usize {
    row.iter().enumerate().map(|(b, &x)| usize::from(x > T::ZERO) << b).sum()
}

/// Attention with one head over whole rows.
struct Lookups<'a> {
    run: &'a KHop,
    ws: Workspace,
    visited: u64,
    visible: u64,
}

impl Lookups<'_> {
    fn attend<T: Real>(
        &mut self,
        method: &Method,
        options: &Options,
        scale: f64,
        (q, k, v): (&[T], &[T], &[T]),
        (d, d_v): (usize, usize),
    ) -> Result<Vec<T>>
    where
        for<'x> Inputs<'x>: From<Qkv<'x, T>>,
        for<'x> Output<'x>: From<Out<'x, T>>,
    {
        let n = self.run.n;
        let problem = Problem { d_v, scale, ..Problem::new(1, n, d).causal() };
        let plan = method.plan(&problem, options)?;
        let view = |x, width| TensorRef::bhnd(x, [1, 1, n, width]);
        let inputs = Inputs::from(Qkv::new(view(q, d)?, view(k, d)?, view(v, d_v)?));
        let mut out = vec![T::ZERO; n * d_v];
        let o = Out::new(TensorMut::bhnd(&mut out, [1, 1, n, d_v])?);
        let info = plan.execute(&inputs, &mut o.into(), &mut self.ws)?;
        if std::ptr::eq(method, self.run.method) {
            self.visited += info.keys_visited;
            self.visible += problem.visible_pairs();
        }
        Ok(out)
    }

    /// Returns for each token the number in `values` at its position `at`.
    fn read(&mut self, at: &[usize], values: &[usize], most: usize) -> Result<Vec<usize>> {
        let (n, d, d_v) = (self.run.n, bits(self.run.n), bits(most));
        // The logit of a wrong position is lower by at least two scales, which suffices in single precision.
        let scale = (n as f64 / LEAK).ln();
        let q: Vec<f32> = at.iter().flat_map(|&p| code(p, d)).collect();
        let k: Vec<f32> = (0..n).flat_map(|p| code(p, d)).collect();
        let v: Vec<f32> = values.iter().flat_map(|&x| code(x, d_v)).collect();
        let (method, options) = (self.run.method, self.run.options.clone());
        let out = self.attend(method, &options, scale, (&q, &k, &v), (d, d_v))?;
        Ok(out.chunks_exact(d_v).map(number).collect())
    }

    /// Returns for each token the latest position whose predecessor equals it; 0 if there is none.
    fn find(&mut self, x: &[usize], before: &[usize]) -> Result<Vec<usize>> {
        let (n, words, d_v) = (self.run.n, bits(self.run.vocabulary), bits(self.run.n));
        // One later position outweighs all other keys, and one wrong bit outweighs all positions.
        let step = (n as f64 / LEAK).ln();
        let scale = step * n as f64;
        let d = words + 1;
        let time = |j: usize| j as f64 / n as f64;
        let q: Vec<f64> = x.iter().flat_map(|&x| code(x, words).chain([1.0])).collect();
        // Position 0 has no predecessor: its score is one bit below a match and above everything else.
        let keys = (0..n).flat_map(|j| {
            let blank = (0..words).map(|_| 0.0).chain([words as f64 - 1.0]);
            let match_ = code(before[j], words).chain([time(j)]);
            if j == 0 { blank.collect::<Vec<f64>>() } else { match_.collect() }
        });
        let k: Vec<f64> = keys.collect();
        let v: Vec<f64> = (0..n).flat_map(|j| code(j, d_v)).collect();
        let exact = registry::baseline();
        let out = self.attend(exact, &Options::new(), scale, (&q, &k, &v), (d, d_v))?;
        Ok(out.chunks_exact(d_v).map(number).collect())
    }
}

impl KHop {
    /// Answers random sequences by their definition and by the heads.
    pub fn run(&self, threads: usize) -> Result<KHopRun> {
        if !(2..=1 << 14).contains(&self.n) || self.count == 0 || self.k == 0 || self.vocabulary == 0 {
            let expected = "2 to 16384 tokens, at least one sequence, hop and different token";
            let found = format!("{}, {}, {} and {}", self.n, self.count, self.k, self.vocabulary);
            return Err(Error::argument("khop", expected, found));
        }
        let ws = Workspace::new(Schedule { threads, ..Schedule::default() })?;
        let mut heads = Lookups { run: self, ws, visited: 0, visible: 0 };
        let key = StreamKey::new(self.seed).named("khop");
        let (mut right, mut reached) = (0, 0);
        for s in 0..self.count {
            let mut rng = key.with(s as u64).rng();
            let x: Vec<usize> = (0..self.n).map(|_| rng.below(self.vocabulary)).collect();
            let answers = self.answer(&x, &mut heads)?;
            let truth = hops(&x, self.k);
            reached += truth.iter().flatten().count();
            right += truth.iter().zip(&answers).filter(|(a, b)| a == b).count();
        }
        let total = self.n * self.count;
        Ok(KHopRun {
            n: self.n,
            k: self.k,
            vocabulary: self.vocabulary,
            method: self.method.id,
            params: self.options.clone(),
            layers: self.k.ilog2() as usize + 3,
            answers: total,
            reached: reached as f64 / total as f64,
            accuracy: right as f64 / total as f64,
            keys_visited: heads.visited as f64 / heads.visible.max(1) as f64,
        })
    }

    fn answer(&self, x: &[usize], heads: &mut Lookups<'_>) -> Result<Vec<Option<usize>>> {
        let last: Vec<usize> = (0..self.n).map(|i| i.saturating_sub(1)).collect();
        let before = heads.read(&last, x, self.vocabulary)?;
        // Pointers of 1, 2, 4, … hops; position 0 points to itself and marks the end of a chain.
        let mut pointers = heads.find(x, &before)?;
        let mut at: Vec<usize> = (0..self.n).collect();
        let (mut left, mut first) = (self.k, true);
        while left > 0 {
            if left & 1 == 1 {
                at = if first { pointers.clone() } else { heads.read(&at, &pointers, self.n)? };
                first = false;
            }
            left >>= 1;
            if left > 0 {
                pointers = heads.read(&pointers.clone(), &pointers, self.n)?;
            }
        }
        let tokens = heads.read(&at, x, self.vocabulary)?;
        Ok(at.iter().zip(tokens).map(|(&at, x)| (at > 0).then_some(x)).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(method: &str, options: Options, k: usize, n: usize) -> KHopRun {
        let method = registry::method(method).unwrap();
        KHop { n, k, vocabulary: 5, count: 3, method, options, seed: 1 }.run(1).unwrap()
    }

    #[test]
    fn answers_are_those_of_the_definition() {
        // a b a b c a: the last a points to the b after the a before it, and that to the a after the b before it.
        let x = [0, 1, 0, 1, 2, 0];
        assert_eq!(hops(&x, 1), [None, None, Some(1), Some(0), None, Some(1)]);
        assert_eq!(hops(&x, 2), [None, None, None, Some(1), None, Some(0)]);
        assert_eq!(hops(&x, 3), [None, None, None, None, None, Some(1)]);
        assert_eq!(hops(&[0, 0, 0], 1), [None, Some(0), Some(0)]);
    }

    #[test]
    fn heads_follow_every_chain_in_logarithmically_many_layers() {
        for k in [1, 2, 3, 5, 8, 13] {
            for n in [2, 33, 128] {
                let found = run("exact", Options::new(), k, n);
                assert_eq!(found.accuracy, 1.0, "k = {k}, n = {n}");
                assert_eq!(found.layers, k.ilog2() as usize + 3);
            }
        }
        assert!(run("exact", Options::new(), 8, 128).reached > 0.5);
    }

    #[test]
    fn nearest_neighbours_from_hash_tables_do_as_well_and_a_window_does_not() {
        // A key meets its own query in every table; of all that meet, the softmax takes it.
        let found = run("anna", Options::new().with("weights", "softmax"), 8, 128);
        assert_eq!(found.accuracy, 1.0, "{found:?}");
        let near = run("sink_window", Options::new().with("window", 8).with("sinks", 0), 8, 128);
        assert!(near.accuracy < 0.9 && near.keys_visited < 0.2, "{near:?}");
        let exact = registry::method("exact").unwrap();
        let wrong =
            KHop { n: 1, k: 1, vocabulary: 2, count: 1, method: exact, options: Options::new(), seed: 0 };
        assert!(wrong.run(1).is_err());
    }
}
