//! Runs every check that needs a GPU, or compiles every kernel, which needs none.
//!
//! ```text
//! attlas-cuda-check [--filter TEXT] [--require] [--cache DIR] [--nvrtc PATH]     run the checks
//! attlas-cuda-check --compile [--chip NAME] [--cache DIR] --nvrtc PATH [--nvrtc PATH]   compile every kernel
//! ```
//! Exit status: 0 passed, 1 failed, 77 no GPU (2 with `--require`).

use attlas::method::Needs;
use attlas::testkit::adversarial::learn;
use attlas::testkit::{Case, How, check_method, run_with};
use attlas::{Mask, Method, Options, Problem};
use attlas_cuda::{
    CHIPS, Compiler, Device, DeviceBuffer, DeviceMut, DeviceOut, DevicePlan, DeviceQkv, DeviceRef,
    DeviceWorkspace, Element, Error, KernelFamily, Setup, on_host, plan, programs, registry,
};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Instant;

#[derive(Default)]
struct Arguments {
    filter: Option<String>,
    require: bool,
    compile: bool,
    chip: Option<String>,
    cache: Option<PathBuf>,
    nvrtc: Vec<PathBuf>,
}

fn arguments() -> Result<Arguments, String> {
    let mut a = Arguments::default();
    let mut words = std::env::args().skip(1);
    while let Some(word) = words.next() {
        let mut value = || words.next().ok_or(format!("{word} needs a value"));
        match word.as_str() {
            "--filter" => a.filter = Some(value()?),
            "--require" => a.require = true,
            "--compile" => a.compile = true,
            "--chip" => a.chip = Some(value()?),
            "--cache" => a.cache = Some(value()?.into()),
            "--nvrtc" => a.nvrtc.push(value()?.into()),
            _ => return Err(format!("unknown argument {word}; see the head of attlas-cuda-check.rs")),
        }
    }
    Ok(a)
}

fn main() -> ExitCode {
    let a = match arguments() {
        Ok(a) => a,
        Err(e) => {
            eprintln!("{e}");
            return ExitCode::from(2);
        }
    };
    if a.compile { compile_all(&a) } else { check_all(&a) }
}

/// Compiles every program for every chip; fails on errors, on remarks other than one harmless one, and on spilt
/// registers.
fn compile_all(a: &Arguments) -> ExitCode {
    let mut failed = 0;
    let paths: Vec<Option<PathBuf>> =
        if a.nvrtc.is_empty() { vec![None] } else { a.nvrtc.iter().cloned().map(Some).collect() };
    for path in paths {
        let compiler = match Compiler::new(path.as_deref(), a.cache.as_deref()) {
            Ok(c) => c,
            Err(e) => {
                eprintln!("{e}");
                return ExitCode::from(if a.require { 2 } else { 77 });
            }
        };
        let (major, minor) = compiler.version();
        for chip in CHIPS.iter().filter(|c| a.chip.as_deref().is_none_or(|x| x == **c)) {
            let (mut count, start) = (0, Instant::now());
            for program in programs::all().iter().filter(|p| !p.hopper || *chip == "sm_90a") {
                count += 1;
                let name =
                    format!("{} {:?} for {chip} by NVRTC {major}.{minor}", program.name, program.constants);
                match compiler.compile(program, chip, &["--ptxas-options=-v"]) {
                    Ok((_, log)) => {
                        for fault in faults(&log) {
                            failed += 1;
                            println!("FAILED {name}: {fault}");
                        }
                        if a.cache.is_some()
                            && let Err(e) = compiler.store(program, chip)
                        {
                            println!("FAILED {name}: {e}");
                            failed += 1;
                        }
                    }
                    Err(e) => {
                        failed += 1;
                        println!("FAILED {name}: {e}");
                    }
                }
            }
            println!(
                "NVRTC {major}.{minor}: {count} programs for {chip} in {:.1} s",
                start.elapsed().as_secs_f64()
            );
        }
    }
    ExitCode::from(u8::from(failed > 0))
}

/// Returns the lines of a compiler's log that indicate faults.
fn faults(log: &str) -> Vec<String> {
    let spilt = |line: &str| {
        let bytes = line.split("bytes spill stores").next().and_then(|s| s.rsplit(", ").next());
        bytes.and_then(|b| b.trim().parse::<usize>().ok()).unwrap_or(0)
    };
    let bad = |line: &&str| {
        let info = line.starts_with("ptxas") || line.trim().is_empty();
        // More than 64 bytes in local memory mean that a kernel has run out of registers.
        !info
            || line.contains("C7510")
            || line.contains("C7512")
            || line.contains("warning")
            || line.contains("spill stores") && spilt(line) > 64
    };
    log.lines().filter(bad).map(String::from).collect()
}

type Check = (String, Box<dyn Fn(&Gpu)>);

struct Gpu {
    device: Device,
    /// The same GPU with the portable kernels.
    portable: Device,
}

