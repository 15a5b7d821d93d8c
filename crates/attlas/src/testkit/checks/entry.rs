//! Required contents of a registry entry, and problems that a plan must refuse.

use super::{Subject, calibrate};
use crate::method::{Ladder, Method};
use crate::testkit::Case;
use crate::{Error, Options, Out, Problem, Qkv, TensorMut, TensorRef, Workspace};

pub(super) fn check_entry(method: &Method) {
    let id = method.id;
    let snake = id.chars().all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_');
    assert!(snake && !id.is_empty(), "{id} is not snake_case");
    assert!(!method.title.is_empty() && !method.reference.is_empty(), "{id} has no title or reference");
    for p in method.params {
        assert!(!p.doc.trim().is_empty(), "{id}.{} has no documentation", p.name);
    }
    let exact_needs_probe = method.claims.exact_at.is_empty() || !method.probes.is_empty();
    assert!(
        exact_needs_probe,
        "{id} becomes exact but has no probe that keeps it approximate on small problems"
    );
    for (law, reason) in method.claims.except {
        assert!(reason.len() > 10, "{id} breaks {law:?} without a reason");
    }
    for w in method.claims.withdrawn {
        assert!(w.reason.len() > 10, "{id} withdraws {:?} without a reason", w.promise);
        assert!(method.params.iter().any(|p| p.name == w.param), "{id} has no parameter {}", w.param);
        // A condition must match something; a plain value must be one that the parameter accepts.
        if !["*", "!", ">", "<"].iter().any(|c| w.value.starts_with(c)) {
            let support = (method.supports)(&Problem::new(1, 8, 8), &Options::new().with(w.param, w.value));
            let unread = format!("parameter {} = {} is not accepted", w.param, w.value);
            assert!(!support.reasons.iter().any(|r| r.starts_with(&unread)), "{id}: {unread}");
        }
    }
    if let Some(name) = method.exact_below {
        assert!(
            method.params.iter().any(|p| p.name == name && p.kind == "integer"),
            "{id} has no length {name}"
        );
    }
    for t in method.tunable {
        let Some(spec) = method.params.iter().find(|p| p.name == t.param) else {
            panic!("{id} has no parameter {} to tune", t.param)
        };
        match t.ladder {
            Ladder::UpToKeys => assert_eq!(spec.kind, "integer", "{id}.{} is no budget", t.param),
            Ladder::Values(values) => assert!(!values.is_empty(), "{id}.{} has no values to try", t.param),
        }
    }
    if !method.claims.deterministic {
        assert!(method.params.iter().any(|p| p.name == "seed"), "{id} draws random numbers but has no seed");
    }
}

impl Subject {
    /// Checks that wrong shapes are errors and leave the output unchanged.
    pub(super) fn check_refusals(&self) {
        let Some(&mask) = self.masks().first() else { return };
        let p = Problem { mask, ..Problem::new(1, 97, 16) };
        let case = Case::gaussian(p, 13);
        let Some(plan) = self.plan_for(&case, &self.options) else { return };
        let mut ws = Workspace::single().unwrap_or_else(|e| panic!("{e}"));
        let view = |n| TensorRef::bhnd(&case.q, [1, 1, n, 16]).unwrap_or_else(|e| panic!("{e}"));
        for (n_q, n_k, n_o) in [(96, 97, 97), (97, 96, 97), (97, 97, 96)] {
            let mut o = vec![7.0f64; n_o * 16];
            let out = Out::new(TensorMut::bhnd(&mut o, [1, 1, n_o, 16]).unwrap_or_else(|e| panic!("{e}")));
            let x = Qkv::new(view(n_q), view(n_k), view(97));
            let result = plan.execute(&x.into(), &mut out.into(), &mut ws);
            // The method may also not support fewer rows than planned.
            let refused = matches!(result, Err(Error::Shape { .. } | Error::Unsupported { .. }));
            assert!(refused, "{}", self.name("takes a wrong shape", &p));
            assert!(o.iter().all(|&x| x == 7.0), "{}", self.name("writes before it refuses", &p));
        }
        let unknown = self.options.clone().with("no_such_parameter", 1);
        let refused =
            self.method.plan_with(&p, &unknown, calibrate(self.method, &case, &self.options).as_ref());
        assert!(
            matches!(refused, Err(Error::UnknownParam { .. } | Error::Unsupported { .. })),
            "{}",
            self.name("takes any parameter", &p)
        );
    }
}
