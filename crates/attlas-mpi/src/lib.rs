//! attlas on more than one machine.
//!
//! Attention over disjoint sets of keys merges exactly by log-sum-exp, and the state of a linear method is a sum. So
//! three schedules make every method that has one distributed, without code of its own; the registry says which
//! ([`attlas::Spread`]):
//!
//! | schedule | what moves |
//! | --- | --- |
//! | [`ring`](mod@ring) | keys and values travel round the ring, the next block while this one is worked on |
//! | [`scan`](mod@scan) | sums over keys: bytes do not depend on the number of tokens |
//! | `sort`, in place of a ring | rows go to the process of their block, for methods that sort rows by a hash |
//! | [`gather`](mod@gather) | a few weighted keys that stand for each process's own |
//!
//! [`attend()`] is the door: a problem, a method, and this process's part of queries, keys and values ([`Sharded`]), cut
//! by a [`Layout`]. [`SpreadCache`] decodes over a cache that lies on all processes, [`SpreadModel`] runs a model whose keys
//! do. [`cluster`] predicts what more
//! machines would bring. Who moves the bytes is a [`Transport`]: [`Threads`] of one program, or with the feature `mpi` the
//! processes of `mpirun`.
//!
//! A result does not depend on the order in which messages arrive, and is the same bits when run again on the same number
//! of processes.

#![deny(unsafe_code)]

mod attend;
pub mod bench;
pub mod checks;
pub mod cluster;
mod crew;
mod decode;
mod element;
pub mod gather;
pub mod launch;
mod layout;
mod model;
pub mod ring;
pub mod scan;
mod sharded;
mod sort;
mod transport;
#[cfg(feature = "mpi")]
mod world;

pub use attend::{Answer, Parts, attend, attend_into, layouts, support};
pub use crew::Team;
pub use decode::SpreadCache;
pub use element::{Element, Wire};
pub use layout::Layout;
pub use model::SpreadModel;
pub use sharded::Sharded;
pub use transport::{Threads, Traffic, Transport};
#[cfg(feature = "mpi")]
pub use world::World;
