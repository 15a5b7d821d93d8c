//! All programs: their sources and constants. The check that compiles all kernels iterates over [`all`].

use crate::Element;
pub use crate::compile::Program;

const COMMON: &str = include_str!("../kernels/common.cu");
const HOPPER: &str = include_str!("../kernels/hopper.cu");
const BLOCKS: &str = include_str!("../kernels/blocks.cu");
const RUNNING: &str = include_str!("../kernels/running.cu");
const ANY: &str = include_str!("../kernels/any.cu");
const HASH: &str = include_str!("../kernels/hash.cu");
const SORT: &str = include_str!("../kernels/sort.cu");
const LISTS: &str = include_str!("../kernels/lists.cu");
const ATTEND_WGMMA: &str = include_str!("../kernels/attend_wgmma.cu");
const ATTEND_MMA: &str = include_str!("../kernels/attend_mma.cu");
const DECODE: &str = include_str!("../kernels/decode.cu");
const LINEAR: &str = include_str!("../kernels/linear.cu");
const SCAN: &str = include_str!("../kernels/scan.cu");
const POSITIVE: &str = include_str!("../kernels/positive.cu");
const FEATURES: &str = include_str!("../kernels/features.cu");
const EXPONENTIAL: &str = include_str!("../kernels/exponential.cu");
const SIGNED: &str = include_str!("../kernels/signed.cu");
const POOL: &str = include_str!("../kernels/pool.cu");
const RANKED: &str = include_str!("../kernels/ranked.cu");

/// Portable forms.
pub(crate) fn any(element: Element) -> Program {
    Program::new("any", element, &[COMMON, BLOCKS, RUNNING, ANY])
}

/// Hashing; on tensor cores if `d` is given.
pub(crate) fn hash(element: Element, d: Option<usize>) -> Program {
    let program = Program::new("hash", element, &[COMMON, HASH]);
    match d {
        Some(d) => program.with("D", d),
        None => program,
    }
}

/// Sorting of integers.
pub(crate) fn sort() -> Program {
    Program::new("sort", Element::F32, &[COMMON, BLOCKS, SORT])
}

/// Gathered blocks on Hopper.
pub(crate) fn lists(element: Element, d: usize, near: usize, far: usize, join: bool) -> Program {
    Program::new("lists", element, &[COMMON, BLOCKS, HOPPER, LISTS])
        .with("D", d)
        .with("NEAR", near.next_multiple_of(64))
        .with("FAR", far.next_multiple_of(64))
        .with("JOIN", u8::from(join))
        .with_products(64, d)
}

/// Shape of the exact kernel on Hopper.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Wgmma {
    pub(crate) d: usize,
    pub(crate) warpgroups: usize,
    pub(crate) keys: usize,
    pub(crate) stages: usize,
}

impl Wgmma {
    pub(crate) fn new(d: usize, masked: bool, n_k: usize) -> Self {
        let (warpgroups, keys, stages) = match d {
            64 => (3, 128, 3),
            128 if !masked && n_k >= 16384 => (2, 176, 2),
            128 => (2, 128, 2),
            _ => (2, 80, 2),
        };
        Self { d, warpgroups, keys, stages }
    }

    pub(crate) fn rows(&self) -> usize {
        64 * self.warpgroups
    }

    pub(crate) fn threads(&self) -> usize {
        128 * (self.warpgroups + 1)
    }

    pub(crate) fn shared(&self) -> usize {
        2 * self.d * (self.rows() + 2 * self.stages * self.keys) + 1024
    }
}

/// Form in which rows are written.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub(crate) enum Write {
    /// As elements.
    #[default]
    Direct,
    /// In the type of sums, merged with existing parts.
    Join,
    /// In the type of sums, as the first part.
    First,
}

/// Keys visible to a row of exact attention, and the form of its output.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub(crate) struct Mode {
    pub(crate) causal: bool,
    pub(crate) window: bool,
    pub(crate) table: bool,
    pub(crate) write: Write,
}

impl Mode {
    pub(crate) fn masked(self) -> bool {
        self.causal || self.window || self.table
    }
}