fn check_all(a: &Arguments) -> ExitCode {
    let setup = |family| Setup { cache: a.cache.clone(), nvrtc: a.nvrtc.first().cloned(), family };
    let opened = Device::open(0, &setup(None))
        .and_then(|d| Ok((d, Device::open(0, &setup(Some(KernelFamily::Mma)))?)));
    let gpu = match opened {
        Ok((device, portable)) => Gpu { device, portable },
        Err(e) => {
            eprintln!("{e}");
            return ExitCode::from(if a.require { 2 } else { 77 });
        }
    };
    let info = gpu.device.info();
    println!(
        "{}, compute capability {}.{}, driver {}.{}, NVRTC {}.{}",
        info.name,
        info.capability.0,
        info.capability.1,
        info.driver.0,
        info.driver.1,
        info.compiler.0,
        info.compiler.1
    );
    let (mut passed, mut failed) = (0, 0);
    for (name, check) in checks() {
        if a.filter.as_ref().is_some_and(|f| !name.contains(f)) {
            continue;
        }
        let start = Instant::now();
        let result = catch_unwind(AssertUnwindSafe(|| check(&gpu)));
        let seconds = start.elapsed().as_secs_f64();
        match result {
            Ok(()) => {
                passed += 1;
                println!("ok      {name} ({seconds:.1} s)");
            }
            Err(_) => {
                failed += 1;
                println!("FAILED  {name} ({seconds:.1} s)");
            }
        }
    }
    println!("{passed} passed, {failed} failed");
    ExitCode::from(u8::from(failed > 0))
}

fn checks() -> Vec<Check> {
    let mut all: Vec<Check> = Vec::new();
    let mut add = |name: String, check: Box<dyn Fn(&Gpu)>| all.push((name, check));
    for element in [Element::Bf16, Element::F16] {
        for d in [64, 128, 256] {
            add(format!("exact {element:?} d{d}"), Box::new(move |g| exact_rows(&g.device, element, d)));
        }
        for d in [64, 128] {
            add(
                format!("exact portable {element:?} d{d}"),
                Box::new(move |g| exact_rows(&g.portable, element, d)),
            );
        }
    }
    for d in [16, 40, 80, 192] {
        add(format!("exact plain Bf16 d{d}"), Box::new(move |g| exact_rows(&g.device, Element::Bf16, d)));
    }
    add("exact F32".into(), Box::new(|g| exact_rows(&g.device, Element::F32, 64)));
    add("exact extreme logits".into(), Box::new(extremes));
    add("exact strides".into(), Box::new(strides));
    add("exact padded sequences".into(), Box::new(padding));
    for d in [64, 128, 256] {
        add(format!("sink_window d{d}"), Box::new(move |g| windows(g, d)));
    }
    for d in [64, 128] {
        add(format!("decode d{d}"), Box::new(move |g| decode(g, d)));
        add(format!("hyper d{d}"), Box::new(move |g| hyper(g, d)));
    }
    add("linear".into(), Box::new(linear));
    for (id, options) in FEATURES {
        add(format!("features {id} {options}"), Box::new(move |g| features(g, id, options)));
    }
    add("ranked keys".into(), Box::new(ranked));
    for (id, options) in AS_HOST {
        add(format!("as on the host {id} {options}"), Box::new(move |g| as_host(g, id, options)));
    }
    for (id, options, d) in FAST {
        add(
            format!("law {id} {options} d{d}: later tokens"),
            Box::new(move |g| later_tokens(&g.device, id, options, *d)),
        );
        add(
            format!("law {id} {options} d{d}: same bits"),
            Box::new(move |g| same_bits(&g.device, id, options, *d)),
        );
    }
    add("law exact portable: later tokens".into(), Box::new(|g| later_tokens(&g.portable, "exact", "", 64)));
    add(
        "law exact portable d128: later tokens".into(),
        Box::new(|g| later_tokens(&g.portable, "exact", "", 128)),
    );
    add("hyper on host and device".into(), Box::new(hyper_as_host));
    add("exact limits".into(), Box::new(exact_limits));
    add("failures".into(), Box::new(failures));
    for form in registry::FORMS {
        let id = form.method.id;
        add(format!("testkit {id}"), Box::new(move |g| check_method(on_host(form, &g.device))));
    }
    all
}

/// Fast forms whose invariants are checked on causal problems.
const FAST: &[(&str, &str, usize)] = &[
    ("exact", "", 64),
    ("exact", "", 128),
    ("exact", "", 256),
    ("sink_window", "sinks=3,window=300", 64),
    ("sink_window", "sinks=130,window=77", 128),
    ("hyper", "block=64,samples=64,n_min=128", 64),
    ("hyper", "block=64,samples=64,n_min=128", 128),
    ("linear", "", 64),
    ("linear", "map=relu", 48),
    ("performer", "", 64),
    ("performer", "map=relu,features=50", 40),
    ("crt", "", 64),
    ("polaformer", "", 64),
    ("hybrid_features", "bases=12,weights=3", 40),
    ("top_k", "keys=60", 64),
    ("loki", "keys=60,rank=16", 64),
    ("linformer", "rank=37", 64),
    ("linformer", "rank=37", 40),
];

/// Maps to positive features whose forms are compared in several element types.
const FEATURES: &[(&str, &str)] = &[
    ("linear", "map=relu"),
    ("linear", "map=softmax"),
    ("performer", ""),
    ("performer", "map=pos,features=77"),
    ("performer", "map=relu"),
    ("performer", "map=pos,features=280"),
    ("crt", "features=128"),
    ("polaformer", ""),
];

