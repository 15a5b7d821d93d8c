//! Logarithms of positive features of rows.

use crate::driver::{Arg, Kernel, Sizes, View};
use crate::workspace::padded;
use crate::{Device, DeviceBuffer, DeviceWorkspace, Element, Result, programs};
use attlas_num::Mat;
use attlas_num::sketch::features::ExpParts;

/// Rows to map.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Rows {
    Keys,
    Queries,
    /// Queries for keys of opposite sign.
    Opposite,
}

/// A coordinate-wise map of `root` · x, by its number in the kernel.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Map {
    pub(crate) code: i32,
    pub(crate) root: f64,
    /// Added to every feature of the relu map.
    pub(crate) eps: f64,
}

/// Rows of one block of the projection kernel.
const BLOCK_ROWS: usize = 16;

/// Directions of queries or of keys: `[maps][d][directions + norms]` and `[maps][directions]`.
#[derive(Clone, Debug)]
struct Side {
    map: DeviceBuffer,
    constants: DeviceBuffer,
}

#[derive(Clone, Debug)]
enum Kind {
    Elementwise(Map),
    Random {
        queries: Side,
        keys: Option<Side>,
        directions: usize,
        norms: usize,
        opposite: bool,
        /// The constant of ReLU features; none for others.
        relu: Option<f64>,
        norm_scale: f64,
        /// The kernel that fits the exponent to the data, and the squared norms of the directions.
        fit: Option<(Kernel, DeviceBuffer)>,
    },
    Pola {
        powers: DeviceBuffer,
        logs: DeviceBuffer,
        maps: usize,
    },
}

/// A feature map.
#[derive(Clone, Debug)]
pub(crate) struct Features {
    kernel: Kernel,
    kind: Kind,
    element: Element,
    d: usize,
    count: usize,
}

/// Directions of the ReLU map, or parts of exponential ones, of every sequence and key head.
pub(crate) struct Random<'a> {
    /// Parts of queries, and of keys if they differ.
    pub(crate) queries: &'a [ExpParts],
    pub(crate) keys: Option<&'a [ExpParts]>,
    pub(crate) opposite: bool,
    pub(crate) relu: Option<f64>,
    /// Squared norms of the directions, if the exponent is fitted to the data.
    pub(crate) lengths: Option<Vec<f64>>,
}

/// Returns the type in which projections are summed.
fn wide(element: Element) -> Element {
    if element.is_half() { Element::F32 } else { Element::F64 }
}

fn wide_number(element: Element, x: f64) -> Arg<'static> {
    if element.is_half() { Arg::Float(x as f32) } else { Arg::Double(x) }
}

impl Features {
    pub(crate) fn elementwise(device: &Device, element: Element, d: usize, map: Map) -> Result<Self> {
        let kernel = device.kernel(&programs::scan(element), "log_features", 0)?;
        Ok(Self { kernel, kind: Kind::Elementwise(map), element, d, count: d })
    }

    pub(crate) fn random(device: &Device, element: Element, d: usize, map: Random<'_>) -> Result<Self> {
        let Some(first) = map.queries.first() else {
            return Err(attlas::Error::shape("feature maps", "at least one", 0).into());
        };
        let directions = first.directions.rows();
        let norms = first.norm.as_ref().map_or(0, Mat::rows);
        let side = |parts: &[ExpParts]| {
            let mut numbers = Vec::with_capacity(parts.len() * d * (directions + norms));
            for part in parts {
                for c in 0..d {
                    numbers.extend((0..directions).map(|l| part.directions[(l, c)]));
                    numbers.extend(part.norm.iter().flat_map(|m| (0..norms).map(move |l| m[(l, c)])));
                }
            }
            let constants: Vec<f64> = parts.iter().flat_map(|p| p.constants.iter().copied()).collect();
            Ok::<_, crate::Error>(Side {
                map: DeviceBuffer::from_host(device, wide(element), &numbers)?,
                constants: DeviceBuffer::from_host(device, wide(element), &constants)?,
            })
        };
        let program = programs::features(element);
        let size = wide(element).bytes();
        let room = BLOCK_ROWS * (d + 1 + if norms > 0 { 256 } else { 0 }) * size;
        let fit = match &map.lengths {
            Some(lengths) => Some((
                device.kernel(&program, "fit_exponent", 0)?,
                DeviceBuffer::from_host(device, wide(element), lengths)?,
            )),
            None => None,
        };
        let kind = Kind::Random {
            queries: side(map.queries)?,
            keys: map.keys.map(side).transpose()?,
            directions,
            norms,
            opposite: map.opposite,
            relu: map.relu,
            norm_scale: first.norm_scale,
            fit,
        };
        let kernel = device.kernel(&program, "project_features", room)?;
        let count = directions * if map.opposite { 2 } else { 1 };
        Ok(Self { kernel, kind, element, d, count })
    }

