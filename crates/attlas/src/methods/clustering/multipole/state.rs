//! The clusters of a cache: built from a prompt, updated as tokens arrive.

use super::Params;
use attlas_num::cluster::kmeans::label_means;
use attlas_num::cluster::{Init, Metric, Options, kmeans, order_by};
use attlas_num::kernels::sq_dist;
use attlas_num::par::*;
use attlas_num::rng::StreamKey;
use attlas_num::{Mat, MatRef, Real};
use std::ops::Range;

/// Clusters of one level: members, numbers of keys, and means of keys and values.
#[derive(Clone, Debug)]
pub(super) struct Level<T> {
    keys: Vec<T>,
    values: Vec<T>,
    counts: Vec<usize>,
    log_counts: Vec<T>,
    /// Cluster `c` holds `members[starts[c]..starts[c + 1]]`.
    members: Vec<u32>,
    starts: Vec<usize>,
    /// Number of leading clusters that hold consecutive members, cluster after cluster, starting at `first`.
    arranged: usize,
    first: u32,
    d: usize,
    d_v: usize,
}

impl<T: Real> Level<T> {
    fn new(d: usize, d_v: usize) -> Self {
        let (keys, values) = (Vec::new(), Vec::new());
        let (counts, log_counts) = (Vec::new(), Vec::new());
        let (members, starts) = (Vec::new(), vec![0]);
        Self { keys, values, counts, log_counts, members, starts, arranged: 0, first: 0, d, d_v }
    }

    /// Number of clusters.
    pub(super) fn len(&self) -> usize {
        self.counts.len()
    }

    /// Means of keys, one row each.
    pub(super) fn keys(&self) -> MatRef<'_, T> {
        MatRef::new(&self.keys, self.len(), self.d)
    }

    /// Means of values, one row each.
    pub(super) fn values(&self) -> MatRef<'_, T> {
        MatRef::new(&self.values, self.len(), self.d_v)
    }

    /// Keys in a cluster.
    pub(super) fn count(&self, c: usize) -> usize {
        self.counts[c]
    }

    /// Natural logarithms of the clusters' numbers of keys.
    pub(super) fn log_counts(&self) -> &[T] {
        &self.log_counts
    }

    /// Positions of the keys in a cluster, or indices of its clusters in the level below.
    pub(super) fn members(&self, c: usize) -> &[u32] {
        &self.members[self.starts[c]..self.starts[c + 1]]
    }

    /// Appends the members of a cluster; arranged clusters need no look-up in the list.
    pub(super) fn append_members(&self, c: usize, to: &mut Vec<u32>) {
        if c < self.arranged {
            let place = |c: usize| self.first + self.starts[c] as u32;
            to.extend(place(c)..place(c + 1));
        } else {
            to.extend_from_slice(self.members(c));
        }
    }

    fn truncate(&mut self, clusters: usize) {
        self.keys.truncate(clusters * self.d);
        self.values.truncate(clusters * self.d_v);
        self.counts.truncate(clusters);
        self.log_counts.truncate(clusters);
        self.starts.truncate(clusters + 1);
        self.members.truncate(self.starts[clusters]);
    }

    /// Appends the clusters given by `labels` of rows numbered from `first`; row `i` stands for `counts(i)` keys.
    fn append(
        &mut self,
        keys: MatRef<'_, T>,
        values: MatRef<'_, T>,
        labels: &[u32],
        first: usize,
        counts: impl Fn(usize) -> usize,
    ) {
        let clusters = labels.iter().max().map_or(0, |&l| l as usize + 1);
        let weights: Vec<f64> = (0..labels.len()).map(|i| counts(i) as f64).collect();
        self.keys.extend_from_slice(label_means(keys, Some(&weights), labels, clusters).0.data());
        self.values.extend_from_slice(label_means(values, Some(&weights), labels, clusters).0.data());
        let start = self.counts.len();
        self.counts.resize(start + clusters, 0);
        let mut sizes = vec![0; clusters];
        for (i, &label) in labels.iter().enumerate() {
            self.counts[start + label as usize] += counts(i);
            sizes[label as usize] += 1;
        }
        let mut end = self.members.len();
        self.starts.extend(sizes.iter().map(|size| {
            end += size;
            end
        }));
        self.members.extend(order_by(labels).iter().map(|&i| (first + i as usize) as u32));
        let logs = self.counts[start..].iter().map(|&n| T::from_f64((n as f64).ln()));
        self.log_counts.extend(logs);
    }

    fn bytes(&self) -> usize {
        (self.keys.len() + self.values.len() + self.log_counts.len()) * size_of::<T>()
            + 8 * (self.counts.len() + self.starts.len())
            + 4 * self.members.len()
    }
}

