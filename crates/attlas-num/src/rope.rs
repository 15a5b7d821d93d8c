//! Rotary position embedding: frequencies, context-extension scalings, and both pair layouts.
//!
//! Feature pairs are complex numbers; pair $l$ of a vector at position $n$ is multiplied by $e^{i n \theta_l}$ with
//! $\theta_l = b^{-2l/\mathrm{dim}}$: $x_{re}' = x_{re}\cos a - x_{im}\sin a$, $x_{im}' = x_{im}\cos a + x_{re}\sin a$,
//! $a = n\theta_l$. Inner products of two rotated vectors depend only on the difference of their positions. The
//! [`Layout`] gives the positions of the two parts of a pair; checkpoints exist in both layouts, and mixing them up
//! gives a model that still writes fluently but is wrong.
//!
//! References: Su et al. 2021 (RoFormer); Chen et al. 2023 (linear); bloc97 2023 (dynamic NTK);
//! Peng et al. 2023 (YaRN); Ding et al. 2024 (LongRoPE); Llama 3.1 model card (llama3).
//!
//! ```
//! use attlas_num::rope::{Angles, Layout, Rope, Scaling, Table};
//!
//! let rope = Rope { dim: 2, base: 10_000.0, layout: Layout::Half, scaling: Scaling::None };
//! let table = Table::<f64>::new(&rope, 8, Angles::Double);
//! let (mut q, mut k) = ([1.0, 0.0], [1.0, 0.0]);
//! table.rotate_in_place(7, &mut q);
//! table.rotate_in_place(5, &mut k);
//! let dot = q[0] * k[0] + q[1] * k[1];
//! assert!((dot - 2f64.cos()).abs() < 1e-12, "only the distance of two tokens matters");
//! ```

use crate::Real;

/// Positions of the parts of pair `l` among the `dim` rotated features.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Layout {
    /// Real part at `l`, imaginary part at `l + dim/2`: Hugging Face checkpoints.
    Half,
    /// Real part at `2l`, imaginary part at `2l + 1`: GGUF files of the `llama` architecture, DeepSeek.
    Interleaved,
}

/// Context extension: how the frequencies differ from $b^{-2l/\mathrm{dim}}$.
#[derive(Clone, Debug, PartialEq)]
pub enum Scaling {
    /// No change.
    None,
    /// $\theta_l / \mathrm{factor}$.
    Linear {
        /// Ratio of new to old context.
        factor: f64,
    },
    /// A base that grows with the current length.
    Dynamic {
        /// Ratio of new to old context.
        factor: f64,
        /// Length up to which nothing changes.
        max_positions: f64,
    },
    /// Long wavelengths divided, short ones kept, a linear blend between.
    Llama3 {
        /// Divisor of the long wavelengths.
        factor: f64,
        /// Wavelengths above `original / low_freq` are divided.
        low_freq: f64,
        /// Wavelengths below `original / high_freq` are kept.
        high_freq: f64,
        /// Context length of the original training.
        original: f64,
    },
    /// YaRN.
    Yarn(Yarn),
    /// Two sets of divisors, for short and for long contexts.
    LongRope(LongRope),
    /// Pair `l` is divided by entry `l`; the form in which GGUF files store the llama3 scaling.
    Divisors(Vec<f64>),
}

/// The parameters of [`Scaling::LongRope`].
#[derive(Clone, Debug, PartialEq)]
pub struct LongRope {
    /// Divisors of the pairs up to `original` tokens.
    pub short: Vec<f64>,
    /// Divisors of the pairs for more tokens.
    pub long: Vec<f64>,
    /// Context length of the original training.
    pub original: f64,
    /// Factor of sines and cosines.
    pub magnitude: f64,
}

impl LongRope {
    /// Returns the usual magnitude of a model whose context grew from `original` to `positions` tokens: $\sqrt{1 +
    /// \ln(\mathrm{positions}/\mathrm{original}) / \ln(\mathrm{original})}$.
    pub fn usual_magnitude(original: f64, positions: f64) -> f64 {
        let ratio = positions / original;
        if ratio <= 1.0 { 1.0 } else { (1.0 + ratio.ln() / original.ln()).sqrt() }
    }
}

/// The parameters of [`Scaling::Yarn`].
#[derive(Clone, Debug, PartialEq)]
pub struct Yarn {
    /// Ratio of new to old context.
    pub factor: f64,
    /// Rotations over the original context above which a pair is kept.
    pub beta_fast: f64,
    /// Rotations over the original context below which a pair is divided.
    pub beta_slow: f64,
    /// Context length of the original training.
    pub original: f64,
    /// Slope of the magnitude, if given.
    pub mscale: Option<f64>,
    /// Slope of the magnitude that is moved into the softmax scale, if given.
    pub mscale_all_dim: Option<f64>,
    /// Replaces the magnitude, if given.
    pub attention_factor: Option<f64>,
    /// Round the ends of the blend to whole pairs.
    pub truncate: bool,
}

