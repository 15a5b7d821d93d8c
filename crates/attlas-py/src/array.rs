//! Views of Python arrays: by the buffer of a plain NumPy array, by NumPy's array interface if there is one, otherwise
//! by DLPack. The only module with `unsafe` code.
//!
//! A view keeps the exporting object alive and checks, in this order: element type, alignment, strides in whole elements,
//! extents without overflow. Memory that the core cannot read in place is refused with `NeedsCopy`, and copied once by
//! the array's own library. Other Python threads may write to an array during a call, as everywhere in NumPy.

use crate::errors;
use attlas::{DType, Error, Real, Result, TensorMut, TensorRef};
use pyo3::buffer::PyUntypedBuffer;
use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyCapsule, PyCapsuleMethods, PyDict, PyTuple, PyType};
use std::ffi::CStr;
use std::ops::Range;

/// Role of an array in a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Access {
    Read,
    Write,
}

/// Memory of a Python array as `[batch, heads, rows, columns]`, columns contiguous.
pub(crate) struct View {
    data: *mut u8,
    dims: [usize; 4],
    /// Elements between neighbours along batch, head and row.
    strides: [usize; 3],
    dtype: DType,
    _owner: Owner,
}

/// Owner that keeps the memory of an array alive.
enum Owner {
    Object { _held: Py<PyAny> },
    Buffer { _held: PyUntypedBuffer },
}

impl Owner {
    fn object(x: Bound<'_, PyAny>) -> Self {
        Self::Object { _held: x.unbind() }
    }
}

// SAFETY: the pointer is to memory that `_owner` keeps alive; its accesses are justified where slices are made.
unsafe impl Send for View {}
// SAFETY: as above; a shared view is only read.
unsafe impl Sync for View {}

/// Description of an array by its exporter.
struct Exported {
    data: *mut u8,
    shape: Vec<usize>,
    /// Strides in bytes; contiguous if absent.
    strides: Option<Vec<isize>>,
    dtype: DType,
    read_only: bool,
    owner: Owner,
}

impl View {
    /// Views an array of two to four axes; `tokens_first` is the layout with tokens before heads. Errors contain
    /// `name`.
    pub(crate) fn new(
        x: &Bound<'_, PyAny>,
        name: &str,
        tokens_first: bool,
        access: Access,
    ) -> PyResult<Self> {
        let exported = export(x, name)?;
        if exported.read_only && access == Access::Write {
            return Err(PyValueError::new_err(format!(
                "{name}: expected an array that can be written, found a read-only one"
            )));
        }
        let py = x.py();
        let size = bytes_of(exported.dtype) as isize;
        let rank = exported.shape.len();
        if !(2..=4).contains(&rank) {
            let expected = "2, 3 or 4 axes";
            return Err(errors::shape(py, name, expected, &format!("{rank}: {:?}", exported.shape)));
        }
        let bytes = exported.strides.unwrap_or_else(|| contiguous(&exported.shape, size));
        let mut dims = [1usize; 4];
        let mut steps = [0isize; 4];
        for (axis, (&n, &stride)) in exported.shape.iter().zip(&bytes).enumerate() {
            let place = 4 - rank + axis;
            dims[place] = n;
            steps[place] = stride;
        }
        if tokens_first && rank > 2 {
            dims.swap(1, 2);
            steps.swap(1, 2);
        }
        let needs_copy = |why: &str| Err(errors::needs_copy(py, &format!("{name}: {why}")));
        if !(exported.data as usize).is_multiple_of(bytes_of(exported.dtype)) {
            return needs_copy("not aligned to its elements");
        }
        let empty = dims.contains(&0);
        let mut strides = [0usize; 3];
        for axis in 0..4 {
            // Strides of axes with one element, or of an empty array, are meaningless.
            if dims[axis] <= 1 || empty {
                if axis == 2 {
                    strides[2] = dims[3];
                }
                continue;
            }
            if steps[axis] % size != 0 {
                return needs_copy("strides that are no whole number of elements");
            }
            let step = steps[axis] / size;
            match (axis, usize::try_from(step)) {
                (3, Ok(1)) => {}
                (2, Ok(step)) if step >= dims[3] => strides[2] = step,
                (0 | 1, Ok(step)) => strides[axis] = step,
                _ => return needs_copy("rows that are not contiguous"),
            }
        }
        let view = Self { data: exported.data, dims, strides, dtype: exported.dtype, _owner: exported.owner };
        if view
            .extent()
            .is_none_or(|n| n.checked_mul(size as usize).is_none_or(|b| isize::try_from(b).is_err()))
        {
            return Err(errors::too_large(py, name, &dims));
        }
        Ok(view)
    }

