//! Tokens as particles.
//!
//! Tokens are particles that attend to each other with shared matrices; the depth of a transformer is time:
//! $P_{ij} = \operatorname{softmax}_j \langle Qx_i, Kx_j\rangle$ and $\dot x_i = \sum_j P_{ij} V x_j$ (`free`), the
//! same in the moving frame $z = e^{-tV}x$ (`rescaled`), or on the unit sphere with $P$ sharpened by $\beta$
//! (`sphere`). Clusters emerge, and $P(t)$ tends to a Boolean matrix of low rank. Proofs need hypotheses: the Boolean
//! limit is for $d = 1$ with $V > 0$, $QK > 0$ and allows one exceptional row; the polytope of limits is for $V = I$
//! and $Q^\top K \succ 0$; one cluster on the sphere holds for $Q = K = V = I$, and causally for $V = I$
//! (geshkovski2023, geshkovski2025, karagodin2024).

use crate::{Error, Result};
use attlas::Mat;
use attlas_num::linalg;
use attlas_num::rng::StreamKey;
use serde::Serialize;
use std::fmt::Write;

/// Space of the particles and motion of its frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
#[cfg_attr(feature = "clap", derive(clap::ValueEnum))]
pub enum Model {
    /// In space, where positions grow like exp(tV).
    Free,
    /// In space, in a frame that grows with the particles.
    Rescaled,
    /// On the unit sphere.
    Sphere,
}

/// Integration scheme.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Scheme {
    /// Fourth order, weights computed anew at every stage.
    Rk4,
    /// First order.
    Euler,
}

/// A system of particles.
#[derive(Clone, Debug)]
pub struct Particles {
    /// Space of the particles.
    pub model: Model,
    /// Initial positions, one particle per row.
    pub start: Mat<f64>,
    /// $Q$, $K$ and $V$, each `d × d`.
    pub qkv: [Mat<f64>; 3],
    /// Factor of the inner products, for the sphere only.
    pub beta: f64,
    /// Particle `i` attends only to particles `0..=i`.
    pub causal: bool,
    /// End time.
    pub t_end: f64,
    /// Length of a step.
    pub dt: f64,
    /// Integration scheme.
    pub scheme: Scheme,
}

/// Result of a run of particles.
#[derive(Clone, Debug, Serialize)]
pub struct ParticlesRun {
    /// Space of the particles.
    pub model: Model,
    /// Particles and their dimension.
    pub n: usize,
    /// Dimension.
    pub d: usize,
    /// Factor of the inner products on the sphere.
    pub beta: f64,
    /// True if later particles are hidden.
    pub causal: bool,
    /// Integration scheme.
    pub scheme: Scheme,
    /// Length of a step.
    pub dt: f64,
    /// Time reached; less than `t_end` if the free system overflowed.
    pub t: f64,
    /// Cluster of each particle, numbered in order of first appearance.
    pub cluster: Vec<usize>,
    /// Particles of each cluster.
    pub cluster_sizes: Vec<usize>,
    /// Mean of each cluster.
    pub centres: Vec<Vec<f64>>,
    /// Singular values of $P$ above 1e-6 of the largest.
    pub rank: usize,
    /// Largest distance of an entry of $P$ to 0 or 1.
    pub boolean_gap: f64,
    /// For each particle, the one it attends to most.
    pub leader: Vec<usize>,
    /// Largest distance between two particles, over the recorded times.
    pub diameter: Vec<f64>,
    /// Rate of contraction to one point (chen2025): $\lambda$ of the fit $\mathrm{diameter} \sim e^{-\lambda t}$ from
    /// the time at which the diameter is a tenth of the first; none if it never is.
    pub contraction_rate: Option<f64>,
    /// Length or area of the convex hull over the recorded times, in one and two dimensions.
    pub hull: Option<Vec<f64>>,
    /// $\sum_{ij} e^{\beta\langle x_i, x_j\rangle} / (2\beta n^2)$ over the recorded times, on the sphere.
    pub energy: Option<Vec<f64>>,
    /// The recorded times.
    pub times: Vec<f64>,
    /// Positions at the recorded times: `[time][particle][coordinate]`.
    pub path: Vec<Vec<Vec<f64>>>,
}

