//! `linformer` with means of segments: without a mask every row attends to all means; with a causal mask, to the means
//! of earlier segments and exactly to its own segment.

use crate::methods::exact::{Exact, empty_rows};
use crate::plan::{Core, Io, Request};
use crate::prims::attend::{Area, Attend, Rule};
use crate::prims::contiguous;
use crate::prims::pool::{Bias, Pool, Shift, Weighted};
use crate::prims::rows::{Copy, GrowingRows, Joined, Places};
use crate::programs::Write;
use crate::workspace::padded;
use crate::{Device, DeviceOut, DeviceRef, DeviceStream, DeviceWorkspace, Element, Form, Pending, Result};
use attlas::methods::low_rank::linformer::{METHOD, Params, Source};
use attlas::{Mask, Problem, RunInfo, Status, Support};

pub(crate) static FORM: Form = Form {
    method: &METHOD,
    draws: false,
    decodes: true,
    supports: |_, options, _, _| {
        let params = Params::from_options(options).unwrap_or_default();
        Support::unless(
            params.source != Source::Pool,
            "sources other than pool mix keys by matrices, which have no form on the device: take source = pool",
        )
    },
    build: |r| {
        let Params { rank, .. } = Params::from_options(r.options)?;
        if rank >= r.problem.n_k {
            return Ok(Box::new(Whole {
                exact: Exact::new(r, Status::Exact)?,
                pooled: Pooled::new(r, rank)?,
            }));
        }
        Ok(Box::new(Pooled::new(r, rank)?))
    },
};

/// Exact attention for segments of one key; a stream may grow beyond the plan.
#[derive(Debug)]
struct Whole {
    exact: Exact,
    pooled: Pooled,
}

impl Core for Whole {
    fn workspace_bytes(&self) -> usize {
        self.exact.workspace_bytes()
    }

    fn run(&self, io: &Io<'_>, ws: &mut DeviceWorkspace) -> Result<RunInfo> {
        self.exact.run(io, ws)
    }

    fn stream(&self, capacity: usize) -> Option<Result<Box<dyn DeviceStream>>> {
        self.pooled.stream(capacity)
    }
}

#[derive(Debug)]
struct Pooled {
    problem: Problem,
    element: Element,
    device: Device,
    /// Tokens of a segment of the causal form, and the number of visible means.
    len: usize,
    count: usize,
    pool: Pool,
    steps: Steps,
    info: RunInfo,
}

#[derive(Debug)]
#[allow(clippy::large_enum_variant)] // one in a plan
enum Steps {
    /// Means with one common bias, which does not change outputs.
    Plain {
        attend: Attend,
        shift: Shift,
        by: f64,
    },
    Biased {
        attend: Weighted,
        bias: Bias,
    },
    Causal {
        own: Attend,
        means: Attend,
        joined: Joined,
        covered: bool,
        shift: Shift,
    },
}

impl Pooled {
    fn new(r: &Request<'_>, rank: usize) -> Result<Self> {
        let (p, element) = (r.problem, r.element);
        let len = p.n_k.div_ceil(rank).max(1);
        let heads = (p.batch * p.n_heads) as u64;
        let (steps, count, pairs) = match p.mask {
            Mask::None => {
                let count = rank.min(p.n_k).max(1);
                let (few, bias) = (Problem { n_k: count, ..*p }, Bias::lengths(p.n_k.max(1), count));
                let steps = if bias.is_constant(count) {
                    let attend = Attend::new(r.device, &few, element, Rule::default())?;
                    Steps::Plain { attend, shift: Shift::new(r.device, element)?, by: bias.low }
                } else {
                    Steps::Biased { attend: Weighted::new(r.device, &few, element, false)?, bias }
                };
                (steps, count, heads * (p.n_q * count) as u64)
            }
            Mask::Causal => {
                let (own, means, pairs) = areas(p, len);
                let covered = p.n_q <= p.n_k;
                let write = if covered { Write::First } else { Write::Join };
                let few = Problem { n_k: p.n_k / len, mask: Mask::None, ..*p };
                let own = Rule { causal: true, write, areas: Some(own), ..Rule::default() };
                let means = Rule { write: Write::Join, areas: Some(means), ..Rule::default() };
                let steps = Steps::Causal {
                    own: Attend::new(r.device, p, element, own)?,
                    means: Attend::new(r.device, &few, element, means)?,
                    joined: Joined::new(r.device, p, element)?,
                    covered,
                    shift: Shift::new(r.device, element)?,
                };
                (steps, p.n_k / len, heads * pairs)
            }
        };
        Ok(Self {
            problem: *p,
            element,
            device: r.device.clone(),
            len,
            count,
            pool: Pool::new(r.device, element)?,
            steps,
            info: RunInfo { rank: Some(count), empty_rows: empty_rows(p), ..RunInfo::visited(pairs) },
        })
    }

