//! Stacks of matrices of one shape, for joint decomposition.
//!
//! A block is a matrix in the orientation $x \cdot W$ (inputs × outputs), or its transpose if it would not fit the
//! others otherwise. The square blocks of a whole network are those of Ren et al.: for each layer $W_Q$, $W_K$, $W_V$,
//! $W_O$, the slices of $W_{in}$ transposed and the slices of $W_{out}$, so that in feed-forward blocks the rows are
//! always the hidden slice and the columns the model width. Feed-forward layers with a gate, or with a width that is no
//! multiple of the model's, form a separate stack, $d \times f$; so do keys and values of grouped-query attention.
//! Nothing is ever padded. If moments of inputs are known, matrices are not cut, and matrices with inputs as rows and
//! those with inputs as columns form separate stacks.

use super::moments::{Moments, Seen};
use super::network::{Network, Role, Slot};
use super::product::{Factor, Product, Values};
use crate::layer::Dense;
use crate::{Error, Mat, Result};
use std::sync::Arc;

/// A matrix on a stack: one block, or several if it is cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Member {
    /// Its place in the network.
    pub slot: Slot,
    /// If true, blocks are outputs × inputs, cut along the outputs; otherwise inputs × outputs, cut along the inputs.
    pub turned: bool,
    /// Number of blocks.
    pub slices: usize,
}

impl Member {
    /// Cuts its matrix (`n_out × n_in`) into blocks.
    pub fn blocks(&self, w: &Mat<f32>) -> Vec<Mat<f32>> {
        let (along, across) = if self.turned { (w.rows(), w.cols()) } else { (w.cols(), w.rows()) };
        let height = along / self.slices;
        (0..self.slices)
            .map(|s| {
                Mat::from_fn(height, across, |i, j| {
                    if self.turned { w[(s * height + i, j)] } else { w[(j, s * height + i)] }
                })
            })
            .collect()
    }

    /// Assembles the matrix (`n_out × n_in`) from its blocks.
    pub fn matrix(&self, blocks: &[Mat<f32>]) -> Mat<f32> {
        let (height, across) = blocks.first().map_or((0, 0), |b| (b.rows(), b.cols()));
        let at = |along: usize, j: usize| blocks[along / height][(along % height, j)];
        if self.turned {
            Mat::from_fn(height * blocks.len(), across, at)
        } else {
            Mat::from_fn(across, height * blocks.len(), |i, j| at(j, i))
        }
    }

    /// Makes the map with blocks $B G_s C^\top$; `core` holds the stacked $G_s$. With a diagonal there is one block.
    pub fn product(&self, b: &Arc<Mat<f32>>, core: Values, c: &Arc<Mat<f32>>) -> Product {
        let rows = |transposed| Factor { slices: self.slices, ..Factor::shared(b, transposed) };
        let core = |transposed| Factor { values: core, transposed, slices: 1 };
        let factors = if self.turned {
            vec![Factor::shared(c, true), core(false), rows(false)]
        } else {
            vec![rows(true), core(true), Factor::shared(c, false)]
        };
        Product { factors }
    }
}

/// Matrices that are decomposed together.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Stack {
    /// The roles on it, such as `q+o`.
    pub name: String,
    /// Rows and columns of every block.
    pub shape: (usize, usize),
    /// The matrices, in the order of their blocks.
    pub members: Vec<Member>,
}

impl Stack {
    /// Returns the number of blocks.
    pub fn len(&self) -> usize {
        self.members.iter().map(|m| m.slices).sum()
    }

    /// True if there is no block.
    pub fn is_empty(&self) -> bool {
        self.members.is_empty()
    }

    /// Counts the numbers in all blocks.
    pub fn numbers(&self) -> usize {
        self.len() * self.shape.0 * self.shape.1
    }

    /// Reads all blocks.
    pub fn blocks(&self, network: &dyn Network) -> Result<Vec<Mat<f32>>> {
        let mut blocks = Vec::with_capacity(self.len());
        for m in &self.members {
            let Dense { weight, .. } = network.map(m.slot)?;
            blocks.extend(m.blocks(&weight));
        }
        Ok(blocks)
    }

    /// Returns the moments of the inputs of all blocks, if all are known.
    pub fn seen(&self, network: &dyn Network) -> Option<Seen> {
        let turned = self.members.first()?.turned;
        let alike = |m: &Member| m.slices == 1 && m.turned == turned;
        if !self.members.iter().all(alike) {
            return None;
        }
        let each: Option<Vec<Arc<Moments>>> = self.members.iter().map(|m| network.moments(m.slot)).collect();
        Some(Seen { turned, each: each? })
    }

    /// Iterates over the members with the indices of their blocks.
    pub fn numbered(&self) -> impl Iterator<Item = (&Member, std::ops::Range<usize>)> {
        let mut next = 0;
        self.members.iter().map(move |m| {
            let first = next;
            next += m.slices;
            (m, first..next)
        })
    }
}

