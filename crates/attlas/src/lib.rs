//! An atlas of fast attention: every numerical method for attention under one interface.
//!
//! A [`Problem`] names the sizes and the mask, a [`Method`] from the [`registry`] plans it, and the
//! [`Plan`] computes outputs from strided views, on the threads and in the scratch memory of a
//! [`Workspace`]. Nothing here prints, reads files, the environment or the clock, or keeps global state.
//!
//! ```
//! use attlas::{Options, Out, Problem, Qkv, TensorMut, TensorRef, Workspace, registry};
//!
//! let problem = Problem::new(2, 100, 16).causal();           // 2 heads, 100 tokens, width 16
//! let data: Vec<f32> = (0..2 * 100 * 16).map(|i| (i as f32 * 0.37).sin()).collect();
//! let x = TensorRef::bhnd(&data, [1, 2, 100, 16])?;
//! let mut output = vec![0.0f32; data.len()];
//! let mut lse = vec![0.0f32; 200];
//!
//! let plan = registry::method("exact")?.plan(&problem, &Options::new())?;
//! let mut ws = Workspace::single()?;
//! let out = Out::with_lse(TensorMut::bhnd(&mut output, [1, 2, 100, 16])?, &mut lse);
//! let info = plan.execute(&Qkv::new(x, x, x).into(), &mut out.into(), &mut ws)?;
//! assert_eq!(info.keys_visited, problem.visible_pairs());
//! # Ok::<(), attlas::Error>(())
//! ```

#![forbid(unsafe_code)]

pub mod cache;
pub mod conversions;
pub mod diagnostics;
pub mod engine;
mod error;
pub mod group;
pub mod layer;
pub mod layers;
pub mod method;
pub mod methods;
pub mod metrics;
pub mod near;
mod negated;
pub mod params;
pub mod problem;
pub mod registry;
#[cfg(any(test, feature = "testkit"))]
pub mod testkit;
pub mod workspace;

pub use attlas_num::kernels::{Isa, merge_lse};
pub use attlas_num::{DType, Mat, MatRef, Real};
pub use error::{Error, Result};
pub use group::{Group, GroupPlan, GroupStream};
pub use method::{Calibration, Claims, Cost, Family, Method, Plan, RunInfo, Status, Stream, Support};
pub use near::Near;
pub use params::Options;
pub use problem::{Inputs, Mask, Out, Output, Problem, Qkv, TensorMut, TensorRef};
pub use workspace::{Context, Schedule, Workspace};
