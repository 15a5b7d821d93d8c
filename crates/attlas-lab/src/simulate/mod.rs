//! Small simulations: tokens as particles, and a task about triples.

mod matching;
mod particles;

pub use matching::{
    Matching, MatchingRun, Score, Task, balanced_modulus, labels, pairwise_head, third_order_head,
};
pub use particles::{Model, Particles, ParticlesRun, Scheme};
