//! Distributed attention on several machines.
//!
//! Attention over disjoint sets of keys merges exactly by log-sum-exp, and the state of a linear method is a sum. Three
//! schedules therefore distribute methods without any code in the method; the registry names the schedule of each
//! ([`attlas::Spread`]):
//!
//! | schedule | what moves |
//! | --- | --- |
//! | [`ring`](mod@ring) | keys and values travel round the ring, the next block while this one is worked on |
//! | [`scan`](mod@scan) | sums over keys: bytes do not depend on the number of tokens |
//! | `sort`, in place of a ring | rows go to the process of their block, for methods that sort rows by a hash |
//! | [`gather`](mod@gather) | a few weighted keys that stand for each process's own |
//!
//! [`attend()`] is the entry point: it takes a problem, a method, and this process's part of queries, keys and values
//! ([`Sharded`]), cut by a [`Layout`]. [`SpreadCache`] decodes over a cache divided among all processes,
//! [`SpreadModel`] runs a model on a divided sequence. [`cluster`] predicts times on more machines. A [`Transport`]
//! moves the bytes: [`Threads`] of one program, or with the feature `mpi` the processes of `mpirun`.
//!
//! A result does not depend on the order in which messages arrive, and is bit-identical when repeated on the same
//! number of processes.

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
