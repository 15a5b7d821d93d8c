//! A method of your own, outside the registry: attention to every `stride`-th key.
//!
//! Write the numerics of one group of heads, say what you claim, and let the shared checks try to refute it:
//! `cargo run -p attlas --features testkit --example your_own_method`. In a crate of your own:
//!
//! ```toml
//! [dependencies]
//! attlas = "0.1"
//!
//! [dev-dependencies]
//! attlas = { version = "0.1", features = ["testkit"] }
//! ```

use attlas::engine::{exact_group, exact_rows};
use attlas::group::{Group, GroupPlan};
use attlas::method::{Accepted, Budget, Claims, Cost, Family, Law, Method, RunInfo, Spec, Status, Support};
use attlas::{Band, MatRef, Options, Problem, Real, Result, metrics, testkit};

static METHOD: Method = Method {
    id: "strided",
    family: Family::Clustering,
    title: "Every stride-th key",
    reference: "none",
    claims: Claims {
        causal: false,
        exact_at: &[("stride", Budget::Value(1.0))],
        except: &[(Law::KeyOrder, "keys are kept by position")],
        ..Claims::BASE
    },
    probes: &[&[("stride", "3")]],
    ..Method::of::<Params>()
};

attlas::params! {
    /// Parameters of [`Strided`].
    pub struct Params {
        /// Distance between kept keys; 1 keeps all of them.
        stride: usize = 4, in 1..=1 << 20;
    }
}

impl Spec for Params {
    const METHOD: &'static Method = &METHOD;

    fn supports(&self, p: &Problem) -> Support {
        Support::unless(p.mask == attlas::Mask::Causal, "early rows would see no kept key")
    }

    fn build(self, _: Accepted<'_>) -> Result<impl GroupPlan> {
        Ok(Strided { params: self })
    }
}

#[derive(Debug)]
struct Strided {
    params: Params,
}

impl GroupPlan for Strided {
    fn cost(&self, p: &Problem) -> Cost {
        let pairs = p.visible_pairs().div_ceil(self.params.stride as u64);
        Cost { run_flops: 2 * pairs * (p.d + p.d_v) as u64, ..Cost::default() }
    }

    fn run<T: Real>(&self, mut g: Group<'_, T>) -> Result<RunInfo> {
        if self.params.stride == 1 {
            return Ok(RunInfo { status: Status::Exact, ..exact_group(&mut g)? });
        }
        let kept = || (0..g.n_k()).step_by(self.params.stride);
        let n = kept().count();
        let (mut k, mut v) = (g.cx.scratch.take::<T>(n * g.k.cols()), g.cx.scratch.take::<T>(n * g.v.cols()));
        g.k.gather_into(kept(), &mut k);
        g.v.gather_into(kept(), &mut v);
        let (k, v) = (MatRef::new(&k, n, g.k.cols()), MatRef::new(&v, n, g.v.cols()));
        let (scale, cx, rows) = (g.scale, g.cx, g.lse.len());
        g.par_row_blocks(96, |b| {
            exact_rows(b.q, k, v, None, scale, Band::ALL, cx, b.out, b.lse);
            Ok(())
        })?;
        Ok(RunInfo::visited((rows * n) as u64))
    }
}

fn main() {
    testkit::check_method(&METHOD);
    let case = testkit::Case::gaussian(Problem::new(1, 512, 32), 1);
    let (exact, _) = testkit::reference(&case);
    for stride in [1, 2, 4, 8] {
        let (o, _) = testkit::run_method(&METHOD, &Options::new().with("stride", stride), &case);
        println!("stride {stride}: relative error {:.3}", metrics::relative_frobenius(&o, &exact));
    }
}
