//! A near field makes methods useful on heads like trained ones: no method is worse with it than its near field alone.

use attlas::method::{Family, Needs};
use attlas::metrics::relative_frobenius;
use attlas::testkit::heads::trained_head;
use attlas::testkit::{How, run_with};
use attlas::{Method, Options, registry};

/// Returns settings that approximate a problem of a thousand tokens with some hundred scores per query.
fn settings(method: &Method) -> Options {
    let pairs: &[(&str, &str)] = match method.id {
        "reformer" => &[("rounds", "4"), ("block", "32")],
        "smyrf" => &[("rounds", "4"), ("block", "16"), ("min_len", "32")],
        "routing" => &[("clusters", "16"), ("window", "48")],
        "kdeformer" | "hyper" => &[("block", "16"), ("samples", "16"), ("n_min", "32")],
        "prescored_hyper" => &[("keys", "128"), ("block", "16"), ("n_min", "32")],
        "anna" => &[("weights", "softmax")],
        "multipole" => &[("budget", "32"), ("window", "128"), ("interval", "16"), ("sinks", "0")],
        "lifted_nystrom" => &[("landmarks", "48"), ("block", "64")],
        "wildcat" => &[("rank", "48"), ("block", "64")],
        "linformer" => &[("rank", "48")],
        _ => &[],
    };
    pairs.iter().fold(Options::new(), |o, (k, v)| o.with(k, *v))
}

#[test]
fn no_method_is_worse_with_a_near_field_than_the_near_field_alone() {
    let case = trained_head(1024, 32, 1).cast_f32();
    let run = |id: &str, options: &Options| {
        let plan = registry::method(id).unwrap().plan(&case.problem, options).unwrap();
        run_with(&*plan, &case, How::default()).unwrap()
    };
    let exact = run("exact", &Options::new());
    let error = |o: &[f64]| relative_frobenius(o, &exact.o);
    let alone = run("sink_window", &Options::new().with("sinks", 4).with("window", 64));
    let alone = error(&alone.o);
    let rows = 1024.0;
    let mut worst = Vec::new();
    let methods = registry::METHODS.iter().filter(|m| m.claims.lse && m.claims.softmax || m.id == "anna");
    let methods = methods.filter(|m| m.family != Family::Exact && m.claims.needs != Needs::Calibration);
    for method in methods {
        let with = settings(method).with("near.sinks", 4).with("near.window", 64);
        let far = run(method.id, &with);
        let heavy = run(method.id, &with.clone().with("near.heavy", 32));
        let published = run(method.id, &settings(method));
        let scores = far.info.keys_visited as f64 / rows;
        // A window with the same number of scores, with the rows before it counted as full.
        let wide = Options::new().with("sinks", 4).with("window", scores as usize - 4);
        println!(
            "{:16} published {:.3}; near field {:.3} at {scores:.0} scores, {:.3} with 32 heavy keys; window of as many {:.3}",
            method.id,
            error(&published.o),
            error(&far.o),
            error(&heavy.o),
            error(&run("sink_window", &wide).o),
        );
        // Its estimate explodes on single rows between those that the guard checks.
        let unguarded = method.id == "hybrid_features";
        if error(&far.o) > alone || error(&heavy.o) > alone && !unguarded {
            worst.push(format!("{}: {:.3}, heavy {:.3}", method.id, error(&far.o), error(&heavy.o)));
        }
    }
    println!("near field alone {alone:.3}");
    assert!(worst.is_empty(), "near field alone {alone:.3}; {worst:?}");
}
