//! `hyper`: hash, sort, blocks with samples; causal problems by recursive halving with merged parts.
//!
//! Planning draws directions and samples from the host's streams: host and device choose the same keys unless a
//! projection is within rounding of zero.

use crate::methods::exact::{Exact, empty_rows};
use crate::plan::{Core, Io, Request};
use crate::prims::attend::{Area, Attend, Rule};
use crate::prims::hash::Hash;
use crate::prims::lists::{Assign, CausalPart, ListOptions, Lists};
use crate::prims::rows::{Joined, Rows};
use crate::programs::Write;
use crate::workspace::padded;
use crate::{DeviceRef, DeviceWorkspace, Form, Result};
use attlas::engine::{Rectangle, UniformSamples};
use attlas::group::GroupIndex;
use attlas::methods::clustering::hyper::{METHOD, Params, Sampling, Variant};
use attlas::{Mask, Problem, RunInfo, Status, Support};
use attlas_num::rng::StreamKey;
use std::ops::Range;

pub(crate) static FORM: Form = Form {
    method: &METHOD,
    draws: true,
    decodes: false,
    supports: |_, options, _, _| {
        let theory = Params::from_options(options).is_ok_and(|p| p.variant == Variant::Theory);
        Support::unless(
            theory,
            "variant = theory draws columns by the norms of values, which has no form on the device",
        )
    },
    build: |r| {
        let params = Params::from_options(r.options)?;
        let p = r.problem;
        if covers(&params, p) {
            Ok(Box::new(Exact::new(r, Status::Exact)?))
        } else {
            Ok(Box::new(Hyper::new(r, params)?))
        }
    },
};

/// Returns true if the whole problem is computed exactly.
fn covers(params: &Params, p: &Problem) -> bool {
    p.n_k <= params.block.max(params.samples) || p.n_q.max(p.n_k) <= params.n_min
}

/// One step of the work, on parts that share no row.
#[derive(Debug)]
#[allow(clippy::large_enum_variant)] // a handful of them in a plan
enum Step {
    Exact(Attend),
    Lists(Lists),
}

#[derive(Debug)]
struct Hyper {
    problem: Problem,
    hash: Option<Hash>,
    steps: Vec<Step>,
    /// Buffer in which parts are merged; without it a single step writes the output.
    joined: Option<Joined>,
    /// True if the first step writes every row.
    covered: bool,
    info: RunInfo,
}

/// Rows and keys of a part.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Piece {
    rows: Range<usize>,
    keys: Range<usize>,
}

/// Halves the causal problem of `n_q` rows and `n_k` keys recursively: exact squares at the bottom, then levels of
/// unmasked parts, the deepest first.
fn halves(n_q: usize, n_k: usize, n_min: usize) -> (Vec<Piece>, Vec<Vec<Piece>>) {
    let offset = n_k as isize - n_q as isize;
    let keys =
        |rows: &Range<usize>| (rows.start as isize + offset) as usize..(rows.end as isize + offset) as usize;
    let (mut base, mut levels) = (Vec::new(), Vec::new());
    // Rows before the first key have no keys.
    let mut squares = Vec::from([n_q.saturating_sub(n_k)..n_q; 1]);
    while !squares.is_empty() {
        let (mut next, mut parts) = (Vec::new(), Vec::new());
        for rows in squares {
            if rows.len() <= n_min.max(1) {
                base.push(Piece { keys: keys(&rows), rows });
                continue;
            }
            let middle = rows.start + rows.len() / 2;
            parts.push(Piece { rows: middle..rows.end, keys: keys(&(rows.start..middle)) });
            next.extend([rows.start..middle, middle..rows.end]);
        }
        if !parts.is_empty() {
            levels.push(parts);
        }
        squares = next;
    }
    levels.reverse();
    if n_k > n_q && n_q > 0 {
        levels.push(vec![Piece { rows: 0..n_q, keys: 0..n_k - n_q }]);
    }
    base.retain(|piece| !piece.rows.is_empty());
    (base, levels)
}