    pub(crate) fn dims(&self) -> [usize; 4] {
        self.dims
    }

    pub(crate) fn dtype(&self) -> DType {
        self.dtype
    }

    /// Returns the index of the last element plus one.
    fn extent(&self) -> Option<usize> {
        if self.dims.contains(&0) {
            return Some(0);
        }
        let reach = |axis: usize| (self.dims[axis] - 1).checked_mul(self.strides[axis]);
        self.dims[3].checked_add(reach(0)?)?.checked_add(reach(1)?)?.checked_add(reach(2)?)
    }

    /// Returns true if both might share memory.
    pub(crate) fn overlaps(&self, other: &View) -> bool {
        let span = |v: &View| {
            let start = v.data as usize;
            (start, start + v.extent().unwrap_or(usize::MAX / 16).saturating_mul(bytes_of(v.dtype)))
        };
        let ((a, b), (c, d)) = (span(self), span(other));
        a < d && c < b && a != b && c != d
    }

    /// Selects sequences, heads and rows.
    pub(crate) fn part(&self, batch: Range<usize>, heads: Range<usize>, rows: Range<usize>) -> Part<'_> {
        let [b, h, n, c] = self.dims;
        assert!(batch.start <= batch.end && batch.end <= b, "sequences {batch:?} of {b}");
        assert!(heads.start <= heads.end && heads.end <= h, "heads {heads:?} of {h}");
        assert!(rows.start <= rows.end && rows.end <= n, "rows {rows:?} of {n}");
        let dims = [batch.len(), heads.len(), rows.len(), c];
        let offset =
            batch.start * self.strides[0] + heads.start * self.strides[1] + rows.start * self.strides[2];
        Part { view: self, offset, dims }
    }

    pub(crate) fn whole(&self) -> Part<'_> {
        Part { view: self, offset: 0, dims: self.dims }
    }
}

/// A part of a view.
#[derive(Clone, Copy)]
pub(crate) struct Part<'a> {
    view: &'a View,
    offset: usize,
    dims: [usize; 4],
}

impl<'a> Part<'a> {
    fn len(&self) -> usize {
        if self.dims.contains(&0) {
            return 0;
        }
        let s = self.view.strides;
        self.dims[3] + (self.dims[0] - 1) * s[0] + (self.dims[1] - 1) * s[1] + (self.dims[2] - 1) * s[2]
    }

    fn check<T: Real>(&self) -> Result<()> {
        if self.view.dtype == T::DTYPE {
            return Ok(());
        }
        Err(Error::shape("element type", format!("{:?}", T::DTYPE), format!("{:?}", self.view.dtype)))
    }

    /// Returns the part for reading.
    pub(crate) fn read<T: Real>(&self) -> Result<TensorRef<'a, T>> {
        self.check::<T>()?;
        let len = self.len();
        let data: &'a [T] = if len == 0 {
            &[]
        } else {
            // SAFETY: the exporter vouches for `extent` elements from `data`, which the view keeps alive for `'a`; this
            // part ends inside them, since it was cut by indices below the sizes. The pointer is aligned (checked).
            unsafe { std::slice::from_raw_parts(self.view.data.cast::<T>().add(self.offset), len) }
        };
        TensorRef::new(data, self.dims, self.view.strides)
    }
}

/// A writable view that shares no memory with the inputs of its call.
pub(crate) struct Target(View);