/// Sorts the given places into as few stacks as shapes allow. With `slice`, feed-forward matrices without a gate are
/// cut into square blocks if their width is a multiple of the model's.
pub fn stacks(network: &dyn Network, slots: &[Slot], slice: bool) -> Result<Vec<Stack>> {
    let d = network.shape().d_model;
    let mut stacks: Vec<(bool, Stack)> = Vec::new();
    for &slot in slots {
        let Some((n_out, n_in)) = network.size(slot) else { continue };
        let gated = network.size(Slot { role: Role::Gate, ..slot }).is_some();
        let hidden = if slot.role == Role::Down { n_in } else { n_out };
        let seen = network.moments(slot).is_some();
        let whole = seen || slot.role.in_attention() || gated;
        let cut = slice && !whole && d > 0 && hidden.is_multiple_of(d) && hidden > 0;
        let (turned, slices) = match slot.role {
            Role::Up if cut => (true, hidden / d),
            Role::Down if cut => (false, hidden / d),
            Role::Down => (true, 1),
            Role::Output => (n_out != n_in, 1),
            _ => (false, 1),
        };
        let member = Member { slot, turned, slices };
        let (along, across) = if turned { (n_out, n_in) } else { (n_in, n_out) };
        let shape = (along / slices, across);
        // Attention and feed-forward matrices share a stack only as square blocks of the whole network.
        let apart = !slot.role.in_attention() && !cut;
        let fits = |s: &Stack| s.shape == shape && (!seen || s.members.iter().all(|m| m.turned == turned));
        match stacks.iter_mut().find(|(a, s)| *a == apart && fits(s)) {
            Some((_, stack)) => stack.members.push(member),
            None => stacks.push((apart, Stack { name: String::new(), shape, members: vec![member] })),
        }
    }
    if stacks.iter().any(|(_, s)| s.shape.0 == 0 || s.shape.1 == 0) {
        return Err(Error::shape("matrices", "at least one row and column", "none"));
    }
    Ok(stacks
        .into_iter()
        .map(|(_, mut stack)| {
            let named = |r: &Role| stack.members.iter().any(|m| m.slot.role == *r);
            let names: Vec<&str> = Role::ALL.iter().filter(|r| named(r)).map(|r| r.name()).collect();
            stack.name = names.join("+");
            stack
        })
        .collect())
}

#[cfg(test)]
mod tests {
    use super::super::product::Product;
    use super::super::tests::Toy;
    use super::*;
    use crate::layers::testing::{assert_close, random};

    fn all(network: &Toy) -> Vec<Slot> {
        let slot = |layer| move |role| Slot { layer, role };
        (0..network.layers).flat_map(|l| Role::ALL.into_iter().map(slot(l))).collect()
    }

    #[test]
    fn stacking_and_unstacking_is_the_identity() {
        for (kv_heads, ffn, gated, slice) in
            [(4, 16, false, true), (4, 16, false, false), (2, 12, true, true), (4, 12, false, true)]
        {
            let toy = Toy { kv_heads, ffn, gated, ..Toy::default() };
            for stack in stacks(&toy, &all(&toy), slice).unwrap() {
                let blocks = stack.blocks(&toy).unwrap();
                assert_eq!(blocks.len(), stack.len());
                assert!(blocks.iter().all(|b| (b.rows(), b.cols()) == stack.shape));
                for (member, range) in stack.numbered() {
                    assert_eq!(member.matrix(&blocks[range]), toy.map(member.slot).unwrap().weight);
                }
            }
        }
    }

    #[test]
    fn square_networks_are_one_stack_in_the_order_of_the_paper() {
        let toy = Toy::default();
        let list = stacks(&toy, &all(&toy), true).unwrap();
        assert_eq!((list.len(), list[0].len(), list[0].name.as_str()), (1, 16, "q+k+v+o+up+down"));
        let blocks = list[0].blocks(&toy).unwrap();
        let weight = |role| toy.map(Slot { layer: 0, role }).unwrap().weight;
        // Blocks act as x·W: the third is the value projection; then come slices of the feed-forward matrices.
        assert_eq!(blocks[2][(1, 3)], weight(Role::Value)[(3, 1)]);
        assert_eq!(blocks[5][(1, 3)], weight(Role::Up)[(9, 3)]);
        assert_eq!(blocks[7][(1, 3)], weight(Role::Down)[(3, 9)]);
    }

    #[test]
    fn what_does_not_fit_is_stacked_apart_and_never_padded() {
        let names = |toy: &Toy, slice| -> Vec<(String, usize, (usize, usize))> {
            let list = stacks(toy, &all(toy), slice).unwrap();
            list.into_iter().map(|s| (s.name.clone(), s.len(), s.shape)).collect()
        };
        let grouped = Toy { kv_heads: 2, ffn: 12, gated: true, ..Toy::default() };
        let want = [("q+o", 4, (8, 8)), ("k+v", 4, (8, 4)), ("gate+up+down", 6, (8, 12))];
        assert_eq!(names(&grouped, true), want.map(|(n, c, s)| (n.to_string(), c, s)));
        let whole = Toy::default();
        let want = [("q+k+v+o", 8, (8, 8)), ("up+down", 4, (8, 16))];
        assert_eq!(names(&whole, false), want.map(|(n, c, s)| (n.to_string(), c, s)));
    }

    #[test]
    fn a_product_has_the_blocks_it_was_made_of() {
        let (b, c) = (Arc::new(random("b", 8, 3)), Arc::new(random("c", 8, 2)));
        let cores = random("g", 6, 2);
        for turned in [false, true] {
            let member = Member { slot: Slot { layer: 0, role: Role::Up }, turned, slices: 2 };
            let core = Values::Matrix(Arc::new(cores.clone()));
            let product: Product = member.product(&b, core, &c);
            for (s, block) in member.blocks(&product.dense()).iter().enumerate() {
                let g = cores.as_ref().sub_rows(3 * s..3 * s + 3).to_mat();
                let bg = attlas_num::linalg::matmul(b.as_ref().as_ref(), g.as_ref());
                let want = attlas_num::linalg::matmul_nt(bg.as_ref(), c.as_ref().as_ref());
                assert_close(block.data(), want.data());
            }
        }
    }
}
