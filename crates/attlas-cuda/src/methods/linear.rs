//! `linear`: three launches on tensor cores for elu + 1 at width 64, otherwise segments by the portable kernels; and
//! the core of every method that is a map to positive features.

use crate::methods::exact::empty_rows;
use crate::plan::{Core, Io, Request, unsupported};
use crate::prims::exponential::Exponential;
use crate::prims::features::{Features, Map, Random, Rows};
use crate::prims::linear::Elu1;
use crate::prims::positive::{Eps, Positive};
use crate::prims::signed::Signed;
use crate::{DeviceBuffer, DeviceOut, DeviceRef, DeviceStream, DeviceWorkspace, Form, Pending, Result};
use attlas::methods::kernel::linear::{METHOD, Map as Function, Params};
use attlas::{Problem, RunInfo, Support};

pub(crate) static FORM: Form = Form {
    method: &METHOD,
    draws: false,
    decodes: true,
    supports: |_, options, _, _| {
        let signed = Params::from_options(options).is_ok_and(|p| p.map == Function::Identity);
        Support::unless(
            signed,
            "map = identity has denominators of either sign, which the device form has no policy for",
        )
    },
    build: |r| {
        let params = Params::from_options(r.options)?;
        let map = Map { code: code(params.map), root: params.qk_scale.sqrt(), eps: params.relu_eps };
        let features = Features::elementwise(r.device, r.element, r.problem.d, map)?;
        let eps = Eps { value: params.den_eps, per_key: false };
        let mut whole = FeatureMap::new(METHOD.id, r, features, eps, None)?;
        if map.code == 0 && map.root == 1.0 && params.den_eps == 0.0 {
            whole.fast = Elu1::new(r.device, r.problem, r.element)?.map(Fast::Elu1);
        }
        Ok(Box::new(whole))
    },
};

/// Returns the number of a map in the kernel.
fn code(map: Function) -> i32 {
    match map {
        Function::Elu1 | Function::Identity => 0,
        Function::Relu => 1,
        Function::Softmax => 2,
        Function::Square => 3,
    }
}

/// Sums of features.
#[derive(Clone, Debug)]
#[allow(clippy::large_enum_variant)] // one in a plan
pub(crate) enum Sums {
    Positive(Positive),
    Signed(Signed),
}

/// Calls the method of either kind.
macro_rules! of_either {
    ($sums:expr, $x:ident => $call:expr) => {
        match $sums {
            Sums::Positive($x) => $call,
            Sums::Signed($x) => $call,
        }
    };
}

/// A method that is a map to features.
#[derive(Debug)]
pub(crate) struct FeatureMap {
    id: &'static str,
    sums: Sums,
    fast: Option<Fast>,
    info: RunInfo,
}

/// Kernels for tensor cores.
#[derive(Debug)]
#[allow(clippy::large_enum_variant)] // one in a plan
enum Fast {
    Elu1(Elu1),
    Exponential(Exponential),
}

impl FeatureMap {
    /// `streams`: maps of queries, each for some columns of the values; if empty, one map for all.
    pub(crate) fn new(
        id: &'static str,
        r: &Request<'_>,
        features: Features,
        eps: Eps,
        streams: Option<Vec<(Rows, std::ops::Range<usize>)>>,
    ) -> Result<Self> {
        let p = r.problem;
        let count = features.count();
        let streams = streams.unwrap_or_else(|| vec![(Rows::Queries, 0..p.d_v)]);
        let positive = Positive::new(r.device, p, r.element, features, eps, streams)?;
        Ok(Self::of(id, r, Sums::Positive(positive), count))
    }

    /// Uses random features, on tensor cores if these have a form.
    pub(crate) fn random(id: &'static str, r: &Request<'_>, map: Random<'_>) -> Result<Self> {
        let fast = Exponential::new(r.device, r.problem, r.element, &map)?;
        let features = Features::random(r.device, r.element, r.problem.d, map)?;
        let plain = Self::new(id, r, features, Eps::default(), None)?;
        Ok(Self { fast: fast.map(Fast::Exponential), ..plain })
    }

    /// Uses features of either sign.
    pub(crate) fn signed(id: &'static str, r: &Request<'_>, signed: Signed) -> Self {
        let count = signed.count();
        Self::of(id, r, Sums::Signed(signed), count)
    }