/// Settings whose plain forms are compared with the host's.
const AS_HOST: &[(&str, &str)] = &[
    ("linear", "map=softmax"),
    ("linear", "map=square,den_eps=0.01"),
    ("performer", ""),
    ("performer", "map=pos,features=33,directions=iid"),
    ("performer", "map=relu,features=40"),
    ("crt", ""),
    ("crt", "a=-0.05,antithetic=false,features=30"),
    ("polaformer", ""),
    ("polaformer", "alpha=0.5,den_eps=0"),
    ("performer", "map=trig,features=80"),
    ("performer", "map=trig,features=9,denominator=zero_row"),
    ("hybrid_features", ""),
    ("hybrid_features", "kind=gaussian,bases=8,weights=3,tau=2,denominator=strict"),
    ("nystromformer", "landmarks=16"),
    ("nystromformer", "landmarks=13,pinv=hyperpower7,iters=4,len_bias=true"),
    ("linformer", "rank=20"),
    ("linformer", "rank=13"),
    ("top_k", "keys=17"),
    ("loki", "keys=17,rank=5,min_len=30"),
    ("loki", "fraction=0.1,group_select=group_max,basis=pca"),
];

fn options(text: &str) -> Options {
    text.split(',').filter_map(|pair| pair.split_once('=')).fold(Options::new(), |o, (k, v)| o.with(k, v))
}

/// Inputs rounded to an element.
fn rounded(p: Problem, element: Element, seed: u64, factor: f64) -> Case {
    let mut case = Case::gaussian(p, seed);
    case.q.iter_mut().for_each(|x| *x *= factor);
    for x in case.q.iter_mut().chain(&mut case.k).chain(&mut case.v) {
        *x = element.round(*x);
    }
    case
}

/// Output and log-sum-exp.
#[derive(Clone, Debug, PartialEq)]
struct Ran {
    o: Vec<f64>,
    lse: Vec<f64>,
}

/// Runs a plan on a case: outputs and scratch memory start as NaN, and guard words after the outputs must stay intact.
fn run(device: &Device, id: &str, planned: &dyn DevicePlan, case: &Case) -> Ran {
    const GUARD: usize = 64;
    let gives_lse = attlas::registry::method(id).unwrap().claims.lse;
    let (p, e) = (planned.problem(), planned.element());
    let load = |x: &[f64]| DeviceBuffer::from_host(device, e, x).unwrap();
    let (q, k, v) = (load(&case.q), load(&case.k), load(&case.v));
    let rows = p.batch * p.n_heads * p.n_q;
    let o = DeviceBuffer::new(device, e, rows * p.d_v + GUARD).unwrap();
    let lse = DeviceBuffer::new(device, e.sum(), rows + GUARD).unwrap();
    o.fill(255).unwrap();
    lse.fill(255).unwrap();
    let mut ws = DeviceWorkspace::new(device).unwrap();
    ws.poison();
    let dims = |h, n, c| [p.batch, h, n, c];
    let x = DeviceQkv {
        q: DeviceRef::bhnd(&q, dims(p.n_heads, p.n_q, p.d)).unwrap(),
        k: DeviceRef::bhnd(&k, dims(p.n_kv_heads, p.n_k, p.d)).unwrap(),
        v: DeviceRef::bhnd(&v, dims(p.n_kv_heads, p.n_k, p.d_v)).unwrap(),
        key_lens: None,
    };
    let mut out = DeviceOut {
        o: DeviceMut::bhnd(&o, dims(p.n_heads, p.n_q, p.d_v)).unwrap(),
        lse: gives_lse.then(|| DeviceMut::bhnd(&lse, dims(p.n_heads, p.n_q, 1)).unwrap()),
    };
    planned.execute(&x, &mut out, &mut ws).unwrap().wait().unwrap();
    for (buffer, len) in [(&o, rows * p.d_v), (&lse, rows)] {
        let bytes = buffer.read_bytes().unwrap();
        assert!(
            bytes[len * buffer.element().bytes()..].iter().all(|&b| b == 255),
            "wrote past the end of an output"
        );
    }
    let (mut o, mut lse) = (o.read().unwrap(), lse.read().unwrap());
    o.truncate(rows * p.d_v);
    lse.truncate(if gives_lse { rows } else { 0 });
    Ran { o, lse }
}

fn run_method(device: &Device, id: &str, options: &Options, element: Element, case: &Case) -> Ran {
    run(device, id, &*planned(device, id, options, element, case), case)
}

/// Plans a method; if it needs calibration, it learns from the case.
fn planned(
    device: &Device,
    id: &str,
    options: &Options,
    element: Element,
    case: &Case,
) -> Box<dyn DevicePlan> {
    let method = attlas::registry::method(id).unwrap();
    let learnt = method.claims.needs == Needs::Calibration;
    let learnt = learnt.then(|| learn(method, options, case).unwrap()).flatten();
    plan(id, &case.problem, options, learnt.as_ref(), element, device).unwrap_or_else(|e| panic!("{e}"))
}

/// Returns the tolerance of a fast kernel, relative to the norm of the output.
fn tolerance(element: Element) -> f64 {
    match element {
        Element::Bf16 => 4e-3,
        Element::F16 => 6e-4,
        Element::F32 => 2e-6,
        Element::F64 => 1e-13,
    }
}

fn norm(x: &[f64]) -> f64 {
    x.iter().map(|x| x * x).sum::<f64>().sqrt()
}

