//! Random directions as a parameter of methods.

use crate::{Problem, Support};
use attlas_num::sketch::Coupling;

crate::choices! {
    /// Dependence of the random directions on each other.
    pub enum Directions {
        /// Orthogonal in blocks, with independent lengths.
        Orthogonal = "orthogonal",
        /// Independent.
        Iid = "iid",
        /// Orthogonal in blocks, all of the same length; biased, for comparison with older code.
        OrthogonalRegularised = "orthogonal_regularised",
        /// Corners of a simplex in blocks; best for one-sided features. Needs a width of at least 2.
        Simplex = "simplex",
        /// Randomised Hadamard blocks; nearly unbiased. Needs a width that is a power of two.
        Hadamard = "hadamard",
    }
}

impl Directions {
    /// Returns the reasons why a problem has no such directions: the width, or a scale without a root.
    pub fn supports(self, p: &Problem) -> Support {
        Support::unless(
            p.scale <= 0.0,
            "random features need a positive scale: move its sign into the queries",
        )
        .and_unless(self == Directions::Simplex && p.d < 2, "simplex directions need a width of at least 2")
        .and_unless(
            self == Directions::Hadamard && !p.d.is_power_of_two(),
            "Hadamard directions need a width that is a power of two",
        )
    }

    /// Returns the coupling of that name.
    pub fn coupling(self) -> Coupling {
        match self {
            Directions::Orthogonal => Coupling::Orthogonal,
            Directions::Iid => Coupling::Iid,
            Directions::OrthogonalRegularised => Coupling::OrthogonalRegularised,
            Directions::Simplex => Coupling::Simplex,
            Directions::Hadamard => Coupling::Hadamard,
        }
    }
}
