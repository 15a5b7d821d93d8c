use attlas::*;
use std::time::Instant;
fn main() {
    let args: Vec<String> = std::env::args().collect();
    let n: usize = args[1].parse().unwrap();
    let causal = args[2] == "causal";
    let threads: usize = args[3].parse().unwrap();
    let method = &args[4];
    let d = 64;
    let p = Problem::new(1, n, d);
    let p = if causal { p.causal() } else { p };
    let data: Vec<f32> = (0..3 * n * d)
        .map(|i| {
            let x = (i as u64).wrapping_mul(0x9e3779b97f4a7c15);
            ((x >> 40) as f32 / (1u64 << 24) as f32 - 0.5) * 2.0
        })
        .collect();
    let t = |i: usize| TensorRef::bhnd(&data[i * n * d..(i + 1) * n * d], [1, 1, n, d]).unwrap();
    let mut o = Options::new();
    for a in &args[5..] {
        let (k, v) = a.split_once('=').unwrap();
        o = o.with(k, v);
    }
    let plan = registry::method(method).unwrap().plan(&p, &o).unwrap();
    let mut ws = Workspace::new(Schedule { threads, ..Schedule::default() }).unwrap();
    let mut out = vec![0.0f32; n * d];
    let mut best = f64::MAX;
    for _ in 0..(if method == "exact" && n > 20000 { 1 } else { 5 }) {
        let s = Instant::now();
        let oo = Out::new(TensorMut::bhnd(&mut out, [1, 1, n, d]).unwrap());
        plan.execute(&Qkv::new(t(0), t(1), t(2)).into(), &mut oo.into(), &mut ws).unwrap();
        best = best.min(s.elapsed().as_secs_f64());
    }
    println!("{method} n={n} causal={causal} threads={threads} {o}: {best:.4} s");
}