/// The clusters of the keys after the sinks: first those of closed blocks, then those of the last, open block.
#[derive(Debug)]
pub(super) struct KeyClusters<T> {
    params: Params,
    key: StreamKey,
    /// Keys that are clustered, and how many of them lie in closed blocks.
    clustered: usize,
    closed: usize,
    fine: Level<T>,
    coarse: Option<Level<T>>,
    closed_fine: usize,
    closed_coarse: usize,
    /// Number of clusterings so far, which names their random streams.
    made: u64,
}

impl<T: Real> KeyClusters<T> {
    /// Creates a state without clusters.
    pub(super) fn new(params: Params, d: usize, d_v: usize, key: StreamKey) -> Self {
        let coarse = params.hierarchy.then(|| Level::new(d, d_v));
        Self {
            params,
            key,
            clustered: 0,
            closed: 0,
            fine: Level::new(d, d_v),
            coarse,
            closed_fine: 0,
            closed_coarse: 0,
            made: 0,
        }
    }

    /// The clusters of keys.
    pub(super) fn fine(&self) -> &Level<T> {
        &self.fine
    }

    /// The clusters of clusters, with a hierarchy.
    pub(super) fn coarse(&self) -> Option<&Level<T>> {
        self.coarse.as_ref()
    }

    /// Keys that are clustered.
    pub(super) fn clustered(&self) -> usize {
        self.clustered
    }

    /// Bytes held.
    pub(super) fn bytes(&self) -> usize {
        self.fine.bytes() + self.coarse.as_ref().map_or(0, Level::bytes)
    }

    /// Clusters the first `n` keys after the sinks, block by block.
    pub(super) fn prefill(&mut self, k: MatRef<'_, T>, v: MatRef<'_, T>, n: usize) {
        let window = self.params.window;
        let (mut blocks, mut rest) = (n / window, n % window);
        if rest < window / 2 && blocks > 0 {
            blocks -= 1;
            rest += window;
        }
        let blocks: Vec<Range<usize>> = (0..blocks)
            .map(|b| b * window..(b + 1) * window)
            .chain((rest > 0).then_some(n - rest..n))
            .collect();
        // Blocks are independent; each has its own random stream.
        let labels: Vec<Vec<u32>> = blocks
            .par_iter()
            .enumerate()
            .with_max_len(1)
            .map(|(b, block)| self.labels(k, block, self.made + 1 + b as u64))
            .collect();
        for (block, labels) in blocks.into_iter().zip(labels) {
            self.made += 1;
            let open = block.end == n;
            self.append(k, v, block, &labels);
            if !open {
                self.close(window);
            }
        }
        self.clustered = n;
    }

    /// Adds keys, `interval` at a time, until `n` are clustered.
    pub(super) fn update(&mut self, k: MatRef<'_, T>, v: MatRef<'_, T>, n: usize) {
        let Params { interval, window, .. } = self.params;
        while self.clustered < n {
            self.clustered += interval;
            let open = self.closed..self.clustered;
            if open.len() >= window + window / 2 {
                self.reopen();
                self.cluster_anew(k, v, open.start..open.start + window);
                self.close(window);
                self.cluster_anew(k, v, open.start + window..open.end);
            } else {
                self.join(k, v, open);
            }
        }
    }