    fn mean_bytes(&self, columns: usize) -> usize {
        let p = &self.problem;
        p.batch * p.n_kv_heads * self.count * columns * self.element.bytes()
    }
}

/// Returns the areas of rows with the keys of their own segment, those with the means of earlier segments, and the
/// number of pairs.
fn areas(p: &Problem, len: usize) -> (Vec<Area>, Vec<Area>, u64) {
    let offset = p.n_k as isize - p.n_q as isize;
    let (mut own, mut means, mut pairs) = (Vec::new(), Vec::new(), 0);
    for segment in 0..p.n_k.div_ceil(len) {
        let keys = segment * len..((segment + 1) * len).min(p.n_k);
        let row = |key: usize| usize::try_from(key as isize - offset).unwrap_or(0).min(p.n_q);
        let rows = row(keys.start)..row(keys.end);
        if rows.is_empty() {
            continue;
        }
        let at = |row: usize| (row as isize + offset) as usize;
        pairs += rows.clone().map(|r| (segment + at(r) - keys.start + 1) as u64).sum::<u64>();
        if segment > 0 {
            means.push(Area { rows: rows.clone(), keys: 0..segment, offset: 0 });
        }
        own.push(Area { rows, keys, offset });
    }
    (own, means, pairs)
}

impl Core for Pooled {
    fn workspace_bytes(&self) -> usize {
        let p = &self.problem;
        let joined = match &self.steps {
            Steps::Causal { joined, .. } => joined.workspace_bytes(),
            _ => 0,
        };
        padded(self.mean_bytes(p.d)) + padded(self.mean_bytes(p.d_v)) + joined
    }

    fn run(&self, io: &Io<'_>, ws: &mut DeviceWorkspace) -> Result<RunInfo> {
        let (p, count) = (&self.problem, self.count);
        if p.n_q == 0 {
            return Ok(self.info.clone());
        }
        // With a causal mask, only complete segments are visible as means.
        let n = if p.mask == Mask::Causal { count * self.len } else { p.n_k };
        let mut bar = [io.k, io.v];
        for x in &mut bar {
            let columns = x.dims()[3];
            let to = contiguous(ws.take(self.mean_bytes(columns))?, p.n_kv_heads, count, columns);
            if count > 0 {
                self.pool.run(x.view(), [p.batch, p.n_kv_heads, n, columns], count, 1, to, ws)?;
            }
            *x = DeviceRef::scratch(to, self.element, [p.batch, p.n_kv_heads, count, columns]);
        }
        let [k, v] = &bar;
        match &self.steps {
            Steps::Plain { attend, shift, by } => {
                attend.run(&io.q, k, v, io.o.view(), io.lse, ws)?;
                if io.lse != 0 {
                    shift.run(io.lse, p.batch * p.n_heads * p.n_q, *by, ws)?;
                }
            }
            Steps::Biased { attend, bias } => {
                let bar = [k.view(), v.view()];
                attend.run(io.q.view(), bar, count, *bias, io.o.view(), io.lse, ws)?;
            }
            Steps::Causal { own, means, joined, covered, shift } => {
                let rows = joined.start(io.lse, !covered, ws)?;
                own.run(&io.q, &io.k, &io.v, rows.o, rows.lse, ws)?;
                // A bias common to all means is subtracted from the other part during the merge.
                let (all, by) = (p.batch * p.n_heads * p.n_q, (self.len as f64).ln());
                if count > 0 {
                    shift.run(rows.lse, all, -by, ws)?;
                    means.run(&io.q, k, v, rows.o, rows.lse, ws)?;
                    shift.run(rows.lse, all, by, ws)?;
                }
                joined.finish(rows, &io.o, ws)?;
            }
        }
        Ok(self.info.clone())
    }

    fn stream(&self, _: usize) -> Option<Result<Box<dyn DeviceStream>>> {
        (self.problem.mask == Mask::Causal)
            .then(|| Ok(Box::new(PooledTokens::new(self)?) as Box<dyn DeviceStream>))
    }
}

/// Decoding: means of complete segments, and the tokens of the last one.
#[derive(Debug)]
struct PooledTokens {
    problem: Problem,
    segment: usize,
    /// Means of keys and of values, and the tokens not yet in a mean.
    means: [GrowingRows; 2],
    tokens: [GrowingRows; 2],
    count: usize,
    open: usize,
    len: usize,
    element: Element,
    pool: Pool,
    copy: Copy,
    own: Attend,
    weighted: Weighted,
    joined: Joined,
}