/// Exact attention on Hopper.
pub(crate) fn attend_wgmma(element: Element, shape: Wgmma, mode: Mode) -> Program {
    Program::new("attend_wgmma", element, &[COMMON, HOPPER, ATTEND_WGMMA])
        .with("D", shape.d)
        .with("NWG", shape.warpgroups)
        .with("KEYS", shape.keys)
        .with("STAGES", shape.stages)
        .with("CAUSAL", u8::from(mode.causal))
        .with("WINDOW", u8::from(mode.window))
        .with("TABLE", u8::from(mode.table))
        .with("JOIN", mode.write as u8)
        .with_products(shape.keys, shape.d)
}

/// Exact attention with `mma.sync`.
pub(crate) fn attend_mma(element: Element, d: usize, causal: bool) -> Program {
    Program::new("attend_mma", element, &[COMMON, ATTEND_MMA]).with("D", d).with("CAUSAL", u8::from(causal))
}

/// Decoding over pieces of the keys.
pub(crate) fn decode(element: Element, d: usize) -> Program {
    Program::new("decode", element, &[COMMON, DECODE]).with("D", d)
}

/// Linear attention on tensor cores, features of 64 columns.
pub(crate) fn linear(element: Element) -> Program {
    Program::new("linear", element, &[COMMON, LINEAR])
}

/// Features of single coordinates, and decoding of linear attention.
pub(crate) fn scan(element: Element) -> Program {
    Program::new("scan", element, &[COMMON, SCAN])
}

/// Linear attention with positive features, by segments.
pub(crate) fn positive(element: Element) -> Program {
    Program::new("positive", element, &[COMMON, POSITIVE])
}

/// Logarithms of positive features.
pub(crate) fn features(element: Element) -> Program {
    Program::new("features", element, &[COMMON, FEATURES])
}

/// Linear attention with exponential features on tensor cores: directions in tiles of 16, with one sign or both.
pub(crate) fn exponential(tiles: usize, signs: usize, causal: bool) -> Program {
    Program::new("exponential", Element::Bf16, &[COMMON, EXPONENTIAL])
        .with("TILES", tiles)
        .with("SIGNS", signs)
        .with("CAUSAL", u8::from(causal))
}

/// Linear attention with features of either sign.
pub(crate) fn signed(element: Element) -> Program {
    Program::new("signed", element, &[COMMON, SIGNED])
}

/// Means of rows, attention to them, and small inverses.
pub(crate) fn pool(element: Element) -> Program {
    Program::new("pool", element, &[COMMON, RUNNING, POOL])
}

/// Attention to the keys of the largest scores.
pub(crate) fn ranked(element: Element) -> Program {
    Program::new("ranked", element, &[COMMON, RUNNING, RANKED])
}

/// Returns every program that a plan can use, the larger families in their usual shapes.
pub fn all() -> Vec<Program> {
    let mut all = vec![sort()];
    for element in Element::ALL {
        all.extend([any(element), hash(element, None), scan(element)]);
        all.extend([positive(element), features(element), signed(element), ranked(element), pool(element)]);
    }
    for causal in [false, true] {
        for (tiles, signs) in [(9, 2), (8, 2), (17, 1)] {
            all.push(exponential(tiles, signs, causal));
        }
    }
    for element in [Element::Bf16, Element::F16] {
        all.push(linear(element));
        for d in [64, 128] {
            all.extend([hash(element, Some(d)), decode(element, d)]);
            for causal in [false, true] {
                all.push(attend_mma(element, d, causal));
            }
            for join in [false, true] {
                all.push(lists(element, d, 256, 256, join));
            }
        }
        for d in [64, 128, 256] {
            for causal in [false, true] {
                let direct = [(false, false, Write::Direct), (true, false, Write::Direct)];
                let parts = [(false, true, Write::Join), (false, true, Write::First)];
                for (window, table, write) in direct.into_iter().chain(parts) {
                    let mode = Mode { causal, window, table, write };
                    all.push(attend_wgmma(element, Wgmma::new(d, mode.masked(), 0), mode));
                }
            }
            all.push(attend_wgmma(element, Wgmma::new(d, false, 1 << 20), Mode::default()));
        }
    }
    all
}