fn assert_close(got: &Ran, want: &Ran, d_v: usize, tolerance: f64, what: &str) {
    let difference: Vec<f64> = got.o.iter().zip(&want.o).map(|(a, b)| a - b).collect();
    let error = norm(&difference) / norm(&want.o).max(1e-30);
    assert!(error <= tolerance, "{what}: relative error {error:.2e}, allowed {tolerance:.0e}");
    let size = norm(&want.o) / (want.o.len() as f64 / d_v as f64).sqrt();
    for (i, (e, w)) in difference.chunks(d_v).zip(want.o.chunks(d_v)).enumerate() {
        let (error, own) = (norm(e), norm(w).max(0.5 * size));
        assert!(error <= 3.0 * tolerance * own, "{what}: row {i} has relative error {:.2e}", error / own);
    }
    for (i, (a, b)) in got.lse.iter().zip(&want.lse).enumerate() {
        // Sums are in single precision; exponentials of the chip have 22 bits.
        let allowed = 1e-5 + 1e-6 * b.abs();
        assert!(a == b || (a - b).abs() <= allowed, "{what}: log-sum-exp of row {i} is {a}, expected {b}");
    }
}

fn masks() -> [Mask; 2] {
    [Mask::None, Mask::Causal]
}

fn exact_rows(device: &Device, element: Element, d: usize) {
    let lens =
        [(1, 1), (63, 63), (65, 64), (127, 129), (193, 193), (700, 1000), (1000, 700), (1, 300), (513, 4097)];
    for (heads, kv) in [(1, 1), (4, 1), (8, 2)] {
        for (n_q, n_k) in lens {
            for mask in masks() {
                let p = Problem { mask, ..Problem::new(heads, 1, d).with_kv_heads(kv).with_lens(n_q, n_k) };
                let case = rounded(p, element, 1, 1.0);
                let got = run_method(device, "exact", &Options::new(), element, &case);
                let want = run_method(device, "naive", &Options::new(), Element::F64, &case);
                assert_close(
                    &got,
                    &want,
                    d,
                    tolerance(element),
                    &format!("{heads}/{kv} heads {n_q}×{n_k} mask {mask}"),
                );
            }
        }
    }
}

fn extremes(g: &Gpu) {
    for device in [&g.device, &g.portable] {
        for d in [64, 128] {
            for mask in masks() {
                let p = Problem { mask, ..Problem::new(2, 300, d) };
                let huge = rounded(p, Element::Bf16, 2, 1e4 / (d as f64).sqrt());
                let got = run_method(device, "exact", &Options::new(), Element::Bf16, &huge);
                assert!(got.o.iter().chain(&got.lse).all(|x| x.is_finite()), "logits of 1e4, d{d} {mask}");
                let mut equal = rounded(p, Element::Bf16, 3, 1.0);
                let row = equal.k[..d].to_vec();
                equal.k = row.repeat(equal.k.len() / d);
                let got = run_method(device, "exact", &Options::new(), Element::Bf16, &equal);
                let want = run_method(device, "naive", &Options::new(), Element::F64, &equal);
                assert_close(&got, &want, d, 4e-3, &format!("equal keys d{d} {mask}"));
                let mut one = rounded(p, Element::Bf16, 4, 1.0);
                one.k[5 * d..6 * d].iter_mut().for_each(|x| *x *= 64.0);
                let got = run_method(device, "exact", &Options::new(), Element::Bf16, &one);
                let want = run_method(device, "naive", &Options::new(), Element::F64, &one);
                assert_close(&got, &want, d, 4e-3, &format!("one huge key d{d} {mask}"));
            }
        }
    }
}

/// Token-major tensors and views with gaps give the same bits as contiguous ones.
fn strides(g: &Gpu) {
    for (device, id, text) in [
        (&g.device, "exact", ""),
        (&g.portable, "exact", ""),
        (&g.device, "sink_window", "window=100"),
        (&g.device, "hyper", "block=64,samples=64,n_min=128"),
        (&g.device, "linear", ""),
        (&g.device, "performer", ""),
        (&g.device, "top_k", "keys=50"),
    ] {
        for (d, gap) in [(64, 0), (64, 8), (64, 3), (128, 8)] {
            let p = Problem { batch: 2, ..Problem::new(4, 400, d).with_kv_heads(2).causal() };
            let case = rounded(p, Element::Bf16, 5, 1.0);
            let want = run_method(device, id, &options(text), Element::Bf16, &case);
            let planned = plan(id, &p, &options(text), None, Element::Bf16, device).unwrap();
            // [batch][row][head][d + gap]
            let load = |x: &[f64], heads: usize| {
                let width = d + gap;
                let mut y = vec![f64::NAN; 2 * 400 * heads * width];
                for (i, row) in x.chunks(d).enumerate() {
                    let (b, h, r) = (i / (400 * heads), i / 400 % heads, i % 400);
                    y[((b * 400 + r) * heads + h) * width..][..d].copy_from_slice(row);
                }
                (
                    DeviceBuffer::from_host(device, Element::Bf16, &y).unwrap(),
                    [400 * heads * width, width, heads * width],
                )
            };
            let ((q, sq), (k, sk), (v, sv)) = (load(&case.q, 4), load(&case.k, 2), load(&case.v, 2));
            let o = DeviceBuffer::new(device, Element::Bf16, 2 * 400 * 4 * (d + gap)).unwrap();
            o.fill(255).unwrap();
            let view = |b, h, s| DeviceRef::new(b, [2, h, 400, d], s).unwrap();
            let x = DeviceQkv { q: view(&q, 4, sq), k: view(&k, 2, sk), v: view(&v, 2, sv), key_lens: None };
            let mut out = DeviceOut { o: DeviceMut::new(&o, [2, 4, 400, d], sq).unwrap(), lse: None };
            let mut ws = DeviceWorkspace::new(device).unwrap();
            planned.execute(&x, &mut out, &mut ws).unwrap().wait().unwrap();
            let o = o.read().unwrap();
            let mut got = Ran { o: Vec::new(), lse: want.lse.clone() };
            for i in 0..2 * 4 * 400 {
                let (b, h, r) = (i / 1600, i / 400 % 4, i % 400);
                got.o.extend(&o[((b * 400 + r) * 4 + h) * (d + gap)..][..d]);
            }
            let what = format!("{id} d{d} gap {gap}");
            if gap % 8 == 0 {
                assert!(got == want, "{what}: bits differ");
            } else {
                // Unaligned rows use the portable form.
                assert_close(&got, &want, d, 8e-3, &what);
            }
            for row in o.chunks(d + gap) {
                assert!(row[d..].iter().all(|x| x.is_nan()), "{what}: wrote between rows");
            }
        }
    }
}

