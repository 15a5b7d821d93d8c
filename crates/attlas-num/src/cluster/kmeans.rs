//! k-means and its relatives: Euclidean, spherical, with medians; rows may carry weights.
//!
//! Lloyd's iteration: every row goes to the centroid with the smallest $|c|^2 - 2\langle x, c\rangle$ (ties to
//! the lower index), then every centroid becomes the weighted mean of its rows. After the last iteration
//! rows are assigned once more, counts and means are taken from those final labels, and empty clusters are
//! dropped, so labels, counts and centroids always agree.
//!
//! Assignment and means run on rayon's current pool where the work is large. Labels of different rows do not
//! depend on each other and every mean is summed in the order of its rows, so the bits of a result do not
//! depend on the number of threads.
//!
//! **Degenerate input.** Duplicate rows leave clusters empty, which are then dropped. A row with a NaN has no nearest
//! centroid and goes to cluster 0, whose centroid becomes NaN; no other row chooses a NaN centroid while another is
//! left.
//!
//! References: Lloyd 1982; Arthur and Vassilvitskii 2007 (k-means++); Dhillon and Modha 2001 (spherical).

use super::buckets::order_by;
use crate::hash::{project_tiles, squared_distance, squared_norm};
use crate::par::*;
use crate::rng::{Rng, StreamKey};
use crate::{Mat, MatRef, Real};

/// Multiplications below which threads cost more than they save.
const PARALLEL_WORK: usize = 1 << 20;
/// Rows that one task assigns.
const TASK_ROWS: usize = 256;
/// Rows whose sum is formed before it is added to that of the cluster: rounding errors grow with
/// $64 + n/64$ instead of $n$.
const SUM_ROWS: usize = 64;

/// Metric: the meaning of "nearest" and "centre".
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Metric {
    /// Least squared distance; the centre is the mean.
    Euclidean,
    /// Largest inner product; the centre is the mean scaled to length 1. Rows should have equal lengths.
    Spherical,
    /// Least squared distance; the centre is the median of every coordinate (the lower one of two). The
    /// objective need not fall from one iteration to the next.
    Median,
}

/// Settings of a clustering.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Options {
    /// Most clusters.
    pub clusters: usize,
    /// Iterations before the final assignment.
    pub iters: usize,
    /// Metric of distances and centres.
    pub metric: Metric,
}

impl Options {
    /// Returns the settings of ten iterations of plain k-means.
    pub fn new(clusters: usize) -> Self {
        Self { clusters, iters: 10, metric: Metric::Euclidean }
    }
}

/// Centroids at the start of the iteration.
#[derive(Clone, Copy, Debug)]
pub enum Init<'a, T> {
    /// Distinct random rows.
    Rows,
    /// Random rows, each drawn by weight times squared distance to the nearest one drawn before.
    PlusPlus,
    /// These centroids, all of them: a warm start.
    Given(MatRef<'a, T>),
}

/// Result of a clustering.
#[derive(Clone, Debug)]
pub struct Clustering<T> {
    /// Centre of each cluster, computed from the final labels.
    pub centroids: Mat<T>,
    /// Cluster of each row.
    pub labels: Vec<u32>,
    /// Rows in each cluster; none is zero.
    pub counts: Vec<usize>,
    /// Sum of the weights of each cluster; the counts if rows carry no weights.
    pub masses: Vec<f64>,
    /// Weighted sum of squared distances of the rows to their centroids.
    pub inertia: f64,
    /// The same sum at each assignment, the final one included, with the centroids before their update.
    /// Without re-seeded clusters it does not grow (Euclidean and spherical).
    pub history: Vec<f64>,
    /// Number of times that an empty cluster was given a new centroid.
    pub reseeded: usize,
}

