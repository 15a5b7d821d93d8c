//! `nystromformer`: averages, attention of averaged queries to all keys, a small inverse, attention of all queries to averaged
//! keys. Averages are stored in the type of the elements, as the fast kernels of exact attention require.

use crate::methods::exact::{Exact, empty_rows};
use crate::plan::{Core, Io, Request, unsupported};
use crate::prims::attend::{Area, Attend, Rule};
use crate::prims::contiguous;
use crate::prims::pool::{Bias, Landmarks, Pool, Weighted};
use crate::programs::Write;
use crate::workspace::padded;
use crate::{DeviceRef, DeviceWorkspace, Element, Form, Result};
use attlas::methods::low_rank::nystromformer::{METHOD, Params, Pinv};
use attlas::{Problem, RunInfo, Status, Support};
use attlas_num::linalg::Iteration;

/// Most landmarks: one block of threads inverts each square matrix.
const MOST: usize = 1024;

pub(crate) static FORM: Form = Form {
    method: &METHOD,
    draws: false,
    decodes: false,
    supports: |p, options, _, _| {
        let params = Params::from_options(options).unwrap_or_default();
        Support::unless(
            params.pinv == Pinv::Svd,
            "pinv = svd has no form on the device: take one of the iterations",
        )
        .and_unless(params.clip, "clip has no form on the device: leave it out")
        .and_unless(
            params.landmarks.min(p.n_q.min(p.n_k)) > MOST && params.landmarks < p.n_q.min(p.n_k),
            "the device form has room for 1024 landmarks: ask for fewer",
        )
    },
    build: |r| {
        let params = Params::from_options(r.options)?;
        if r.calibration.is_some() {
            return Err(unsupported(METHOD.id, "a trained convolution has no form on the device"));
        }
        if params.landmarks >= r.problem.n_q.min(r.problem.n_k) {
            return Ok(Box::new(Exact::new(r, Status::Exact)?));
        }
        Ok(Box::new(Nystromformer::new(r, &params)?))
    },
};

#[derive(Debug)]
struct Nystromformer {
    problem: Problem,
    element: Element,
    m: usize,
    bias: Bias,
    pool: Pool,
    /// Averaged queries against all keys.
    gather: Attend,
    landmarks: Landmarks,
    /// All queries against averaged keys, without and with a bias.
    spread: Attend,
    biased: Option<Weighted>,
    info: RunInfo,
}

impl Nystromformer {
    fn new(r: &Request<'_>, params: &Params) -> Result<Self> {
        let (p, m, element) = (r.problem, params.landmarks, r.element);
        let (kind, iteration) = match params.pinv {
            Pinv::Razavi => (0, Iteration::Razavi),
            Pinv::NewtonSchulz => (1, Iteration::NewtonSchulz),
            Pinv::Chebyshev => (2, Iteration::Chebyshev),
            Pinv::Hyperpower7 | Pinv::Svd => (3, Iteration::Hyperpower7),
        };
        let steps = params.iters.min(iteration.max_steps());
        let bias =
            if params.len_bias { Bias::lengths(p.n_k, m) } else { Bias { split: m, ..Bias::default() } };
        let few = Problem { n_q: m, ..*p };
        let areas = Some(vec![Area { rows: 0..m, keys: 0..p.n_k, offset: 0 }]);
        let sums = Rule { write: Write::First, areas, ..Rule::default() };
        let wide = Problem { n_k: m, n_kv_heads: p.n_heads, ..*p };
        let unequal = !bias.is_constant(m);
        let heads = (p.batch * p.n_heads) as u64;
        let pairs = heads * (m * p.n_k + m * m + p.n_q * m) as u64;
        Ok(Self {
            problem: *p,
            element,
            m,
            bias,
            pool: Pool::new(r.device, element)?,
            gather: Attend::new(r.device, &few, element, sums)?,
            landmarks: Landmarks::new(r.device, element, kind, steps)?,
            spread: Attend::new(r.device, &wide, element, Rule::default())?,
            biased: unequal.then(|| Weighted::new(r.device, &wide, element, false)).transpose()?,
            info: RunInfo {
                rank: Some(m),
                iterations: Some(steps),
                empty_rows: empty_rows(p),
                ..RunInfo::visited(pairs)
            },
        })
    }

    /// Bytes of averaged queries, averaged keys, their answers, the log-sum-exp of those, values and matrices.
    fn bytes(&self) -> [usize; 6] {
        let p = &self.problem;
        let rows = p.batch * p.n_heads * self.m;
        let (e, s) = (self.element.bytes(), self.element.sum().bytes());
        let matrices = Landmarks::workspace_bytes(p.batch * p.n_heads, self.m);
        [rows * p.d * e, rows * p.d * e, rows * p.d_v * s, rows * s, rows * p.d_v * e, matrices]
    }
}

impl Core for Nystromformer {
    fn workspace_bytes(&self) -> usize {
        self.bytes().map(padded).iter().sum()
    }

    fn run(&self, io: &Io<'_>, ws: &mut DeviceWorkspace) -> Result<RunInfo> {
        let (p, m) = (&self.problem, self.m);
        let mut places = [0; 6];
        for (place, bytes) in places.iter_mut().zip(self.bytes()) {
            *place = ws.take(bytes)?;
        }
        let [q_bar, k_bar, u, lse, t, room] = places;
        let few = |address, columns| {
            let view = contiguous(address, p.n_heads, m, columns);
            DeviceRef::scratch(view, self.element, [p.batch, p.n_heads, m, columns])
        };
        let (q_bar, k_bar, t) = (few(q_bar, p.d), few(k_bar, p.d), few(t, p.d_v));
        self.pool.run(io.q.view(), [p.batch, p.n_heads, p.n_q, p.d], m, 1, q_bar.view(), ws)?;
        let group = p.group_size();
        self.pool.run(io.k.view(), [p.batch, p.n_kv_heads, p.n_k, p.d], m, group, k_bar.view(), ws)?;
        self.gather.run(&q_bar, &io.k, &io.v, contiguous(u, p.n_heads, m, p.d_v), lse, ws)?;
        self.landmarks.run(&q_bar, &k_bar, p.scale, self.bias, u, t.view(), p.d_v, room, ws)?;
        match &self.biased {
            Some(biased) => {
                let bar = [k_bar.view(), t.view()];
                biased.run(io.q.view(), bar, m, self.bias, io.o.view(), io.lse, ws)?;
            }
            None => self.spread.run(&io.q, &k_bar, &t, io.o.view(), io.lse, ws)?,
        }
        Ok(self.info.clone())
    }
}