/// Distance below which two particles share a cluster.
const TOUCH: f64 = 0.05;
/// Inner product above which two particles on the sphere share a cluster.
const TOUCH_SPHERE: f64 = 0.999;
/// Number of recorded positions.
const FRAMES: usize = 200;

impl Particles {
    /// Draws `n` particles in `d` dimensions with $Q = K = V = I$, uniform in $[-5, 5]^d$ or on the sphere.
    pub fn new(model: Model, n: usize, d: usize, seed: u64) -> Self {
        let mut rng = StreamKey::new(seed).named("particles").rng();
        let mut start = match model {
            Model::Sphere => Mat::from_fn(n, d, |_, _| rng.normal()),
            _ => Mat::from_fn(n, d, |_, _| 10.0 * rng.uniform() - 5.0),
        };
        if model == Model::Sphere {
            normalise(&mut start);
        }
        let id = Mat::identity(d);
        let t_end = match model {
            Model::Sphere => 15.0,
            Model::Rescaled => 6.0,
            Model::Free => 2.0,
        };
        Self {
            model,
            start,
            qkv: [id.clone(), id.clone(), id],
            beta: 1.0,
            causal: false,
            t_end,
            dt: 0.05,
            scheme: Scheme::Rk4,
        }
    }

    fn check(&self) -> Result<()> {
        let (n, d) = (self.start.rows(), self.start.cols());
        if n == 0 || d == 0 {
            return Err(Error::argument(
                "particles",
                "at least one, of at least one dimension",
                format!("{n} of {d}"),
            ));
        }
        if self.qkv.iter().any(|m| (m.rows(), m.cols()) != (d, d)) {
            return Err(Error::argument("Q, K and V", format!("{d} × {d} matrices"), "other sizes"));
        }
        let finite =
            self.start.data().iter().chain(self.qkv.iter().flat_map(|m| m.data())).all(|x| x.is_finite());
        if !finite || !self.beta.is_finite() || self.beta <= 0.0 {
            return Err(Error::argument(
                "particles",
                "finite positions, matrices and a positive beta",
                "others",
            ));
        }
        if !(self.t_end >= 0.0 && self.t_end.is_finite() && self.dt > 0.0 && self.t_end / self.dt <= 1e7) {
            let found = format!("{} in steps of {}", self.t_end, self.dt);
            return Err(Error::argument("time", "a finite time in at most ten million steps", found));
        }
        Ok(())
    }

    /// Returns the attention matrix of positions `x` (in the moving frame, if there is one) at time `t`.
    pub fn weights(&self, x: &Mat<f64>, t: f64) -> Mat<f64> {
        let moved;
        let x = match self.model {
            Model::Rescaled => {
                moved = linalg::matmul_nt(x.as_ref(), exponential(&self.qkv[2], t).as_ref());
                &moved
            }
            _ => x,
        };
        let q = linalg::matmul_nt(x.as_ref(), self.qkv[0].as_ref());
        let k = linalg::matmul_nt(x.as_ref(), self.qkv[1].as_ref());
        let mut p = linalg::matmul_nt(q.as_ref(), k.as_ref());
        let beta = if self.model == Model::Sphere { self.beta } else { 1.0 };
        for i in 0..p.rows() {
            let row = p.row_mut(i);
            row.iter_mut().enumerate().for_each(|(j, p)| {
                *p = if self.causal && j > i { f64::NEG_INFINITY } else { beta * *p };
            });
            // The standard library's exponential keeps weights of 1e-200.
            let top = row.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            row.iter_mut().for_each(|p| *p = (*p - top).exp());
            let total: f64 = row.iter().sum();
            row.iter_mut().for_each(|p| *p /= total);
        }
        p
    }

    fn velocity(&self, x: &Mat<f64>, t: f64) -> Mat<f64> {
        let p = self.weights(x, t);
        let v = linalg::matmul_nt(x.as_ref(), self.qkv[2].as_ref());
        let mut out = linalg::matmul(p.as_ref(), v.as_ref());
        for i in 0..x.rows() {
            match self.model {
                Model::Free => {}
                Model::Rescaled => out.row_mut(i).iter_mut().zip(v.row(i)).for_each(|(o, v)| *o -= v),
                Model::Sphere => {
                    let along: f64 = x.row(i).iter().zip(out.row(i)).map(|(a, b)| a * b).sum();
                    out.row_mut(i).iter_mut().zip(x.row(i)).for_each(|(o, x)| *o -= along * x);
                }
            }
        }
        out
    }