impl Yarn {
    /// Returns the usual parameters for a factor and an original context.
    pub fn new(factor: f64, original: f64) -> Self {
        Self {
            factor,
            beta_fast: 32.0,
            beta_slow: 1.0,
            original,
            mscale: None,
            mscale_all_dim: None,
            attention_factor: None,
            truncate: true,
        }
    }

    fn slope(factor: f64, c: f64) -> f64 {
        if factor <= 1.0 { 1.0 } else { 0.1 * c * factor.ln() + 1.0 }
    }

    /// Returns the factor of sines and cosines.
    pub fn magnitude(&self) -> f64 {
        match (self.attention_factor, self.mscale, self.mscale_all_dim) {
            (Some(factor), ..) => factor,
            (None, Some(m), Some(all)) => Self::slope(self.factor, m) / Self::slope(self.factor, all),
            _ => Self::slope(self.factor, 1.0),
        }
    }

    /// Returns DeepSeek's factor of the softmax scale.
    pub fn softmax_factor(&self) -> f64 {
        self.mscale_all_dim.map_or(1.0, |all| Self::slope(self.factor, all).powi(2))
    }

    /// Returns the frequency of pair `l`: divided, kept, or a blend of both.
    fn frequency(&self, theta: f64, l: usize, dim: usize, base: f64) -> f64 {
        let pair_of = |turns: f64| {
            dim as f64 * (self.original / (std::f64::consts::TAU * turns)).ln() / (2.0 * base.ln())
        };
        let (mut low, mut high) = (pair_of(self.beta_fast), pair_of(self.beta_slow));
        if self.truncate {
            (low, high) = (low.floor(), high.ceil());
        }
        let (low, mut high) = (low.max(0.0), high.min(dim as f64 - 1.0));
        if low == high {
            high += 0.001;
        }
        let ramp = ((l as f64 - low) / (high - low)).clamp(0.0, 1.0);
        ramp * theta / self.factor + (1.0 - ramp) * theta
    }
}

/// A rotary embedding.
#[derive(Clone, Debug, PartialEq)]
pub struct Rope {
    /// Features that are rotated: even, at most the head dimension; the rest pass through.
    pub dim: usize,
    /// The base $b$.
    pub base: f64,
    /// Layout of the pairs.
    pub layout: Layout,
    /// Context extension.
    pub scaling: Scaling,
}

impl Rope {
    /// Returns the frequencies $\theta_l$ for a context of `length` tokens; only [`Scaling::Dynamic`] and
    /// [`Scaling::LongRope`] depend on it.
    pub fn frequencies(&self, length: usize) -> Vec<f64> {
        let dim = self.dim;
        let mut base = self.base;
        if let Scaling::Dynamic { factor, max_positions } = self.scaling
            && length as f64 > max_positions
            && dim > 2
        {
            let stretch = factor * length as f64 / max_positions - (factor - 1.0);
            base *= stretch.powf(dim as f64 / (dim as f64 - 2.0));
        }
        (0..dim / 2)
            .map(|l| {
                let theta = base.powf(-2.0 * l as f64 / dim as f64);
                match &self.scaling {
                    Scaling::None | Scaling::Dynamic { .. } => theta,
                    Scaling::Linear { factor } => theta / factor,
                    Scaling::Llama3 { factor, low_freq, high_freq, original } => {
                        let turns = original * theta / std::f64::consts::TAU;
                        if turns > *high_freq {
                            theta
                        } else if turns < *low_freq {
                            theta / factor
                        } else {
                            let s = (turns - low_freq) / (high_freq - low_freq);
                            (1.0 - s) * theta / factor + s * theta
                        }
                    }
                    Scaling::Yarn(yarn) => yarn.frequency(theta, l, dim, base),
                    Scaling::LongRope(rope) => {
                        let list = if length as f64 > rope.original { &rope.long } else { &rope.short };
                        theta / list.get(l).copied().unwrap_or(1.0)
                    }
                    Scaling::Divisors(d) => theta / d.get(l).copied().unwrap_or(1.0),
                }
            })
            .collect()
    }

