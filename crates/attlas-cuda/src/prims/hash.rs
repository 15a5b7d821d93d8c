//! Sign hashes of rows.

use crate::driver::{Arg, Kernel};
use crate::prims::aligned;
use crate::{Device, DeviceBuffer, DeviceRef, DeviceWorkspace, Element, KernelFamily, Result, programs};
use attlas_num::hash::SignHash;
use attlas_num::rng::StreamKey;

/// Most bits for the tensor-core kernel.
const FAST_BITS: usize = 8;

/// Directions of every group, on the device.
#[derive(Debug)]
pub(crate) struct Hash {
    directions: DeviceBuffer,
    any: Kernel,
    fast: Option<Kernel>,
}

impl Hash {
    /// Draws `bits` directions of width `d` for the group of each stream key, as on the host.
    pub(crate) fn new(
        device: &Device,
        element: Element,
        d: usize,
        bits: usize,
        keys: &[StreamKey],
    ) -> Result<Self> {
        // [group][d][32]: one bit per lane.
        let mut data = vec![0.0; keys.len() * d * 32];
        for (g, &key) in keys.iter().enumerate() {
            let drawn = directions(element, key, d, bits);
            for t in 0..bits {
                for c in 0..d {
                    data[(g * d + c) * 32 + t] = drawn[t * d + c];
                }
            }
        }
        let quick = bits <= FAST_BITS && [64, 128].contains(&d) && element.is_half();
        let quick = quick && device.info().family != KernelFamily::Any;
        Ok(Self {
            directions: DeviceBuffer::from_host(device, element.sum(), &data)?,
            any: device.kernel(&programs::hash(element, None), "any_hash", 0)?,
            fast: quick
                .then(|| device.kernel(&programs::hash(element, Some(d)), "hash_rows", 0))
                .transpose()?,
        })
    }

    /// Computes the Gray ranks of all rows of `x`, `[batch, heads, rows]` integers; `group` heads share directions.
    pub(crate) fn run(
        &self,
        x: &DeviceRef<'_>,
        ranks: u64,
        group: usize,
        ws: &DeviceWorkspace,
    ) -> Result<()> {
        let [batch, heads, n, d] = x.dims();
        let int = |x: usize| Arg::Int(x as i32);
        let args = [
            Arg::View(x.view()),
            Arg::Address(self.directions.address()),
            Arg::Address(ranks),
            int(n),
            int(d),
            int(heads),
            int(group),
        ];
        match &self.fast {
            Some(kernel) if aligned(&[x]) => {
                kernel.launch(ws.stream(), [n.div_ceil(2048), heads, batch], 256, 0, &args)
            }
            _ => self.any.launch(ws.stream(), [n.div_ceil(8), heads, batch], 256, 0, &args),
        }
    }
}

/// Draws the directions of the host for inputs of this precision, row by row.
fn directions(element: Element, key: StreamKey, d: usize, bits: usize) -> Vec<f64> {
    if element == Element::F64 {
        SignHash::<f64>::new(key, d, bits, 1).map_or(Vec::new(), |h| h.directions(0).data().to_vec())
    } else {
        SignHash::<f32>::new(key, d, bits, 1)
            .map_or(Vec::new(), |h| h.directions(0).data().iter().map(|&x| f64::from(x)).collect())
    }
}
