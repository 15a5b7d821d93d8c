//! Seeded random streams, one per purpose, the same bits on every machine.
//!
//! The generator is Philox4x32-10 (Salmon et al. 2011), which is counter-based: number `i` of a stream is a function of
//! the stream's key and `i` alone, so results do not depend on threads or call order. [`StreamKey::with`] derives keys
//! from a seed and small integers that name the consumer and the purpose, such as
//! `(seed, batch, kv head, purpose, step)`. Normal variates use pure-Rust logarithm and sine, so no system library can
//! change a result.
//!
//! ```
//! use attlas_num::rng::StreamKey;
//!
//! let key = StreamKey::new(7).named("directions").with(3);
//! let (a, b) = (key.rng().normal(), key.rng().normal());
//! assert_eq!(a, b, "a stream starts anew from its key");
//! assert_ne!(a, key.with(0).rng().normal());
//! ```

/// Key of a stream: a seed folded with any number of labels.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct StreamKey(u64);

impl StreamKey {
    /// Returns the root key of all streams of a seed.
    pub fn new(seed: u64) -> Self {
        Self(mix(seed ^ 0x6174_746c_6173_2131))
    }

    /// Derives the key with a numeric label.
    #[must_use]
    pub fn with(self, label: u64) -> Self {
        Self(mix(self.0.rotate_left(23) ^ mix(label.wrapping_add(0x9e37_79b9_7f4a_7c15))))
    }

    /// Derives the key named by a word, such as `"directions"`.
    #[must_use]
    pub fn named(self, purpose: &str) -> Self {
        // FNV-1a: short, fixed for ever, good enough before `mix`.
        let hash = purpose
            .bytes()
            .fold(0xcbf2_9ce4_8422_2325u64, |h, b| (h ^ u64::from(b)).wrapping_mul(0x100_0000_01b3));
        self.with(hash)
    }

    /// Returns a generator at the start of this stream.
    pub fn rng(self) -> Rng {
        Rng { key: [self.0 as u32, (self.0 >> 32) as u32], block: 0, buffer: [0; 4], used: 4, spare: None }
    }
}

