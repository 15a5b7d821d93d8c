//! Plans over tensors on the device.

use crate::driver::Stream;
use crate::prims::contiguous;
use crate::prims::rows::Negate;
use crate::tensor::DeviceRef;
use crate::workspace::padded;
use crate::{Device, DeviceBuffer, DeviceInfo, DeviceMut, DeviceWorkspace, Element, Error, Result, registry};
use attlas::method::{Claims, Needs};
use attlas::{Calibration, Cost, Method, Near, Options, Problem, RunInfo, Support};
use std::collections::HashMap;
use std::fmt::Debug;
use std::sync::{Arc, Mutex, PoisonError};

/// Queries, keys and values on the device.
#[derive(Clone, Copy, Debug)]
pub struct DeviceQkv<'a> {
    /// `[batch, n_heads, n_q, d]`.
    pub q: DeviceRef<'a>,
    /// `[batch, n_kv_heads, n_k, d]`.
    pub k: DeviceRef<'a>,
    /// `[batch, n_kv_heads, n_k, d_v]`.
    pub v: DeviceRef<'a>,
    /// Valid keys of each sequence; the rest is padding and is never read. All keys if absent.
    pub key_lens: Option<&'a [usize]>,
}

/// Outputs on the device.
#[derive(Debug)]
pub struct DeviceOut<'a> {
    /// `[batch, n_heads, n_q, d_v]`.
    pub o: DeviceMut<'a>,
    /// Log-sum-exp of each row, contiguous `[batch, n_heads, n_q, 1]`, in single precision, double for double inputs.
    pub lse: Option<DeviceMut<'a>>,
}

/// A plan on the device: all decisions about a problem that do not depend on the data.
pub trait DevicePlan: Debug + Send + Sync {
    /// Returns the planned problem.
    fn problem(&self) -> &Problem;

    /// Returns the type of queries, keys, values and outputs.
    fn element(&self) -> Element;

    /// Returns the counted work.
    fn cost(&self) -> Cost;

    /// Returns the bytes of scratch memory of a run.
    fn workspace_bytes(&self) -> usize;

    /// Puts the work on the workspace's stream and returns. After [`DeviceWorkspace::reserve`] a run allocates nothing,
    /// copies nothing from the host and does not wait: it can be captured into a graph. A new number of valid keys of a
    /// sequence is planned first.
    fn execute(
        &self,
        x: &DeviceQkv<'_>,
        out: &mut DeviceOut<'_>,
        ws: &mut DeviceWorkspace,
    ) -> Result<Pending>;

    /// Returns a stream for decoding, initially with room for `capacity` tokens.
    fn stream(&self, capacity: usize) -> Option<Result<Box<dyn DeviceStream>>> {
        let _ = capacity;
        None
    }
}

/// Decoding with keys and values on the device.
pub trait DeviceStream: Debug + Send {
    /// Appends the keys and values of some tokens.
    fn push(&mut self, k: DeviceRef<'_>, v: DeviceRef<'_>, ws: &mut DeviceWorkspace) -> Result<()>;

    /// Attends with the queries `[batch, n_heads, 1, d]` of the last token to everything pushed.
    fn attend(
        &mut self,
        q: DeviceRef<'_>,
        out: &mut DeviceOut<'_>,
        ws: &mut DeviceWorkspace,
    ) -> Result<Pending>;

    /// Returns the number of tokens pushed so far.
    fn len(&self) -> usize;

    /// Returns true if no token has been pushed.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns the bytes of the current state.
    fn state_bytes(&self) -> usize;
}

/// Report of a run, read back on request. It can be dropped without waiting.
#[derive(Debug)]
pub struct Pending {
    info: RunInfo,
    stream: Arc<Stream>,
}

impl Pending {
    pub(crate) fn new(info: RunInfo, ws: &DeviceWorkspace) -> Self {
        Self { info, stream: ws.stream().clone() }
    }

    /// Waits for the run and returns its report.
    pub fn wait(self) -> Result<RunInfo> {
        self.stream.synchronize()?;
        Ok(self.info)
    }
}

/// Input of a device form's constructor.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Request<'a> {
    pub(crate) problem: &'a Problem,
    /// Index of the first sequence of the problem, which identifies random streams.
    pub(crate) first_batch: usize,
    pub(crate) options: &'a Options,
    pub(crate) calibration: Option<&'a Calibration>,
    pub(crate) element: Element,
    pub(crate) device: &'a Device,
}

