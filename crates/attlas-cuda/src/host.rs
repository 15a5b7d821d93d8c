//! Device forms over host tensors: the only file that uses both interfaces.

use crate::plan::{NO_NEAR, NO_SOFTCAP};
use crate::registry::FORMS;
use crate::{
    Device, DeviceBuffer, DeviceMut, DeviceOut, DevicePlan, DeviceQkv, DeviceRef, DeviceStream,
    DeviceWorkspace, Element, Form, plan,
};
use attlas::method::{Build, Claims, Needs};
use attlas::{
    Calibration, Cost, DType, Error, Inputs, Method, Options, Out, Output, Plan, Problem, Qkv, Real, Result,
    RunInfo, Stream, Support, Tensor, TensorRef, Workspace,
};
use std::collections::HashMap;
use std::collections::hash_map::Entry as MapEntry;
use std::sync::{Mutex, OnceLock, PoisonError};

static DEVICE: OnceLock<Device> = OnceLock::new();

fn element_of(dtype: DType) -> Element {
    match dtype {
        DType::F64 => Element::F64,
        DType::F32 => Element::F32,
    }
}

/// Returns the registry entry with `build` replaced by the device form over host tensors, for the testkit and the lab.
/// The process's first device serves all entries. Exact limits are bit-identical only to the device's own `exact`: the
/// entry does not claim them against the host. Settings that the device refuses are no probes.
pub fn on_host(form: &'static Form, device: &Device) -> &'static Method {
    let device = DEVICE.get_or_init(|| device.clone());
    let at = FORMS.iter().position(|f| std::ptr::eq(*f, form)).unwrap_or(0);
    let (build, supports) = ENTRIES[at];
    let probe = |pairs: &&&[(&str, &str)]| {
        let options = pairs.iter().fold(Options::new(), |o, (k, v)| o.with(k, *v));
        let p = Problem::new(1, 97, 16);
        let learns = form.method.claims.needs == Needs::Calibration;
        (form.supports)(&p, &options, Element::F64, device.info()).is_yes()
            && (learns || plan(form.method.id, &p, &options, None, Element::F64, device).is_ok())
    };
    let probes: Vec<&'static [(&'static str, &'static str)]> =
        form.method.probes.iter().filter(probe).copied().collect();
    let m = form.method;
    Box::leak(Box::new(Method {
        id: m.id,
        family: m.family,
        title: m.title,
        reference: m.reference,
        claims: Claims { exact_at: &[], ..form.claims() },
        params: m.params,
        probes: Vec::leak(probes),
        subsets: m.subsets,
        exact_below: m.exact_below,
        tunable: m.tunable,
        supports,
        calibrate: m.calibrate,
        build,
    }))
}

type Entry = (Build, fn(&Problem, &Options) -> Support);

/// Plain functions for each index of [`FORMS`]: a registry entry cannot contain closures.
static ENTRIES: &[Entry] = &[
    (build_at::<0>, supports_at::<0>),
    (build_at::<1>, supports_at::<1>),
    (build_at::<2>, supports_at::<2>),
    (build_at::<3>, supports_at::<3>),
    (build_at::<4>, supports_at::<4>),
    (build_at::<5>, supports_at::<5>),
    (build_at::<6>, supports_at::<6>),
    (build_at::<7>, supports_at::<7>),
    (build_at::<8>, supports_at::<8>),
    (build_at::<9>, supports_at::<9>),
    (build_at::<10>, supports_at::<10>),
    (build_at::<11>, supports_at::<11>),
    (build_at::<12>, supports_at::<12>),
    (build_at::<13>, supports_at::<13>),
    (build_at::<14>, supports_at::<14>),
    (build_at::<15>, supports_at::<15>),
    (build_at::<16>, supports_at::<16>),
    (build_at::<17>, supports_at::<17>),
];
const _: () = assert!(FORMS.len() <= 18, "every form needs an entry");

fn supports_at<const I: usize>(p: &Problem, o: &Options) -> Support {
    let form = FORMS[I.min(FORMS.len() - 1)];
    let mut support = (form.method.supports)(p, o)
        .and_unless(!p.near.is_none(), NO_NEAR)
        .and_unless(p.softcap.is_some(), NO_SOFTCAP);
    if let Some(device) = DEVICE.get() {
        for dtype in [DType::F32, DType::F64] {
            let more = (form.supports)(p, o, element_of(dtype), device.info()).reasons;
            support
                .reasons
                .extend(more.into_iter().filter(|r| !support.reasons.contains(r)).collect::<Vec<_>>());
        }
    }
    support
}

fn build_at<const I: usize>(p: &Problem, o: &Options, c: Option<&Calibration>) -> Result<Box<dyn Plan>> {
    let form = FORMS[I.min(FORMS.len() - 1)];
    let cost = (form.method.build)(p, o, c)?.cost();
    let on_device = OnHost {
        form,
        problem: *p,
        options: o.clone(),
        calibration: c.cloned(),
        cost,
        plans: Mutex::new(HashMap::new()),
    };
    // Refusals by the device form's constructor must come here, not in the first run.
    on_device.with_plan(Element::F64, |_| Ok(()))?;
    Ok(Box::new(on_device))
}

/// A device form over host tensors.
#[derive(Debug)]
struct OnHost {
    form: &'static Form,
    problem: Problem,
    options: Options,
    calibration: Option<Calibration>,
    cost: Cost,
    plans: Mutex<HashMap<Element, Box<dyn DevicePlan>>>,
}

fn device() -> Result<&'static Device> {
    DEVICE.get().ok_or_else(|| Error::Device { device: "cuda".into(), reason: "no device was opened".into() })
}