/// Sequences of different lengths in a batch give the same results as alone.
fn padding(g: &Gpu) {
    for (id, text) in [
        ("exact", ""),
        ("sink_window", "window=50"),
        ("hyper", "block=64,samples=64,n_min=128"),
        ("linear", ""),
        ("performer", ""),
        ("polaformer", ""),
        ("top_k", "keys=50"),
    ] {
        for mask in masks() {
            let p = Problem { mask, batch: 2, ..Problem::new(2, 500, 64) };
            let case = rounded(p, Element::Bf16, 6, 1.0);
            let device = &g.device;
            let planned = plan(id, &p, &options(text), None, Element::Bf16, device).unwrap();
            let load = |x: &[f64]| DeviceBuffer::from_host(device, Element::Bf16, x).unwrap();
            let mut spoilt = case.clone();
            for h in 2..4 {
                for x in [&mut spoilt.k, &mut spoilt.v] {
                    x[(h * 500 + 333) * 64..(h + 1) * 500 * 64].fill(f64::NAN);
                }
            }
            let (q, k, v) = (load(&case.q), load(&spoilt.k), load(&spoilt.v));
            let o = DeviceBuffer::new(device, Element::Bf16, case.q.len()).unwrap();
            let dims = [2, 2, 500, 64];
            let view = |b| DeviceRef::bhnd(b, dims).unwrap();
            let x = DeviceQkv { q: view(&q), k: view(&k), v: view(&v), key_lens: Some(&[500, 333]) };
            let mut out = DeviceOut { o: DeviceMut::bhnd(&o, dims).unwrap(), lse: None };
            let mut ws = DeviceWorkspace::new(device).unwrap();
            planned.execute(&x, &mut out, &mut ws).unwrap().wait().unwrap();
            let got = o.read().unwrap();
            assert!(got.iter().all(|x| x.is_finite()), "{id} {mask}: padding was read");
            if id != "hyper" && id != "performer" {
                // The second sequence alone; the index of the sequence identifies its random streams.
                let half = |x: &[f64], n: usize| -> Vec<f64> {
                    x[2 * 500 * 64..].chunks(500 * 64).flat_map(|h| h[..n * 64].to_vec()).collect()
                };
                let one = Case {
                    problem: Problem { batch: 1, n_k: 333, ..p },
                    q: half(&case.q, 500),
                    k: half(&case.k, 333),
                    v: half(&case.v, 333),
                    single: false,
                };
                let want = run_method(device, id, &options(text), Element::Bf16, &one);
                assert!(got[2 * 500 * 64..] == want.o[..], "{id} {mask}: differs from the shorter sequence");
            }
        }
    }
}

fn windows(g: &Gpu, d: usize) {
    for element in [Element::Bf16, Element::F16] {
        for (n_q, n_k) in [(700, 700), (1000, 1000), (130, 900), (600, 300), (1, 500)] {
            for text in [
                "sinks=4,window=1",
                "sinks=0,window=100",
                "sinks=4,window=257",
                "sinks=200,window=64",
                "sinks=4,window=690",
            ] {
                for mask in masks() {
                    let p = Problem { mask, ..Problem::new(4, 1, d).with_kv_heads(2).with_lens(n_q, n_k) };
                    let case = rounded(p, element, 7, 1.0);
                    let got = run_method(&g.device, "sink_window", &options(text), element, &case);
                    let want = run_method(&g.device, "sink_window", &options(text), Element::F64, &case);
                    assert_close(
                        &got,
                        &want,
                        d,
                        tolerance(element),
                        &format!("{n_q}×{n_k} {text} mask {mask}"),
                    );
                }
            }
        }
    }
}