/// Operands of one run, with checked shapes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Io<'a> {
    pub(crate) q: DeviceRef<'a>,
    pub(crate) k: DeviceRef<'a>,
    pub(crate) v: DeviceRef<'a>,
    pub(crate) o: DeviceRef<'a>,
    /// Address of the log-sum-exp, 0 for none.
    pub(crate) lse: u64,
}

/// A method on the device; all keys are valid.
pub(crate) trait Core: Debug + Send + Sync {
    fn workspace_bytes(&self) -> usize {
        0
    }

    fn run(&self, io: &Io<'_>, ws: &mut DeviceWorkspace) -> Result<RunInfo>;

    fn stream(&self, capacity: usize) -> Option<Result<Box<dyn DeviceStream>>> {
        let _ = capacity;
        None
    }
}

/// Checks and sizes that do not depend on data.
pub(crate) type Supports = fn(&Problem, &Options, Element, &DeviceInfo) -> Support;

/// A method on the device: its line in [`registry::FORMS`].
#[derive(Debug)]
pub struct Form {
    /// The method.
    pub method: &'static Method,
    /// True if it draws random numbers; some methods draw only with options that have no device form.
    pub draws: bool,
    /// True if it decodes token by token.
    pub decodes: bool,
    /// Reasons beyond the method's own: options without a device form.
    pub supports: Supports,
    pub(crate) build: fn(&Request<'_>) -> Result<Box<dyn Core>>,
}

impl Form {
    /// Returns the claims of the form: those of the method that it supports. Gradients are only on the host.
    pub fn claims(&self) -> Claims {
        let Claims { decode, .. } = self.method.claims;
        let decode = decode && self.decodes;
        Claims { gradient: false, deterministic: !self.draws, decode, ..self.method.claims }
    }
}

/// Reason for refusing a near field.
pub(crate) const NO_NEAR: &str = "a near field has no form on the device: leave near.* out";
/// Reason for refusing capped logits.
pub(crate) const NO_SOFTCAP: &str = "capped logits have no form on the device: leave softcap out";

/// Plans the method `id` on a device; the error gives all reasons against it.
pub fn plan(
    id: &str,
    problem: &Problem,
    options: &Options,
    calibration: Option<&Calibration>,
    element: Element,
    device: &Device,
) -> Result<Box<dyn DevicePlan>> {
    let form = registry::form(id)?;
    problem.validate()?;
    let method = form.method;
    let (near, options) = &Near::split(problem.near, options, method.params)?;
    // Methods that rank, hash or map queries expect a positive scale: as on the host, its sign goes into the queries.
    let negative = problem.scale < 0.0 && method.claims_with(options).softmax;
    let positive = &Problem { scale: if negative { -problem.scale } else { problem.scale }, ..*problem };
    let mut reasons = (method.supports)(positive, options).reasons;
    if !near.is_none() {
        reasons.push(NO_NEAR.into());
    }
    if problem.softcap.is_some() {
        reasons.push(NO_SOFTCAP.into());
    }
    reasons.extend((form.supports)(positive, options, element, device.info()).reasons);
    if method.claims.needs == Needs::Calibration && calibration.is_none() {
        reasons.push(format!("{id} learns from data first: pass a calibration"));
    }
    if [problem.n_q, problem.n_k, problem.d, problem.d_v].iter().any(|&n| n > 1 << 30) {
        reasons.push("sizes on the device are at most 2^30".into());
    }
    if !reasons.is_empty() {
        return Err(attlas::Error::Unsupported { method: id.into(), reasons }.into());
    }
    // The host's plan checks options and counts the work.
    let cost = (method.build)(problem, options, calibration)?.cost();
    let request = Request { problem: positive, first_batch: 0, options, calibration, element, device };
    let core = (form.build)(&request)?;
    let negate = negative.then(|| Negate::new(device, element)).transpose()?;
    Ok(Box::new(Planned {
        form,
        problem: *problem,
        options: options.clone(),
        calibration: calibration.cloned(),
        element,
        device: device.clone(),
        cost,
        core,
        positive: *positive,
        negate,
        shorter: Mutex::new(HashMap::new()),
    }))
}

/// A form with its problem.
#[derive(Debug)]
struct Planned {
    form: &'static Form,
    problem: Problem,
    options: Options,
    calibration: Option<Calibration>,
    element: Element,
    device: Device,
    cost: Cost,
    core: Box<dyn Core>,
    /// The problem of `core`, and, if the scale is negative, the kernel that moves its sign into the queries.
    positive: Problem,
    negate: Option<Negate>,
    /// Plans of single sequences with fewer valid keys, by sequence and number of keys.
    shorter: Mutex<HashMap<(usize, usize), Arc<dyn Core>>>,
}

impl Planned {
    fn check<'a>(&self, x: &DeviceQkv<'a>, out: &DeviceOut<'a>) -> Result<Io<'a>> {
        let p = &self.problem;
        let expect = |what, t: &DeviceRef<'_>, want: [usize; 4], element: Element| {
            if t.element() != element {
                return Err(attlas::Error::shape(what, format!("{element:?}"), format!("{:?}", t.element())));
            }
            if t.dims() != want {
                return Err(attlas::Error::shape(what, format!("{want:?}"), format!("{:?}", t.dims())));
            }
            Ok(())
        };
        let o = out.o.as_ref();
        expect("queries", &x.q, [p.batch, p.n_heads, p.n_q, p.d], self.element)?;
        expect("keys", &x.k, [p.batch, p.n_kv_heads, p.n_k, p.d], self.element)?;
        expect("values", &x.v, [p.batch, p.n_kv_heads, p.n_k, p.d_v], self.element)?;
        expect("output", &o, [p.batch, p.n_heads, p.n_q, p.d_v], self.element)?;
        let lse = match &out.lse {
            Some(lse) => {
                let (lse, want) = (lse.as_ref(), [p.batch, p.n_heads, p.n_q, 1]);
                expect("log-sum-exp", &lse, want, self.element.sum())?;
                if lse.strides() != attlas::problem::bhnd(want) {
                    return Err(attlas::Error::shape(
                        "log-sum-exp",
                        "contiguous rows",
                        format!("{:?}", lse.strides()),
                    )
                    .into());
                }
                lse.view().address
            }
            None => 0,
        };
        Ok(Io { q: x.q, k: x.k, v: x.v, o, lse })
    }