impl Target {
    /// Creates a view like [`View::new`]; fails if memory of `inputs` might be overwritten.
    pub(crate) fn new(
        x: &Bound<'_, PyAny>,
        name: &str,
        tokens_first: bool,
        inputs: &[(&str, &View)],
    ) -> PyResult<Self> {
        let view = View::new(x, name, tokens_first, Access::Write)?;
        let mut axes: Vec<(usize, usize)> =
            (0..3).map(|a| (view.strides[a], view.dims[a])).filter(|&(_, n)| n > 1).collect();
        axes.sort_unstable();
        let mut reach = view.dims[3];
        for (stride, n) in axes {
            if stride < reach && !view.dims.contains(&0) {
                let text = format!(
                    "{name}: expected every element at a place of its own, found two at the same one"
                );
                return Err(PyValueError::new_err(text));
            }
            reach = reach.saturating_add(stride.saturating_mul(n - 1));
        }
        match inputs.iter().find(|(_, input)| view.overlaps(input)) {
            Some((input, _)) => Err(PyValueError::new_err(format!(
                "{name}: expected memory of its own, found memory that {input} may share"
            ))),
            None => Ok(Self(view)),
        }
    }

    pub(crate) fn view(&self) -> &View {
        &self.0
    }

    /// Returns sequences, heads and rows for writing.
    pub(crate) fn part<T: Real>(
        &mut self,
        batch: Range<usize>,
        heads: Range<usize>,
        rows: Range<usize>,
    ) -> Result<TensorMut<'_, T>> {
        let part = self.0.part(batch, heads, rows);
        part.check::<T>()?;
        let len = part.len();
        let data: &mut [T] = if len == 0 {
            &mut []
        } else {
            // SAFETY: as in `Part::read`. The exporter says that the memory can be written; it overlaps no input of the
            // call (checked above), and `&mut self` keeps any other slice of it away.
            unsafe { std::slice::from_raw_parts_mut(part.view.data.cast::<T>().add(part.offset), len) }
        };
        TensorMut::new(data, part.dims, part.view.strides)
    }

    /// Returns the whole view for writing.
    pub(crate) fn whole<T: Real>(&mut self) -> Result<TensorMut<'_, T>> {
        let [b, h, n, _] = self.0.dims;
        self.part(0..b, 0..h, 0..n)
    }
}

/// A contiguous, writable `[n]` or `[batch, heads, rows]` array: the log-sum-exp.
pub(crate) struct Flat {
    data: *mut u8,
    len: usize,
    dtype: DType,
    _owner: Owner,
}

// SAFETY: as for `View`.
unsafe impl Send for Flat {}

impl Flat {
    pub(crate) fn new(x: &Bound<'_, PyAny>, name: &str) -> PyResult<Self> {
        let exported = export(x, name)?;
        let size = bytes_of(exported.dtype);
        let strides = exported.strides.unwrap_or_else(|| contiguous(&exported.shape, size as isize));
        let expected = contiguous(&exported.shape, size as isize);
        let len: usize = exported.shape.iter().product();
        let in_order =
            exported.shape.iter().zip(strides.iter().zip(&expected)).all(|(&n, (a, b))| n <= 1 || a == b);
        if exported.read_only || len > 0 && !in_order || !(exported.data as usize).is_multiple_of(size) {
            return Err(PyValueError::new_err(format!(
                "{name}: expected a contiguous array that can be written"
            )));
        }
        Ok(Self { data: exported.data, len, dtype: exported.dtype, _owner: exported.owner })
    }

    /// Returns the elements; none if they are of another type.
    pub(crate) fn write<T: Real>(&mut self) -> &mut [T] {
        if self.len == 0 || self.dtype != T::DTYPE {
            return &mut [];
        }
        // SAFETY: the exporter vouches for `len` contiguous elements that can be written; alignment is checked. The
        // package allocates this array for each call: nothing else refers to its memory.
        unsafe { std::slice::from_raw_parts_mut(self.data.cast::<T>(), self.len) }
    }

    pub(crate) fn len(&self) -> usize {
        self.len
    }
}