    fn step(&self, x: &Mat<f64>, t: f64, dt: f64) -> Mat<f64> {
        let moved = |k: &Mat<f64>, c: f64| Mat::from_fn(x.rows(), x.cols(), |i, j| x[(i, j)] + c * k[(i, j)]);
        let k1 = self.velocity(x, t);
        let mut next = match self.scheme {
            Scheme::Euler => moved(&k1, dt),
            Scheme::Rk4 => {
                let k2 = self.velocity(&moved(&k1, dt / 2.0), t + dt / 2.0);
                let k3 = self.velocity(&moved(&k2, dt / 2.0), t + dt / 2.0);
                let k4 = self.velocity(&moved(&k3, dt), t + dt);
                let mean = Mat::from_fn(x.rows(), x.cols(), |i, j| {
                    (k1[(i, j)] + 2.0 * k2[(i, j)] + 2.0 * k3[(i, j)] + k4[(i, j)]) / 6.0
                });
                moved(&mean, dt)
            }
        };
        if self.model == Model::Sphere {
            normalise(&mut next);
        }
        next
    }

    /// Integrates from time 0 to the end; returns the times and positions of each `every`-th step and of the last.
    fn integrate(&self, dt: f64, every: usize) -> (Vec<f64>, Vec<Mat<f64>>) {
        let steps = (self.t_end / dt).round().max(if self.t_end > 0.0 { 1.0 } else { 0.0 }) as usize;
        let dt = if steps > 0 { self.t_end / steps as f64 } else { 0.0 };
        let (mut times, mut path) = (vec![0.0], vec![self.start.clone()]);
        let mut x = self.start.clone();
        for s in 0..steps {
            let next = self.step(&x, s as f64 * dt, dt);
            if next.data().iter().any(|x| !x.is_finite() || x.abs() > 1e300) {
                break;
            }
            x = next;
            if (s + 1).is_multiple_of(every) || s + 1 == steps {
                times.push((s + 1) as f64 * dt);
                path.push(x.clone());
            }
        }
        (times, path)
    }

    /// Runs the system and describes its final state.
    pub fn run(&self) -> Result<ParticlesRun> {
        self.check()?;
        let every = ((self.t_end / self.dt) as usize / FRAMES).max(1);
        let (times, path) = self.integrate(self.dt, every);
        let (x, t) = (&path[path.len() - 1], times[times.len() - 1]);
        let p = self.weights(x, t);
        let cluster = self.clusters(x);
        let count = cluster.iter().max().map_or(0, |c| c + 1);
        let mut sizes = vec![0u32; count];
        let mut centres = vec![vec![0.0; x.cols()]; count];
        for (i, &c) in cluster.iter().enumerate() {
            sizes[c] += 1;
            centres[c].iter_mut().zip(x.row(i)).for_each(|(m, x)| *m += x);
        }
        for (centre, &size) in centres.iter_mut().zip(&sizes) {
            centre.iter_mut().for_each(|m| *m /= f64::from(size));
        }
        let singular = linalg::singular_values(p.as_ref())
            .map_err(|e| Error::argument("attention matrix", "one whose singular values can be found", e))?;
        let leader = (0..p.rows())
            .map(|i| (0..p.cols()).fold(0, |best, j| if p[(i, j)] > p[(i, best)] { j } else { best }))
            .collect();
        Ok(ParticlesRun {
            model: self.model,
            n: x.rows(),
            d: x.cols(),
            beta: self.beta,
            causal: self.causal,
            scheme: self.scheme,
            dt: self.dt,
            t,
            cluster,
            cluster_sizes: sizes.iter().map(|&s| s as usize).collect(),
            centres,
            rank: linalg::eps_rank(&singular, 1e-6),
            boolean_gap: p.data().iter().map(|p| (p - p.round()).abs()).fold(0.0, f64::max),
            leader,
            contraction_rate: contraction_rate(&times, &path.iter().map(diameter).collect::<Vec<_>>()),
            diameter: path.iter().map(diameter).collect(),
            hull: (x.cols() <= 2).then(|| path.iter().map(hull).collect()),
            energy: (self.model == Model::Sphere).then(|| path.iter().map(|x| self.energy(x)).collect()),
            path: path.iter().map(|x| (0..x.rows()).map(|i| x.row(i).to_vec()).collect()).collect(),
            times,
        })
    }

