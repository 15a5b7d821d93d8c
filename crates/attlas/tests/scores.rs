//! `keys_visited` has one unit for every method: inner products of queries with keys or with vectors that represent
//! keys.

use attlas::testkit::{Case, How, run_with};
use attlas::{DType, Method, Options, Out, Problem, RunInfo, TensorMut, TensorRef, Workspace, registry};

fn options(pairs: &[(&str, &str)]) -> Options {
    pairs.iter().fold(Options::new(), |o, (k, v)| o.with(k, *v))
}

fn run(id: &str, pairs: &[(&str, &str)], case: &Case) -> RunInfo {
    let method: &Method = registry::method(id).unwrap();
    let plan = method.plan(&case.problem, &options(pairs)).unwrap();
    run_with(&*plan, case, How { lse: method.claims.lse, ..How::default() }).unwrap().info
}

#[test]
fn densities_of_kdeformer_count_every_term() {
    let case = Case::gaussian(Problem::new(1, 128, 8), 1);
    let pairs = [("block", "8"), ("samples", "16"), ("kde", "exact"), ("z_mode", "kde")];
    // One density for the row sums, and 16 sampled columns.
    let rows = run("kdeformer", &pairs, &case).keys_visited;
    assert_eq!(rows, 128 * (128 + 16));
    // Another one for the norms of columns.
    let both = run("kdeformer", &[&pairs[..], &[("p_mode", "kde")]].concat(), &case).keys_visited;
    assert_eq!(both, 128 * (2 * 128 + 16));
    let sampled = [("kde", "weighted"), ("kde_samples", "5")];
    let few = run("kdeformer", &[&pairs[..2], &[("z_mode", "kde")], &sampled].concat(), &case);
    assert_eq!(few.keys_visited, 128 * (5 + 16));
}

#[test]
fn routing_counts_its_centroids_and_its_clustering() {
    let case = Case::gaussian(Problem::new(2, 96, 8).with_kv_heads(1), 2);
    let pairs = [("clusters", "6"), ("window", "10"), ("iters", "3"), ("fallback", "zero")];
    let info = run("routing", &pairs, &case);
    // Each of 192 queries is scored by 6 centroids, and 6 groups of 10 queries attend to 10 keys in either head.
    assert_eq!(info.keys_visited, 192 * 6 + 2 * 6 * 10 * 10);
    // 288 rows in 3 iterations and a last assignment, then the keys.
    assert_eq!(info.setup_scores, 288 * 6 * 4 + 96 * 6);
}

#[test]
fn anna_counts_the_sums_and_the_keys_it_reads() {
    let case = Case::gaussian(Problem::new(1, 50, 6), 3);
    // One bucket in either table.
    let sums = run("anna", &[("hashes", "0"), ("rounds", "2")], &case);
    assert_eq!(sums.keys_visited, 100);
    // Every key shares a bucket with every query in three tables, and has one logit.
    let wide = [("hashes", "1"), ("width", "1e9"), ("rounds", "3"), ("weights", "softmax")];
    assert_eq!(run("anna", &wide, &case).keys_visited, 2500);
    // Buckets that hold no key are not read.
    let narrow = run("anna", &[("hashes", "8"), ("width", "0.01"), ("rounds", "4")], &case);
    assert_eq!(narrow.keys_visited, 0);
}

#[test]
fn clusterings_of_keys_are_set_up() {
    let case = Case::gaussian(Problem::new(1, 96, 8), 4);
    let pairs = [("keys", "40"), ("block", "8"), ("n_min", "8"), ("clusters", "5"), ("iters", "3")];
    let info = run("prescored_hyper", &[&pairs[..], &[("score", "kmeans_outlier")]].concat(), &case);
    assert_eq!(info.setup_scores, 96 * 5 * 4);
    assert_eq!(run("prescored_hyper", &pairs, &case).setup_scores, 0);
}

#[test]
fn a_stream_of_features_counts_what_its_prompt_counts() {
    let p = Problem::new(2, 40, 8).with_kv_heads(1).causal();
    let case = Case::gaussian(p, 5);
    let method = registry::method("performer").unwrap();
    let plan = method.plan(&p, &options(&[("features", "24")])).unwrap();
    let prompt = run_with(&*plan, &case, How::default()).unwrap().info.keys_visited;
    assert_eq!(prompt, 80 * 24);
    let view = |x, h| TensorRef::bhnd(x, [1, h, 40, 8]).unwrap();
    let (q, k, v) = (view(&case.q, 2), view(&case.k, 1), view(&case.v, 1));
    let mut stream = plan.stream(DType::F64).unwrap();
    let mut ws = Workspace::single().unwrap();
    stream.push(k.into(), v.into(), &mut ws).unwrap();
    let mut o = vec![0.0f64; 16];
    let out = Out::new(TensorMut::bhnd(&mut o, [1, 2, 1, 8]).unwrap());
    let info = stream.attend(q.rows(39..40).into(), &mut out.into(), &mut ws).unwrap();
    assert_eq!(info.keys_visited, 2 * 24);
}
