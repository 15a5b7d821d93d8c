//! The maps from tokens to factors, the factors of tokens, and their cache.

use super::HeadAct;
use super::factors::{Query, Side, combine};
use crate::MatRef;
use crate::layer::{LayerCache, Linear};
use crate::layers::common::{constant, project};
use crate::workspace::Context;
use std::borrow::Cow;
use std::ops::Range;

/// A factor that depends on the token, or a fixed one.
#[derive(Debug)]
pub(super) enum Map {
    Contextual(Box<dyn Linear>),
    Fixed(Vec<f32>, usize),
}

impl Map {
    pub(super) fn new(w: Box<dyn Linear>, contextual: bool) -> Self {
        if contextual { Self::Contextual(w) } else { Self::Fixed(constant(&*w), w.parameters()) }
    }

    pub(super) fn parameters(&self) -> usize {
        match self {
            Self::Contextual(w) => w.parameters(),
            Self::Fixed(_, n) => *n,
        }
    }

    /// Computes the rows of the new tokens; empty if the factor is fixed.
    pub(super) fn rows(&self, x: MatRef<'_, f32>, cx: Context<'_>) -> Vec<f32> {
        match self {
            Self::Contextual(w) => project(&**w, x, cx),
            Self::Fixed(..) => Vec::new(),
        }
    }

    /// Returns the rows of a range of tokens, or the fixed one.
    pub(super) fn of<'a>(&'a self, rows: &'a [f32], tokens: Range<usize>, width: usize) -> (&'a [f32], bool) {
        match self {
            Self::Contextual(_) => (&rows[tokens.start * width..tokens.end * width], false),
            Self::Fixed(x, _) => (x, true),
        }
    }
}

/// The factors of queries, keys or values.
#[derive(Debug)]
pub(super) struct Maps {
    pub(super) rank: usize,
    pub(super) a: Map,
    /// `None` if values use the factors of keys.
    pub(super) b: Option<Map>,
    pub(super) c: Option<Map>,
    pub(super) act: HeadAct,
}

impl Maps {
    pub(super) fn parameters(&self) -> usize {
        let more = self.b.iter().chain(&self.c).map(Map::parameters).sum::<usize>();
        self.a.parameters() + more
    }

    pub(super) fn project(&self, x: MatRef<'_, f32>, heads: usize, cx: Context<'_>) -> Rows {
        let mut a = self.a.rows(x, cx);
        activate(self.act, &mut a, heads);
        let of = |m: &Option<Map>| m.as_ref().map_or(Vec::new(), |m| m.rows(x, cx));
        Rows { a, b: of(&self.b), c: of(&self.c) }
    }
}

pub(super) fn activate(act: HeadAct, a: &mut [f32], heads: usize) {
    match act {
        HeadAct::None => {}
        HeadAct::Sigmoid => a.iter_mut().for_each(|x| *x = 1.0 / (1.0 + (-*x).exp())),
        HeadAct::Softmax => a.chunks_exact_mut(heads.max(1)).for_each(|row| {
            attlas_num::kernels::softmax_in_place(row);
        }),
    }
}

/// Factors of a number of tokens, each `[token, rank, width]`; empty if they are fixed.
#[derive(Clone, Debug, Default)]
pub(super) struct Rows {
    pub(super) a: Vec<f32>,
    pub(super) b: Vec<f32>,
    pub(super) c: Vec<f32>,
}

impl Rows {
    pub(super) fn extend(&mut self, other: &Rows) {
        self.a.extend_from_slice(&other.a);
        self.b.extend_from_slice(&other.b);
        self.c.extend_from_slice(&other.c);
    }
}

/// Queries of the new tokens.
pub(super) struct Queries {
    /// `[token, rank, heads]`, or those of one token if fixed.
    pub(super) a: Vec<f32>,
    pub(super) a_fixed: bool,
    /// `[token, rank, d]`, rotated.
    pub(super) b: Vec<f32>,
    pub(super) rank: usize,
    /// `[token, heads, d]` if queries are not in factors.
    pub(super) plain: Option<Vec<f32>>,
}

impl Queries {
    fn side(&self) -> Side<'_, f32> {
        Side { rank: self.rank, a: &self.a, a_fixed: self.a_fixed, b: Cow::Borrowed(&self.b) }
    }

    pub(super) fn heads(&self, heads: usize, d: usize) -> Vec<f32> {
        self.plain.clone().unwrap_or_else(|| combine(&self.side(), heads, d))
    }

    pub(super) fn token(&self, t: usize, heads: usize, d: usize) -> Query<'_, f32> {
        match &self.plain {
            Some(q) => Query::Formed(Cow::Borrowed(&q[t * heads * d..(t + 1) * heads * d])),
            None => {
                let at = if self.a_fixed { 0 } else { t * self.rank * heads };
                Query::Factors {
                    a: &self.a[at..at + self.rank * heads],
                    b: &self.b[t * self.rank * d..(t + 1) * self.rank * d],
                    rank: self.rank,
                }
            }
        }
    }
}

/// Factors of keys (feature factors rotated, unless values share them) and values.
#[derive(Debug)]
pub(super) struct FactorCache {
    pub(super) k: Rows,
    pub(super) v: Rows,
    pub(super) len: usize,
    /// Numbers of one token in each factor.
    pub(super) widths: [[usize; 3]; 2],
}

impl LayerCache for FactorCache {
    fn len(&self) -> usize {
        self.len
    }

    fn truncate(&mut self, len: usize) {
        self.len = self.len.min(len);
        for (rows, widths) in [&mut self.k, &mut self.v].into_iter().zip(self.widths) {
            for (x, width) in [&mut rows.a, &mut rows.b, &mut rows.c].into_iter().zip(widths) {
                x.truncate(self.len * width);
            }
        }
    }

    fn bytes(&self) -> usize {
        [&self.k, &self.v].iter().map(|r| 4 * (r.a.len() + r.b.len() + r.c.len())).sum()
    }
}
