//! Checks that results do not depend on the form of the call: shape, number of threads, tile, layout, padding.

use super::Subject;
use crate::testkit::{Case, How, assert_same_bits};
use crate::{Inputs, Mask, Out, Problem, Qkv, Schedule, TensorMut, TensorRef, Workspace};

/// Sequence lengths that are no multiple of a block, and lengths at and just past one.
const LENGTHS: [usize; 9] = [0, 1, 2, 3, 17, 31, 64, 65, 129];

impl Subject {
    /// Checks every length, odd widths, more queries than keys and the reverse: an answer without NaN or a refusal.
    pub(super) fn check_shapes(&self) {
        let mut shapes: Vec<Problem> =
            LENGTHS.iter().map(|&n| Problem { d_v: 5, ..Problem::new(1, n, 8) }).collect();
        for (n_q, n_k) in [(1, 97), (13, 97), (97, 13), (65, 0), (0, 65), (3, 64)] {
            shapes.push(Problem::new(2, 1, 8).with_lens(n_q, n_k).with_kv_heads(1));
        }
        for (d, d_v) in [(1, 1), (3, 7), (7, 3), (33, 1), (16, 40)] {
            shapes.push(Problem { d_v, ..Problem::new(1, 67, d) });
        }
        shapes.push(Problem { batch: 2, ..Problem::new(6, 41, 8).with_kv_heads(3) });
        let planned = shapes
            .into_iter()
            .flat_map(|p| [p, p.causal()])
            .flat_map(|p| [Case::gaussian(p, 1), Case::gaussian(p, 2).cast_f32()])
            .filter(|case| self.check_shape(case))
            .count();
        assert!(planned > 0, "{}", self.name("refuses every shape", &Problem::new(1, 64, 8)));
    }

    fn check_shape(&self, case: &Case) -> bool {
        let p = &case.problem;
        let Some(plan) = self.plan_for(case, &self.options) else { return false };
        if p.mask == Mask::Causal {
            assert!(self.method.claims.causal, "{}", self.name("plans what it does not claim", p));
        }
        let ran = self.run_plan(&*plan, case, self.how());
        let name = self.name("gives NaN or infinity", p);
        assert!(ran.o.iter().all(|x| x.is_finite()), "{name}");
        if self.method.claims.lse {
            let sane = |l: &f64| l.is_finite() || *l == f64::NEG_INFINITY;
            assert!(ran.lse.iter().all(sane), "{name} as log-sum-exp");
        }
        for row in 0..p.batch * p.n_heads * p.n_q {
            let unseen = p.n_k == 0 || p.mask == Mask::Causal && row % p.n_q + p.n_k < p.n_q;
            if unseen {
                let zero = ran.o[row * p.d_v..(row + 1) * p.d_v].iter().all(|&x| x == 0.0);
                let lse = !self.method.claims.lse || ran.lse[row] == f64::NEG_INFINITY;
                assert!(zero && lse, "{}", self.name("a row that sees no key is not (0, −∞)", p));
            }
        }
        let cost = plan.cost();
        assert!(cost.flops() > 0 || p.visible_pairs() == 0, "{}", self.name("costs nothing", p));
        true
    }

    /// Checks that a second run, two threads and other query tiles give the same bits.
    pub(super) fn check_bits(&self) {
        for p in self.problems() {
            let p = p.with_kv_heads(1);
            for case in [Case::gaussian(p, 3), Case::gaussian(p, 3).cast_f32()] {
                let Some(plan) = self.plan_for(&case, &self.options) else { continue };
                let first = self.run_plan(&*plan, &case, self.how());
                for (what, threads, tile_q) in
                    [("again", 1, 0), ("2 threads", 2, 0), ("tile_q 32", 1, 32), ("tile_q 80", 2, 80)]
                {
                    let schedule = Schedule { threads, tile_q, ..Schedule::default() };
                    let ran = self.run_plan(&*plan, &case, How { schedule, ..self.how() });
                    let name = self.name(what, &p);
                    assert_same_bits(&ran.o, &first.o, &name);
                    assert_same_bits(&ran.lse, &first.lse, &name);
                }
            }
        }
    }

    /// Checks that both layouts, with and without log-sum-exp, give the same bits.
    pub(super) fn check_layouts(&self) {
        for p in self.problems() {
            let case = Case::gaussian(Problem { batch: 2, d_v: 9, ..p }, 4);
            let Some(plan) = self.plan_for(&case, &self.options) else { continue };
            let first = self.run_plan(&*plan, &case, self.how());
            for how in [How { token_major: true, ..self.how() }, How { lse: false, ..self.how() }] {
                let ran = self.run_plan(&*plan, &case, how);
                assert_same_bits(&ran.o, &first.o, &self.name("other layout", &case.problem));
            }
        }
    }

    /// Checks that padded keys are never read: the result is that of the shorter sequence.
    pub(super) fn check_padding(&self) {
        for p in self.problems() {
            let case = Case::gaussian(p, 14);
            let short = case.with_keys(83);
            let (Some(plan), Some(want)) = (self.plan_for(&case, &self.options), self.run(&short)) else {
                continue;
            };
            let mut padded = case.clone();
            for h in 0..2 {
                padded.key_rows(h).skip(83).for_each(|row| row.fill(f64::NAN));
            }
            let view = |x, n, c| TensorRef::bhnd(x, [1, 2, n, c]).unwrap_or_else(|e| panic!("{e}"));
            let mut x =
                Qkv::new(view(&padded.q, 97, p.d), view(&padded.k, 97, p.d), view(&padded.v, 97, p.d_v));
            x.key_lens = Some(&[83]);
            let mut o = vec![f64::NAN; want.o.len()];
            let out = Out::new(TensorMut::bhnd(&mut o, [1, 2, 97, p.d_v]).unwrap_or_else(|e| panic!("{e}")));
            let mut ws = Workspace::single().unwrap_or_else(|e| panic!("{e}"));
            if let Err(e) = plan.execute(&Inputs::F64(x), &mut out.into(), &mut ws) {
                panic!("{}: {e}", self.name("padded", &p));
            }
            assert_same_bits(&o, &want.o, &self.name("padded to 97 from 83 keys", &p));
        }
    }
}