/// Reads the int32 array `[batch, 1, rows, 2]` of intervals.
pub(crate) fn intervals(x: &Bound<'_, PyAny>) -> PyResult<Vec<Vec<(i32, i32)>>> {
    let raw = capsule(x, "mask")?;
    let t = raw.tensor();
    let shape = t.shape();
    let expected = "an int32 array [batch, 1, rows, 2]";
    let &[batch, 1, rows, 2] = &shape[..] else {
        return Err(errors::shape(x.py(), "mask", expected, &format!("{shape:?}")));
    };
    if (t.dtype.code, t.dtype.bits, t.dtype.lanes) != (0, 32, 1) || !t.data().cast::<i32>().is_aligned() {
        return Err(PyTypeError::new_err(format!("mask: expected {expected}, found other elements")));
    }
    let strides = t.strides().unwrap_or_else(|| contiguous(&shape, 1));
    let at = |b: usize, i: usize, c: usize| {
        let offset = b as isize * strides[0] + i as isize * strides[2] + c as isize * strides[3];
        // SAFETY: indices are below the shape the exporter gives, and the capsule lives until the end of this function.
        unsafe { t.data().cast::<i32>().offset(offset).read() }
    };
    Ok((0..batch).map(|b| (0..rows).map(|i| (at(b, i, 0), at(b, i, 1))).collect()).collect())
}

/// Returns where an array is read: address of the first element, sizes `[batch, heads, rows, columns]`, and strides
/// along the first three axes in elements. It makes the same view as every call, which lets a test verify that nothing
/// is copied.
#[pyfunction]
#[pyo3(signature = (x, tokens_first = false))]
pub(crate) fn view(x: &Bound<'_, PyAny>, tokens_first: bool) -> PyResult<(usize, [usize; 4], [usize; 3])> {
    let view = View::new(x, "x", tokens_first, Access::Read)?;
    Ok((view.data as usize, view.dims, view.strides))
}

fn bytes_of(dtype: DType) -> usize {
    match dtype {
        DType::F32 => size_of::<f32>(),
        DType::F64 => size_of::<f64>(),
    }
}

fn contiguous(shape: &[usize], size: isize) -> Vec<isize> {
    let mut strides = vec![size; shape.len()];
    for axis in (0..shape.len().saturating_sub(1)).rev() {
        strides[axis] = strides[axis + 1].saturating_mul(shape[axis + 1] as isize);
    }
    strides
}

fn export(x: &Bound<'_, PyAny>, name: &str) -> PyResult<Exported> {
    let py = x.py();
    static NDARRAY: PyOnceLock<Py<PyType>> = PyOnceLock::new();
    if x.get_type().is(NDARRAY.import(py, "numpy", "ndarray")?)
        && let Some(exported) = from_buffer(x)
    {
        return Ok(exported);
    }
    if let Some(object) = torch_export(x, name)? {
        return from_capsule(opened(object, name)?, name);
    }
    // NumPy's own interface first: it also covers read-only arrays, which older versions do not export by DLPack.
    match x.getattr_opt(intern!(py, "__array_interface__"))? {
        Some(interface) => from_interface(x, interface.cast::<PyDict>()?, name),
        None => from_capsule(opened(exported_capsule(x, name)?, name)?, name),
    }
}

fn wrong_type(name: &str, found: &str) -> PyErr {
    PyTypeError::new_err(format!("{name}: expected elements float32 or float64 here, found {found}"))
}

/// Reads a plain NumPy array of floats in native byte order, in a tenth of the interface's time. `None` for all other
/// arrays, which go through the interface.
fn from_buffer(x: &Bound<'_, PyAny>) -> Option<Exported> {
    let buffer = PyUntypedBuffer::get(x).ok()?;
    let dtype = match buffer.format().to_bytes() {
        b"f" => DType::F32,
        b"d" => DType::F64,
        _ => return None,
    };
    if buffer.suboffsets().is_some() || buffer.item_size() != bytes_of(dtype) {
        return None;
    }
    Some(Exported {
        data: buffer.buf_ptr().cast(),
        shape: buffer.shape().to_vec(),
        strides: Some(buffer.strides().to_vec()),
        dtype,
        read_only: buffer.readonly(),
        owner: Owner::Buffer { _held: buffer },
    })
}