impl OnHost {
    fn with_plan<R>(&self, element: Element, work: impl FnOnce(&dyn DevicePlan) -> Result<R>) -> Result<R> {
        let mut plans = self.plans.lock().unwrap_or_else(PoisonError::into_inner);
        let plan = match plans.entry(element) {
            MapEntry::Occupied(known) => known.into_mut(),
            MapEntry::Vacant(place) => {
                let (method, calibration) = (self.form.method.id, self.calibration.as_ref());
                place.insert(plan(method, &self.problem, &self.options, calibration, element, device()?)?)
            }
        };
        work(&**plan)
    }

    fn run<T: Real>(&self, x: &Qkv<'_, T>, out: &mut Out<'_, T>) -> Result<RunInfo> {
        let p = &self.problem;
        x.validate(p)?;
        out.validate(p)?;
        let (device, element) = (device()?, element_of(T::DTYPE));
        self.with_plan(element, |plan| {
            let (q, k, v) =
                (upload(device, element, x.q)?, upload(device, element, x.k)?, upload(device, element, x.v)?);
            let dims = [p.batch, p.n_heads, p.n_q, p.d_v];
            let o = DeviceBuffer::new(device, element, dims.iter().product())?;
            let lse = DeviceBuffer::new(device, element.sum(), p.batch * p.n_heads * p.n_q)?;
            o.fill(255)?;
            let view = |b, t: TensorRef<'_, T>| DeviceRef::bhnd(b, t.dims());
            let operands =
                DeviceQkv { q: view(&q, x.q)?, k: view(&k, x.k)?, v: view(&v, x.v)?, key_lens: x.key_lens };
            let mut ws = DeviceWorkspace::new(device)?;
            ws.poison();
            ws.reserve(plan.workspace_bytes())?;
            let start = ws.event()?;
            let mut to = DeviceOut {
                o: DeviceMut::bhnd(&o, dims)?,
                lse: Some(DeviceMut::bhnd(&lse, [p.batch, p.n_heads, p.n_q, 1])?),
            };
            let pending = plan.execute(&operands, &mut to, &mut ws)?;
            let end = ws.event()?;
            let mut info = pending.wait()?;
            info.figures.insert("device_milliseconds", f64::from(end.milliseconds_since(&start)?));
            let result = o.read()?;
            for b in 0..p.batch {
                for h in 0..p.n_heads {
                    for i in 0..p.n_q {
                        let at = ((b * p.n_heads + h) * p.n_q + i) * p.d_v;
                        let row = out.o.row_mut(b, h, i);
                        row.iter_mut().zip(&result[at..]).for_each(|(o, &x)| *o = T::from_f64(x));
                    }
                }
            }
            if let Some(to) = &mut out.lse {
                to.iter_mut().zip(lse.read()?).for_each(|(l, x)| *l = T::from_f64(x));
            }
            Ok(info)
        })
    }
}