impl PooledTokens {
    fn new(plan: &Pooled) -> Result<Self> {
        let (p, element, device) = (&plan.problem, plan.element, &plan.device);
        let problem = Problem { n_q: 1, mask: Mask::None, ..*p };
        let rows = |n, columns| GrowingRows::new(device, element, [p.batch, p.n_kv_heads, n, columns]);
        Ok(Self {
            problem,
            segment: plan.len,
            means: [rows(plan.count, p.d)?, rows(plan.count, p.d_v)?],
            tokens: [rows(plan.len, p.d)?, rows(plan.len, p.d_v)?],
            count: 0,
            open: 0,
            len: 0,
            element,
            pool: plan.pool.clone(),
            copy: Copy::new(device, element)?,
            own: Attend::plain(device, &problem, element, Rule { write: Write::Join, ..Rule::default() })?,
            weighted: Weighted::new(device, &problem, element, true)?,
            joined: Joined::new(device, &problem, element)?,
        })
    }
}

impl DeviceStream for PooledTokens {
    fn push(&mut self, k: DeviceRef<'_>, v: DeviceRef<'_>, ws: &mut DeviceWorkspace) -> Result<()> {
        let (p, rows) = (self.problem, k.dims()[2]);
        let mut done = 0;
        while done < rows {
            // A full segment becomes its mean when the next token arrives: its last token still attends to its single
            // keys.
            if self.open == self.segment {
                for (tokens, means) in self.tokens.iter().zip(&mut self.means) {
                    means.reserve(self.count + 1, ws.stream())?;
                    let columns = means.columns();
                    let mut to = means.view();
                    to.address += (self.count * columns * self.element.bytes()) as u64;
                    let dims = [p.batch, p.n_kv_heads, self.segment, columns];
                    self.pool.run(tokens.view(), dims, 1, 1, to, ws)?;
                }
                self.count += 1;
                self.open = 0;
            }
            let now = (self.segment - self.open).min(rows - done);
            let places = Places { at: self.open, ..Places::default() };
            for (x, tokens) in [&k, &v].into_iter().zip(&self.tokens) {
                self.copy.run(&x.rows(done, now), tokens.view(), 0, places, ws)?;
            }
            self.open += now;
            done += now;
        }
        self.len += rows;
        Ok(())
    }

    fn attend(
        &mut self,
        q: DeviceRef<'_>,
        out: &mut DeviceOut<'_>,
        ws: &mut DeviceWorkspace,
    ) -> Result<Pending> {
        let p = self.problem;
        ws.reserve(self.joined.workspace_bytes())?;
        ws.reset();
        let lse = out.lse.as_ref().map_or(0, |l| l.as_ref().view().address);
        let rows = self.joined.start(lse, true, ws)?;
        let [k, v] = [0, 1].map(|i| {
            let dims = [p.batch, p.n_kv_heads, self.open, self.tokens[i].columns()];
            DeviceRef::scratch(self.tokens[i].view(), self.element, dims)
        });
        self.own.set_keys(self.open);
        self.own.run(&q, &k, &v, rows.o, rows.lse, ws)?;
        if self.count > 0 {
            let by = (self.segment as f64).ln();
            let bias = Bias { split: self.count, low: by, high: by };
            let means = [self.means[0].view(), self.means[1].view()];
            self.weighted.run(q.view(), means, self.count, bias, rows.o, rows.lse, ws)?;
        }
        self.joined.finish(rows, &out.o.as_ref(), ws)?;
        let rows = (p.batch * p.n_heads) as u64;
        let info = RunInfo {
            empty_rows: if self.len == 0 { rows } else { 0 },
            ..RunInfo::visited(rows * (self.count + self.open) as u64)
        };
        Ok(Pending::new(info, ws))
    }

    fn len(&self) -> usize {
        self.len
    }

    fn state_bytes(&self) -> usize {
        self.means.iter().chain(&self.tokens).map(GrowingRows::bytes).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_see_means_before_their_segment_and_their_own_keys() {
        for (n_q, n_k, len) in [(10, 10, 3), (4, 10, 3), (10, 4, 3), (7, 7, 1), (5, 5, 9)] {
            let p = Problem::new(1, 1, 4).with_lens(n_q, n_k).causal();
            let (own, means, pairs) = areas(&p, len);
            let mut seen = 0;
            for row in 0..n_q {
                let at = row as isize + n_k as isize - n_q as isize;
                let of = |areas: &[Area]| {
                    areas.iter().filter(|a| a.rows.contains(&row)).cloned().collect::<Vec<_>>()
                };
                let (own, means) = (of(&own), of(&means));
                if at < 0 {
                    assert!(own.is_empty() && means.is_empty());
                    continue;
                }
                let segment = at as usize / len;
                assert_eq!(own.len(), 1);
                assert_eq!(own[0].keys, segment * len..((segment + 1) * len).min(n_k));
                assert_eq!(means.iter().map(|a| a.keys.len()).sum::<usize>(), segment);
                seen += segment + at as usize - segment * len + 1;
            }
            assert_eq!(pairs, seen as u64);
        }
    }
}