/// The finaliser of SplitMix64: a bijection of 64-bit words that spreads every bit.
fn mix(mut z: u64) -> u64 {
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// Applies ten rounds of Philox4x32.
fn philox(mut key: [u32; 2], counter: [u32; 4]) -> [u32; 4] {
    let mut c = counter;
    for _ in 0..10 {
        let a = u64::from(c[0]) * 0xd251_1f53;
        let b = u64::from(c[2]) * 0xcd9e_8d57;
        c = [(b >> 32) as u32 ^ c[1] ^ key[0], b as u32, (a >> 32) as u32 ^ c[3] ^ key[1], a as u32];
        key = [key[0].wrapping_add(0x9e37_79b9), key[1].wrapping_add(0xbb67_ae85)];
    }
    c
}

/// Generator: a position in a stream.
#[derive(Clone, Debug)]
pub struct Rng {
    key: [u32; 2],
    block: u64,
    buffer: [u32; 4],
    used: usize,
    spare: Option<f64>,
}

impl Rng {
    /// Draws the next 32 bits.
    pub fn next_u32(&mut self) -> u32 {
        if self.used == 4 {
            self.buffer = philox(self.key, [self.block as u32, (self.block >> 32) as u32, 0, 0]);
            self.block += 1;
            self.used = 0;
        }
        self.used += 1;
        self.buffer[self.used - 1]
    }

    /// Draws the next 64 bits.
    pub fn next_u64(&mut self) -> u64 {
        u64::from(self.next_u32()) | u64::from(self.next_u32()) << 32
    }

    /// Draws a uniform number in `[0, 1)`, with 53 bits.
    pub fn uniform(&mut self) -> f64 {
        (self.next_u64() >> 11) as f64 * (1.0 / (1u64 << 53) as f64)
    }

    /// Draws a uniform number in `(0, 1]`: its logarithm is finite.
    pub fn uniform_positive(&mut self) -> f64 {
        1.0 - self.uniform()
    }

    /// Draws a uniform integer in `0..n`, without bias. Panics if `n` is 0.
    pub fn below(&mut self, n: usize) -> usize {
        assert!(n > 0, "no integer is below 0");
        let n = n as u64;
        // Lemire's multiply-and-reject.
        loop {
            let product = u128::from(self.next_u64()) * u128::from(n);
            if product as u64 >= n.wrapping_neg() % n {
                return (product >> 64) as usize;
            }
        }
    }

    /// Draws a standard normal number, by Box and Muller in f64.
    pub fn normal(&mut self) -> f64 {
        if let Some(z) = self.spare.take() {
            return z;
        }
        let radius = (-2.0 * libm::log(self.uniform_positive())).sqrt();
        let (sin, cos) = libm::sincos(std::f64::consts::TAU * self.uniform());
        self.spare = Some(radius * sin);
        radius * cos
    }

    /// Draws +1 or −1 with equal probability.
    pub fn sign(&mut self) -> f64 {
        if self.next_u32() >> 31 == 0 { 1.0 } else { -1.0 }
    }

    /// Draws the norm of a standard normal vector of length `d`.
    pub fn chi(&mut self, d: usize) -> f64 {
        (0..d).map(|_| self.normal()).map(|z| z * z).sum::<f64>().sqrt()
    }

    /// Returns `0..n` in random order.
    pub fn permutation(&mut self, n: usize) -> Vec<usize> {
        let mut order: Vec<usize> = (0..n).collect();
        for i in (1..n).rev() {
            order.swap(i, self.below(i + 1));
        }
        order
    }

    /// Draws `m` distinct numbers of `0..n`, every set equally likely, in increasing order; returns all of them if
    /// `m ≥ n`.
    pub fn subset(&mut self, n: usize, m: usize) -> Vec<usize> {
        if m >= n {
            return (0..n).collect();
        }
        // Floyd's algorithm: m draws, whatever n.
        let mut chosen = std::collections::BTreeSet::new();
        for j in n - m..n {
            let t = self.below(j + 1);
            chosen.insert(if chosen.contains(&t) { j } else { t });
        }
        chosen.into_iter().collect()
    }

    /// Fills `out` with standard normal variates, drawn in f64 and rounded once.
    pub fn fill_normal<T: crate::mat::Real>(&mut self, out: &mut [T]) {
        out.iter_mut().for_each(|x| *x = T::from_f64(self.normal()));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn philox_gives_the_published_vectors() {
        // Known answers distributed with Random123.
        assert_eq!(philox([0, 0], [0; 4]), [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8]);
        assert_eq!(
            philox([u32::MAX; 2], [u32::MAX; 4]),
            [0x408f_276d, 0x41c8_3b0e, 0xa20b_c7c6, 0x6d54_51fd]
        );
    }

    #[test]
    fn streams_are_fixed_for_ever() {
        let mut rng = StreamKey::new(7).with(1).named("test").rng();
        let first: Vec<u32> = (0..4).map(|_| rng.next_u32()).collect();
        let mut again = StreamKey::new(7).with(1).named("test").rng();
        assert_eq!(first, (0..4).map(|_| again.next_u32()).collect::<Vec<_>>());
        assert_ne!(StreamKey::new(7).with(1), StreamKey::new(7).with(2));
        assert_ne!(StreamKey::new(7).with(1).with(2), StreamKey::new(7).with(2).with(1));
    }

    #[test]
    fn normals_have_the_moments_of_a_normal() {
        let mut rng = StreamKey::new(1).rng();
        let n = 200_000;
        let x: Vec<f64> = (0..n).map(|_| rng.normal()).collect();
        let moment = |p: i32| x.iter().map(|v| v.powi(p)).sum::<f64>() / f64::from(n);
        let se = (1.0 / f64::from(n)).sqrt();
        assert!(moment(1).abs() < 5.0 * se);
        assert!((moment(2) - 1.0).abs() < 5.0 * 2f64.sqrt() * se);
        assert!(moment(3).abs() < 5.0 * 15f64.sqrt() * se);
        assert!((moment(4) - 3.0).abs() < 5.0 * 96f64.sqrt() * se);
    }

    #[test]
    fn subsets_are_distinct_sorted_and_uniform() {
        let mut rng = StreamKey::new(3).rng();
        let mut counts = [0u32; 7];
        for _ in 0..7000 {
            let s = rng.subset(7, 3);
            assert!(s.windows(2).all(|w| w[0] < w[1]) && s.len() == 3);
            s.iter().for_each(|&i| counts[i] += 1);
        }
        // Binomial(7000, 3/7): standard deviation 41.
        assert!(counts.iter().all(|&c| (2800..3200).contains(&c)), "{counts:?}");
        assert_eq!(rng.subset(4, 9), vec![0, 1, 2, 3]);
    }

    #[test]
    fn below_is_uniform_and_permutations_are_permutations() {
        let mut rng = StreamKey::new(5).rng();
        let mut counts = [0u32; 5];
        (0..5000).for_each(|_| counts[rng.below(5)] += 1);
        assert!(counts.iter().all(|&c| (850..1150).contains(&c)), "{counts:?}");
        let mut p = rng.permutation(100);
        p.sort_unstable();
        assert_eq!(p, (0..100).collect::<Vec<_>>());
    }
}