/// A contiguous copy of a host tensor.
fn upload<T: Real>(device: &Device, element: Element, t: TensorRef<'_, T>) -> Result<DeviceBuffer> {
    let [b, h, n, c] = t.dims();
    let mut data = Vec::with_capacity(b * h * n * c);
    for bi in 0..b {
        for hi in 0..h {
            t.head(bi, hi).iter_rows().for_each(|row| data.extend(row.iter().map(|x| x.to_f64())));
        }
    }
    Ok(DeviceBuffer::from_host(device, element, &data)?)
}

impl Plan for OnHost {
    fn problem(&self) -> &Problem {
        &self.problem
    }

    fn cost(&self) -> Cost {
        self.cost
    }

    fn execute(&self, inputs: &Inputs<'_>, out: &mut Output<'_>, _: &mut Workspace) -> Result<RunInfo> {
        match (inputs, out) {
            (Inputs::F32(x), Output::F32(out)) => self.run(x, out),
            (Inputs::F64(x), Output::F64(out)) => self.run(x, out),
            _ => Err(Error::shape("output", "the element type of the inputs", "another")),
        }
    }

    fn stream(&self, dtype: DType) -> Option<Box<dyn Stream>> {
        let element = element_of(dtype);
        let made = self.with_plan(element, |plan| {
            let Some(stream) = plan.stream(64) else { return Ok(None) };
            let ws = DeviceWorkspace::new(device()?)?;
            Ok(Some(HostStream { stream: stream?, ws, problem: self.problem, element }))
        });
        // The plan itself reports a stream that cannot be made on first use; here there is none.
        made.ok().flatten().map(|s| Box::new(s) as Box<dyn Stream>)
    }
}

/// Decoding with host tensors.
#[derive(Debug)]
struct HostStream {
    stream: Box<dyn DeviceStream>,
    ws: DeviceWorkspace,
    problem: Problem,
    element: Element,
}

impl HostStream {
    fn push_typed<T: Real>(&mut self, k: TensorRef<'_, T>, v: TensorRef<'_, T>) -> Result<()> {
        let (device, p) = (device()?, self.problem);
        let rows = k.dims()[2];
        let (want_k, want_v) = ([p.batch, p.n_kv_heads, rows, p.d], [p.batch, p.n_kv_heads, rows, p.d_v]);
        if k.dims() != want_k || v.dims() != want_v {
            let found = format!("{:?} and {:?}", k.dims(), v.dims());
            return Err(Error::shape("keys and values", format!("{want_k:?} and {want_v:?}"), found));
        }
        let (keys, values) = (upload(device, self.element, k)?, upload(device, self.element, v)?);
        let (k, v) = (DeviceRef::bhnd(&keys, want_k)?, DeviceRef::bhnd(&values, want_v)?);
        self.stream.push(k, v, &mut self.ws)?;
        Ok(self.ws.synchronize()?)
    }