impl Hyper {
    fn new(r: &Request<'_>, params: Params) -> Result<Self> {
        let p = r.problem;
        let is_exact = |piece: &Piece| {
            let keys = piece.keys.len();
            keys <= params.block || keys <= params.samples || piece.rows.len() < params.n_min
        };
        let (base, levels) = match p.mask {
            Mask::Causal => halves(p.n_q, p.n_k, params.n_min),
            Mask::None => (Vec::new(), vec![vec![Piece { rows: 0..p.n_q, keys: 0..p.n_k }]]),
        };
        let assign = if p.mask == Mask::Causal { Assign::Alone } else { Assign::Balanced };
        let alone = p.mask == Mask::None && !is_exact(&levels[0][0]);
        let exact = |pieces: &[Piece], causal: bool, write: Write, pairs: &mut u64| -> Result<Step> {
            let area = |piece: &Piece| {
                let (n, m) = (piece.rows.len() as u64, piece.keys.len() as u64);
                *pairs += if causal { n * (n + 1) / 2 } else { n * m };
                Area {
                    rows: piece.rows.clone(),
                    keys: piece.keys.clone(),
                    offset: p.n_k as isize - p.n_q as isize,
                }
            };
            let areas = Some(pieces.iter().map(area).collect());
            let rule = Rule { causal, write, areas, ..Rule::default() };
            Ok(Step::Exact(Attend::new(r.device, p, r.element, rule)?))
        };
        let mut pairs = 0;
        let mut steps = Vec::new();
        // Squares at the bottom contain every row with a key: if all rows have one, none needs clearing.
        let covered = !base.is_empty() && p.n_q <= p.n_k;
        if !base.is_empty() {
            let write = if covered { Write::First } else { Write::Join };
            steps.push(exact(&base, true, write, &mut pairs)?);
        }
        let mut hashed = 0;
        for level in &levels {
            let (small, large): (Vec<Piece>, Vec<Piece>) = level.iter().cloned().partition(|x| is_exact(x));
            if !small.is_empty() {
                steps.push(exact(&small, false, Write::Join, &mut pairs)?);
            }
            if !large.is_empty() {
                let parts: Vec<CausalPart> = large.iter().map(|x| part(r, &params, x)).collect();
                let options = ListOptions {
                    block: params.block,
                    samples: params.samples,
                    replacement: params.sampling == Sampling::WithReplacement,
                    codes: 1 << params.hashes,
                    assign,
                    join: !alone,
                };
                let lists = Lists::new(r.device, p, r.element, &parts, options)?;
                hashed += lists.pairs();
                steps.push(Step::Lists(lists));
            }
        }
        let hash = if steps.iter().any(|s| matches!(s, Step::Lists(_))) {
            let keys: Vec<StreamKey> =
                groups(r).map(|g| g.stream_key(params.seed).named("directions")).collect();
            Some(Hash::new(r.device, r.element, p.d, params.hashes, &keys)?)
        } else {
            None
        };
        let heads = (p.batch * p.n_heads) as u64;
        Ok(Self {
            problem: *p,
            hash,
            steps,
            joined: if alone { None } else { Some(Joined::new(r.device, p, r.element)?) },
            covered,
            info: RunInfo {
                keys_visited: heads * pairs + hashed,
                empty_rows: empty_rows(p),
                ..RunInfo::default()
            },
        })
    }

