//! Tensors on the device.

use crate::driver::{Memory, View};
use crate::{Device, Result};
use attlas::problem::{Dims, Strides, bhnd};
use std::marker::PhantomData;
use std::sync::Arc;

/// Type of a tensor's elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Element {
    /// 8 significant bits, range of single precision.
    Bf16,
    /// 11 significant bits.
    F16,
    /// Single precision.
    F32,
    /// Double precision.
    F64,
}

impl Element {
    /// All types.
    pub const ALL: [Element; 4] = [Element::Bf16, Element::F16, Element::F32, Element::F64];

    /// Returns the bytes of one element.
    pub fn bytes(self) -> usize {
        match self {
            Element::Bf16 | Element::F16 => 2,
            Element::F32 => 4,
            Element::F64 => 8,
        }
    }

    /// Returns the type of sums and of the log-sum-exp.
    #[must_use]
    pub fn sum(self) -> Element {
        if self == Element::F64 { Element::F64 } else { Element::F32 }
    }

    /// Returns true for the types of tensor cores.
    pub fn is_half(self) -> bool {
        matches!(self, Element::Bf16 | Element::F16)
    }

    fn encode(self, x: f64, out: &mut Vec<u8>) {
        match self {
            Element::Bf16 => out.extend(half::bf16::from_f64(x).to_le_bytes()),
            Element::F16 => out.extend(half::f16::from_f64(x).to_le_bytes()),
            Element::F32 => out.extend((x as f32).to_le_bytes()),
            Element::F64 => out.extend(x.to_le_bytes()),
        }
    }

    fn decode(self, bytes: &[u8]) -> f64 {
        match (self, bytes) {
            (Element::Bf16, &[a, b]) => half::bf16::from_le_bytes([a, b]).to_f64(),
            (Element::F16, &[a, b]) => half::f16::from_le_bytes([a, b]).to_f64(),
            (Element::F32, &[a, b, c, d]) => f64::from(f32::from_le_bytes([a, b, c, d])),
            (Element::F64, &[a, b, c, d, e, f, g, h]) => f64::from_le_bytes([a, b, c, d, e, f, g, h]),
            _ => f64::NAN,
        }
    }

    /// Rounds `x` to this type.
    pub fn round(self, x: f64) -> f64 {
        let mut bytes = Vec::with_capacity(8);
        self.encode(x, &mut bytes);
        self.decode(&bytes)
    }
}

/// Memory on a device.
#[derive(Clone, Debug)]
pub struct DeviceBuffer {
    memory: Arc<Memory>,
    element: Element,
}

impl DeviceBuffer {
    /// Allocates `len` uninitialised elements.
    pub fn new(device: &Device, element: Element, len: usize) -> Result<Self> {
        let bytes = len
            .checked_mul(element.bytes())
            .ok_or(attlas::Error::TooLarge { what: "device buffer", sizes: vec![len, element.bytes()] })?;
        Ok(Self { memory: Arc::new(Memory::new(device.context(), bytes)?), element })
    }

    /// Copies elements from the host, rounded to the element type.
    pub fn from_host(device: &Device, element: Element, data: &[f64]) -> Result<Self> {
        let buffer = Self::new(device, element, data.len())?;
        buffer.write(data)?;
        Ok(buffer)
    }

    /// Copies integers for kernels.
    pub(crate) fn from_ints(device: &Device, data: &[u32]) -> Result<Self> {
        let buffer = Self::new(device, Element::F32, data.len())?;
        let bytes: Vec<u8> = data.iter().flat_map(|x| x.to_le_bytes()).collect();
        buffer.memory.write(0, &bytes)?;
        Ok(buffer)
    }

    /// Writes elements from the start of the buffer, and waits for the copy.
    pub fn write(&self, data: &[f64]) -> Result<()> {
        let mut bytes = Vec::with_capacity(data.len() * self.element.bytes());
        data.iter().for_each(|&x| self.element.encode(x, &mut bytes));
        self.memory.write(0, &bytes)
    }

    /// Reads all elements, after all work of the device.
    pub fn read(&self) -> Result<Vec<f64>> {
        let mut bytes = vec![0; self.memory.bytes()];
        self.memory.read(0, &mut bytes)?;
        Ok(bytes.chunks_exact(self.element.bytes()).map(|b| self.element.decode(b)).collect())
    }

    /// Reads all bytes, after all work of the device.
    pub fn read_bytes(&self) -> Result<Vec<u8>> {
        let mut bytes = vec![0; self.memory.bytes()];
        self.memory.read(0, &mut bytes)?;
        Ok(bytes)
    }

    /// Sets every byte; 255 makes every element NaN.
    pub fn fill(&self, byte: u8) -> Result<()> {
        self.memory.fill(byte)
    }

    /// Its element type.
    pub fn element(&self) -> Element {
        self.element
    }

    /// Returns the number of elements.
    pub fn len(&self) -> usize {
        self.memory.bytes() / self.element.bytes()
    }

    /// Returns true if it has no elements.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Its address on the device.
    pub fn address(&self) -> u64 {
        self.memory.address()
    }
}

