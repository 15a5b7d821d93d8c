//! An atlas of fast attention: every numerical method for attention under one interface.
//!
//! Exact softmax attention on all threads, from plain slices:
//!
//! ```
//! use attlas::{Attention, attention};
//!
//! let x: Vec<f32> = (0..8 * 100 * 64).map(|i| (i as f32 * 0.37).sin()).collect();
//! let o = attention(&x, &x, &x, &Attention { causal: true, ..Attention::new(8, 64) })?;
//! # assert_eq!(o.len(), x.len());
//! # Ok::<(), attlas::Error>(())
//! ```
//!
//! With the feature `ndarray`, `attention_array` takes and returns arrays; with `half`, elements may be `f16` or `bf16`.
//! Without `double`, which is on by default, methods other than `exact` and `naive` refuse double precision, and the
//! library's code is a quarter smaller.
//!
//! [`registry::method`] finds any method by name. A [`Problem`] gives the sizes and the mask, the [`Method`] plans it,
//! and the [`Plan`] runs in a [`Workspace`], which keeps threads and scratch memory from call to call. Tensors may be
//! strided, and a run can also return the log-sum-exp of each row:
//!
//! ```
//! use attlas::{Options, Out, Problem, Qkv, Schedule, TensorMut, TensorRef, Workspace, registry};
//!
//! let problem = Problem::new(2, 100, 16).causal();           // 2 heads, 100 tokens, width 16
//! let data: Vec<f32> = (0..2 * 100 * 16).map(|i| (i as f32 * 0.37).sin()).collect();
//! let x = TensorRef::bhnd(&data, [1, 2, 100, 16])?;
//! let (mut output, mut lse) = (vec![0.0f32; data.len()], vec![0.0f32; 200]);
//!
//! let plan = registry::method("sink_window")?.plan(&problem, &Options::new().with("window", 32))?;
//! let mut ws = Workspace::new(Schedule::default())?;
//! let out = Out::with_lse(TensorMut::bhnd(&mut output, [1, 2, 100, 16])?, &mut lse);
//! let info = plan.execute(&Qkv::new(x, x, x).into(), &mut out.into(), &mut ws)?;
//! assert!(info.keys_visited < problem.visible_pairs());
//! # Ok::<(), attlas::Error>(())
//! ```
//!
//! A [`Stream`] decodes token by token and holds the state that a method keeps of earlier tokens:
//!
//! ```
//! use attlas::{DType, Options, Out, Problem, TensorMut, TensorRef, Workspace, registry};
//!
//! let plan = registry::baseline().plan(&Problem::new(2, 100, 16).causal(), &Options::new())?;
//! let mut stream = plan.stream(DType::F32).expect("exact attention decodes");
//! let mut ws = Workspace::single()?;
//! for _ in 0..3 {
//!     let token = vec![0.5f32; 2 * 16];
//!     let x = TensorRef::bhnd(&token, [1, 2, 1, 16])?;
//!     let mut output = vec![0.0f32; 2 * 16];
//!     stream.push(x.into(), x.into(), &mut ws)?;
//!     stream.attend(x.into(), &mut Out::new(TensorMut::bhnd(&mut output, [1, 2, 1, 16])?).into(), &mut ws)?;
//! }
//! assert_eq!(stream.len(), 3);
//! # Ok::<(), attlas::Error>(())
//! ```
//!
//! | module | contents |
//! | --- | --- |
//! | [`problem`] | sizes, masks, strided tensors |
//! | [`registry`] | the lists of methods, layers and conversions |
//! | [`method`] | the contract of a method: claims, plans, streams, calibration |
//! | [`gradient`] | backward passes, for methods that claim a gradient |
//! | [`group`] | the numerics of one key head, which the author of a method writes, and the runner around them |
//! | [`mod@params`] | parameters declared once, options read from text |
//! | [`workspace`] | threads, tiles and scratch memory |
//! | [`spread`] | how methods run when keys lie on several processes |
//! | [`cache`] | keys and values for exact decoding |
//! | [`methods`], [`engine`] | every method by family, and the code they share |
//! | [`layer`], [`layers`], [`conversions`] | attention layers with weights, and conversions between them |
//! | [`diagnostics`], [`metrics`] | statistics of an attention head, and the distance of an output from the exact one |
//! | `testkit` | with the feature `testkit`: inputs, references and the checks that every method passes |
//!
//! [`registry::baseline`] is exact attention alone: a program that plans nothing else links none of the other methods
//! and is a tenth of the size of one that calls [`registry::method`]. The crate prints nothing, reads no files,
//! environment or clock, and keeps no global state.

#![forbid(unsafe_code)]

#[cfg(feature = "ndarray")]
mod array;
mod attention;
pub mod cache;
pub mod conversions;
pub mod diagnostics;
pub mod engine;
mod error;
pub mod gradient;
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
pub mod spread;
#[cfg(any(test, feature = "testkit"))]
pub mod testkit;
pub mod workspace;

#[cfg(feature = "ndarray")]
pub use array::attention_array;
pub use attention::{Attention, Element, attention};
pub use attlas_num::kernels::{Band, Isa, merge_lse};
pub use attlas_num::rng::StreamKey;
pub use attlas_num::{DType, Mat, MatRef, Real};
pub use error::{Error, Result};
pub use group::{Group, GroupPlan, GroupStream};
pub use method::{Calibration, Claims, Cost, Family, Method, Plan, RunInfo, Spec, Status, Stream, Support};
pub use near::Near;
pub use params::Options;
pub use problem::{Align, Inputs, Mask, Out, Output, Problem, Qkv, Tensor, TensorMut, TensorRef};
pub use spread::{Numbers, Spread};
pub use workspace::{Context, Schedule, Workspace};