    /// Reorders the rows of closed blocks, keys with their values, by cluster: attention reads them by cluster from now
    /// on, in contiguous runs of memory.
    pub(super) fn arrange(&mut self, rows: &mut [T]) {
        let width = self.fine.d + self.fine.d_v;
        let fine = &mut self.fine;
        let new = fine.starts[fine.arranged]..fine.starts[self.closed_fine];
        fine.arranged = self.closed_fine;
        if new.is_empty() {
            return;
        }
        // Blocks are consecutive, and so are the members of their clusters.
        fine.first = self.params.sinks as u32;
        let first = self.params.sinks + new.start;
        let (window, order) = (self.params.window, &mut fine.members[new]);
        for (first, block) in (first..).step_by(window).zip(order.chunks_mut(window)) {
            let moved: Vec<T> =
                block.iter().flat_map(|&j| &rows[j as usize * width..][..width]).copied().collect();
            rows[first * width..][..moved.len()].copy_from_slice(&moved);
            (first as u32..).zip(block).for_each(|(next, place)| *place = next);
        }
    }

    /// Closes the open block, which is `len` keys long.
    fn close(&mut self, len: usize) {
        self.closed += len;
        self.closed_fine = self.fine.len();
        self.closed_coarse = self.coarse.as_ref().map_or(0, Level::len);
    }

    /// Forgets the clusters of the open block.
    fn reopen(&mut self) {
        self.fine.truncate(self.closed_fine);
        if let Some(coarse) = &mut self.coarse {
            coarse.truncate(self.closed_coarse);
        }
    }

    fn rows<'a>(&self, x: MatRef<'a, T>, keys: &Range<usize>) -> MatRef<'a, T> {
        x.sub_rows(self.params.sinks + keys.start..self.params.sinks + keys.end)
    }

    /// Clusters the keys of a block from scratch.
    fn cluster_anew(&mut self, k: MatRef<'_, T>, v: MatRef<'_, T>, block: Range<usize>) {
        if block.is_empty() {
            return;
        }
        self.made += 1;
        let labels = self.labels(k, &block, self.made);
        self.append(k, v, block, &labels);
    }

    /// Clusters the keys of a block with the random stream of clustering number `made`; returns their labels.
    fn labels(&self, k: MatRef<'_, T>, block: &Range<usize>, made: u64) -> Vec<u32> {
        let clusters = share(block.len(), self.params.ratio);
        let options = Options { clusters, iters: self.params.iters, metric: Metric::Euclidean };
        kmeans(self.rows(k, block), None, options, Init::Rows, self.key.with(made)).labels
    }

    /// Lets the last `interval` keys of the open block join its clusters.
    fn join(&mut self, k: MatRef<'_, T>, v: MatRef<'_, T>, open: Range<usize>) {
        let Params { interval, ratio, update_iters, .. } = self.params;
        let rows = self.rows(k, &open);
        self.made += 1;
        let key = self.key.with(self.made);
        let old = self.closed_fine..self.fine.len();
        let mut centroids: Vec<T> = self.fine.keys[old.start * self.fine.d..].to_vec();
        let mut counts: Vec<usize> = self.fine.counts[old].to_vec();
        let new = open.len() - interval..open.len();
        let least = usize::from(counts.is_empty());
        let seeds = ((interval as f64 * ratio).round() as usize).clamp(least, interval);
        let seeds = key.named("seeds").rng().subset(interval, seeds);
        for &s in &seeds {
            centroids.extend_from_slice(rows.row(new.start + s));
            counts.push(1);
        }
        let d = rows.cols();
        for i in (0..interval).filter(|i| seeds.binary_search(i).is_err()) {
            let x = rows.row(new.start + i);
            let nearest = (0..counts.len())
                .map(|c| sq_dist(x, &centroids[c * d..(c + 1) * d]))
                .enumerate()
                .fold((0, T::INFINITY), |best, (c, far)| if far < best.1 { (c, far) } else { best })
                .0;
            counts[nearest] += 1;
            let share = T::from_f64(1.0 / counts[nearest] as f64);
            let centroid = &mut centroids[nearest * d..(nearest + 1) * d];
            centroid.iter_mut().zip(x).for_each(|(c, &x)| *c += (x - *c) * share);
        }
        let start = Mat::from_vec(centroids, counts.len(), d);
        let options = Options { clusters: counts.len(), iters: update_iters, metric: Metric::Euclidean };
        let found = kmeans(rows, None, options, Init::Given(start.as_ref()), key);
        self.reopen();
        self.append(k, v, open, &found.labels);
    }

    /// Appends the clusters of a block, and the coarse ones above them.
    fn append(&mut self, k: MatRef<'_, T>, v: MatRef<'_, T>, block: Range<usize>, labels: &[u32]) {
        let (keys, values) = (self.rows(k, &block), self.rows(v, &block));
        let first = self.fine.len();
        self.fine.append(keys, values, labels, self.params.sinks + block.start, |_| 1);
        let key = self.key.named("coarse").with(self.made);
        let Some(coarse) = &mut self.coarse else { return };
        let fine = &self.fine;
        let (keys, values) =
            (fine.keys().sub_rows(first..fine.len()), fine.values().sub_rows(first..fine.len()));
        let weights: Vec<f64> = fine.counts[first..].iter().map(|&n| n as f64).collect();
        let clusters = share(block.len(), self.params.coarse_ratio);
        let options = Options { clusters, iters: self.params.iters, metric: Metric::Euclidean };
        let found = kmeans(keys, Some(&weights), options, Init::Rows, key);
        coarse.append(keys, values, &found.labels, first, |i| fine.counts[first + i]);
    }

    /// A state with given clusters, for tests.
    #[cfg(test)]
    pub(super) fn with_labels(mut self, k: MatRef<'_, T>, v: MatRef<'_, T>, labels: &[u32]) -> Self {
        self.clustered = labels.len();
        self.append(k, v, 0..labels.len(), labels);
        self
    }
}