fn decode(g: &Gpu, d: usize) {
    for (device, element) in
        [(&g.device, Element::Bf16), (&g.device, Element::F16), (&g.portable, Element::Bf16)]
    {
        for (heads, kv) in [(1, 1), (8, 2), (8, 1)] {
            let n = 9000;
            let p = Problem::new(heads, n, d).with_kv_heads(kv).causal();
            let case = rounded(Problem { n_q: 1, ..p }, element, 8, 1.0);
            let planned = plan("exact", &p, &Options::new(), None, element, device).unwrap();
            let mut stream = planned.stream(100).unwrap().unwrap();
            let mut ws = DeviceWorkspace::new(device).unwrap();
            let load = |x: &[f64]| DeviceBuffer::from_host(device, element, x).unwrap();
            let (q, k, v) = (load(&case.q), load(&case.k), load(&case.v));
            let mut done = 0;
            for len in [1, 2, 17, 64, 65, 300, 5000, 9000] {
                // Rows `done..len` of every head.
                let cut = |x: &[f64]| -> Vec<f64> {
                    x.chunks(n * d).flat_map(|h| h[done * d..len * d].to_vec()).collect()
                };
                let (k, v) = (load(&cut(&case.k)), load(&cut(&case.v)));
                let dims = [1, kv, len - done, d];
                stream
                    .push(DeviceRef::bhnd(&k, dims).unwrap(), DeviceRef::bhnd(&v, dims).unwrap(), &mut ws)
                    .unwrap();
                ws.synchronize().unwrap();
                done = len;
                let o = DeviceBuffer::new(device, element, heads * d).unwrap();
                let lse = DeviceBuffer::new(device, Element::F32, heads).unwrap();
                o.fill(255).unwrap();
                let mut out = DeviceOut {
                    o: DeviceMut::bhnd(&o, [1, heads, 1, d]).unwrap(),
                    lse: Some(DeviceMut::bhnd(&lse, [1, heads, 1, 1]).unwrap()),
                };
                let query = DeviceRef::bhnd(&q, [1, heads, 1, d]).unwrap();
                stream.attend(query, &mut out, &mut ws).unwrap().wait().unwrap();
                let got = Ran { o: o.read().unwrap(), lse: lse.read().unwrap() };
                let short = Case { problem: Problem { n_q: 1, mask: Mask::None, ..p }, ..case.clone() }
                    .with_keys(len);
                let want = run_method(device, "naive", &Options::new(), Element::F64, &short);
                assert_close(&got, &want, d, tolerance(element), &format!("{heads}/{kv} heads, {len} keys"));
            }
            assert_eq!(stream.len(), 9000);
            drop((k, v));
        }
    }
}

/// Compares the fast kernels with the portable ones on the same rounded inputs: both hash in single precision.
fn hyper(g: &Gpu, d: usize) {
    for (n, text) in [
        (3001, "block=256,samples=256,n_min=512"),
        (2048, "block=100,samples=70,n_min=256,sampling=with_replacement"),
        (1500, "block=64,samples=0,n_min=128,hashes=11"),
        (1500, "block=64,samples=64,n_min=128"),
        (1000, "block=64,samples=64,n_min=999"),
    ] {
        for mask in masks() {
            let p = Problem { mask, ..Problem::new(4, n, d).with_kv_heads(2) };
            let case = rounded(p, Element::Bf16, 9, 1.0);
            let got = run_method(&g.device, "hyper", &options(text), Element::Bf16, &case);
            let want = run_method(&g.device, "hyper", &options(text), Element::F32, &case);
            assert_close(&got, &want, d, 4e-3, &format!("n {n} {text} mask {mask}"));
        }
    }
}

/// Portable forms choose the same keys as the host.
fn hyper_as_host(g: &Gpu) {
    let host = attlas::registry::method("hyper").unwrap();
    for text in ["block=32,samples=40,n_min=64", "block=32,samples=40,n_min=64,sampling=with_replacement"] {
        for mask in masks() {
            let p = Problem { mask, batch: 2, d_v: 24, ..Problem::new(4, 700, 32).with_kv_heads(2) };
            let case = Case::gaussian(p, 10);
            let want = run_with(&*host.plan(&p, &options(text)).unwrap(), &case, How::default()).unwrap();
            let got = run_method(&g.device, "hyper", &options(text), Element::F64, &case);
            let want = Ran { o: want.o, lse: want.lse };
            assert_close(&got, &want, 24, 1e-12, &format!("{text} mask {mask}"));
        }
    }
}

fn linear(g: &Gpu) {
    for element in [Element::Bf16, Element::F16] {
        for (n_q, n_k) in [(1, 1), (63, 63), (64, 64), (1025, 1025), (3001, 3001), (700, 1500)] {
            for mask in masks() {
                for (heads, kv) in [(2, 2), (4, 1)] {
                    let p =
                        Problem { mask, ..Problem::new(heads, 1, 64).with_kv_heads(kv).with_lens(n_q, n_k) };
                    let case = rounded(p, element, 11, 1.0);
                    let got = run_method(&g.device, "linear", &Options::new(), element, &case);
                    let want = run_method(&g.device, "linear", &Options::new(), Element::F64, &case);
                    let what = format!("{element:?} {heads}/{kv} heads {n_q}×{n_k} mask {mask}");
                    // Features are rounded to the element before multiplication, which limits the accuracy of the
                    // normaliser.
                    let rows = Ran { o: got.o.clone(), lse: want.lse.clone() };
                    assert_close(&rows, &want, 64, tolerance(element), &what);
                    for (a, b) in got.lse.iter().zip(&want.lse) {
                        assert!(
                            (a - b).abs() <= 2.0 * tolerance(element),
                            "{what}: log-sum-exp {a}, expected {b}"
                        );
                    }
                }
            }
        }
    }
}

