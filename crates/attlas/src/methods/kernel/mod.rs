//! Feature maps, sketches and linear attention.

pub mod crt;
pub mod gated_linear;
pub mod hybrid_features;
pub mod lev;
pub mod linear;
pub mod performer;
pub mod polaformer;
pub mod polynomial;
pub mod polysketch;
pub mod scatterbrain;
pub mod tensor_sketch;

#[cfg(test)]
mod tests {
    use crate::method::Family;
    use crate::testkit::{Case, How, run_with};
    use crate::{Options, Problem, TensorRef, Workspace, registry};
    use attlas_num::DType;

    #[test]
    fn decoding_holds_a_stated_number_of_bytes_whatever_the_length() {
        let p = Problem { d_v: 6, ..Problem::new(1, 2560, 8).causal() };
        let x = Case::gaussian(p, 1);
        let mut stated = Vec::new();
        for method in registry::METHODS.iter().filter(|m| m.family == Family::Kernel && m.claims.decode) {
            let plan = method.plan(&p, &Options::new()).unwrap();
            let info = run_with(&*plan, &x, How { lse: false, ..How::default() }).unwrap().info;
            let Some(&bytes) = info.figures.get("decode_bytes") else { continue };
            stated.push(method.id);
            let mut stream = plan.stream(DType::F64).unwrap();
            let mut ws = Workspace::single().unwrap();
            let mut cached = Vec::new();
            for start in (0..2560).step_by(128) {
                let rows = |x, width| TensorRef::bhnd(x, [1, 1, 2560, width]).unwrap();
                let k = rows(&x.k, 8).rows(start..start + 128);
                let v = rows(&x.v, 6).rows(start..start + 128);
                stream.push(k.into(), v.into(), &mut ws).unwrap();
                cached.push(stream.state_bytes());
            }
            let most = *cached.iter().max().unwrap();
            assert!(most as f64 <= bytes, "{}: {most} bytes, stated {bytes}", method.id);
            // Once the first blocks are full, the cache stops growing.
            let (early, late) = (cached[4..12].iter().max(), cached[12..].iter().max());
            assert_eq!(early, late, "{}", method.id);
        }
        for id in [
            "linear",
            "polaformer",
            "performer",
            "crt",
            "hybrid_features",
            "gated_linear",
            "lev",
            "polysketch",
            "tensor_sketch",
            "scatterbrain",
        ] {
            assert!(stated.contains(&id), "{id} does not state what decoding holds");
        }
    }
}
