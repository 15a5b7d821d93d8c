//! Natural logarithms of many numbers.
//!
//! $x = 2^k (1 + f)$ with $1 + f$ between $\sqrt{1/2}$ and $\sqrt 2$; with $s = f / (2 + f)$,
//! $\ln(1 + f) = f - f^2/2 + s\,(f^2/2 + R)$ and $R = 2 \sum_{i \ge 1} s^{2i} / (2i + 1)$, the form of fdlibm's `log`:
//! the rounded terms are small compared with $f$. As $s^2 \le 0.0295$, a few terms of the series suffice. $k \ln 2$ is
//! added in two parts, the first of them exact.
//!
//! Plain Rust without branches or fused products: the compiler vectorises it for the instruction set of each function
//! below, and all of them give the same bits.

use super::Isa;

macro_rules! logarithm {
    ($t:ty, $bits:ty, $ln:ident, $mantissa:literal, $bias:literal, $lift:literal, $half:expr,
     $ln2:expr, [$last:expr $(, $term:expr)*]) => {
        #[inline(always)]
        fn $ln(x: $t) -> $t {
            const ONE: $bits = <$t>::to_bits(1.0);
            const HALF: $bits = <$t>::to_bits($half);
            // The exponent field of a subnormal number is 0, so scale it up first.
            let tiny = x < <$t>::MIN_POSITIVE;
            let (scaled, lift) = if tiny { (x * (1u64 << $lift) as $t, $lift as $t) } else { (x, 0.0) };
            let bits = scaled.to_bits().wrapping_add(ONE - HALF);
            let k = ((bits >> $mantissa) as i32 - $bias) as $t - lift;
            let f = <$t>::from_bits((bits & ((1 << $mantissa) - 1)) + HALF) - 1.0;
            let s = f / (2.0 + f);
            let z = s * s;
            let mut r = $last;
            $( r = $term + z * r; )*
            let half = 0.5 * f * f;
            let (high, low) = $ln2;
            let value = k * high + (f - (half - (s * (half + z * r) + k * low)));
            let value = if x < <$t>::INFINITY { value } else { x };
            let value = if x == 0.0 { <$t>::NEG_INFINITY } else { value };
            if x < 0.0 { <$t>::NAN } else { value }
        }
    };
}

logarithm!(
    f32,
    u32,
    ln_single,
    23,
    127,
    25,
    std::f32::consts::FRAC_1_SQRT_2,
    (0.693_145_75, 1.428_606_8e-6),
    [2.0 / 9.0, 2.0 / 7.0, 2.0 / 5.0, 2.0 / 3.0]
);
logarithm!(
    f64,
    u64,
    ln_double,
    52,
    1023,
    54,
    std::f64::consts::FRAC_1_SQRT_2,
    (0.693_147_180_369_123_8, 1.908_214_929_270_587_7e-10),
    [
        2.0 / 25.0,
        2.0 / 23.0,
        2.0 / 21.0,
        2.0 / 19.0,
        2.0 / 17.0,
        2.0 / 15.0,
        2.0 / 13.0,
        2.0 / 11.0,
        2.0 / 9.0,
        2.0 / 7.0,
        2.0 / 5.0,
        2.0 / 3.0
    ]
);

macro_rules! in_place {
    ($t:ty, $ln:ident, $in_place:ident, $avx2:ident, $avx512:ident) => {
        pub(super) fn $in_place(isa: Isa, x: &mut [$t]) {
            match isa {
                // SAFETY: the machine was found to have the instruction set.
                #[cfg(target_arch = "x86_64")]
                Isa::Avx512 if Isa::Avx512.is_available() => unsafe { $avx512(x) },
                // SAFETY: as above.
                #[cfg(target_arch = "x86_64")]
                Isa::Avx2 if Isa::Avx2.is_available() => unsafe { $avx2(x) },
                _ => x.iter_mut().for_each(|x| *x = $ln(*x)),
            }
        }

        #[cfg(target_arch = "x86_64")]
        #[target_feature(enable = "avx512f,avx512dq,avx512bw,avx512vl")]
        fn $avx512(x: &mut [$t]) {
            x.iter_mut().for_each(|x| *x = $ln(*x));
        }

        #[cfg(target_arch = "x86_64")]
        #[target_feature(enable = "avx2")]
        fn $avx2(x: &mut [$t]) {
            x.iter_mut().for_each(|x| *x = $ln(*x));
        }
    };
}

in_place!(f32, ln_single, single, single_avx2, single_avx512);
in_place!(f64, ln_double, double, double_avx2, double_avx512);