/// Compares feature maps in half and in single precision with double precision, on the same inputs.
fn features(g: &Gpu, id: &str, text: &str) {
    for (n_q, n_k) in [(1, 1), (129, 129), (1025, 1025), (300, 900), (200, 90)] {
        for mask in masks() {
            for (heads, kv, d) in [(2, 2, 64), (4, 1, 40)] {
                let p = Problem { mask, ..Problem::new(heads, 1, d).with_kv_heads(kv).with_lens(n_q, n_k) };
                let case = rounded(p, Element::Bf16, 16, 1.0);
                let want = run_method(&g.device, id, &options(text), Element::F64, &case);
                for (element, allowed) in [(Element::Bf16, 4e-3), (Element::F32, 2e-5)] {
                    let got = run_method(&g.device, id, &options(text), element, &case);
                    let what = format!("{element:?} {heads}/{kv} heads {n_q}×{n_k} mask {mask}");
                    // Causal exponential features by tensor cores: a weight of the row's own segment is a sum of positive
                    // products whose two factors are rounded to bf16, each to within a factor of 1 + 2^-8. So sums of
                    // weights are within (1 + 2^-8)^2 of the exact ones, and the log-sum-exp within 2 ln(1 + 2^-8) < 2^-7,
                    // beside the error of single precision.
                    let exponential = ["performer", "crt"].contains(&id) && !text.contains("relu");
                    let own = exponential && mask == Mask::Causal && n_q == n_k && d == 64;
                    let sums = if own && element == Element::Bf16 { 1.0 / 128.0 + 2e-5 } else { allowed };
                    // A logarithm of size 100 has five decimal places in single precision.
                    let rows = Ran { o: got.o, lse: want.lse.clone() };
                    assert_close(&rows, &want, d, allowed, &what);
                    for (a, b) in got.lse.iter().zip(&want.lse) {
                        assert!(
                            a == b || (a - b).abs() <= sums + 1e-5 * b.abs(),
                            "{what}: log-sum-exp {a}, expected {b}"
                        );
                    }
                }
            }
        }
    }
}

/// Half precision chooses the same keys as single precision: products of the same numbers, summed in the same order.
fn ranked(g: &Gpu) {
    for (n_q, n_k, keys) in [(1, 5000, 700), (300, 300, 40), (130, 1000, 64), (400, 100, 30), (1, 40, 39)] {
        for mask in masks() {
            for (heads, kv, d) in [(1, 1, 64), (8, 2, 128), (4, 1, 40)] {
                let p = Problem { mask, ..Problem::new(heads, 1, d).with_kv_heads(kv).with_lens(n_q, n_k) };
                let case = rounded(p, Element::Bf16, 17, 2.0);
                let options = options(&format!("keys={keys}"));
                let got = run_method(&g.device, "top_k", &options, Element::Bf16, &case);
                let want = run_method(&g.device, "top_k", &options, Element::F32, &case);
                assert_close(&got, &want, d, 4e-3, &format!("{heads}/{kv} heads d{d} {n_q}×{n_k} {mask}"));
            }
        }
    }
}

/// Portable forms in double precision equal the host.
fn as_host(g: &Gpu, id: &str, text: &str) {
    let (host, options) = (attlas::registry::method(id).unwrap(), options(text));
    for (n_q, n_k) in [(300, 300), (70, 260), (260, 70), (1, 200)] {
        for mask in masks() {
            if mask == Mask::Causal && !host.claims.causal {
                continue;
            }
            let shape = Problem::new(4, 1, 16).with_kv_heads(2).with_lens(n_q, n_k);
            let p = Problem { mask, batch: 2, d_v: 24, ..shape };
            let case = Case::gaussian(p, 18);
            let learnt = (host.claims.needs == Needs::Calibration)
                .then(|| learn(host, &options, &case).unwrap())
                .flatten();
            let plan = host.plan_with(&p, &options, learnt.as_ref()).unwrap();
            let how = How { lse: host.claims.lse, ..How::default() };
            let want = run_with(&*plan, &case, how).unwrap();
            let got = run_method(&g.device, id, &options, Element::F64, &case);
            let want = Ran { o: want.o, lse: want.lse };
            assert_close(&got, &want, 24, 1e-10, &format!("{n_q}×{n_k} mask {mask}"));
        }
    }
}

/// A change of a later token does not change a bit of earlier rows; rows that attend to a NaN are not finite.
fn later_tokens(device: &Device, id: &str, text: &str, d: usize) {
    for (n_q, n_k) in [(1500, 1500), (700, 1500)] {
        let p = Problem::new(2, 1, d).with_kv_heads(1).with_lens(n_q, n_k).causal();
        let case = rounded(p, Element::Bf16, 12, 1.0);
        let planned = planned(device, id, &options(text), Element::Bf16, &case);
        let first = run(device, id, &*planned, &case);
        for t in [n_k - n_q + 1, 900, 1000, n_k - 1] {
            for change in [-3.0, 1e3, f64::NAN, f64::INFINITY] {
                let mut changed = case.clone();
                let row = t + n_q - n_k;
                let spoil = |x: &mut f64| *x = Element::Bf16.round(*x * change);
                changed.k[t * d..(t + 1) * d].iter_mut().for_each(spoil);
                changed.v[t * d..(t + 1) * d].iter_mut().for_each(spoil);
                for h in 0..2 {
                    changed.q[(h * n_q + row) * d..][..d].iter_mut().for_each(spoil);
                }
                let got = run(device, id, &*planned, &changed);
                for h in 0..2 {
                    let rows = h * n_q * d..(h * n_q + row) * d;
                    let same = got.o[rows.clone()]
                        .iter()
                        .zip(&first.o[rows])
                        .position(|(a, b)| a.to_bits() != b.to_bits());
                    assert!(
                        same.is_none(),
                        "{id} {n_q}×{n_k}: row {} before token {t} changed by {change}",
                        same.unwrap_or(0) / d
                    );
                    if change.is_nan() {
                        let own = &got.o[(h * n_q + row) * d..][..d];
                        assert!(own.iter().any(|x| x.is_nan()), "{id}: row {row} hides NaN");
                    }
                }
            }
        }
    }
}