    /// Runs with a step so short that halving it moves no final position by 1e-4; halves it at most eight times.
    pub fn run_converged(&self) -> Result<ParticlesRun> {
        self.check()?;
        let end = |dt: f64| self.integrate(dt, usize::MAX).1.pop().unwrap_or_else(|| self.start.clone());
        let mut fine = Self { dt: self.dt.min(0.05), ..self.clone() };
        let mut last = end(fine.dt);
        for _ in 0..8 {
            let next = end(fine.dt / 2.0);
            let moved = last.data().iter().zip(next.data()).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
            if moved < 1e-4 {
                break;
            }
            fine.dt /= 2.0;
            last = next;
        }
        fine.run()
    }

    /// Clusters particles by single linkage: chains of neighbours that touch.
    fn clusters(&self, x: &Mat<f64>) -> Vec<usize> {
        let n = x.rows();
        let touch = |i: usize, j: usize| match self.model {
            Model::Sphere => x.row(i).iter().zip(x.row(j)).map(|(a, b)| a * b).sum::<f64>() > TOUCH_SPHERE,
            _ => distance(x, i, j) < TOUCH,
        };
        let mut cluster = vec![usize::MAX; n];
        let mut count = 0;
        for first in 0..n {
            if cluster[first] != usize::MAX {
                continue;
            }
            let mut open = vec![first];
            cluster[first] = count;
            while let Some(i) = open.pop() {
                for j in 0..n {
                    if cluster[j] == usize::MAX && touch(i, j) {
                        cluster[j] = count;
                        open.push(j);
                    }
                }
            }
            count += 1;
        }
        cluster
    }

    fn energy(&self, x: &Mat<f64>) -> f64 {
        let n = x.rows() as f64;
        let gram = linalg::matmul_nt(x.as_ref(), x.as_ref());
        gram.data().iter().map(|g| (self.beta * g).exp()).sum::<f64>() / (2.0 * self.beta * n * n)
    }
}

fn normalise(x: &mut Mat<f64>) {
    for i in 0..x.rows() {
        let norm = x.row(i).iter().map(|x| x * x).sum::<f64>().sqrt();
        if norm > 0.0 {
            x.row_mut(i).iter_mut().for_each(|x| *x /= norm);
        }
    }
}

fn distance(x: &Mat<f64>, i: usize, j: usize) -> f64 {
    x.row(i).iter().zip(x.row(j)).map(|(a, b)| (a - b) * (a - b)).sum::<f64>().sqrt()
}

fn diameter(x: &Mat<f64>) -> f64 {
    (0..x.rows())
        .flat_map(|i| (0..i).map(move |j| (i, j)))
        .map(|(i, j)| distance(x, i, j))
        .fold(0.0, f64::max)
}

/// Returns the length or area of the convex hull of points on a line or in the plane.
fn hull(x: &Mat<f64>) -> f64 {
    if x.cols() == 1 {
        return diameter(x);
    }
    let mut points: Vec<(f64, f64)> = (0..x.rows()).map(|i| (x[(i, 0)], x[(i, 1)])).collect();
    points.sort_by(|a, b| a.0.total_cmp(&b.0).then(a.1.total_cmp(&b.1)));
    let turn =
        |a: (f64, f64), b: (f64, f64), c: (f64, f64)| (b.0 - a.0) * (c.1 - a.1) - (b.1 - a.1) * (c.0 - a.0);
    let chain = |points: &mut dyn Iterator<Item = &(f64, f64)>| {
        let mut line: Vec<(f64, f64)> = Vec::new();
        for &p in points {
            while line.len() > 1 && turn(line[line.len() - 2], line[line.len() - 1], p) <= 0.0 {
                line.pop();
            }
            line.push(p);
        }
        line.pop();
        line
    };
    let mut ring = chain(&mut points.iter());
    ring.extend(chain(&mut points.iter().rev()));
    let twice: f64 = (0..ring.len())
        .map(|i| {
            let (a, b) = (ring[i], ring[(i + 1) % ring.len()]);
            a.0 * b.1 - a.1 * b.0
        })
        .sum();
    twice.abs() / 2.0
}