    /// Powers and logarithms of divisors, `maps` rows of each.
    pub(crate) fn pola(
        device: &Device,
        element: Element,
        d: usize,
        [powers, logs]: [&[f64]; 2],
    ) -> Result<Self> {
        let kernel = device.kernel(&programs::features(element), "pola_features", 0)?;
        let upload = |x: &[f64]| DeviceBuffer::from_host(device, wide(element), x);
        let kind = Kind::Pola { powers: upload(powers)?, logs: upload(logs)?, maps: powers.len() / d };
        Ok(Self { kernel, kind, element, d, count: 2 * d })
    }

    /// Returns the number of features of a row.
    pub(crate) fn count(&self) -> usize {
        self.count
    }

    /// Returns true if the map depends on all queries and keys of a run.
    pub(crate) fn is_fitted(&self) -> bool {
        matches!(&self.kind, Kind::Random { fit: Some(_), .. })
    }

    /// Returns the scratch memory of `fit`.
    pub(crate) fn fit_bytes(&self, maps: usize) -> usize {
        if self.is_fitted() { padded(maps * 3 * wide(self.element).bytes()) } else { 0 }
    }

    /// Fits the exponents to the queries and keys of `batch` sequences; returns the address of the fit, 0 if nothing is
    /// fitted.
    pub(crate) fn fit(
        &self,
        [q, k]: [View; 2],
        n: Sizes,
        batch: usize,
        scale: f64,
        ws: &mut DeviceWorkspace,
    ) -> Result<u64> {
        let Kind::Random { fit: Some((kernel, _)), .. } = &self.kind else { return Ok(0) };
        let heads = (n.heads / n.group) as usize;
        let fitted = ws.take(batch * heads * 3 * wide(self.element).bytes())?;
        let args = [Arg::View(q), Arg::View(k), Arg::Address(fitted), Arg::Sizes(n), Arg::Double(scale)];
        kernel.launch(ws.stream(), [heads, batch, 1], 1024, 0, &args)?;
        Ok(fitted)
    }

    /// Writes the logarithms of `n` rows of `[batch, heads]` to `to`, contiguous. `group` heads share a map; the first
    /// has number `map`. `fitted` is the address from `fit`.
    #[allow(clippy::too_many_arguments)]
    pub(crate) fn run(
        &self,
        x: View,
        [batch, heads, n]: [usize; 3],
        group: usize,
        map: usize,
        rows: Rows,
        fitted: u64,
        to: u64,
        ws: &DeviceWorkspace,
    ) -> Result<()> {
        let (d, int) = (self.d, |x: usize| Arg::Int(x as i32));
        let size = wide(self.element).bytes();
        let at = |b: &DeviceBuffer, numbers: usize| Arg::Address(b.address() + (numbers * size) as u64);
        match &self.kind {
            Kind::Elementwise(f) => {
                let number = |x| crate::prims::number(self.element, x);
                let args = [
                    Arg::View(x),
                    Arg::Address(to),
                    int(n),
                    int(d),
                    int(heads),
                    Arg::Int(f.code),
                    Arg::Int(i32::from(rows != Rows::Keys)),
                    number(f.root),
                    number(f.eps),
                ];
                self.kernel.launch(ws.stream(), [n.div_ceil(8), heads, batch], 256, 0, &args)
            }
            Kind::Random { queries, keys, directions, norms, opposite, relu, norm_scale, fit } => {
                let side = if rows == Rows::Keys { keys.as_ref().unwrap_or(queries) } else { queries };
                let lengths =
                    fit.as_ref().map_or(Arg::Address(0), |(_, lengths)| at(lengths, map * directions));
                let args = [
                    Arg::View(x),
                    at(&side.map, map * d * (directions + norms)),
                    at(&side.constants, map * directions),
                    Arg::Address(fitted),
                    lengths,
                    Arg::Address(to),
                    int(n),
                    int(d),
                    int(heads),
                    int(group),
                    int(*directions),
                    int(*norms),
                    Arg::Int(i32::from(*opposite)),
                    Arg::Int(i32::from(relu.is_some())),
                    wide_number(self.element, *norm_scale),
                    wide_number(self.element, relu.unwrap_or(0.0)),
                ];
                let grid = [n.div_ceil(BLOCK_ROWS), heads, batch];
                self.kernel.launch(ws.stream(), grid, 256, self.kernel.shared, &args)
            }
            Kind::Pola { powers, logs, maps } => {
                // All sequences share the maps of the key heads.
                let first = if *maps > 1 { map % maps * d } else { 0 };
                let args = [
                    Arg::View(x),
                    at(powers, first),
                    at(logs, first),
                    Arg::Address(to),
                    int(n),
                    int(d),
                    int(heads),
                    int(group),
                    int(*maps),
                    Arg::Int(i32::from(rows == Rows::Opposite)),
                ];
                self.kernel.launch(ws.stream(), [n.div_ceil(8), heads, batch], 256, 0, &args)
            }
        }
    }
}