    fn of(id: &'static str, r: &Request<'_>, sums: Sums, count: usize) -> Self {
        let (p, empty_rows) = (r.problem, empty_rows(r.problem));
        let rows = (p.batch * p.n_heads * p.n_q) as u64 - empty_rows;
        let info = RunInfo { empty_rows, rank: Some(count), ..RunInfo::visited(rows * count as u64) };
        Self { id, sums, fast: None, info }
    }
}

impl Core for FeatureMap {
    fn workspace_bytes(&self) -> usize {
        // Strides may exclude the fast form: reserve room for either.
        let fast = match &self.fast {
            Some(Fast::Elu1(fast)) => fast.workspace_bytes(),
            Some(Fast::Exponential(fast)) => fast.workspace_bytes(),
            None => 0,
        };
        of_either!(&self.sums, s => s.workspace_bytes()).max(fast)
    }

    fn run(&self, io: &Io<'_>, ws: &mut DeviceWorkspace) -> Result<RunInfo> {
        let (x, all) = ([&io.q, &io.k, &io.v], [&io.q, &io.k, &io.v, &io.o]);
        match &self.fast {
            Some(Fast::Elu1(fast)) if fast.takes(&all) => fast.run(x, &io.o, io.lse, ws)?,
            Some(Fast::Exponential(fast)) if fast.takes(&all) => fast.run(x, &io.o, io.lse, ws)?,
            _ => of_either!(&self.sums, s => s.run(x, &io.o, io.lse, ws))?,
        }
        Ok(self.info.clone())
    }

    fn stream(&self, _: usize) -> Option<Result<Box<dyn DeviceStream>>> {
        if matches!(&self.sums, Sums::Positive(p) if p.is_fitted()) {
            let reason = "the map is fitted to all queries and keys: a stream needs a causal plan";
            return Some(Err(unsupported(self.id, reason)));
        }
        let (device, element, bytes) =
            of_either!(&self.sums, s => (s.device(), s.element().sum(), s.state_bytes()));
        let made = DeviceBuffer::new(device, element, bytes / element.bytes()).map(|state| FeatureStream {
            sums: self.sums.clone(),
            state,
            len: 0,
        });
        Some(made.map(|s| Box::new(s) as Box<dyn DeviceStream>))
    }
}

/// Decoding with one state of constant size.
#[derive(Debug)]
struct FeatureStream {
    sums: Sums,
    state: DeviceBuffer,
    len: usize,
}

impl DeviceStream for FeatureStream {
    fn push(&mut self, k: DeviceRef<'_>, v: DeviceRef<'_>, ws: &mut DeviceWorkspace) -> Result<()> {
        let [_, heads, rows, _] = k.dims();
        ws.reserve(of_either!(&self.sums, s => s.step_bytes(heads, rows)))?;
        ws.reset();
        if self.len == 0 {
            of_either!(&self.sums, s => s.clear_state(self.state.address(), ws))?;
        }
        of_either!(&self.sums, s => s.push(self.state.address(), &k, &v, ws))?;
        self.len += rows;
        Ok(())
    }

    fn attend(
        &mut self,
        q: DeviceRef<'_>,
        out: &mut DeviceOut<'_>,
        ws: &mut DeviceWorkspace,
    ) -> Result<Pending> {
        let p: Problem = *of_either!(&self.sums, s => s.problem());
        ws.reserve(of_either!(&self.sums, s => s.step_bytes(p.n_heads, 1)))?;
        ws.reset();
        if self.len == 0 {
            of_either!(&self.sums, s => s.clear_state(self.state.address(), ws))?;
        }
        let lse = out.lse.as_ref().map_or(0, |l| l.as_ref().view().address);
        let (state, o) = (self.state.address(), out.o.as_ref());
        of_either!(&self.sums, s => s.attend(state, self.len, &q, &o, lse, ws))?;
        let empty_rows = if self.len == 0 { (p.batch * p.n_heads) as u64 } else { 0 };
        Ok(Pending::new(RunInfo { empty_rows, ..RunInfo::default() }, ws))
    }

    fn len(&self) -> usize {
        self.len
    }

    fn state_bytes(&self) -> usize {
        of_either!(&self.sums, s => s.state_bytes())
    }
}