/// `[batch, heads, rows, columns]` on the device; strides in elements as for host tensors, columns contiguous.
#[derive(Clone, Copy, Debug)]
pub struct DeviceRef<'a> {
    address: u64,
    element: Element,
    dims: Dims,
    strides: Strides,
    lives: PhantomData<&'a ()>,
}

fn extent(dims: Dims, strides: Strides) -> Option<usize> {
    if dims.contains(&0) {
        return Some(0);
    }
    (0..3).try_fold(dims[3], |last, a| last.checked_add((dims[a] - 1).checked_mul(strides[a])?))
}

impl<'a> DeviceRef<'a> {
    /// A view of a buffer. An error if it reaches past its end.
    pub fn new(buffer: &'a DeviceBuffer, dims: Dims, strides: Strides) -> Result<Self> {
        match extent(dims, strides) {
            Some(n) if n <= buffer.len() => {}
            Some(n) => {
                return Err(attlas::Error::shape(
                    "device tensor",
                    format!("at least {n} elements"),
                    buffer.len(),
                )
                .into());
            }
            None => {
                return Err(attlas::Error::TooLarge { what: "device tensor", sizes: dims.to_vec() }.into());
            }
        }
        Ok(Self { address: buffer.address(), element: buffer.element(), dims, strides, lives: PhantomData })
    }

    /// A contiguous view.
    pub fn bhnd(buffer: &'a DeviceBuffer, dims: Dims) -> Result<Self> {
        Self::new(buffer, dims, bhnd(dims))
    }

    /// A view of memory of another library.
    ///
    /// # Safety
    /// The memory is on this device, lives for `'a` and holds what the sizes say.
    #[allow(unsafe_code)]
    pub unsafe fn from_raw(
        _: &Device,
        address: u64,
        element: Element,
        dims: Dims,
        strides: Strides,
    ) -> Result<Self> {
        if extent(dims, strides).is_none() {
            return Err(attlas::Error::TooLarge { what: "device tensor", sizes: dims.to_vec() }.into());
        }
        Ok(Self { address, element, dims, strides, lives: PhantomData })
    }

    /// Batch, heads, rows, columns.
    pub fn dims(&self) -> Dims {
        self.dims
    }

    /// Elements between neighbours along batch, head and row.
    pub fn strides(&self) -> Strides {
        self.strides
    }

    /// Its element type.
    pub fn element(&self) -> Element {
        self.element
    }

    pub(crate) fn view(&self) -> View {
        View { address: self.address, strides: self.strides.map(|s| s as i64) }
    }

    /// Views scratch memory as a tensor.
    pub(crate) fn scratch(view: View, element: Element, dims: Dims) -> Self {
        let strides = view.strides.map(|s| s as usize);
        Self { address: view.address, element, dims, strides, lives: PhantomData }
    }

    /// Returns `count` rows from `first` on.
    pub(crate) fn rows(&self, first: usize, count: usize) -> Self {
        let [b, h, _, c] = self.dims;
        let address = self.address + (first * self.strides[2] * self.element.bytes()) as u64;
        Self { address, dims: [b, h, count, c], ..*self }
    }

    /// Returns the first `rows` rows of one sequence.
    pub(crate) fn sequence(&self, batch: usize, rows: usize) -> Self {
        let [_, h, n, c] = self.dims;
        let address = self.address + (batch * self.strides[0] * self.element.bytes()) as u64;
        Self { address, dims: [1, h, rows.min(n), c], ..*self }
    }
}

/// A writable tensor on the device, like [`DeviceRef`].
#[derive(Debug)]
pub struct DeviceMut<'a> {
    to: DeviceRef<'a>,
}

impl<'a> DeviceMut<'a> {
    /// A view of a buffer. An error if it reaches past its end.
    pub fn new(buffer: &'a DeviceBuffer, dims: Dims, strides: Strides) -> Result<Self> {
        Ok(Self { to: DeviceRef::new(buffer, dims, strides)? })
    }

    /// A contiguous view.
    pub fn bhnd(buffer: &'a DeviceBuffer, dims: Dims) -> Result<Self> {
        Self::new(buffer, dims, bhnd(dims))
    }

    /// A view of memory of another library.
    ///
    /// # Safety
    /// The memory is on this device, lives for `'a`, holds what the sizes say, and nothing else touches it until the work
    /// is done.
    #[allow(unsafe_code)]
    pub unsafe fn from_raw(
        device: &Device,
        address: u64,
        element: Element,
        dims: Dims,
        strides: Strides,
    ) -> Result<Self> {
        // SAFETY: of the caller.
        Ok(Self { to: unsafe { DeviceRef::from_raw(device, address, element, dims, strides)? } })
    }

    pub(crate) fn as_ref(&self) -> DeviceRef<'a> {
        self.to
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn elements_round_as_their_types_do() {
        assert_eq!(Element::Bf16.round(1.0 + 1.0 / 512.0), 1.0);
        assert_eq!(Element::F16.round(1.0 + 1.0 / 1024.0), 1.0 + 1.0 / 1024.0);
        assert_eq!(Element::F64.round(0.1), 0.1);
        assert!(Element::F32.round(f64::NAN).is_nan());
        assert_eq!(extent([2, 3, 5, 4], [60, 20, 4]), Some(120));
        assert_eq!(extent([2, 3, 5, 4], [usize::MAX, 20, 4]), None);
    }
}