/// Computes $e^{tV}$ by scaling, Taylor's polynomial and squaring.
fn exponential(v: &Mat<f64>, t: f64) -> Mat<f64> {
    let d = v.rows();
    let norm = (0..d).map(|i| v.row(i).iter().map(|x| (x * t).abs()).sum::<f64>()).fold(0.0, f64::max);
    let squarings = norm.log2().ceil().max(0.0) as i32 + 4;
    let factor = t / 2f64.powi(squarings);
    let small = Mat::from_fn(d, d, |i, j| v[(i, j)] * factor);
    let (mut sum, mut term) = (Mat::identity(d), Mat::identity(d));
    for n in 1..=14 {
        term = linalg::matmul(term.as_ref(), small.as_ref());
        term.data_mut().iter_mut().for_each(|x| *x /= f64::from(n));
        sum.data_mut().iter_mut().zip(term.data()).for_each(|(s, t)| *s += t);
    }
    for _ in 0..squarings {
        sum = linalg::matmul(sum.as_ref(), sum.as_ref());
    }
    sum
}

impl ParticlesRun {
    /// Draws the paths of the particles: rings at the start, dots at the end, one colour per cluster. Beyond two
    /// dimensions the first two coordinates are drawn.
    pub fn svg(&self) -> String {
        const SIZE: f64 = 640.0;
        const MARGIN: f64 = 28.0;
        let at = |frame: usize, i: usize| {
            let p = &self.path[frame][i];
            // On a line, time runs to the right.
            if self.d > 1 { (p[0], p[1]) } else { (self.times[frame], p[0]) }
        };
        let frames = 0..self.path.len();
        let all: Vec<(f64, f64)> =
            frames.clone().flat_map(|f| (0..self.n).map(move |i| (f, i))).map(|(f, i)| at(f, i)).collect();
        let range = |of: fn(&(f64, f64)) -> f64| {
            let lo = all.iter().map(of).fold(f64::INFINITY, f64::min);
            let hi = all.iter().map(of).fold(f64::NEG_INFINITY, f64::max);
            (lo, if hi > lo { hi } else { lo + 1.0 })
        };
        let (x, y) = (range(|p| p.0), range(|p| p.1));
        // Equal units on both axes in the plane.
        let unit = |lo: f64, hi: f64| (SIZE - 2.0 * MARGIN) / (hi - lo);
        let (ux, uy) = match self.d {
            1 => (unit(x.0, x.1), unit(y.0, y.1)),
            _ => {
                let u = unit(x.0, x.1).min(unit(y.0, y.1));
                (u, u)
            }
        };
        let place = |(px, py): (f64, f64)| (MARGIN + (px - x.0) * ux, SIZE - MARGIN - (py - y.0) * uy);
        let colour = |c: usize| format!("hsl({:.0} 65% 45%)", (c as f64 * 137.508) % 360.0);
        let mut svg = format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {SIZE} {SIZE}\" role=\"img\" \
             aria-label=\"paths of {} particles that end in {} clusters\">\n<rect width=\"{SIZE}\" height=\"{SIZE}\" fill=\"#fff\"/>\n",
            self.n,
            self.cluster_sizes.len()
        );
        for i in 0..self.n {
            let c = colour(self.cluster[i]);
            let points: Vec<String> = frames
                .clone()
                .map(|f| {
                    let (px, py) = place(at(f, i));
                    format!("{px:.1},{py:.1}")
                })
                .collect();
            let ((sx, sy), (ex, ey)) = (place(at(0, i)), place(at(self.path.len() - 1, i)));
            let _ = writeln!(
                svg,
                "<polyline points=\"{}\" fill=\"none\" stroke=\"{c}\" stroke-opacity=\"0.45\"/>\
                 <circle cx=\"{sx:.1}\" cy=\"{sy:.1}\" r=\"3.5\" fill=\"none\" stroke=\"{c}\"/>\
                 <circle cx=\"{ex:.1}\" cy=\"{ey:.1}\" r=\"4\" fill=\"{c}\"/>",
                points.join(" ")
            );
        }
        let _ = writeln!(
            svg,
            "<text x=\"{MARGIN}\" y=\"18\" font-family=\"system-ui,sans-serif\" font-size=\"13\">{} particles, t = {:.2}: {} clusters, \
             attention of rank {}</text>\n</svg>",
            self.n,
            self.t,
            self.cluster_sizes.len(),
            self.rank
        );
        svg
    }
}