    /// Returns the scratch memory of negated queries.
    fn negated_bytes(&self) -> usize {
        let p = &self.problem;
        let bytes = p.batch * p.n_heads * p.n_q * p.d * self.element.bytes();
        if self.negate.is_some() { padded(bytes) } else { 0 }
    }

    /// Returns the operands for `core`.
    fn signed<'a>(&self, io: Io<'a>, ws: &mut DeviceWorkspace) -> Result<Io<'a>> {
        let Some(negate) = &self.negate else { return Ok(io) };
        let p = &self.problem;
        let to = contiguous(ws.take(self.negated_bytes())?, p.n_heads, p.n_q, p.d);
        negate.run(&io.q, to, ws)?;
        Ok(Io { q: DeviceRef::scratch(to, self.element, io.q.dims()), ..io })
    }

    /// Returns the plan of one sequence with `keys` valid keys.
    fn sequence(&self, batch: usize, keys: usize) -> Result<Arc<dyn Core>> {
        let mut plans = self.shorter.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(core) = plans.get(&(batch, keys)) {
            return Ok(core.clone());
        }
        let problem = Problem { batch: 1, n_k: keys, ..self.positive };
        let request = Request {
            problem: &problem,
            first_batch: batch,
            options: &self.options,
            calibration: self.calibration.as_ref(),
            element: self.element,
            device: &self.device,
        };
        let core: Arc<dyn Core> = (self.form.build)(&request)?.into();
        plans.insert((batch, keys), core.clone());
        Ok(core)
    }
}

impl DevicePlan for Planned {
    fn problem(&self) -> &Problem {
        &self.problem
    }

    fn element(&self) -> Element {
        self.element
    }

    fn cost(&self) -> Cost {
        self.cost
    }

    fn workspace_bytes(&self) -> usize {
        self.negated_bytes() + self.core.workspace_bytes()
    }

