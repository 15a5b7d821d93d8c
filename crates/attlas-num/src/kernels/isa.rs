//! Instruction sets: which ones exist, and which of them this machine has.

use std::fmt;
use std::str::FromStr;
use std::sync::OnceLock;

/// An instruction set that the kernels are written for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Isa {
    /// Plain Rust, one element at a time: the definition the others are tested against.
    Scalar,
    /// x86-64 with AVX2 and FMA.
    Avx2,
    /// x86-64 with the AVX-512 foundation, DQ, BW and VL; BF16 products where the machine has them.
    Avx512,
    /// AArch64.
    Neon,
}

impl Isa {
    const ALL: [Self; 4] = [Self::Scalar, Self::Avx2, Self::Neon, Self::Avx512];

    /// Returns the fastest instruction set of this machine; detected once.
    pub fn best() -> Self {
        static BEST: OnceLock<Isa> = OnceLock::new();
        *BEST.get_or_init(|| {
            Self::ALL.into_iter().rev().find(|isa| isa.is_available()).unwrap_or(Self::Scalar)
        })
    }

    /// Returns the instruction sets of this machine, slowest first; never empty.
    pub fn available() -> Vec<Self> {
        Self::ALL.into_iter().filter(|isa| isa.is_available()).collect()
    }

    /// Returns true if this machine has the instruction set. A kernel called with a missing one runs as
    /// [`Isa::Scalar`].
    pub fn is_available(self) -> bool {
        match self {
            Self::Scalar => true,
            #[cfg(target_arch = "x86_64")]
            Self::Avx2 => is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma"),
            #[cfg(target_arch = "x86_64")]
            Self::Avx512 => {
                // The kernels enable AVX2 and FMA as well, and a hypervisor may mask those alone.
                Self::Avx2.is_available()
                    && is_x86_feature_detected!("avx512f")
                    && is_x86_feature_detected!("avx512dq")
                    && is_x86_feature_detected!("avx512bw")
                    && is_x86_feature_detected!("avx512vl")
            }
            #[cfg(target_arch = "aarch64")]
            Self::Neon => true,
            #[allow(unreachable_patterns)]
            _ => false,
        }
    }

    fn name(self) -> &'static str {
        match self {
            Self::Scalar => "scalar",
            Self::Avx2 => "avx2",
            Self::Avx512 => "avx512",
            Self::Neon => "neon",
        }
    }
}

impl fmt::Display for Isa {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// Runs plain loops compiled for the widest registers of this machine; a portable build uses narrow ones.
///
/// Results are the same bits: no additions are reordered and none is fused with a multiplication. `work` should be
/// short, or call only inlined functions.
///
/// ```
/// let mut x = [1.0f32, 4.0, 9.0];
/// attlas_num::kernels::vectorised(|| x.iter_mut().for_each(|x| *x = x.sqrt()));
/// assert_eq!(x, [1.0, 2.0, 3.0]);
/// ```
#[inline]
pub fn vectorised<R>(work: impl FnOnce() -> R) -> R {
    #[cfg(target_arch = "x86_64")]
    {
        #[target_feature(enable = "avx2,fma")]
        fn on_avx2<R>(work: impl FnOnce() -> R) -> R {
            work()
        }
        #[target_feature(enable = "avx512f,avx512dq,avx512bw,avx512vl,avx2,fma")]
        fn on_avx512<R>(work: impl FnOnce() -> R) -> R {
            work()
        }
        match Isa::best() {
            // SAFETY: the machine has the features.
            Isa::Avx512 => return unsafe { on_avx512(work) },
            // SAFETY: as above.
            Isa::Avx2 => return unsafe { on_avx2(work) },
            _ => {}
        }
    }
    work()
}

/// Name that is none of `scalar`, `avx2`, `avx512`, `neon`.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("unknown instruction set `{0}`; expected scalar, avx2, avx512 or neon")]
pub struct UnknownIsa(String);

impl FromStr for Isa {
    type Err = UnknownIsa;
    fn from_str(name: &str) -> Result<Self, UnknownIsa> {
        Self::ALL.into_iter().find(|isa| isa.name() == name).ok_or_else(|| UnknownIsa(name.to_owned()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_read_back() {
        for isa in Isa::ALL {
            assert_eq!(isa.to_string().parse(), Ok(isa));
        }
        assert!("sse9".parse::<Isa>().is_err());
    }

    #[test]
    fn the_best_set_is_the_last_available_one() {
        let available = Isa::available();
        assert_eq!(available[0], Isa::Scalar);
        assert_eq!(available.last(), Some(&Isa::best()));
    }
}