/// Fits the slope of $-\ln \mathrm{diameter}$ by least squares, from a tenth of the first diameter down to rounding;
/// `None` with fewer than five times in between.
fn contraction_rate(times: &[f64], diameter: &[f64]) -> Option<f64> {
    let first = *diameter.first()?;
    let near = |d: f64| d < 0.1 * first && d > 1e-9 * first;
    let points: Vec<(f64, f64)> =
        times.iter().zip(diameter).filter(|(_, d)| near(**d)).map(|(t, d)| (*t, d.ln())).collect();
    if points.len() < 5 {
        return None;
    }
    let n = points.len() as f64;
    let mean = |f: fn(&(f64, f64)) -> f64| points.iter().map(f).sum::<f64>() / n;
    let (t, y) = (mean(|p| p.0), mean(|p| p.1));
    let (up, down) =
        points.iter().fold((0.0, 0.0), |(a, b), p| (a + (p.0 - t) * (p.1 - y), b + (p.0 - t).powi(2)));
    Some(-up / down)
}

#[cfg(test)]
mod tests {
    use super::*;
    use attlas_num::tensor::known::entry;

    fn fill(n: usize, d: usize, seed: u64, factor: f64) -> Mat<f64> {
        Mat::from_fn(n, d, |i, j| factor * entry(i * d + j, seed))
    }

    fn system(model: Model, start: Mat<f64>, t_end: f64) -> Particles {
        Particles { start, t_end, ..Particles::new(model, 1, 1, 0) }.identity()
    }

    impl Particles {
        fn identity(mut self) -> Self {
            let id = Mat::identity(self.start.cols());
            self.qkv = [id.clone(), id.clone(), id];
            self
        }
    }

    fn never_grows(series: &[f64]) {
        let start = series[0].abs();
        assert!(series.windows(2).all(|w| w[1] <= w[0] + 1e-12 * start), "{series:?}");
    }

    #[test]
    fn rescaled_particles_gather_at_the_corners_of_a_polytope() {
        let run = system(Model::Rescaled, fill(20, 2, 60, 5.0), 6.0).run().unwrap();
        assert_eq!(run.cluster_sizes, [9, 2, 5, 2, 2]);
        let corners = [[3.176, -4.260], [2.215, 4.960], [-4.855, 3.485], [4.854, 1.169], [-3.693, -4.125]];
        for (centre, corner) in run.centres.iter().zip(corners) {
            assert!((centre[0] - corner[0]).hypot(centre[1] - corner[1]) < 0.02, "{centre:?} {corner:?}");
        }
        assert!(run.boolean_gap < 1e-200, "{}", run.boolean_gap);
        assert!(run.rank <= 5);
        never_grows(&run.diameter);
        never_grows(run.hull.as_ref().unwrap());
    }

    #[test]
    fn on_a_line_attention_becomes_boolean_of_rank_two_or_one() {
        let run = system(Model::Rescaled, fill(8, 1, 61, 3.0), 5.0).run().unwrap();
        assert_eq!(run.rank, 2);
        let want: Vec<usize> = (0..8).map(|i| if [4, 5, 7].contains(&i) { 5 } else { 1 }).collect();
        assert_eq!(run.leader, want);
        let narrow = system(Model::Rescaled, fill(8, 1, 61, 1.0), 5.0).run().unwrap();
        assert_eq!((narrow.rank, narrow.leader), (1, vec![1; 8]));
    }