    fn execute(
        &self,
        x: &DeviceQkv<'_>,
        out: &mut DeviceOut<'_>,
        ws: &mut DeviceWorkspace,
    ) -> Result<Pending> {
        let io = self.check(x, out)?;
        let p = &self.problem;
        let Some(lens) = x.key_lens.filter(|lens| lens.iter().any(|&n| n != p.n_k)) else {
            ws.reserve(self.workspace_bytes())?;
            ws.reset();
            let io = self.signed(io, ws)?;
            let info = self.core.run(&io, ws)?;
            return Ok(Pending::new(info, ws));
        };
        if lens.len() != p.batch {
            return Err(attlas::Error::shape(
                "key lengths",
                format!("one for each of {} sequences", p.batch),
                lens.len(),
            )
            .into());
        }
        if let Some(&n) = lens.iter().find(|&&n| n > p.n_k) {
            return Err(attlas::Error::shape("key length", format!("at most {}", p.n_k), n).into());
        }
        let plans: Vec<Arc<dyn Core>> =
            lens.iter().enumerate().map(|(b, &n)| self.sequence(b, n)).collect::<Result<_>>()?;
        ws.reserve(self.negated_bytes() + plans.iter().map(|c| c.workspace_bytes()).max().unwrap_or(0))?;
        ws.reset();
        let io = self.signed(io, ws)?;
        let mark = ws.mark();
        let mut info: Option<RunInfo> = None;
        for (b, (core, &n)) in plans.iter().zip(lens).enumerate() {
            let rows = (b * p.n_heads * p.n_q * self.element.sum().bytes()) as u64;
            let one = Io {
                q: io.q.sequence(b, p.n_q),
                k: io.k.sequence(b, n),
                v: io.v.sequence(b, n),
                o: io.o.sequence(b, p.n_q),
                lse: if io.lse == 0 { 0 } else { io.lse + rows },
            };
            ws.rewind(mark);
            let more = core.run(&one, ws)?;
            info = Some(match info {
                Some(info) => info.merge(more),
                None => more,
            });
        }
        Ok(Pending::new(info.unwrap_or_default(), ws))
    }

    fn stream(&self, capacity: usize) -> Option<Result<Box<dyn DeviceStream>>> {
        let inner = self.form.claims().decode.then(|| self.core.stream(capacity)).flatten()?;
        let Some(negate) = &self.negate else { return Some(inner) };
        let dims = [self.problem.batch, self.problem.n_heads, 1, self.problem.d];
        let q = DeviceBuffer::new(&self.device, self.element, dims.iter().product());
        Some(inner.and_then(|inner| {
            Ok(Box::new(NegatedStream { inner, negate: negate.clone(), q: q?, dims })
                as Box<dyn DeviceStream>)
        }))
    }
}

/// A stream for a positive scale that receives negated queries.
#[derive(Debug)]
struct NegatedStream {
    inner: Box<dyn DeviceStream>,
    negate: Negate,
    q: DeviceBuffer,
    dims: [usize; 4],
}

impl DeviceStream for NegatedStream {
    fn push(&mut self, k: DeviceRef<'_>, v: DeviceRef<'_>, ws: &mut DeviceWorkspace) -> Result<()> {
        self.inner.push(k, v, ws)
    }

    fn attend(
        &mut self,
        q: DeviceRef<'_>,
        out: &mut DeviceOut<'_>,
        ws: &mut DeviceWorkspace,
    ) -> Result<Pending> {
        if (q.dims(), q.element()) != (self.dims, self.q.element()) {
            let [expected, found] =
                [(self.dims, self.q.element()), (q.dims(), q.element())].map(|(n, e)| format!("{n:?} {e:?}"));
            return Err(attlas::Error::shape("queries", expected, found).into());
        }
        let negated = DeviceRef::bhnd(&self.q, self.dims)?;
        self.negate.run(&q, negated.view(), ws)?;
        self.inner.attend(negated, out, ws)
    }

    fn len(&self) -> usize {
        self.inner.len()
    }

    fn state_bytes(&self) -> usize {
        self.inner.state_bytes()
    }
}

/// Creates the error for an unsupported setting of a device form.
pub(crate) fn unsupported(id: &str, reason: impl Into<String>) -> Error {
    attlas::Error::Unsupported { method: id.into(), reasons: vec![reason.into()] }.into()
}