/// Clusters the rows of `x`.
///
/// `options.clusters` is clamped to `1 ..= n`; [`Init::Given`] sets it instead. `weights` multiply rows; those that are
/// not positive finite numbers count as zero. A cluster without mass restarts from a random row, except in the last
/// iteration, where it keeps its centroid.
///
/// # Panics
/// If there are weights but not one per row, or given centroids have another length than rows.
pub fn kmeans<T: Real>(
    x: MatRef<'_, T>,
    weights: Option<&[f64]>,
    options: Options,
    init: Init<'_, T>,
    key: StreamKey,
) -> Clustering<T> {
    let Options { clusters, iters, metric } = options;
    let (n, d) = (x.rows(), x.cols());
    let weights: Vec<f64> = match weights {
        None => vec![1.0; n],
        Some(w) => {
            assert_eq!(w.len(), n);
            w.iter().map(|&w| if w > 0.0 && w.is_finite() { w } else { 0.0 }).collect()
        }
    };
    let mut centroids = if n == 0 {
        Mat::zeros(0, d)
    } else {
        initial(x, &weights, clusters.clamp(1, n), init, key.named("initial centroids"))
    };
    if metric == Metric::Spherical {
        (0..centroids.rows()).for_each(|c| normalise(centroids.row_mut(c)));
    }
    let mut labels = vec![0; n];
    let mut history = Vec::with_capacity(iters + 1);
    let mut reseeded = 0;
    let reseed = key.named("re-seeds");
    for iter in 0..iters {
        history.push(assign_and_measure(x, &weights, centroids.as_ref(), metric, &mut labels));
        let groups = Groups::new(&labels, &weights, centroids.rows());
        update(x, &weights, &groups, metric, &mut centroids);
        if iter + 1 < iters {
            for c in (0..centroids.rows()).filter(|&c| groups.masses[c] == 0.0) {
                let row = reseed.with(iter as u64).with(c as u64).rng().below(n);
                centroids.row_mut(c).copy_from_slice(x.row(row));
                if metric == Metric::Spherical {
                    normalise(centroids.row_mut(c));
                }
                reseeded += 1;
            }
        }
    }
    history.push(assign_and_measure(x, &weights, centroids.as_ref(), metric, &mut labels));
    let groups = Groups::new(&labels, &weights, centroids.rows());
    update(x, &weights, &groups, metric, &mut centroids);
    let counts = groups.counts();

    let full: Vec<usize> = (0..counts.len()).filter(|&c| counts[c] > 0).collect();
    let mut renumber = vec![0; counts.len()];
    full.iter().zip(0..).for_each(|(&c, new)| renumber[c] = new);
    labels.iter_mut().for_each(|l| *l = renumber[*l as usize]);
    let centroids = Mat::from_fn(full.len(), d, |c, j| centroids[(full[c], j)]);
    Clustering {
        inertia: inertia(x, &weights, centroids.as_ref(), &labels),
        centroids,
        labels,
        counts: full.iter().map(|&c| counts[c]).collect(),
        masses: full.iter().map(|&c| groups.masses[c]).collect(),
        history,
        reseeded,
    }
}

/// Assigns every row to its nearest centroid, the lowest index among equals; 0 if no distance is comparable.
///
/// # Panics
/// If `labels` does not have one element per row of `x`, or lengths of rows differ.
pub fn assign_into<T: Real>(x: MatRef<'_, T>, centroids: MatRef<'_, T>, metric: Metric, labels: &mut [u32]) {
    assert_eq!(labels.len(), x.rows());
    // Least |c|²/2 − ⟨x, c⟩; without the norms, the largest inner product.
    let half_norms: Vec<T> = match metric {
        Metric::Spherical => vec![T::ZERO; centroids.rows()],
        _ => centroids.iter_rows().map(|c| T::from_f64(0.5 * squared_norm(c))).collect(),
    };
    let work = x.rows() * x.cols() * centroids.rows();
    for_each_chunk(work, labels, |start, labels| {
        project_tiles(x.sub_rows(start..start + labels.len()), centroids, |i, y| {
            labels[i] = first_least(y, &half_norms);
        });
    });
}

/// Returns the index of the first least `norms[c] − y[c]`; 0 if none is comparable.
fn first_least<T: Real>(y: &[T], norms: &[T]) -> u32 {
    // Lane by lane, so that the compiler can keep the running minimum and its index in vector registers.
    const LANES: usize = 8;
    let (y_chunks, y_rest) = y.as_chunks::<LANES>();
    let (n_chunks, n_rest) = norms.as_chunks::<LANES>();
    let (mut least, mut place) = ([T::INFINITY; LANES], [0u32; LANES]);
    for (t, (y, n)) in (0u32..).zip(y_chunks.iter().zip(n_chunks)) {
        for l in 0..LANES {
            let score = n[l] - y[l];
            let better = score < least[l];
            least[l] = if better { score } else { least[l] };
            place[l] = if better { t } else { place[l] };
        }
    }
    let mut best = (T::INFINITY, 0);
    for l in 0..LANES {
        let c = place[l] * LANES as u32 + l as u32;
        if least[l] < best.0 || least[l] == best.0 && c < best.1 {
            best = (least[l], c);
        }
    }
    let tail = (y_chunks.len() * LANES) as u32;
    for (c, (&y, &n)) in (tail..).zip(y_rest.iter().zip(n_rest)) {
        if n - y < best.0 {
            best = (n - y, c);
        }
    }
    if best.0 == T::INFINITY { 0 } else { best.1 }
}