    fn run_steps(&self, [q, k, v]: [&DeviceRef<'_>; 3], rows: Rows, ws: &mut DeviceWorkspace) -> Result<()> {
        let p = &self.problem;
        let ranks = match &self.hash {
            Some(hash) => {
                let ranks =
                    [ws.take(p.batch * p.n_heads * p.n_q * 4)?, ws.take(p.batch * p.n_kv_heads * p.n_k * 4)?];
                hash.run(q, ranks[0], p.group_size(), ws)?;
                hash.run(k, ranks[1], 1, ws)?;
                ranks
            }
            None => [0, 0],
        };
        for step in &self.steps {
            match step {
                Step::Exact(attend) => attend.run(q, k, v, rows.o, rows.lse, ws)?,
                Step::Lists(lists) => lists.run([q, k, v], ranks, rows.o, rows.lse, ws)?,
            }
        }
        Ok(())
    }
}

/// Returns the groups of the problem, key heads of the first sequence first.
pub(crate) fn groups(r: &Request<'_>) -> impl Iterator<Item = GroupIndex> + use<> {
    let (first, kv) = (r.first_batch, r.problem.n_kv_heads);
    (0..r.problem.batch)
        .flat_map(move |b| (0..kv).map(move |kv_head| GroupIndex { batch: first + b, kv_head }))
}

/// Makes a part with the samples that the host would draw.
fn part(r: &Request<'_>, params: &Params, piece: &Piece) -> CausalPart {
    let rectangle = Rectangle { rows: piece.rows.clone(), keys: piece.keys.clone() };
    let replacement = params.sampling == Sampling::WithReplacement;
    let samples = groups(r)
        .flat_map(|g| {
            let key = rectangle.stream(g.stream_key(params.seed)).named("samples");
            let drawn = UniformSamples::new(piece.keys.len(), params.samples, replacement, key);
            drawn.ranks().iter().map(|&x| x as u32).collect::<Vec<u32>>()
        })
        .collect();
    CausalPart { rows: piece.rows.clone(), keys: piece.keys.clone(), samples }
}

impl Core for Hyper {
    fn workspace_bytes(&self) -> usize {
        let p = &self.problem;
        let ranks = padded(p.batch * p.n_heads * p.n_q * 4) + padded(p.batch * p.n_kv_heads * p.n_k * 4);
        let step = |s: &Step| match s {
            Step::Exact(_) => 0,
            Step::Lists(lists) => lists.workspace_bytes(),
        };
        ranks
            + self.joined.as_ref().map_or(0, Joined::workspace_bytes)
            + self.steps.iter().map(step).max().unwrap_or(0)
    }

    fn run(&self, io: &Io<'_>, ws: &mut DeviceWorkspace) -> Result<RunInfo> {
        let operands = [&io.q, &io.k, &io.v];
        match &self.joined {
            Some(joined) => {
                let rows = joined.start(io.lse, !self.covered, ws)?;
                self.run_steps(operands, rows, ws)?;
                joined.finish(rows, &io.o, ws)?;
            }
            None => self.run_steps(operands, Rows { o: io.o.view(), lse: io.lse }, ws)?,
        }
        Ok(self.info.clone())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn halves_cover_every_visible_pair_once() {
        for (n_q, n_k) in [(1, 1), (37, 37), (13, 50), (50, 13), (64, 64), (0, 4), (4, 0)] {
            for n_min in [0, 1, 5, 16, 100] {
                let (base, levels) = halves(n_q, n_k, n_min);
                let mut seen = vec![0; n_q * n_k.max(1)];
                for piece in &base {
                    for (a, i) in piece.rows.clone().enumerate() {
                        piece.keys.clone().take(a + 1).for_each(|j| seen[i * n_k + j] += 1);
                    }
                }
                for piece in levels.iter().flatten() {
                    for i in piece.rows.clone() {
                        piece.keys.clone().for_each(|j| seen[i * n_k + j] += 1);
                    }
                }
                for i in 0..n_q {
                    for j in 0..n_k {
                        assert_eq!(
                            seen[i * n_k + j],
                            usize::from(j + n_q <= i + n_k),
                            "{n_q}×{n_k} base {n_min}: {i} {j}"
                        );
                    }
                }
                for level in &levels {
                    let mut rows: Vec<usize> = level.iter().flat_map(|x| x.rows.clone()).collect();
                    let all = rows.len();
                    rows.sort_unstable();
                    rows.dedup();
                    assert_eq!(rows.len(), all, "parts of a level share a row");
                }
            }
        }
    }
}