    /// Returns true if the frequencies of a context of `length` tokens differ from those of short ones.
    pub fn is_stretched(&self, length: usize) -> bool {
        match &self.scaling {
            Scaling::Dynamic { max_positions, .. } => length as f64 > *max_positions,
            Scaling::LongRope(rope) => length as f64 > rope.original,
            _ => false,
        }
    }

    /// Returns the factor of sines and cosines; 1 except under YaRN and LongRoPE.
    pub fn magnitude(&self) -> f64 {
        match &self.scaling {
            Scaling::Yarn(yarn) => yarn.magnitude(),
            Scaling::LongRope(rope) => rope.magnitude,
            _ => 1.0,
        }
    }
}

/// Arithmetic in which the angles $n\theta_l$ are formed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Angles {
    /// As a product in single precision, as Hugging Face's models do; at position 10⁵ the fastest pair is
    /// off by up to 4e-3.
    Single,
    /// In double precision.
    Double,
}

/// Sines and cosines for the positions `0..n`.
#[derive(Clone, Debug)]
pub struct Table<T> {
    cos: Vec<T>,
    sin: Vec<T>,
    pairs: usize,
    layout: Layout,
}

impl<T: Real> Table<T> {
    /// Builds the table of `rope` for `n` positions.
    pub fn new(rope: &Rope, n: usize, angles: Angles) -> Self {
        let mut table = Self { cos: Vec::new(), sin: Vec::new(), pairs: rope.dim / 2, layout: rope.layout };
        table.cos.reserve(n * table.pairs);
        table.sin.reserve(n * table.pairs);
        let (theta, magnitude) = (rope.frequencies(n), rope.magnitude());
        for position in 0..n {
            for &theta in &theta {
                let angle = match angles {
                    Angles::Single => f64::from(position as f32 * theta as f32),
                    Angles::Double => position as f64 * theta,
                };
                let (sin, cos) = libm::sincos(angle);
                table.cos.push(T::from_f64(magnitude * cos));
                table.sin.push(T::from_f64(magnitude * sin));
            }
        }
        table
    }

    /// Returns the number of positions.
    pub fn positions(&self) -> usize {
        self.cos.len().checked_div(self.pairs).unwrap_or(usize::MAX)
    }

    /// Rotates the first `dim` features of one head at `position`. Panics if the table is too short.
    pub fn rotate_in_place(&self, position: usize, head: &mut [T]) {
        let range = position * self.pairs..(position + 1) * self.pairs;
        let (cos, sin) = (&self.cos[range.clone()], &self.sin[range]);
        match self.layout {
            Layout::Half => {
                let (re, im) = head[..2 * self.pairs].split_at_mut(self.pairs);
                for (((re, im), &c), &s) in re.iter_mut().zip(im).zip(cos).zip(sin) {
                    (*re, *im) = (*re * c - *im * s, *im * c + *re * s);
                }
            }
            Layout::Interleaved => {
                let pairs = head[..2 * self.pairs].as_chunks_mut::<2>().0;
                for (([re, im], &c), &s) in pairs.iter_mut().zip(cos).zip(sin) {
                    (*re, *im) = (*re * c - *im * s, *im * c + *re * s);
                }
            }
        }
    }

    /// Rotates every head of consecutive tokens: `x` is `[tokens, heads, head_dim]`, contiguous, and its
    /// first token is at `first_position`.
    pub fn rotate_tokens_in_place(
        &self,
        first_position: usize,
        x: &mut [T],
        n_heads: usize,
        head_dim: usize,
    ) {
        for (i, token) in x.chunks_exact_mut((n_heads * head_dim).max(1)).enumerate() {
            for head in token.chunks_exact_mut(head_dim) {
                self.rotate_in_place(first_position + i, head);
            }
        }
    }
}