fn from_interface(x: &Bound<'_, PyAny>, interface: &Bound<'_, PyDict>, name: &str) -> PyResult<Exported> {
    let py = x.py();
    let get = |key: &str| {
        interface
            .get_item(key)?
            .ok_or_else(|| PyTypeError::new_err(format!("{name}: __array_interface__ without {key}")))
    };
    let typestr = get("typestr")?;
    let dtype = match typestr.extract::<&str>()? {
        "<f4" if cfg!(target_endian = "little") => DType::F32,
        "<f8" if cfg!(target_endian = "little") => DType::F64,
        "<f4" | "<f8" | ">f4" | ">f8" => return Err(errors::needs_copy(py, "the other order of bytes")),
        other => return Err(wrong_type(name, other)),
    };
    let (data, read_only): (usize, bool) = get("data")?.extract()?;
    let shape: Vec<usize> = get("shape")?.extract()?;
    let strides = interface.get_item(intern!(py, "strides"))?.filter(|s| !s.is_none());
    let strides: Option<Vec<isize>> = strides.map(|s| s.extract()).transpose()?;
    Ok(Exported { data: data as *mut u8, shape, strides, dtype, read_only, owner: Owner::object(x.clone()) })
}

#[repr(C)]
#[derive(Clone, Copy)]
struct DlDevice {
    kind: i32,
    id: i32,
}

#[repr(C)]
#[derive(Clone, Copy)]
struct DlType {
    code: u8,
    bits: u8,
    lanes: u16,
}

/// `DLTensor` of the DLPack header.
#[repr(C)]
struct DlTensor {
    data: *mut u8,
    device: DlDevice,
    ndim: i32,
    dtype: DlType,
    shape: *const i64,
    strides: *const i64,
    byte_offset: u64,
}

/// The part of `DLManagedTensorVersioned` that is read.
#[repr(C)]
struct Versioned {
    major: u32,
    minor: u32,
    manager: *mut u8,
    deleter: *mut u8,
    flags: u64,
    tensor: DlTensor,
}

const DEVICE_CPU: i32 = 1;
const READ_ONLY: u64 = 1;
const VERSIONED: &CStr = c"dltensor_versioned";
const PLAIN: &CStr = c"dltensor";

/// A capsule that is borrowed, not consumed: its own destructor frees the tensor.
struct Capsule<'py> {
    object: Bound<'py, PyCapsule>,
    tensor: *const DlTensor,
    read_only: bool,
}

impl Capsule<'_> {
    fn tensor(&self) -> &DlTensor {
        // SAFETY: the pointer came from a capsule of the right name, which `object` keeps alive.
        unsafe { &*self.tensor }
    }
}

impl DlTensor {
    fn data(&self) -> *mut u8 {
        self.data.wrapping_add(self.byte_offset as usize)
    }

    fn shape(&self) -> Vec<usize> {
        if self.ndim <= 0 || self.shape.is_null() {
            return Vec::new();
        }
        // SAFETY: DLPack promises `ndim` sizes.
        unsafe { std::slice::from_raw_parts(self.shape, self.ndim as usize) }
            .iter()
            .map(|&n| usize::try_from(n).unwrap_or(0))
            .collect()
    }

    /// Returns the strides in elements; `None` for a compact tensor.
    fn strides(&self) -> Option<Vec<isize>> {
        if self.strides.is_null() || self.ndim <= 0 {
            return None;
        }
        // SAFETY: DLPack promises `ndim` strides where there are any.
        let strides = unsafe { std::slice::from_raw_parts(self.strides, self.ndim as usize) };
        Some(strides.iter().map(|&s| s as isize).collect())
    }
}