/// Computes the weighted mean of the rows of each label below `clusters`, and the number of rows; zero rows if a label
/// has no mass.
///
/// # Panics
/// If labels or weights do not have one element per row, or a label is not below `clusters`.
pub fn label_means<T: Real>(
    x: MatRef<'_, T>,
    weights: Option<&[f64]>,
    labels: &[u32],
    clusters: usize,
) -> (Mat<T>, Vec<usize>) {
    assert_eq!(labels.len(), x.rows());
    let ones;
    let weights = match weights {
        Some(w) => w,
        None => {
            ones = vec![1.0; x.rows()];
            &ones
        }
    };
    let mut means = Mat::zeros(clusters, x.cols());
    let groups = Groups::new(labels, weights, clusters);
    update(x, weights, &groups, Metric::Euclidean, &mut means);
    (means, groups.counts())
}

/// Rows of each cluster, in increasing order.
struct Groups {
    order: Vec<u32>,
    /// Rows of cluster `c` are `order[starts[c]..starts[c + 1]]`.
    starts: Vec<usize>,
    masses: Vec<f64>,
}

impl Groups {
    fn new(labels: &[u32], weights: &[f64], clusters: usize) -> Self {
        assert_eq!(labels.len(), weights.len());
        let mut starts = vec![0; clusters + 1];
        let mut masses = vec![0.0; clusters];
        for (&label, &weight) in labels.iter().zip(weights) {
            starts[label as usize + 1] += 1;
            masses[label as usize] += weight;
        }
        (0..clusters).for_each(|c| starts[c + 1] += starts[c]);
        Self { order: order_by(labels), starts, masses }
    }

    fn rows(&self, c: usize) -> &[u32] {
        &self.order[self.starts[c]..self.starts[c + 1]]
    }

    fn counts(&self) -> Vec<usize> {
        self.starts.windows(2).map(|w| w[1] - w[0]).collect()
    }
}

/// Moves every centroid with mass to the centre of its rows.
fn update<T: Real>(
    x: MatRef<'_, T>,
    weights: &[f64],
    groups: &Groups,
    metric: Metric,
    centroids: &mut Mat<T>,
) {
    let d = x.cols();
    if d == 0 || centroids.rows() == 0 {
        return;
    }
    let centre = |(c, out): (usize, &mut [T])| {
        let (rows, mass) = (groups.rows(c), groups.masses[c]);
        if mass == 0.0 {
            return;
        }
        match metric {
            Metric::Median => median_into(x, weights, rows, mass, out),
            Metric::Euclidean => {
                let sum = weighted_sum(x, weights, rows);
                out.iter_mut().zip(&sum).for_each(|(o, s)| *o = T::from_f64(s / mass));
            }
            Metric::Spherical => {
                let sum = weighted_sum(x, weights, rows);
                let length = squared_norm(&sum).sqrt();
                // Rows that cancel have no direction: the centroid stays.
                if length != 0.0 {
                    out.iter_mut().zip(&sum).for_each(|(o, s)| *o = T::from_f64(s / length));
                }
            }
        }
    };
    if x.rows() * d >= PARALLEL_WORK {
        centroids.data_mut().par_chunks_mut(d).enumerate().for_each(centre);
    } else {
        centroids.data_mut().chunks_mut(d).enumerate().for_each(centre);
    }
}

/// Computes the weighted sum of some rows, in their order.
fn weighted_sum<T: Real>(x: MatRef<'_, T>, weights: &[f64], rows: &[u32]) -> Vec<f64> {
    let mut total = vec![0.0; x.cols()];
    let mut part = vec![0.0; x.cols()];
    for block in rows.chunks(SUM_ROWS) {
        part.fill(0.0);
        for &i in block {
            let w = weights[i as usize];
            part.iter_mut().zip(x.row(i as usize)).for_each(|(p, v)| *p += w * v.to_f64());
        }
        total.iter_mut().zip(&part).for_each(|(t, p)| *t += p);
    }
    total
}