    fn normalised(mut x: Mat<f64>) -> Mat<f64> {
        normalise(&mut x);
        x
    }

    #[test]
    fn a_hemisphere_collapses_to_a_point_and_energy_rises_to_its_limit() {
        let mut start = fill(32, 3, 62, 1.0);
        (0..32).for_each(|i| start[(i, 2)] = start[(i, 2)].abs() + 0.2);
        let spread = |run: &ParticlesRun| {
            let x = &run.path[run.path.len() - 1];
            let dot = |i: usize, j: usize| x[i].iter().zip(&x[j]).map(|(a, b)| a * b).sum::<f64>();
            (0..32)
                .flat_map(|i| (0..32).map(move |j| (i, j)))
                .map(|(i, j)| 1.0 - dot(i, j))
                .fold(0.0, f64::max)
        };
        let system = system(Model::Sphere, normalised(start), 10.0);
        let run = system.run().unwrap();
        assert!(spread(&run) < 1e-7);
        let longer = Particles { t_end: 15.0, ..system }.run().unwrap();
        assert!(spread(&longer) < 1e-12);
        let energy = longer.energy.unwrap();
        assert!(energy.windows(2).all(|w| w[1] >= w[0] - 1e-14));
        assert!((energy[energy.len() - 1] - 1f64.exp() / 2.0).abs() < 1e-10);
        assert_eq!(longer.cluster_sizes, [32]);
    }

    #[test]
    fn causal_particles_on_the_sphere_follow_the_first() {
        let start = normalised(fill(32, 3, 63, 1.0));
        let system = Particles { causal: true, ..system(Model::Sphere, start.clone(), 30.0) };
        let far = |run: &ParticlesRun| {
            let x = &run.path[run.path.len() - 1];
            let to =
                |p: &Vec<f64>| p.iter().zip(start.row(0)).map(|(a, b)| (a - b).powi(2)).sum::<f64>().sqrt();
            assert!(to(&x[0]) < 1e-14);
            x.iter().map(to).fold(0.0, f64::max)
        };
        assert!(far(&system.run().unwrap()) < 2e-3);
        assert!(far(&Particles { t_end: 60.0, ..system }.run().unwrap()) < 4e-10);
    }

    #[test]
    fn sharper_attention_leaves_more_clusters_on_the_circle() {
        let start = normalised(fill(32, 2, 64, 1.0));
        for (beta, clusters) in [(1.0, 1), (4.0, 2), (9.0, 3), (25.0, 4)] {
            let run = Particles { beta, ..system(Model::Sphere, start.clone(), 50.0) }.run().unwrap();
            assert_eq!(run.cluster_sizes.len(), clusters, "beta = {beta}");
        }
    }

    #[test]
    fn a_rotation_of_the_start_rotates_the_end() {
        let start = fill(12, 2, 65, 2.0);
        let (c, s) = (0.6, 0.8);
        let turned = Mat::from_fn(12, 2, |i, j| {
            if j == 0 { c * start[(i, 0)] - s * start[(i, 1)] } else { s * start[(i, 0)] + c * start[(i, 1)] }
        });
        for model in [Model::Free, Model::Rescaled] {
            let end = |x: Mat<f64>| system(model, x, 1.0).run().unwrap().path.pop().unwrap();
            let (a, b) = (end(start.clone()), end(turned.clone()));
            for (p, q) in a.iter().zip(b) {
                assert!(
                    (c * p[0] - s * p[1] - q[0]).abs() < 1e-11 && (s * p[0] + c * p[1] - q[1]).abs() < 1e-11
                );
            }
        }
    }

    #[test]
    fn both_frames_describe_the_same_particles() {
        let start = fill(9, 2, 66, 1.0);
        let v = Mat::from_vec(vec![0.7, 0.2, -0.1, 0.4], 2, 2);
        let run = |model| {
            let mut p = Particles { dt: 0.01, ..system(model, start.clone(), 1.5) };
            p.qkv[2] = v.clone();
            p.run().unwrap().path.pop().unwrap()
        };
        let (x, z) = (run(Model::Free), run(Model::Rescaled));
        let e = exponential(&v, 1.5);
        for (x, z) in x.iter().zip(z) {
            for i in 0..2 {
                assert!((x[i] - e[(i, 0)] * z[0] - e[(i, 1)] * z[1]).abs() < 1e-7);
            }
        }
    }

