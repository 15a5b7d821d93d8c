//! Small simulations: tokens as particles, a task about triples, and one about chains.

mod khop;
mod matching;
mod particles;

pub use khop::{KHop, KHopRun, hops};
pub use matching::{
    Matching, MatchingRun, Score, Task, balanced_modulus, labels, pairwise_head, third_order_head,
};
pub use particles::{Model, Particles, ParticlesRun, Scheme};