/// Exports a PyTorch tensor by PyTorch's native function; `Tensor.__dlpack__` is written in Python and takes ten times
/// as long. `None` for other arrays and for subclasses, which define their own export.
fn torch_export<'py>(x: &Bound<'py, PyAny>, name: &str) -> PyResult<Option<Bound<'py, PyAny>>> {
    static TORCH: PyOnceLock<(Py<PyAny>, Py<PyAny>)> = PyOnceLock::new();
    let py = x.py();
    let (class, export) = match TORCH.get(py) {
        Some(found) => found,
        None => {
            let modules = py.import("sys")?.getattr("modules")?;
            let get = |name: &str| modules.call_method1("get", (name,));
            let (torch, dlpack) = (get("torch")?, get("torch.utils.dlpack")?);
            if torch.is_none() || dlpack.is_none() {
                return Ok(None);
            }
            let found = (torch.getattr("Tensor")?.unbind(), dlpack.getattr("to_dlpack")?.unbind());
            TORCH.get_or_init(py, || found)
        }
    };
    if !x.get_type().is(class) {
        return Ok(None);
    }
    if x.call_method0(intern!(py, "is_neg"))?.is_truthy()? {
        return Err(errors::needs_copy(py, &format!("{name}: negated when it is read")));
    }
    export.bind(py).call1((x,)).map(Some)
}

fn capsule<'py>(x: &Bound<'py, PyAny>, name: &str) -> PyResult<Capsule<'py>> {
    let object = match torch_export(x, name)? {
        Some(object) => object,
        None => exported_capsule(x, name)?,
    };
    opened(object, name)
}

fn opened<'py>(object: Bound<'py, PyAny>, name: &str) -> PyResult<Capsule<'py>> {
    let py = object.py();
    let object = object.cast_into::<PyCapsule>()?;
    let (tensor, read_only) = if object.is_valid_checked(Some(VERSIONED)) {
        let managed = object.pointer_checked(Some(VERSIONED))?.cast::<Versioned>().as_ptr();
        // SAFETY: a capsule of this name points to a `DLManagedTensorVersioned`; the version comes first in every major one.
        let (major, flags) = unsafe { ((*managed).major, (*managed).flags) };
        if major != 1 {
            return Err(PyTypeError::new_err(format!("{name}: expected DLPack version 1, found {major}")));
        }
        // SAFETY: as above; only the address of the field is taken.
        (unsafe { &raw const (*managed).tensor }, flags & READ_ONLY != 0)
    } else {
        let managed = object.pointer_checked(Some(PLAIN))?.cast::<DlTensor>();
        (managed.as_ptr().cast_const(), false)
    };
    let found = Capsule { object, tensor, read_only };
    let device = found.tensor().device;
    if device.kind != DEVICE_CPU {
        let reason = format!(
            "arrays are read on the cpu, {name} is on a device of kind {} ({})",
            device.kind, device.id
        );
        return Err(errors::unsupported(py, "attention", vec![reason]));
    }
    Ok(found)
}

fn exported_capsule<'py>(x: &Bound<'py, PyAny>, name: &str) -> PyResult<Bound<'py, PyAny>> {
    let py = x.py();
    let Some(method) = x.getattr_opt(intern!(py, "__dlpack__"))? else {
        let found = x.get_type().name()?;
        return Err(PyTypeError::new_err(format!(
            "{name}: expected an array of NumPy, PyTorch or JAX, found {found}"
        )));
    };
    let version = PyDict::new(py);
    version.set_item(intern!(py, "max_version"), (1, 0))?;
    match method.call(PyTuple::empty(py), Some(&version)) {
        Err(e) if e.is_instance_of::<PyTypeError>(py) => method.call0(),
        other => other,
    }
}

fn from_capsule(found: Capsule<'_>, name: &str) -> PyResult<Exported> {
    let t = found.tensor();
    let dtype = match (t.dtype.code, t.dtype.bits, t.dtype.lanes) {
        (2, 32, 1) => DType::F32,
        (2, 64, 1) => DType::F64,
        (code, bits, lanes) => {
            return Err(wrong_type(name, &format!("DLPack type {code} of {bits} bits, {lanes} lanes")));
        }
    };
    let size = bytes_of(dtype) as isize;
    let strides = t.strides().map(|s| s.into_iter().map(|s| s.saturating_mul(size)).collect());
    Ok(Exported {
        data: t.data(),
        shape: t.shape(),
        strides,
        dtype,
        read_only: found.read_only,
        owner: Owner::object(found.object.into_any()),
    })
}