    #[test]
    fn the_scheme_is_of_fourth_order() {
        let start = fill(6, 2, 67, 1.0);
        let end = |dt: f64| {
            let p = Particles { dt, ..system(Model::Free, start.clone(), 1.0) };
            p.integrate(dt, usize::MAX).1.pop().unwrap()
        };
        let exact = end(1.0 / 512.0);
        let error =
            |dt: f64| end(dt).data().iter().zip(exact.data()).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
        let ratio = error(1.0 / 8.0) / error(1.0 / 16.0);
        assert!(ratio > 12.0 && ratio < 20.0, "{ratio}");
        let fine = system(Model::Free, start, 1.0).run_converged().unwrap();
        assert!(fine.dt <= 0.05);
    }

    #[test]
    fn a_free_system_stops_before_it_overflows_and_bad_ones_are_refused() {
        let run = Particles { dt: 0.5, ..system(Model::Free, fill(3, 1, 1, 1.0), 5000.0) }.run().unwrap();
        assert!(run.t < 5000.0 && run.path.iter().flatten().flatten().all(|x| x.is_finite()));
        assert!(Particles { dt: 0.0, ..system(Model::Free, fill(3, 1, 1, 1.0), 1.0) }.run().is_err());
        assert!(system(Model::Free, Mat::zeros(0, 2), 1.0).run().is_err());
        let mut bad = system(Model::Free, fill(3, 2, 1, 1.0), 1.0);
        bad.qkv[0] = Mat::identity(3);
        assert!(bad.run().is_err());
    }

    #[test]
    fn the_picture_holds_every_particle() {
        for (model, d) in [(Model::Rescaled, 2), (Model::Rescaled, 1), (Model::Sphere, 3)] {
            let svg = Particles { t_end: 1.0, ..Particles::new(model, 7, d, 1) }.run().unwrap().svg();
            assert_eq!(svg.matches("<polyline").count(), 7);
            assert!(svg.starts_with("<svg") && svg.ends_with("</svg>\n") && !svg.contains("NaN"));
        }
    }

    #[test]
    fn one_cluster_on_the_sphere_contracts_at_a_rate_that_is_found() {
        // Close particles with Q = K = V = I: the linearised system contracts like e^(-t).
        let mut system = Particles::new(Model::Sphere, 12, 3, 4);
        let mut near = Mat::from_fn(12, 3, |i, j| if j == 0 { 1.0 } else { 0.01 * system.start[(i, j)] });
        normalise(&mut near);
        system.start = near;
        system.t_end = 12.0;
        let rate = system.run().unwrap().contraction_rate.unwrap();
        assert!((rate - 1.0).abs() < 0.02, "{rate}");
        // A value matrix twice as large contracts twice as fast.
        system.qkv[2].data_mut().iter_mut().for_each(|v| *v *= 2.0);
        let twice = system.run().unwrap().contraction_rate.unwrap();
        assert!((twice / rate - 2.0).abs() < 0.02, "{twice}");
        assert!(Particles::new(Model::Rescaled, 20, 2, 1).run().unwrap().contraction_rate.is_none());
    }

    #[test]
    fn a_value_matrix_of_one_good_direction_sends_particles_to_hyperplanes() {
        // V = diag(1, −1): rescaled particles keep their second coordinate and take few values along the first axis
        // (geshkovski2023, Theorem 4.2: at most three parallel hyperplanes).
        let mut system = Particles::new(Model::Rescaled, 20, 2, 2);
        system.qkv[2] = Mat::from_fn(2, 2, |i, j| if i == j { 1.0 - 2.0 * i as f64 } else { 0.0 });
        system.t_end = 10.0;
        let run = system.run().unwrap();
        let end = &run.path[run.path.len() - 1];
        let mut along: Vec<f64> = end.iter().map(|x| x[0]).collect();
        along.sort_by(f64::total_cmp);
        let planes = 1 + along.windows(2).filter(|w| w[1] - w[0] > 0.1).count();
        assert!(planes <= 3, "{along:?}");
    }
}
