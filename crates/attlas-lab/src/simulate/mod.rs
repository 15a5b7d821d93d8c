//! Small simulations: tokens as particles ([`particles`]), and a task about triples ([`match3`]).

pub mod match3;
pub mod particles;

pub use match3::{Matching, MatchingRun, Score, Task};
pub use particles::{Model, Particles, ParticlesRun, Scheme};
