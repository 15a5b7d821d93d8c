//! A C interface for measuring scripts: plans over raw device pointers on a stream of the caller.
//!
//! Every function returns null or a negative number on failure; `attlas_error` returns the reason.

#![allow(unsafe_code, clippy::missing_safety_doc)]

use attlas::{Mask, Options, Problem};
use attlas_cuda::{
    Device, DeviceMut, DeviceOut, DevicePlan, DeviceQkv, DeviceRef, DeviceStream, DeviceWorkspace, Element,
    KernelFamily, Result, Setup, plan,
};
use std::cell::RefCell;
use std::ffi::{CStr, CString, c_char, c_void};

thread_local! {
    static ERROR: RefCell<CString> = RefCell::default();
}

fn fail<T>(result: Result<T>) -> Option<T> {
    result.map_err(|e| ERROR.with(|x| *x.borrow_mut() = CString::new(e.to_string()).unwrap_or_default())).ok()
}

unsafe fn text<'a>(s: *const c_char) -> &'a str {
    if s.is_null() {
        return "";
    }
    // SAFETY: the caller passes a string that ends with zero.
    unsafe { CStr::from_ptr(s) }.to_str().unwrap_or("")
}

/// Message of the last error.
#[unsafe(no_mangle)]
pub extern "C" fn attlas_error() -> *const c_char {
    ERROR.with(|x| x.borrow().as_ptr())
}

/// Opens GPU 0. `family`: 0 the best, 1 portable, 2 plain.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn attlas_open(cache: *const c_char, nvrtc: *const c_char, family: i32) -> *mut Device {
    // SAFETY: of the caller.
    let (cache, nvrtc) = unsafe { (text(cache), text(nvrtc)) };
    let path = |s: &str| (!s.is_empty()).then(|| s.into());
    let family = [None, Some(KernelFamily::Mma), Some(KernelFamily::Any)][family.clamp(0, 2) as usize];
    let device = fail(Device::open(0, &Setup { cache: path(cache), nvrtc: path(nvrtc), family }));
    device.map_or(std::ptr::null_mut(), |d| Box::into_raw(Box::new(d)))
}

/// A plan with its workspace, and a stream of tokens if one was started.
#[derive(Debug)]
pub struct Planned {
    device: Device,
    plan: Box<dyn DevicePlan>,
    ws: Option<(usize, DeviceWorkspace)>,
    tokens: Option<Box<dyn DeviceStream>>,
}

impl Planned {
    /// The workspace on a stream of the caller.
    fn on(&mut self, stream: *mut c_void) -> Result<&mut DeviceWorkspace> {
        if self.ws.as_ref().is_none_or(|(s, _)| *s != stream as usize) {
            // SAFETY: the caller's stream belongs to the primary context and outlives the plan.
            let mut ws = unsafe { DeviceWorkspace::on_stream(&self.device, stream)? };
            ws.reserve(self.plan.workspace_bytes())?;
            self.ws = Some((stream as usize, ws));
        }
        match &mut self.ws {
            Some((_, ws)) => Ok(ws),
            None => unreachable!("made above"),
        }
    }
}

/// Plans a method. `sizes`: batch, heads, key heads, n_q, n_k, d, d_v, causal; `element`: 0 bf16, 1 f16, 2 f32, 3 f64.
/// A method that needs calibration learns from `tokens` queries and keys on the host, contiguous in single precision.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn attlas_plan(
    device: *const Device,
    id: *const c_char,
    options: *const c_char,
    sizes: *const i64,
    element: i32,
    queries: *const f32,
    keys: *const f32,
    tokens: i64,
) -> *mut Planned {
    // SAFETY: of the caller: a device of `attlas_open`, strings that end with zero, eight numbers.
    let (device, id, options, s) =
        unsafe { (&*device, text(id), text(options), std::slice::from_raw_parts(sizes, 8)) };
    let options =
        options.split(',').filter_map(|p| p.split_once('=')).fold(Options::new(), |o, (k, v)| o.with(k, v));
    let n = |i: usize| s[i].max(0) as usize;
    let p = Problem {
        batch: n(0),
        d_v: n(6),
        mask: if s[7] != 0 { Mask::Causal } else { Mask::None },
        ..Problem::new(n(1), 1, n(5)).with_kv_heads(n(2)).with_lens(n(3), n(4))
    };
    let element = Element::ALL[element.clamp(0, 3) as usize];
    let tokens = tokens.max(0) as usize;
    let learnt = (tokens > 0).then(|| -> attlas::Result<_> {
        let rows = |data, heads| {
            let dims = [p.batch, heads, tokens, p.d];
            // SAFETY: of the caller.
            let data = unsafe { std::slice::from_raw_parts(data, dims.iter().product()) };
            attlas::TensorRef::bhnd(data, dims)
        };
        let (q, k) = (rows(queries, p.n_heads)?, rows(keys, p.n_kv_heads)?);
        let method = attlas::registry::method(id)?;
        // Calibration does not use values.
        let x = attlas::Qkv::new(q, k, k);
        let p = Problem { d_v: p.d, ..p.with_lens(tokens, tokens) };
        method.calibrate.map(|learn| learn(&p, &options, &[x.into()])).transpose()
    });
    let Some(learnt) = fail(learnt.transpose().map_err(Into::into)) else { return std::ptr::null_mut() };
    let made = fail(plan(id, &p, &options, learnt.flatten().as_ref(), element, device));
    made.map_or(std::ptr::null_mut(), |plan| {
        Box::into_raw(Box::new(Planned { device: device.clone(), plan, ws: None, tokens: None }))
    })
}