/// A repeated run, a run from a graph, and a run of each head alone give the same bits.
fn same_bits(device: &Device, id: &str, text: &str, d: usize) {
    let p = Problem::new(4, 1500, d).with_kv_heads(2).causal();
    let case = rounded(p, Element::Bf16, 13, 1.0);
    let planned = planned(device, id, &options(text), Element::Bf16, &case);
    let first = run(device, id, &*planned, &case);
    for _ in 0..3 {
        assert!(run(device, id, &*planned, &case) == first, "{id}: bits differ from run to run");
    }
    // Captured into a graph and replayed.
    let load = |x: &[f64]| DeviceBuffer::from_host(device, Element::Bf16, x).unwrap();
    let (q, k, v) = (load(&case.q), load(&case.k), load(&case.v));
    let o = DeviceBuffer::new(device, Element::Bf16, case.q.len()).unwrap();
    let view = |b, h| DeviceRef::bhnd(b, [1, h, 1500, d]).unwrap();
    let x = DeviceQkv { q: view(&q, 4), k: view(&k, 2), v: view(&v, 2), key_lens: None };
    let mut out = DeviceOut { o: DeviceMut::bhnd(&o, [1, 4, 1500, d]).unwrap(), lse: None };
    let mut ws = DeviceWorkspace::new(device).unwrap();
    ws.reserve(planned.workspace_bytes()).unwrap();
    let graph = ws.capture(|ws| planned.execute(&x, &mut out, ws).map(|_| ())).unwrap();
    o.fill(255).unwrap();
    ws.replay(&graph).unwrap();
    ws.synchronize().unwrap();
    assert!(o.read().unwrap() == first.o, "{id}: a graph gives other bits");
}

/// At every setting at which a method claims to be exact, its bits equal those of `exact` on the same device.
fn exact_limits(g: &Gpu) {
    for form in registry::FORMS {
        let method: &Method = form.method;
        for &(name, budget) in method.claims.exact_at {
            for mask in masks() {
                for (element, d) in [(Element::Bf16, 64), (Element::F32, 16), (Element::F64, 16)] {
                    let p = Problem { mask, ..Problem::new(4, 197, d).with_kv_heads(2) };
                    let case = rounded(p, element, 14, 1.0);
                    let options = Options::new().with(name, budget.value(&p));
                    if !method.support(&p, &options).is_yes() {
                        continue;
                    }
                    let got = run_method(&g.device, method.id, &options, element, &case);
                    let mut want = run_method(&g.device, "exact", &Options::new(), element, &case);
                    if !method.claims.lse {
                        want.lse.clear();
                    }
                    assert!(got == want, "{} at {name} = {budget:?}, mask {mask}, {element:?}", method.id);
                }
            }
        }
    }
}

fn failures(g: &Gpu) {
    let device = &g.device;
    let too_much = DeviceBuffer::new(device, Element::F64, 1 << 42);
    assert!(
        matches!(too_much, Err(Error::OutOfMemory { asked, free }) if asked == 1 << 45 && free > 0),
        "{too_much:?}"
    );
    // The device still works.
    let p = Problem::new(2, 100, 64);
    let case = rounded(p, Element::Bf16, 15, 1.0);
    let first = run_method(device, "exact", &Options::new(), Element::Bf16, &case);
    let refused = plan("hyper", &p, &options("variant=theory"), None, Element::Bf16, device);
    assert!(
        matches!(&refused, Err(Error::Method(attlas::Error::Unsupported { reasons, .. })) if reasons.len() == 1)
    );
    let refused = plan("anna", &p, &Options::new(), None, Element::Bf16, device);
    assert!(matches!(refused, Err(Error::Method(attlas::Error::Unsupported { .. }))));
    let planned = plan("exact", &p, &Options::new(), None, Element::Bf16, device).unwrap();
    let (q, o) = (
        DeviceBuffer::from_host(device, Element::Bf16, &case.q).unwrap(),
        DeviceBuffer::new(device, Element::Bf16, case.q.len()).unwrap(),
    );
    o.fill(255).unwrap();
    let view = |n| DeviceRef::bhnd(&q, [1, 2, n, 64]).unwrap();
    let x = DeviceQkv { q: view(99), k: view(100), v: view(100), key_lens: None };
    let mut out = DeviceOut { o: DeviceMut::bhnd(&o, [1, 2, 100, 64]).unwrap(), lse: None };
    let mut ws = DeviceWorkspace::new(device).unwrap();
    assert!(matches!(
        planned.execute(&x, &mut out, &mut ws),
        Err(Error::Method(attlas::Error::Shape { .. }))
    ));
    assert!(o.read_bytes().unwrap().iter().all(|&b| b == 255), "writes before it refuses");
    // Corrupt cubins in the cache are recompiled.
    let folder = std::env::temp_dir().join(format!("attlas-cuda-check-{}", std::process::id()));
    let setup = Setup { cache: Some(folder.clone()), ..Setup::default() };
    for image in [b"\x7fELF of nothing".to_vec(), b"no cubin".to_vec()] {
        let Ok(own) = Device::open(0, &setup) else { return };
        run_method(&own, "exact", &Options::new(), Element::Bf16, &case);
        let mut files = 0;
        for file in std::fs::read_dir(&folder).unwrap() {
            std::fs::write(file.unwrap().path(), &image).unwrap();
            files += 1;
        }
        assert!(files > 0, "nothing was kept");
        let again = Device::open(0, &setup).unwrap();
        assert!(run_method(&again, "exact", &Options::new(), Element::Bf16, &case) == first);
    }
    std::fs::remove_dir_all(folder).unwrap();
}