/// Computes the lower weighted median of every coordinate.
fn median_into<T: Real>(x: MatRef<'_, T>, weights: &[f64], rows: &[u32], mass: f64, out: &mut [T]) {
    let mut column: Vec<(T, f64)> = Vec::with_capacity(rows.len());
    for (j, out) in out.iter_mut().enumerate() {
        column.clear();
        column.extend(rows.iter().map(|&i| (x.row(i as usize)[j], weights[i as usize])));
        column.sort_by(|a, b| a.0.to_f64().total_cmp(&b.0.to_f64()));
        let mut below = 0.0;
        let middle = column.iter().find(|(_, w)| {
            below += w;
            2.0 * below >= mass
        });
        // Rounding may leave the running sum just short of half the mass at the very end.
        if let Some(&(v, _)) = middle.or(column.last()) {
            *out = v;
        }
    }
}

/// Scales to length 1; a zero row stays.
fn normalise<T: Real>(row: &mut [T]) {
    let length = squared_norm(row).sqrt();
    if length != 0.0 {
        row.iter_mut().for_each(|v| *v = T::from_f64(v.to_f64() / length));
    }
}

fn assign_and_measure<T: Real>(
    x: MatRef<'_, T>,
    weights: &[f64],
    centroids: MatRef<'_, T>,
    metric: Metric,
    labels: &mut [u32],
) -> f64 {
    if x.rows() == 0 {
        return 0.0;
    }
    assign_into(x, centroids, metric, labels);
    inertia(x, weights, centroids, labels)
}

/// Computes the weighted sum of squared distances, from differences: rows on their centroid add exactly nothing.
fn inertia<T: Real>(x: MatRef<'_, T>, weights: &[f64], centroids: MatRef<'_, T>, labels: &[u32]) -> f64 {
    let mut terms = vec![0.0; x.rows()];
    for_each_chunk(x.rows() * x.cols(), &mut terms, |start, terms| {
        for (i, term) in (start..).zip(terms) {
            *term = weights[i] * squared_distance(x.row(i), centroids.row(labels[i] as usize));
        }
    });
    terms.iter().sum()
}

/// Calls `f(start, chunk)` on pieces of `out`, in parallel if `work` is large.
fn for_each_chunk<U: Send>(work: usize, out: &mut [U], f: impl Fn(usize, &mut [U]) + Sync) {
    if work >= PARALLEL_WORK {
        out.par_chunks_mut(TASK_ROWS).enumerate().for_each(|(t, chunk)| f(t * TASK_ROWS, chunk));
    } else {
        f(0, out);
    }
}

fn initial<T: Real>(
    x: MatRef<'_, T>,
    weights: &[f64],
    k: usize,
    init: Init<'_, T>,
    key: StreamKey,
) -> Mat<T> {
    let rows = match init {
        Init::Given(centroids) => {
            assert_eq!(centroids.cols(), x.cols());
            // An empty list of centroids cannot serve any row.
            if centroids.rows() > 0 {
                return centroids.to_mat();
            }
            vec![0]
        }
        Init::Rows => key.rng().subset(x.rows(), k),
        Init::PlusPlus => plus_plus(x, weights, k, &mut key.rng()),
    };
    let mut centroids = Mat::zeros(rows.len(), x.cols());
    x.gather_into(rows, centroids.data_mut());
    centroids
}

/// Chooses rows by k-means++: probability proportional to weight times *squared* distance.
fn plus_plus<T: Real>(x: MatRef<'_, T>, weights: &[f64], k: usize, rng: &mut Rng) -> Vec<usize> {
    let mut chosen = vec![draw(weights, rng)];
    let mut mass = vec![f64::INFINITY; x.rows()];
    while chosen.len() < k {
        let last = x.row(chosen[chosen.len() - 1]);
        for_each_chunk(x.rows() * x.cols(), &mut mass, |start, mass| {
            for (i, m) in (start..).zip(mass) {
                *m = m.min(weights[i] * squared_distance(x.row(i), last));
            }
        });
        chosen.push(draw(&mass, rng));
    }
    chosen
}