    /// Appends tokens one by one.
    fn extend_typed<T: Real>(&mut self, x: &Qkv<'_, T>, out: &mut Out<'_, T>) -> Result<RunInfo> {
        let tokens = x.k.dims()[2];
        let p = self.problem.with_lens(tokens, tokens);
        x.validate(&p)?;
        out.validate(&p)?;
        let rows = p.batch * p.n_heads;
        let mut lse = vec![T::ZERO; rows];
        let mut info = RunInfo::default();
        for i in 0..tokens {
            self.push_typed(x.k.rows(i..i + 1), x.v.rows(i..i + 1))?;
            let mut one = Out::with_lse(out.o.rows_mut(i..i + 1), &mut lse);
            info = info.merge(self.attend_typed(x.q.rows(i..i + 1), &mut one)?);
            if let Some(to) = &mut out.lse {
                lse.iter().enumerate().for_each(|(h, l)| to[h * tokens + i] = *l);
            }
        }
        Ok(info)
    }

    fn attend_typed<T: Real>(&mut self, q: TensorRef<'_, T>, out: &mut Out<'_, T>) -> Result<RunInfo> {
        let (device, p) = (device()?, Problem { n_q: 1, ..self.problem });
        let want = [p.batch, p.n_heads, 1, p.d];
        if q.dims() != want {
            return Err(Error::shape("queries", format!("{want:?}"), format!("{:?}", q.dims())));
        }
        out.validate(&p)?;
        let query = upload(device, self.element, q)?;
        let dims = [p.batch, p.n_heads, 1, p.d_v];
        let o = DeviceBuffer::new(device, self.element, dims.iter().product())?;
        let lse = DeviceBuffer::new(device, self.element.sum(), p.batch * p.n_heads)?;
        let mut to = DeviceOut {
            o: DeviceMut::bhnd(&o, dims)?,
            lse: Some(DeviceMut::bhnd(&lse, [p.batch, p.n_heads, 1, 1])?),
        };
        let info = self.stream.attend(DeviceRef::bhnd(&query, want)?, &mut to, &mut self.ws)?.wait()?;
        let result = o.read()?;
        for b in 0..p.batch {
            for h in 0..p.n_heads {
                let at = (b * p.n_heads + h) * p.d_v;
                let row = out.o.row_mut(b, h, 0);
                row.iter_mut().zip(&result[at..]).for_each(|(o, &x)| *o = T::from_f64(x));
            }
        }
        if let Some(to) = &mut out.lse {
            to.iter_mut().zip(lse.read()?).for_each(|(l, x)| *l = T::from_f64(x));
        }
        Ok(info)
    }
}

impl Stream for HostStream {
    fn push(&mut self, k: Tensor<'_>, v: Tensor<'_>, _: &mut Workspace) -> Result<()> {
        match (k, v) {
            (Tensor::F32(k), Tensor::F32(v)) => self.push_typed(k, v),
            (Tensor::F64(k), Tensor::F64(v)) => self.push_typed(k, v),
            _ => Err(Error::shape("values", "the element type of the keys", "another")),
        }
    }

    fn attend(&mut self, q: Tensor<'_>, out: &mut Output<'_>, _: &mut Workspace) -> Result<RunInfo> {
        match (q, out) {
            (Tensor::F32(q), Output::F32(out)) => self.attend_typed(q, out),
            (Tensor::F64(q), Output::F64(out)) => self.attend_typed(q, out),
            _ => Err(Error::shape("output", "the element type of the queries", "another")),
        }
    }

    fn extend(&mut self, inputs: &Inputs<'_>, out: &mut Output<'_>, _: &mut Workspace) -> Result<RunInfo> {
        match (inputs, out) {
            (Inputs::F32(x), Output::F32(out)) => self.extend_typed(x, out),
            (Inputs::F64(x), Output::F64(out)) => self.extend_typed(x, out),
            _ => Err(Error::shape("output", "the element type of the inputs", "another")),
        }
    }

    fn len(&self) -> usize {
        self.stream.len()
    }

    fn state_bytes(&self) -> usize {
        self.stream.state_bytes()
    }
}
