//! The element types of matrices.

use std::fmt::{Debug, Display};
use std::iter::Sum;
use std::ops::{Add, AddAssign, Div, DivAssign, Mul, MulAssign, Neg, Sub, SubAssign};

/// The name of an element type.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum DType {
    /// IEEE single precision.
    F32,
    /// IEEE double precision.
    F64,
}

/// `f32` or `f64`.
pub trait Real:
    Copy
    + Debug
    + Display
    + Default
    + PartialOrd
    + Send
    + Sync
    + 'static
    + Add<Output = Self>
    + Sub<Output = Self>
    + Mul<Output = Self>
    + Div<Output = Self>
    + Neg<Output = Self>
    + AddAssign
    + SubAssign
    + MulAssign
    + DivAssign
    + Sum
    + bytemuck::Pod
    + crate::kernels::Element
{
    /// Name of this type.
    const DTYPE: DType;
    /// 0.
    const ZERO: Self;
    /// 1.
    const ONE: Self;
    /// Unit roundoff: half the distance from 1 to the next number.
    const ROUNDOFF: f64;
    /// −∞.
    const NEG_INFINITY: Self;
    /// +∞.
    const INFINITY: Self;
    /// Not a number.
    const NAN: Self;
    /// Nearest value of this type.
    fn from_f64(x: f64) -> Self;
    /// The value in double precision.
    fn to_f64(self) -> f64;
    /// Nearest value of this type to an integer.
    fn from_usize(n: usize) -> Self {
        Self::from_f64(n as f64)
    }
    /// $e^x$.
    fn exp(self) -> Self;
    /// Natural logarithm.
    fn ln(self) -> Self;
    /// Square root.
    fn sqrt(self) -> Self;
    /// Absolute value.
    fn abs(self) -> Self;
    /// `self · a + b`, rounded once.
    fn mul_add(self, a: Self, b: Self) -> Self;
    /// Returns the larger number; the other operand if one is NaN.
    fn max(self, other: Self) -> Self;
    /// Returns the smaller number; the other operand if one is NaN.
    fn min(self, other: Self) -> Self;
    /// Returns true if the number is neither infinite nor NaN.
    fn is_finite(self) -> bool;
    /// Returns true if the number is NaN.
    fn is_nan(self) -> bool;
    /// Returns the bits, widened to 64, for bitwise comparisons.
    fn to_bits64(self) -> u64;
}

macro_rules! real {
    ($t:ident, $dtype:ident) => {
        impl Real for $t {
            const DTYPE: DType = DType::$dtype;
            const ZERO: Self = 0.0;
            const ONE: Self = 1.0;
            const ROUNDOFF: f64 = $t::EPSILON as f64 / 2.0;
            const NEG_INFINITY: Self = $t::NEG_INFINITY;
            const INFINITY: Self = $t::INFINITY;
            const NAN: Self = $t::NAN;
            #[inline(always)]
            fn from_f64(x: f64) -> Self {
                x as $t
            }
            #[inline(always)]
            fn to_f64(self) -> f64 {
                self as f64
            }
            #[inline(always)]
            fn exp(self) -> Self {
                $t::exp(self)
            }
            #[inline(always)]
            fn ln(self) -> Self {
                $t::ln(self)
            }
            #[inline(always)]
            fn sqrt(self) -> Self {
                $t::sqrt(self)
            }
            #[inline(always)]
            fn abs(self) -> Self {
                $t::abs(self)
            }
            #[inline(always)]
            fn mul_add(self, a: Self, b: Self) -> Self {
                $t::mul_add(self, a, b)
            }
            #[inline(always)]
            fn max(self, other: Self) -> Self {
                $t::max(self, other)
            }
            #[inline(always)]
            fn min(self, other: Self) -> Self {
                $t::min(self, other)
            }
            #[inline(always)]
            fn is_finite(self) -> bool {
                $t::is_finite(self)
            }
            #[inline(always)]
            fn is_nan(self) -> bool {
                $t::is_nan(self)
            }
            #[inline(always)]
            fn to_bits64(self) -> u64 {
                u64::from(self.to_bits())
            }
        }
    };
}

real!(f32, F32);
real!(f64, F64);