/// Draws an index by weight; uniformly if no weight is a positive finite number.
fn draw(weights: &[f64], rng: &mut Rng) -> usize {
    let usable = |w: f64| if w > 0.0 && w.is_finite() { w } else { 0.0 };
    let total: f64 = weights.iter().map(|&w| usable(w)).sum();
    if !(total > 0.0 && total.is_finite()) {
        return rng.below(weights.len());
    }
    let mut left = rng.uniform() * total;
    let mut last = 0;
    for (i, w) in weights.iter().map(|&w| usable(w)).enumerate().filter(|(_, w)| *w > 0.0) {
        if left < w {
            return i;
        }
        left -= w;
        last = i;
    }
    last
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::hash::tests::{assert_frequency, gaussian};

    const KEY: u64 = 17;

    fn run(x: &Mat<f64>, k: usize, iters: usize, metric: Metric, init: Init<'_, f64>) -> Clustering<f64> {
        let result =
            kmeans(x.as_ref(), None, Options { clusters: k, iters, metric }, init, StreamKey::new(KEY));
        check(x, &result);
        result
    }

    /// Checks the properties of every result.
    fn check(x: &Mat<f64>, result: &Clustering<f64>) {
        let k = result.counts.len();
        assert_eq!(result.centroids.rows(), k);
        assert_eq!(result.counts.iter().sum::<usize>(), x.rows());
        let mut counts = vec![0; k];
        result.labels.iter().for_each(|&l| counts[l as usize] += 1);
        assert_eq!(counts, result.counts);
        assert!(counts.iter().all(|&c| c > 0));
        assert!(result.centroids.data().iter().all(|v| v.is_finite()));
    }

    fn unit_rows(mut x: Mat<f64>) -> Mat<f64> {
        (0..x.rows()).for_each(|i| normalise(x.row_mut(i)));
        x
    }

    #[test]
    fn inertia_never_grows() {
        for seed in 0..8 {
            let x = gaussian::<f64>(seed, 300, 5);
            let u = unit_rows(x.clone());
            for init in [Init::Rows, Init::PlusPlus] {
                for (x, metric) in [(&x, Metric::Euclidean), (&u, Metric::Spherical)] {
                    let result = run(x, 12, 15, metric, init);
                    assert_eq!(result.reseeded, 0);
                    assert_eq!(result.history.len(), 16);
                    let slack = 1.0 + 300.0 * f64::EPSILON;
                    assert!(result.history.windows(2).all(|w| w[1] <= w[0] * slack), "{:?}", result.history);
                    assert!(result.history[15] < 0.95 * result.history[0]);
                    assert!(result.inertia <= result.history[15] * slack);
                }
            }
        }
    }

    #[test]
    fn one_cluster_is_the_mean_of_all_rows() {
        let x = gaussian::<f64>(1, 1000, 3);
        for iters in [0, 1, 4] {
            let result = run(&x, 1, iters, Metric::Euclidean, Init::Rows);
            for j in 0..3 {
                let mean = (0..1000).map(|i| x[(i, j)]).sum::<f64>() / 1000.0;
                assert!((result.centroids[(0, j)] - mean).abs() < 1e-14);
            }
            assert_eq!(result.masses, [1000.0]);
        }
    }

    #[test]
    fn one_cluster_of_medians_is_the_median_of_every_coordinate() {
        for n in [1, 4, 7] {
            let x = gaussian::<f64>(2, n, 3);
            let result = run(&x, 1, 2, Metric::Median, Init::Rows);
            for j in 0..3 {
                let mut column: Vec<f64> = (0..n).map(|i| x[(i, j)]).collect();
                column.sort_by(f64::total_cmp);
                assert_eq!(result.centroids[(0, j)], column[(n - 1) / 2]);
            }
        }
        // An outlier moves the mean, not the median.
        let x = Mat::from_vec(vec![0.0, 1.0, 2.0, 3.0, 1e6], 5, 1);
        assert_eq!(run(&x, 1, 1, Metric::Median, Init::Rows).centroids.data(), [2.0]);
        let w = kmeans(
            x.as_ref(),
            Some(&[1.0, 1.0, 1.0, 1.0, 9.0]),
            Options { clusters: 1, iters: 1, metric: Metric::Median },
            Init::Rows,
            StreamKey::new(0),
        );
        assert_eq!(w.centroids.data(), [1e6]);
    }

    #[test]
    fn as_many_clusters_as_distinct_rows_leave_no_inertia() {
        let x = gaussian::<f64>(3, 40, 6);
        for k in [40, 41, 4000] {
            for init in [Init::Rows, Init::PlusPlus] {
                let result = run(&x, k, 3, Metric::Euclidean, init);
                assert_eq!((result.inertia, result.counts.len()), (0.0, 40));
            }
        }
        // In single precision as well.
        let single = kmeans(
            x.cast::<f32>().as_ref(),
            None,
            Options { clusters: 40, iters: 3, metric: Metric::Euclidean },
            Init::Rows,
            StreamKey::new(1),
        );
        assert_eq!(single.inertia, 0.0);
    }

    #[test]
    fn duplicates_give_fewer_clusters_and_no_nan() {
        let x = Mat::from_fn(30, 2, |i, j| (i % 3) as f64 + 10.0 * j as f64);
        for metric in [Metric::Euclidean, Metric::Spherical, Metric::Median] {
            for init in [Init::Rows, Init::PlusPlus] {
                let result = run(&x, 9, 6, metric, init);
                assert!(result.counts.len() <= 3, "{metric:?}");
            }
        }
        let found = run(&x, 9, 6, Metric::Euclidean, Init::PlusPlus);
        assert_eq!((found.counts, found.inertia), (vec![10, 10, 10], 0.0));
        assert!(found.reseeded > 0);
        let same = Mat::from_fn(20, 4, |_, j| j as f64);
        let result = run(&same, 5, 3, Metric::Euclidean, Init::PlusPlus);
        assert_eq!((result.counts, result.inertia), (vec![20], 0.0));
        assert_eq!(run(&Mat::zeros(6, 2), 2, 2, Metric::Spherical, Init::Rows).counts, [6]);
    }

    #[test]
    fn well_separated_clusters_are_found_by_k_means_plus_plus() {
        let noise = gaussian::<f64>(5, 400, 4);
        let x = Mat::from_fn(400, 4, |i, j| 0.1 * noise[(i, j)] + if j == i % 4 { 50.0 } else { 0.0 });
        let result = run(&x, 4, 5, Metric::Euclidean, Init::PlusPlus);
        assert_eq!(result.counts, [100; 4]);
        assert!((0..400).all(|i| result.labels[i] == result.labels[i % 4]));
        let far = |i: usize| squared_distance(x.row(i), result.centroids.row(result.labels[i] as usize));
        assert!((0..400).all(|i| far(i) < 1.0));
        let squares: f64 = (0..400).map(far).sum();
        assert!((squares - result.inertia).abs() < 1e-12 * squares);
    }

    #[test]
    fn k_means_plus_plus_draws_by_squared_distance() {
        let x = Mat::from_vec(vec![0.0, 1.0, 3.0], 3, 1);
        let mut rng = StreamKey::new(6).rng();
        let mut missing = [0; 3];
        for _ in 0..20_000 {
            let chosen = plus_plus(x.as_ref(), &[1.0; 3], 2, &mut rng);
            missing[3 - chosen[0] - chosen[1]] += 1;
        }
        let (p2, p1) = ((1.0 / 10.0 + 1.0 / 5.0) / 3.0, (9.0 / 10.0 + 9.0 / 13.0) / 3.0);
        for (count, p) in missing.into_iter().zip([1.0 - p1 - p2, p1, p2]) {
            assert_frequency(count, 20_000, p);
        }
        // Weights multiply the squared distances, and the first draw is by weight alone.
        let first =
            (0..20_000).filter(|_| plus_plus(x.as_ref(), &[1.0, 0.0, 3.0], 2, &mut rng)[0] == 2).count();
        assert_frequency(first, 20_000, 0.75);
        assert!(!plus_plus(x.as_ref(), &[1.0, 0.0, 3.0], 2, &mut rng).contains(&1));
    }

    #[test]
    fn a_warm_start_at_a_fixed_point_stays_there() {
        let x = gaussian::<f64>(7, 200, 3);
        let cold = run(&x, 6, 200, Metric::Euclidean, Init::Rows);
        let warm = run(&x, 1, 3, Metric::Euclidean, Init::Given(cold.centroids.as_ref()));
        assert_eq!(cold.labels, warm.labels);
        assert_eq!(cold.centroids, warm.centroids);
        assert_eq!(cold.inertia, warm.inertia);
        // Without iterations, given centroids only assign labels; then means are taken.
        let given = Mat::from_vec(vec![-10.0, 0.0, 0.0, 10.0, 0.0, 0.0], 2, 3);
        let labelled = run(&x, 2, 0, Metric::Euclidean, Init::Given(given.as_ref()));
        assert!((0..200).all(|i| labelled.labels[i] == u32::from(x[(i, 0)] > 0.0)));
        assert_eq!(label_means(x.as_ref(), None, &labelled.labels, 2), (labelled.centroids, labelled.counts));
        let none = run(&x, 2, 1, Metric::Euclidean, Init::Given(Mat::zeros(0, 3).as_ref()));
        assert_eq!(none.counts, [200]);
    }

    #[test]
    fn empty_clusters_start_anew_but_not_in_the_last_iteration() {
        let x = gaussian::<f64>(15, 50, 2);
        let start = Mat::from_vec(vec![0.0, 0.0, 1e6, 1e6], 2, 2);
        let init = Init::Given(start.as_ref());
        let last = run(&x, 2, 1, Metric::Euclidean, init);
        assert_eq!((last.reseeded, last.counts), (0, vec![50]));
        let again = run(&x, 2, 2, Metric::Euclidean, init);
        assert_eq!((again.reseeded, again.counts.len()), (1, 2));
    }

    #[test]
    fn integer_weights_count_as_copies() {
        let x = gaussian::<f64>(8, 60, 3);
        let weights: Vec<f64> = (0..60).map(|i| f64::from(i % 4)).collect();
        let copies: Vec<usize> = (0..60).flat_map(|i| std::iter::repeat_n(i, i % 4)).collect();
        let repeated = Mat::from_fn(copies.len(), 3, |i, j| x[(copies[i], j)]);
        let start = gaussian::<f64>(9, 5, 3);
        for metric in [Metric::Euclidean, Metric::Spherical, Metric::Median] {
            let init = Init::Given(start.as_ref());
            let a = kmeans(
                x.as_ref(),
                Some(&weights),
                Options { clusters: 5, iters: 8, metric },
                init,
                StreamKey::new(1),
            );
            let b = run(&repeated, 5, 8, metric, init);
            assert_eq!(a.masses, b.counts.iter().map(|&c| c as f64).collect::<Vec<_>>());
            let close = |(x, y): (&f64, &f64)| (x - y).abs() < 1e-12;
            assert!(a.centroids.data().iter().zip(b.centroids.data()).all(close), "{metric:?}");
            assert!((a.inertia - b.inertia).abs() < 1e-12 * b.inertia);
        }
    }

    #[test]
    fn clusters_of_centroids_keep_the_mass_and_the_mean_of_the_rows() {
        let x = gaussian::<f64>(10, 500, 4);
        let fine = run(&x, 60, 10, Metric::Euclidean, Init::Rows);
        let coarse = kmeans(
            fine.centroids.as_ref(),
            Some(&fine.masses),
            Options { clusters: 8, iters: 10, metric: Metric::Euclidean },
            Init::Rows,
            StreamKey::new(2),
        );
        assert_eq!(coarse.masses.iter().sum::<f64>(), 500.0);
        let through: Vec<u32> = fine.labels.iter().map(|&l| coarse.labels[l as usize]).collect();
        let (means, counts) = label_means(x.as_ref(), None, &through, coarse.counts.len());
        for (c, &count) in counts.iter().enumerate() {
            assert_eq!(count as f64, coarse.masses[c]);
            assert!(squared_distance(means.row(c), coarse.centroids.row(c)) < 1e-26);
        }
    }

    #[test]
    fn spherical_centroids_have_length_one_and_scores_are_inner_products() {
        let x = unit_rows(gaussian(11, 200, 4));
        let result = run(&x, 7, 20, Metric::Spherical, Init::Rows);
        for c in 0..7 {
            assert!((squared_norm(result.centroids.row(c)) - 1.0).abs() < 1e-14);
        }
        // At a fixed point every row is with its largest inner product.
        let again = run(&x, 7, 100, Metric::Spherical, Init::Given(result.centroids.as_ref()));
        let mut labels = vec![0; 200];
        assign_into(x.as_ref(), again.centroids.as_ref(), Metric::Spherical, &mut labels);
        assert_eq!(labels, again.labels);
        for (i, &label) in labels.iter().enumerate() {
            let score = |c: usize| crate::linalg::dot(x.row(i), again.centroids.row(c));
            // The product and this dot product are rounded differently.
            assert!((0..7).all(|c| score(c) <= score(label as usize) + 8.0 * f64::EPSILON));
        }
    }

    #[test]
    fn ties_go_to_the_lower_index() {
        let x = Mat::from_vec(vec![0.0, 0.0, 5.0, 0.0], 2, 2);
        let centroids = Mat::from_vec(vec![1.0, 0.0, -1.0, 0.0, 1.0, 0.0], 3, 2);
        let mut labels = [9; 2];
        for metric in [Metric::Euclidean, Metric::Spherical] {
            assign_into(x.as_ref(), centroids.as_ref(), metric, &mut labels);
            assert_eq!(labels, [0, 0]);
        }
    }

    #[test]
    fn the_number_of_threads_does_not_move_a_bit() {
        let x = gaussian::<f32>(12, 3000, 16);
        // Large enough for the parallel path in assignment.
        const { assert!(3000 * 16 * 40 >= PARALLEL_WORK) };
        let with = |threads: usize| {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
            pool.install(|| {
                kmeans(
                    x.as_ref(),
                    None,
                    Options { clusters: 40, iters: 5, metric: Metric::Euclidean },
                    Init::PlusPlus,
                    StreamKey::new(3),
                )
            })
        };
        let (one, four) = (with(1), with(4));
        assert_eq!(one.labels, four.labels);
        assert_eq!(one.centroids, four.centroids);
        assert_eq!(one.history, four.history);
    }

    #[test]
    fn no_rows_and_one_row_are_clustered() {
        let none = run(&Mat::zeros(0, 3), 4, 5, Metric::Euclidean, Init::PlusPlus);
        assert!(none.labels.is_empty() && none.counts.is_empty() && none.inertia == 0.0);
        assert_eq!(none.centroids.cols(), 3);
        let x = Mat::from_vec(vec![2.0, -1.0], 1, 2);
        let one = run(&x, 0, 5, Metric::Euclidean, Init::PlusPlus);
        assert_eq!((one.centroids.data(), &one.labels[..], one.inertia), (x.data(), &[0][..], 0.0));
        assert_eq!(run(&Mat::zeros(3, 0), 2, 2, Metric::Euclidean, Init::Rows).counts, [3]);
    }

    #[test]
    fn rows_with_nan_spoil_one_cluster_only() {
        let mut x = gaussian::<f64>(13, 100, 2);
        x[(17, 1)] = f64::NAN;
        x[(60, 0)] = f64::NAN;
        for init in [Init::Rows, Init::PlusPlus] {
            let result = kmeans(
                x.as_ref(),
                None,
                Options { clusters: 5, iters: 6, metric: Metric::Euclidean },
                init,
                StreamKey::new(4),
            );
            assert_eq!(result.labels.len(), 100);
            let bad = result.labels[17];
            assert_eq!(result.labels[60], bad);
            for c in 0..result.counts.len() {
                let finite = result.centroids.row(c).iter().all(|v| v.is_finite());
                assert_eq!(finite, c != bad as usize);
            }
            assert_eq!(result.counts[bad as usize], 2);
        }
    }

    #[test]
    fn weights_that_are_no_weights_count_as_zero() {
        let x = gaussian::<f64>(14, 5, 2);
        let weights = [1.0, f64::NAN, -3.0, f64::INFINITY, 1.0];
        let result = kmeans(
            x.as_ref(),
            Some(&weights),
            Options { clusters: 1, iters: 3, metric: Metric::Euclidean },
            Init::PlusPlus,
            StreamKey::new(5),
        );
        assert_eq!((result.masses[0], result.counts[0]), (2.0, 5));
        for j in 0..2 {
            assert!((result.centroids[(0, j)] - 0.5 * (x[(0, j)] + x[(4, j)])).abs() < 1e-15);
        }
        let none = kmeans(
            x.as_ref(),
            Some(&[0.0; 5]),
            Options { clusters: 2, iters: 3, metric: Metric::Euclidean },
            Init::PlusPlus,
            StreamKey::new(5),
        );
        assert!(none.centroids.data().iter().all(|v| v.is_finite()) && none.inertia == 0.0);
    }
}
