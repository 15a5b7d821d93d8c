//! Does a token cost less when the cache is clustered, and does the answer stay right while the cache grows?
//! `cargo run --release -p attlas --features testkit --example decode_growing_cache`.

use attlas::metrics::relative_frobenius;
use attlas::testkit::Case;
use attlas::{DType, Options, Out, Plan, Problem, Result, Stream, TensorMut, TensorRef, Workspace, registry};
use std::time::Instant;

const D: usize = 64;
const HEADS: usize = 4;
const PROMPT: usize = 8192;
const STEPS: usize = 384;

fn main() -> Result<()> {
    let problem = Problem::new(HEADS, PROMPT + STEPS, D).with_kv_heads(1).causal();
    let case = Case::clustered(problem, 1);
    let [q, k, v] = [&case.q, &case.k, &case.v].map(|x| x.iter().map(|x| *x as f32).collect::<Vec<f32>>());
    let mut ws = Workspace::single()?;
    let options = Options::new().with("budget", 256).with("window", 1024);
    let multipole = registry::method("multipole")?.plan(&problem, &options)?;
    let exact = registry::method("exact")?.plan(&problem, &Options::new())?;
    let open = |plan: &dyn Plan| plan.stream(DType::F32).expect("both methods decode");
    let mut streams: [Box<dyn Stream>; 2] = [open(&*exact), open(&*multipole)];
    let n = PROMPT + STEPS;
    let q = TensorRef::bhnd(&q, [1, HEADS, n, D])?;
    let [k, v] = [TensorRef::bhnd(&k, [1, 1, n, D])?, TensorRef::bhnd(&v, [1, 1, n, D])?];
    for stream in &mut streams {
        stream.push(k.rows(0..PROMPT).into(), v.rows(0..PROMPT).into(), &mut ws)?;
    }
    println!("{:>6} {:>9} {:>12} {:>12} {:>12}", "cache", "error", "keys visited", "clustered", "exact");
    let (mut seconds, mut visited, mut gap) = ([0.0; 2], 0, Vec::new());
    for step in 1..=STEPS {
        let mut rows = [[0.0f32; HEADS * D]; 2];
        for ((stream, row), seconds) in streams.iter_mut().zip(&mut rows).zip(&mut seconds) {
            let token = PROMPT + step - 1..PROMPT + step;
            let mut out = Out::new(TensorMut::bhnd(row, [1, HEADS, 1, D])?).into();
            let start = Instant::now();
            stream.push(k.rows(token.clone()).into(), v.rows(token.clone()).into(), &mut ws)?;
            let info = stream.attend(q.rows(token).into(), &mut out, &mut ws)?;
            *seconds += start.elapsed().as_secs_f64();
            visited = info.keys_visited / HEADS as u64;
        }
        let [want, got] = rows.map(|row| row.map(f64::from));
        gap.push(relative_frobenius(&got, &want));
        if step % 128 == 0 {
            let error = gap.drain(..).sum::<f64>() / 128.0;
            let [exact, clustered] = std::mem::take(&mut seconds).map(|s| 1e6 * s / 128.0);
            let n = PROMPT + step;
            println!("{n:>6} {error:>9.5} {visited:>12} {clustered:>9.0} µs {exact:>9.0} µs");
        }
    }
    Ok(())
}