/// Reorders the rows of a query or key projection from the other layout to `to`.
///
/// `rows` holds `n_heads · dim` rows of `row_len` elements of any type, stored blocks included. For keys, `n_heads` is
/// the number of key heads.
pub fn convert_rows<T: Copy>(rows: &[T], row_len: usize, n_heads: usize, dim: usize, to: Layout) -> Vec<T> {
    assert_eq!(rows.len(), n_heads * dim * row_len);
    let mut out = Vec::with_capacity(rows.len());
    for h in 0..n_heads {
        for i in 0..dim {
            let from = match to {
                Layout::Interleaved => i % 2 * (dim / 2) + i / 2,
                Layout::Half => 2 * (i % (dim / 2)) + i / (dim / 2),
            };
            out.extend_from_slice(&rows[(h * dim + from) * row_len..][..row_len]);
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rng::StreamKey;

    fn plain(dim: usize, base: f64, layout: Layout) -> Rope {
        Rope { dim, base, layout, scaling: Scaling::None }
    }

    fn ratios(rope: &Rope) -> Vec<f64> {
        let unscaled = Rope { scaling: Scaling::None, ..rope.clone() };
        unscaled.frequencies(1).iter().zip(rope.frequencies(1)).map(|(a, b)| a / b).collect()
    }

    fn assert_close(got: &[f64], want: &[f64], relative: f64) {
        assert_eq!(got.len(), want.len());
        for (g, w) in got.iter().zip(want) {
            assert!((g / w - 1.0).abs() < relative, "{got:?} {want:?}");
        }
    }

    fn dot(a: &[f64], b: &[f64]) -> f64 {
        a.iter().zip(b).map(|(x, y)| x * y).sum()
    }

    #[test]
    fn pairs_keep_their_norm_and_position_zero_is_the_identity() {
        for layout in [Layout::Half, Layout::Interleaved] {
            let table = Table::<f64>::new(&plain(16, 1e4, layout), 100, Angles::Double);
            let mut x = [0.0; 20];
            StreamKey::new(1).rng().fill_normal(&mut x);
            let mut y = x;
            table.rotate_in_place(0, &mut y);
            assert_eq!(x, y);
            table.rotate_in_place(77, &mut y);
            assert_eq!(x[16..], y[16..], "features past dim pass through");
            for l in 0..8 {
                let (re, im) = if layout == Layout::Half { (l, l + 8) } else { (2 * l, 2 * l + 1) };
                let norm = |v: &[f64]| v[re].hypot(v[im]);
                assert!((norm(&x) - norm(&y)).abs() < 8.0 * f64::EPSILON * norm(&x));
                assert!((x[re] - y[re]).abs() > 1e-9);
            }
        }
    }

    #[test]
    fn scores_depend_on_the_difference_of_positions_only() {
        let table = Table::<f64>::new(&plain(64, 1e5, Layout::Half), 1000, Angles::Double);
        let mut qk = [0.0; 128];
        StreamKey::new(2).rng().fill_normal(&mut qk);
        let score = |n: usize, m: usize| {
            let (mut q, mut k) = (qk[..64].to_vec(), qk[64..].to_vec());
            table.rotate_in_place(n, &mut q);
            table.rotate_in_place(m, &mut k);
            dot(&q, &k)
        };
        for shift in [1, 17, 900] {
            assert!((score(40, 3) - score(40 + shift, 3 + shift)).abs() < 1e-12);
        }
        assert!((score(40, 3) - score(3, 40)).abs() > 1e-3, "the sign of the rotation matters");
    }

    #[test]
    fn a_rotation_turns_towards_the_imaginary_axis() {
        let table = Table::<f64>::new(&plain(2, 1e4, Layout::Half), 2, Angles::Double);
        let mut x = [1.0, 0.0];
        table.rotate_in_place(1, &mut x);
        assert_eq!(x, [libm::cos(1.0), libm::sin(1.0)]);
    }

    #[test]
    fn permuted_rows_in_the_other_layout_give_the_same_scores() {
        // Three query heads, one key head: the permutation must be per head on both sides.
        let (dim, d) = (8, 5);
        let mut rng = StreamKey::new(3).rng();
        let mut weights = [vec![0.0; 3 * dim * d], vec![0.0; dim * d]];
        weights.iter_mut().for_each(|w| rng.fill_normal(w));
        let mut x = vec![0.0; 2 * d];
        rng.fill_normal(&mut x);
        let scores = |layout: Layout, q_rows: &[f64], k_rows: &[f64]| {
            let table = Table::<f64>::new(&plain(dim, 1e4, layout), 20, Angles::Double);
            let project = |rows: &[f64], x: &[f64], position: usize| {
                let mut y: Vec<f64> = rows.chunks_exact(d).map(|row| dot(row, x)).collect();
                table.rotate_tokens_in_place(position, &mut y, rows.len() / d / dim, dim);
                y
            };
            let (q, k) = (project(q_rows, &x[..d], 13), project(k_rows, &x[d..], 4));
            q.chunks_exact(dim).map(|q| dot(q, &k)).collect::<Vec<_>>()
        };
        let half = scores(Layout::Half, &weights[0], &weights[1]);
        let q = convert_rows(&weights[0], d, 3, dim, Layout::Interleaved);
        let k = convert_rows(&weights[1], d, 1, dim, Layout::Interleaved);
        let interleaved = scores(Layout::Interleaved, &q, &k);
        assert!(half.iter().zip(&interleaved).all(|(a, b)| (a - b).abs() < 1e-12));
        let mixed = scores(Layout::Interleaved, &weights[0], &weights[1]);
        assert!(
            half.iter().zip(&mixed).any(|(a, b)| (a - b).abs() > 1e-3),
            "layouts must not be interchangeable"
        );
        assert_eq!(convert_rows(&q, d, 3, dim, Layout::Half), weights[0]);
    }

    #[test]
    fn llama3_scaling_gives_the_frequencies_of_llama_3_2_1b() {
        let rope = Rope {
            scaling: Scaling::Llama3 { factor: 32.0, low_freq: 1.0, high_freq: 4.0, original: 8192.0 },
            ..plain(64, 5e5, Layout::Half)
        };
        let r = ratios(&rope);
        assert!(r[..15].iter().all(|&x| x == 1.0));
        assert_close(&r[15..18], &[1.6513, 3.2923, 9.6667], 1e-4);
        assert_close(&r[18..], &[32.0; 14], 1e-12);
        let theta = rope.frequencies(1);
        assert_close(&[theta[15], theta[17]], &[1.29054793e-3, 9.70828780e-5], 1e-8);
    }

    #[test]
    fn llama3_scaling_gives_the_frequencies_of_llama_3_1_8b() {
        let rope = Rope {
            scaling: Scaling::Llama3 { factor: 8.0, low_freq: 1.0, high_freq: 4.0, original: 8192.0 },
            ..plain(128, 5e5, Layout::Half)
        };
        let r = ratios(&rope);
        assert!(r[..29].iter().all(|&x| x == 1.0));
        assert_close(&r[29..36], &[1.20748, 1.55341, 2.02631, 2.69453, 3.68425, 5.25733, 8.0], 1e-5);
    }

    #[test]
    fn yarn_gives_the_frequencies_of_deepseek_v3() {
        let yarn = Yarn { mscale: Some(1.0), mscale_all_dim: Some(1.0), ..Yarn::new(40.0, 4096.0) };
        let rope = Rope { scaling: Scaling::Yarn(yarn.clone()), ..plain(64, 1e4, Layout::Interleaved) };
        let r = ratios(&rope);
        assert!(r[..11].iter().all(|&x| x == 1.0));
        assert_close(
            &[r[11], r[15], r[20], r[22], r[23], r[31]],
            &[1.08108, 1.6, 4.0, 10.0, 40.0, 40.0],
            1e-5,
        );
        assert_eq!(yarn.magnitude(), 1.0);
        assert!((yarn.softmax_factor() / 192f64.sqrt() - 0.1352338).abs() < 1e-7);
        let v2 = Yarn { mscale: Some(0.707), mscale_all_dim: Some(0.707), ..yarn };
        assert!((v2.softmax_factor().sqrt() - 1.260804).abs() < 1e-6);
        assert!((v2.softmax_factor() / 192f64.sqrt() - 0.1147214).abs() < 1e-7);
        assert!((Yarn::new(4.0, 32768.0).magnitude() - 1.138_629_436).abs() < 1e-9);
    }

    #[test]
    fn linear_dynamic_and_divisors_change_what_they_say() {
        let rope = |scaling| Rope { scaling, ..plain(8, 1e4, Layout::Half) };
        assert_close(&ratios(&rope(Scaling::Linear { factor: 4.0 })), &[4.0; 4], 1e-12);
        assert_close(
            &ratios(&rope(Scaling::Divisors(vec![1.0, 2.0, 3.0, 8.0]))),
            &[1.0, 2.0, 3.0, 8.0],
            1e-12,
        );
        let dynamic = rope(Scaling::Dynamic { factor: 2.0, max_positions: 100.0 });
        let unscaled = rope(Scaling::None).frequencies(1);
        assert_eq!(dynamic.frequencies(100), unscaled);
        // Base times (2·2 − 1)^(8/6).
        let base = 1e4 * 3f64.powf(8.0 / 6.0);
        assert_close(&dynamic.frequencies(200), &plain(8, base, Layout::Half).frequencies(1), 1e-12);
    }

    #[test]
    fn single_precision_angles_are_near_double_ones_for_short_contexts() {
        let rope = plain(64, 1e4, Layout::Half);
        let single = Table::<f32>::new(&rope, 2000, Angles::Single);
        let double = Table::<f32>::new(&rope, 2000, Angles::Double);
        let worst = single.cos.iter().zip(&double.cos).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
        // θ and the product are each rounded once: two roundings of an angle below 2000.
        assert!(worst <= 2.5 * 2000.0 * f32::EPSILON / 2.0, "{worst}");
        assert!(worst > 0.0);
        assert_eq!(single.positions(), 2000);
    }
}