/// Number of clusters for `n` keys.
pub(super) fn share(n: usize, ratio: f64) -> usize {
    ((n as f64 * ratio).round() as usize).max(1)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Options as Settings;

    #[test]
    fn arranged_clusters_hold_the_same_keys_in_runs() {
        let settings = [("ratio", "0.2"), ("sinks", "3"), ("interval", "4"), ("window", "16")];
        let settings = settings.iter().fold(Settings::new(), |o, (k, v)| o.with(k, *v));
        let params = Params::from_options(&settings).unwrap();
        let mut rng = StreamKey::new(4).rng();
        let mut rows = vec![0.0f64; 100 * 5];
        rng.fill_normal(&mut rows);
        let mut state = KeyClusters::new(params, 2, 3, StreamKey::new(1));
        for (first, n) in [(true, 40), (false, 60), (false, 88)] {
            let view = |from: usize, cols| MatRef::with_stride(&rows[from..], 100, cols, 5).unwrap();
            let (keys, values) = (view(0, 2), view(2, 3));
            if first {
                state.prefill(keys, values, n)
            } else {
                state.update(keys, values, n)
            }
            state.arrange(&mut rows);
            assert!(state.fine.arranged > 0 && state.fine.arranged == state.closed_fine);
            for c in 0..state.fine.len() {
                let members = state.fine.members(c);
                assert!(c >= state.fine.arranged || members.windows(2).all(|m| m[1] == m[0] + 1));
                let mut appended = vec![7];
                state.fine.append_members(c, &mut appended);
                assert_eq!(&appended[1..], members);
                for (from, width, means) in [(0, 2, &state.fine.keys), (2, 3, &state.fine.values)] {
                    for i in 0..width {
                        let sum: f64 = members.iter().map(|&j| rows[j as usize * 5 + from + i]).sum();
                        assert!((sum / members.len() as f64 - means[c * width + i]).abs() < 1e-13);
                    }
                }
            }
        }
    }
}
