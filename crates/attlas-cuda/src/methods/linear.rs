//! `linear`: three launches by tensor cores for elu + 1 at width 64, token by token otherwise.

use crate::methods::exact::empty_rows;
use crate::plan::{Core, Io, Request};
use crate::prims::linear::{Linear, Map};
use crate::prims::sizes;
use crate::{
    Device, DeviceBuffer, DeviceOut, DeviceRef, DeviceStream, DeviceWorkspace, Element, Form, Pending, Result,
};
use attlas::methods::kernel::linear::{METHOD, Map as Function, Params};
use attlas::{Problem, RunInfo, Support};

pub(crate) static FORM: Form = Form {
    method: &METHOD,
    supports: |_, options, _, _| {
        let signed = Params::from_options(options).is_ok_and(|p| p.map == Function::Identity);
        Support::unless(
            signed,
            "map = identity has denominators of either sign, which the device form has no policy for",
        )
    },
    build: |r| Ok(Box::new(Whole::new(r)?)),
};

/// The map of the options.
fn map(params: &Params) -> Map {
    let code = match params.map {
        Function::Elu1 | Function::Identity => 0,
        Function::Relu => 1,
        Function::Softmax => 2,
        Function::Square => 3,
    };
    Map { code, root: params.qk_scale.sqrt(), eps: params.relu_eps, den_eps: params.den_eps }
}

#[derive(Debug)]
struct Whole {
    linear: Linear,
    problem: Problem,
    element: Element,
    device: Device,
}

impl Whole {
    fn new(r: &Request<'_>) -> Result<Self> {
        let params = Params::from_options(r.options)?;
        let linear = Linear::new(r.device, r.problem, r.element, map(&params))?;
        Ok(Self { linear, problem: *r.problem, element: r.element, device: r.device.clone() })
    }
}

impl Core for Whole {
    fn workspace_bytes(&self) -> usize {
        self.linear.workspace_bytes()
    }

    fn run(&self, io: &Io<'_>, ws: &mut DeviceWorkspace) -> Result<RunInfo> {
        self.linear.run([&io.q, &io.k, &io.v], &io.o, io.lse, ws)?;
        Ok(RunInfo { empty_rows: empty_rows(&self.problem), ..RunInfo::default() })
    }

    fn stream(&self, _: usize) -> Option<Result<Box<dyn DeviceStream>>> {
        let bytes = self.linear.state_bytes();
        let size = self.element.sum().bytes();
        let state = DeviceBuffer::new(&self.device, self.element.sum(), bytes / size);
        let made = state.map(|state| LinearStream {
            linear: self.linear.clone(),
            problem: self.problem,
            element: self.element,
            state,
            len: 0,
        });
        Some(made.map(|s| Box::new(s) as Box<dyn DeviceStream>))
    }
}

/// Decoding: one state, whatever the number of tokens.
#[derive(Debug)]
struct LinearStream {
    linear: Linear,
    problem: Problem,
    element: Element,
    state: DeviceBuffer,
    len: usize,
}

impl DeviceStream for LinearStream {
    fn push(&mut self, k: DeviceRef<'_>, v: DeviceRef<'_>, ws: &mut DeviceWorkspace) -> Result<()> {
        let (p, rows) = (&self.problem, k.dims()[2]);
        let bytes = p.batch * p.n_kv_heads * rows * p.d * self.element.sum().bytes();
        ws.reserve(bytes + 256)?;
        ws.reset();
        if self.len == 0 {
            self.linear.clear_state(self.state.address(), ws)?;
        }
        let features = ws.take(bytes)?;
        self.linear.log_features(&k, false, features, ws)?;
        let n = sizes(&Problem { n_q: 0, n_k: rows, ..*p });
        self.linear.absorb(self.state.address(), features, v.view(), n, None, ws)?;
        self.len += rows;
        Ok(())
    }

    fn attend(
        &mut self,
        q: DeviceRef<'_>,
        out: &mut DeviceOut<'_>,
        ws: &mut DeviceWorkspace,
    ) -> Result<Pending> {
        let p = Problem { n_q: 1, ..self.problem };
        let bytes = p.batch * p.n_heads * p.d * self.element.sum().bytes();
        ws.reserve(bytes + 256)?;
        ws.reset();
        if self.len == 0 {
            self.linear.clear_state(self.state.address(), ws)?;
        }
        let features = ws.take(bytes)?;
        self.linear.log_features(&q, true, features, ws)?;
        let lse = out.lse.as_ref().map_or(0, |l| l.as_ref().view().address);
        self.linear.read(self.state.address(), features, out.o.as_ref().view(), lse, sizes(&p), ws)?;
        let empty_rows = if self.len == 0 { (p.batch * p.n_heads) as u64 } else { 0 };
        Ok(Pending::new(RunInfo { empty_rows, ..RunInfo::default() }, ws))
    }

    fn len(&self) -> usize {
        self.len
    }

    fn state_bytes(&self) -> usize {
        self.linear.state_bytes()
    }
}