/// Runs a plan on contiguous tensors; `lse` may be null. The first run on a stream reserves its scratch memory.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn attlas_run(
    planned: *mut Planned,
    stream: *mut c_void,
    q: u64,
    k: u64,
    v: u64,
    o: u64,
    lse: u64,
) -> i32 {
    // SAFETY: of the caller: a plan of `attlas_plan` and tensors of its sizes.
    let this = unsafe { &mut *planned };
    let mut work = || -> Result<()> {
        let (p, e, device) = (*this.plan.problem(), this.plan.element(), this.device.clone());
        this.on(stream)?;
        let Some((_, ws)) = &mut this.ws else { unreachable!("made above") };
        let read = |address, h, n, c| {
            let dims = [p.batch, h, n, c];
            // SAFETY: of the caller.
            unsafe { DeviceRef::from_raw(&device, address, e, dims, attlas::problem::bhnd(dims)) }
        };
        let write = |address, c, e| {
            let dims = [p.batch, p.n_heads, p.n_q, c];
            // SAFETY: of the caller.
            unsafe { DeviceMut::from_raw(&device, address, e, dims, attlas::problem::bhnd(dims)) }
        };
        let x = DeviceQkv {
            q: read(q, p.n_heads, p.n_q, p.d)?,
            k: read(k, p.n_kv_heads, p.n_k, p.d)?,
            v: read(v, p.n_kv_heads, p.n_k, p.d_v)?,
            key_lens: None,
        };
        let lse = if lse == 0 { None } else { Some(write(lse, 1, e.sum())?) };
        let mut out = DeviceOut { o: write(o, p.d_v, e)?, lse };
        this.plan.execute(&x, &mut out, ws).map(|_| ())
    };
    fail(work()).map_or(-1, |()| 0)
}

/// Starts decoding and appends `n` tokens; tensors are contiguous `[batch, key heads, n, columns]`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn attlas_push(
    planned: *mut Planned,
    stream: *mut c_void,
    k: u64,
    v: u64,
    n: i64,
) -> i32 {
    // SAFETY: of the caller.
    let this = unsafe { &mut *planned };
    let mut work = || -> Result<()> {
        let (p, e, device, n) =
            (*this.plan.problem(), this.plan.element(), this.device.clone(), n.max(0) as usize);
        this.on(stream)?;
        if this.tokens.is_none() {
            this.tokens = this.plan.stream(n).transpose()?;
        }
        let (Some((_, ws)), Some(tokens)) = (&mut this.ws, &mut this.tokens) else {
            return Err(attlas::Error::shape("method", "one that decodes", "none").into());
        };
        let read = |address, c| {
            let dims = [p.batch, p.n_kv_heads, n, c];
            // SAFETY: of the caller.
            unsafe { DeviceRef::from_raw(&device, address, e, dims, attlas::problem::bhnd(dims)) }
        };
        tokens.push(read(k, p.d)?, read(v, p.d_v)?, ws)
    };
    fail(work()).map_or(-1, |()| 0)
}

/// Attends with one query per head.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn attlas_attend(planned: *mut Planned, stream: *mut c_void, q: u64, o: u64) -> i32 {
    // SAFETY: of the caller.
    let this = unsafe { &mut *planned };
    let mut work = || -> Result<()> {
        let (p, e, device) = (*this.plan.problem(), this.plan.element(), this.device.clone());
        this.on(stream)?;
        let (Some((_, ws)), Some(tokens)) = (&mut this.ws, &mut this.tokens) else {
            return Err(attlas::Error::shape("stream", "tokens pushed before", "none").into());
        };
        let dims = |c| [p.batch, p.n_heads, 1, c];
        // SAFETY: of the caller.
        let query =
            unsafe { DeviceRef::from_raw(&device, q, e, dims(p.d), attlas::problem::bhnd(dims(p.d)))? };
        // SAFETY: of the caller.
        let o =
            unsafe { DeviceMut::from_raw(&device, o, e, dims(p.d_v), attlas::problem::bhnd(dims(p.d_v)))? };
        tokens.attend(query, &mut DeviceOut { o, lse: None }, ws).map(|_| ())
    };
    fail(work()).map_or(-1, |()| 0)
}

/// Frees a plan.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn attlas_free(planned: *mut Planned) {
    if !planned.is_null() {
        // SAFETY: of the caller: a plan of `attlas_plan`, not used again.
        drop(unsafe { Box::from_raw(planned) });
    }
}
