//! Rotary embeddings of keys and queries: moves rows from one position to another.

use crate::Real;

crate::choices! {
    /// Position of the two parts of a rotated pair.
    pub enum RopeLayout {
        /// Half the rotated features apart.
        Half = "half",
        /// Next to each other.
        Interleaved = "interleaved",
    }
}

/// Rotations of feature pairs by multiples of fixed angles.
#[derive(Clone, Debug)]
pub struct Turn {
    angles: Vec<f64>,
    /// Distance between the parts of a pair, and between pairs.
    part: usize,
    pair: usize,
}

impl Turn {
    /// Makes the rotary embedding of `dim` features with base `base`.
    pub fn new(base: f64, dim: usize, half: bool) -> Self {
        let angles: Vec<f64> = (0..dim / 2).map(|l| base.powf(-2.0 * l as f64 / dim as f64)).collect();
        let (part, pair) = if half { (angles.len(), 1) } else { (1, 2) };
        Self { angles, part, pair }
    }

    /// Moves `row` by `shift` positions.
    pub fn apply<T: Real>(&self, shift: f64, row: &mut [T]) {
        for (l, &angle) in self.angles.iter().enumerate() {
            let (re, im) = (l * self.pair, l * self.pair + self.part);
            let (sin, cos) = (shift * angle).sin_cos();
            let (x, y) = (row[re].to_f64(), row[im].to_f64());
            (row[re], row[im]) = (T::from_f64(x * cos - y * sin), T::from_f64(y * cos + x * sin));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use attlas_num::rope::{Angles, Layout, Rope, Scaling, Table};

    #[test]
    fn turning_moves_a_row_from_one_position_to_another() {
        for (layout, half) in [(Layout::Half, true), (Layout::Interleaved, false)] {
            let rope = Rope { dim: 6, base: 1e4, layout, scaling: Scaling::None };
            let table = Table::<f64>::new(&rope, 60, Angles::Double);
            let row = [0.3, -1.0, 2.0, 0.7, 0.1, -0.4, 9.0];
            let (mut from, mut to) = (row, row);
            table.rotate_in_place(50, &mut from);
            table.rotate_in_place(7, &mut to);
            Turn::new(1e4, 6, half).apply(-43.0, &mut from);
            assert!(from.iter().zip(&to).all(|(a, b)| (a - b).abs() < 1e-13), "{layout:?}");
        }
    }
}
